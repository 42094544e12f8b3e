"""Run the examples in docstrings and compare their output."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("wandb_gradwatch", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "    >>> " in path.read_text(encoding="utf-8")
)


def test_there_are_examples_to_run() -> None:
    assert {"wandb_gradwatch._pipeline.rank_tree", "wandb_gradwatch.sinks._base", "wandb_gradwatch.rules._base"} <= set(
        MODULES
    )


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_show(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted
    assert not failed
