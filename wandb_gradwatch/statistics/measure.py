"""Measure the gradients of one device in one batched pass: the door to the backends.

A backend is a module with two functions, `measure` and `sum_sq`, of the signatures in reference.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .columns import NUM_BINS, NUM_COLUMNS

# N tensors, C columns, B histogram bins

BACKENDS: Final = {"cpu": "cpu", "torch": "generic", "reference": "reference"}  # name -> module


@dataclass(frozen=True)
class Measurement:
    """One row, and one histogram if it was asked for, per gradient, on the gradients' device.

    Args:
        rows: [N, C] in float64 (float32 on MPS). RECEIVED_SUM_SQ equals GRAD_SUM_SQ; the parameter columns are NaN
            where no parameters were given.
        histogram: [N, B] in int64.
    """

    rows: Tensor
    histogram: Tensor | None


@torch.no_grad()
def measure(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    *,
    dead_threshold: float = 0.0,
    inverse_scale: Tensor | None = None,
    histogram: bool = False,
    backend: str = "auto",
) -> Measurement:
    """Measure every gradient, on its device and without waiting for it.

    Args:
        gradients: N tensors on one device, of any dtype and layout.
        parameters: N tensors, for the parameter columns; None leaves those NaN.
        dead_threshold: |g| <= this counts as dead.
        inverse_scale: 0-dim float tensor on the device; everything is that of gradient * inverse_scale.
        histogram: count the elements in the fixed bins too.
        backend: "auto" or a name that `resolve_backend` knows.

    Returns:
        N rows and, if asked for, N histograms.

    Raises:
        ValueError: the backend is unknown, or the numbers of gradients and parameters differ.
        RuntimeError: the backend cannot run on the gradients' device.
    """
    if parameters is not None and len(parameters) != len(gradients):
        raise ValueError(f"measure() got {len(gradients)} gradients, but {len(parameters)} parameters")
    if not gradients:
        resolve_backend(backend, torch.device("cpu"), "nothing")
        return Measurement(
            torch.empty((0, NUM_COLUMNS), dtype=torch.float64),
            torch.empty((0, NUM_BINS), dtype=torch.int64) if histogram else None,
        )
    with _plain_arithmetic(gradients[0].device):
        rows_NC, histogram_NB = _module_of(backend, gradients).measure(
            gradients, parameters, dead_threshold=dead_threshold, inverse_scale=inverse_scale, histogram=histogram
        )
    return Measurement(rows_NC, histogram_NB)


@torch.no_grad()
def sum_sq(gradients: Sequence[Tensor], *, inverse_scale: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Sum the squares of every gradient's finite elements: [N]. One read; 1e20 and 1e-25 are summed exactly too.

    Raises:
        ValueError: the backend is unknown.
        RuntimeError: the backend cannot run on the gradients' device.
    """
    if not gradients:
        return torch.empty(0, dtype=torch.float64)
    with _plain_arithmetic(gradients[0].device):
        result: Tensor = _module_of(backend, gradients).sum_sq(gradients, inverse_scale=inverse_scale)
    return result


def resolve_backend(backend: str, device: torch.device, example_name: str) -> str:
    """Return the name of the backend that measures gradients on a device.

    Args:
        backend: "auto" or a backend's name, as the user gave it.
        device: where the gradients are.
        example_name: the name of a gradient on that device, for the message.

    Raises:
        ValueError: the backend is unknown.
        RuntimeError: it cannot run on that device.
    """
    if backend == "auto":
        return "cpu" if device.type == "cpu" else "torch"
    if backend not in BACKENDS:
        names = ", ".join(f'"{name}"' for name in BACKENDS)
        raise ValueError(f'backend={backend!r} is unknown; choose "auto" or one of {names}')
    if backend == "cpu" and device.type != "cpu":
        raise RuntimeError(
            f"backend={backend!r} needs CPU gradients, but {example_name!r} is on {device}; use backend='auto'"
        )
    return backend


def _plain_arithmetic(device: torch.device) -> AbstractContextManager[Any]:
    """Keep the user's autocast region from choosing dtypes in here."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _module_of(backend: str, gradients: Sequence[Tensor]) -> Any:
    name = resolve_backend(backend, gradients[0].device, "gradients[0]")
    return importlib.import_module(f"{__package__}.{BACKENDS[name]}")
