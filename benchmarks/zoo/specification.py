"""What the sets write instead of code: a call as a list, a formula of the step, and a training as a row.

A name with a dot is one of `parts/`, as "dense.mlp"; a name without is one of torch.nn.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .loop import Loop, supervised
from .parts.optimizers import follower

_NAMES = {"min": min, "max": max, "abs": abs}


def formula(text: str | float) -> Callable[[int], float]:
    """Return the function of the step that a number or a formula says, as "0.5 ** (step // 60)"."""
    if not isinstance(text, str):
        return lambda step: text
    code = compile(text, "formula", "eval")
    return lambda step: eval(code, {"__builtins__": _NAMES, "step": step})


def named(name: str) -> Any:
    """Return the function or class of a name."""
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"{__package__}.parts.{module}"), own) if module else getattr(nn, name)


def called(call: Sequence[Any]) -> Any:
    """Call what ["name", argument, ..., {"name": argument, ...}] says; arguments may be calls and names."""
    name, *arguments = call
    options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    return named(name)(*map(resolved, arguments), **{key: resolved(value) for key, value in options.items()})


def resolved(value: Any) -> Any:
    """Return what a call makes, what a name names, or the value itself."""
    if isinstance(value, list):
        return called(value)
    is_name = isinstance(value, str) and ("." in value or hasattr(nn, value))
    return named(value) if is_name else value


def training(row: Mapping[str, Any]) -> Loop:
    """Build a healthy training: what its function makes, or one model, data set, loss and optimizer with options."""
    if "make" in row:
        return called(row["make"])
    known = {key: row[key] for key in ("lr", "steps", "clip", "accumulate", "options") if key in row}
    if "optimizer" in row:
        known["optimizer"] = _optimizer(row["optimizer"])
    if "schedule" in row:
        known["schedule"] = called(row["schedule"]) if isinstance(row["schedule"], list) else formula(row["schedule"])
    if "scaler" in row:
        known["scaler"] = torch.amp.GradScaler("cpu", **row["scaler"])
    if "autocast" in row:
        known["autocast"] = getattr(torch, row["autocast"])
    if "update" in row:
        known["update"] = resolved(row["update"])
    for hooks in ("before", "received", "after"):
        if hooks in row:
            known[hooks] = [named(hook) for hook in row[hooks]]
    # Both draw from the same generator: which is first decides what both are.
    parts = {part: resolved(row[part]) for part in (("data", "model") if "data_first" in row else ("model", "data"))}
    loop = supervised(parts["model"], parts["data"], resolved(row["loss"]), **known)
    if "average" in row:
        follower(loop, loop.model, row["average"])
    return loop


def _optimizer(spec: str | Sequence[Any]) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of torch or of `parts/`, with its options if there are any but the learning rate."""
    name, options = (spec, {}) if isinstance(spec, str) else spec
    return functools.partial(named(name) if "." in name else getattr(torch.optim, name), **options)
