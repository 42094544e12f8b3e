"""The keys of the W&B history: each is written in one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from wandb_gradwatch.snapshot import keys

PACKAGE = Path(keys.__file__).parent.parent
FAMILIES = (*keys.LAYER_FAMILIES, *keys.HISTOGRAM_FAMILIES, *keys.METRIC_FAMILIES)
KEY = re.compile(rf"(?:{keys.PREFIX}|\^?(?:{'|'.join(FAMILIES)})/)(?!\S* )")


def written_keys(text: str) -> Iterator[str]:
    """Strings of a source, parts of f-strings too, that begin like a key; docstrings and other prose left out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY.match(node.value):
            yield node.value


def test_no_key_is_written_beside_the_file_of_keys() -> None:
    sources = sorted(set(PACKAGE.rglob("*.py")) - {Path(keys.__file__)})
    found = {path.name: list(written_keys(path.read_text(encoding="utf-8"))) for path in sources}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_a_key_that_is_written_elsewhere_is_found() -> None:
    text = 'KEY = "gradwatch/step"\nother = f"grad_norm/{name}"\npattern = "^dead_ratio/.+"\nwords = "gradients of a"'
    assert set(written_keys(text)) == {"gradwatch/step", "grad_norm/", "^dead_ratio/.+"}


def test_the_page_asks_for_keys_that_there_are() -> None:
    text = "".join((PACKAGE / f"_page/assets/{name}.js").read_text(encoding="utf-8") for name in ("main", "strip"))
    asking = r'\b(?:sum|known|has|bars|globalSeries|globalValues)\("(\w+)"'
    asked = {keys.PREFIX + name for name in re.findall(asking, text)}
    assert keys.GRAD_NORM in asked
    assert asked <= {*keys.MODEL_KEYS, keys.CHANGED_RATIO, keys.SAMPLE_EVERY}


def test_every_key_of_the_whole_model_is_explained() -> None:
    text = (PACKAGE.parent / "docs/keys.md").read_text(encoding="utf-8").replace("<format>", keys.FORMATS[0])
    names = {key.removeprefix(keys.PREFIX) for key in (*keys.MODEL_KEYS, keys.SAMPLE_EVERY, keys.CHANGED_RATIO)}
    names = {re.sub("|".join(keys.FORMATS), keys.FORMATS[0], name) for name in names} - {
        f"{keys.FORMATS[0]}_flush_ratio"
    }
    assert [name for name in sorted(names) if f"{name}`" not in text] == []


def test_the_summary_is_left_to_the_users_own_numbers() -> None:
    """W&B prints ten keys of it, in the order of the alphabet: the step and these come before the user's "loss"."""
    of_model = {keys.in_namespace(key, space) for key in keys.MODEL_KEYS for space in ("", "model1")}
    of_layers = {f"{family}/0/weight" for family in (*keys.LAYER_SCALARS, *keys.HISTOGRAM_FAMILIES)}
    kept = set(filter(keys.is_in_summary, {*of_model, *of_layers, keys.STEP, keys.FLIGHT_RECORDER, keys.CHANGED_RATIO}))
    norms = {f"gradwatch/{space}grad_norm{end}" for space in ("", "model1/") for end in ("", "_max")}
    assert kept == {keys.STEP, keys.FLIGHT_RECORDER} | norms  # one table
    assert not keys.is_in_summary("activation/0/std")
    assert keys.is_in_summary("train/grad_norm")  # a framework's own name, which the user knows
