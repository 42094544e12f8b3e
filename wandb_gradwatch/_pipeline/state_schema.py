"""The form of a watcher's saved state, against which a state is checked before anything of it is used."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .._measure.columns import NUM_BINS
from .._measure.probe_values import HISTOGRAM_SIZE

# P watched parameters, C columns, B histogram bins

VERSION: Final = 1  # of the form of a state

Check = Callable[[Any], bool]
Schema = Mapping[str, Any]  # a check, or a nested schema, by key


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 2**63 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tensor(value: Any, *shape: int | None, is_float: bool) -> bool:
    """Whether this is a tensor on the CPU of a shape in which None stands for any size."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.is_floating_point() != is_float:
        return False
    return value.ndim == len(shape) and all(
        size in (None, is_one) for size, is_one in zip(shape, value.shape, strict=True)
    )


def _each(check: Check) -> Check:
    return lambda values: isinstance(values, list | tuple) and all(map(check, values))


def _each_value(check: Check) -> Check:
    def holds(values: Any) -> bool:
        return isinstance(values, Mapping) and all(
            isinstance(key, str) and check(value) for key, value in values.items()
        )

    return holds


def _fits(schema: Schema) -> Check:
    def holds(value: Any) -> bool:
        return isinstance(value, Mapping) and all(key in value and check(value[key]) for key, check in schema.items())

    return holds


_SAMPLE: Final[Schema] = {
    "step": _is_count,
    "rows": lambda value: _is_tensor(value, None, None, is_float=True),
    "loss_scale": _is_number,
    "skipped": lambda value: isinstance(value, bool | int),
    "metrics": _each_value(_is_number),
    "histograms": _each_value(lambda value: _is_tensor(value, HISTOGRAM_SIZE, is_float=True)),
}
_STATE: Final[Schema] = {
    "version": _is_count,
    "columns": _each(lambda value: isinstance(value, str)),
    "sampler": {
        "step": _is_count,
        "trust_versions": lambda value: isinstance(value, bool | int),
        "num_samples": _is_count,
        "samples_in_window": _is_count,
        "last_histogram": lambda value: value is None or _is_count(value),
    },
    "alert_manager": {
        "rules": _each_value(lambda value: True),
        "judge": lambda value: value is None or _is_mapping(value),
        "book": _is_mapping,
    },
    "guard": lambda value: value is None or _is_mapping(value),
    "said": _each(lambda value: isinstance(value, str)),
    "names": _each(lambda value: isinstance(value, str)),
    "samples": _each(_fits(_SAMPLE)),
    "part_of": lambda value: value is None or _each(_is_count)(value),
    "histogram": {
        "counts": lambda value: value is None or _is_tensor(value, None, NUM_BINS, is_float=False),
        "steps": _each(_is_count),
    },
    "metrics": _each_value(_is_mapping),
}


def checked(state: Any) -> Mapping[str, Any]:
    """Return the state if it has the form of a saved state.

    Raises:
        ValueError: it has not; the message names the key, or the version that saved it.
    """
    if isinstance(state, Mapping) and state.get("version", VERSION) != VERSION:
        raise ValueError(f"its version is {state['version']!r:.20}, and this one reads version {VERSION}")
    return _checked(state, _STATE)


def _checked(state: Any, schema: Schema, where: str = "") -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise ValueError(f"{where or 'got'} {'is ' if where else ''}{state!r:.100}")
    for key, check in schema.items():
        if key not in state:
            raise ValueError(
                f"{where}{key!r} is not among the keys {list(state)[:5]}; pass that part of the checkpoint"
            )
        if isinstance(check, Mapping):
            _checked(state[key], check, f"{where}{key!r}: ")
        elif not check(state[key]):
            raise ValueError(f"{where}{key!r} does not fit: {state[key]!r:.100}")
    return state
