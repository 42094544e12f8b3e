"""Whatever raises in the package, and wherever: the training ends as without it, with one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from injections import CONFIGURATIONS, FIRST, inject
from processes import forked

PARTS = {FIRST: 4}  # processes, so that each takes less than a minute; the other configurations need one


@pytest.fixture
def check(tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """A function that injects, and checks that no exception has reached the loop, changed the training or been spam."""

    def run(name: str, part: int, num_parts: int, *, only_entries: bool = False) -> None:
        path = tmp_path / "results.jsonl"
        (ended,) = forked(inject, (name, part, num_parts, str(path), only_entries), WANDB_MODE="offline")
        assert ended.returncode == 0, ended.stderr[-4000:]
        results: list[dict[str, Any]] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert len(results) > 10, "there is something to inject into"
        record_property("injected", len(results))
        record_property("configuration", name)
        assert [one for one in results if one["raised"]] == []
        assert [one for one in results if not one["is_equal"]] == []
        assert [one for one in results if len(one["errors"]) > 1] == []
        told = sum(bool(one["errors"]) for one in results)
        # Silent: what Python calls when an object is freed, and functions whose failure changes nothing.
        assert told > len(results) / 2

    return run


def test_exceptions_where_torch_and_the_user_call_the_package_do_not_reach_the_training(
    check: Callable[..., None],
) -> None:
    check("scaled", 0, 1, only_entries=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name in CONFIGURATIONS for part in range(PARTS.get(name, 1))]
)
def test_exceptions_in_any_function_do_not_reach_the_training(name: str, part: int, check: Callable[..., None]) -> None:
    check(name, part, PARTS.get(name, 1))
