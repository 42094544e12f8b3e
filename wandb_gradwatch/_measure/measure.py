"""Measure the gradients of one device in one batched pass, with a backend.

A backend is a module with two functions, `measure` and `measure_received`, with the signatures in reference.py. Those
of other devices than the CPU have a third, `take_witnesses`.
"""

import importlib
import importlib.util
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from .._interruptions import raise_interruption
from . import cpu_compiled
from .elements import Measurement

# N tensors, C columns, B histogram bins

BACKENDS: Final = {  # name -> module
    "cpu": "cpu",
    "compiled": "cpu_compiled",
    "cuda": "cuda_launch",
    "torch": "generic",
    "reference": "reference",
}
_DEVICE_OF: Final = {"cpu": "cpu", "compiled": "cpu", "cuda": "cuda"}  # for backends that support only one device type


def measure(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor] | None,
    *,
    dead_threshold: float = 0.0,
    inverse_scale: Tensor | None = None,
    histogram: bool = False,
    backend: str = "auto",
) -> Measurement:
    """Measure every gradient on its device, without waiting for the device.

    Args:
        gradients: N tensors on one device, of any dtype and layout; N is at least 1.
        parameters: N tensors, for the parameter columns; None leaves these columns NaN.
        dead_threshold: an element with |g| <= this counts as dead.
        inverse_scale: a 0-dim float tensor on the device; all statistics are those of gradient * inverse_scale.
        histogram: count the elements in the fixed bins as well.
        backend: "auto" or the name of a backend, as for `resolve_backend`.

    Returns:
        N rows, and with `histogram` N histograms.

    Raises:
        ValueError: the backend is unknown.
        RuntimeError: the backend cannot run on the gradients' device.
    """
    asked = {"dead_threshold": dead_threshold, "inverse_scale": inverse_scale, "histogram": histogram}
    measured: Measurement = _run("measure", backend, gradients, parameters, **asked)
    return measured


def measure_received(
    gradients: Sequence[Tensor], *, inverse_scale: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Measure only the received columns, in one cheap read: [N, 3]. Exact for squares of 1e20 and 1e-25, too.

    Arguments and errors are those of `measure`.
    """
    result: Tensor = _run("measure_received", backend, gradients, inverse_scale=inverse_scale)
    return result


def take_witnesses(gradients: Sequence[Tensor], parameters: Sequence[Tensor], num_witnesses: int) -> Tensor:
    """Copy a few elements of N gradients and of N parameters on a device other than the CPU: [2, N, num_witnesses].

    Arguments and result are those of `generic.take_witnesses`.
    """
    witnesses: Tensor = _run("take_witnesses", "auto", gradients, parameters, num_witnesses)
    return witnesses


def sum_sq(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of every tensor's finite elements: [N]."""
    return measure_received(tensors)[:, 0]


def check_backend(backend: str) -> None:
    """Raise a ValueError for a backend that is unknown."""
    if backend not in ("auto", *BACKENDS):
        names = ", ".join(f'"{name}"' for name in BACKENDS)
        raise ValueError(f'backend={backend!r} is unknown; choose "auto" or one of {names}')


def resolve_backend(backend: str, device: torch.device, example_name: str) -> str:
    """Return the name of the backend that measures gradients on a device.

    Args:
        backend: "auto" or the name of a backend, as the user passed it.
        device: the device of the gradients.
        example_name: the name of a gradient on that device, for the error message.

    Raises:
        ValueError: the backend is unknown.
        RuntimeError: the backend cannot run on that device.
    """
    check_backend(backend)
    if backend == "auto":
        return _best_backend(device)
    only_device = _DEVICE_OF.get(backend, device.type)
    if device.type != only_device:
        raise RuntimeError(
            f"backend={backend!r} needs {only_device.upper()} gradients, but {example_name!r} is on {device}; "
            "use backend='auto'"
        )
    if backend == "compiled" and not cpu_compiled.is_installed():
        raise RuntimeError(
            "backend='compiled' needs numba, which is not installed; "
            "pip install 'wandb-gradwatch[fast]', or backend='auto'"
        )
    if backend == "cuda" and not _triton_is_installed():
        raise RuntimeError("backend='cuda' needs Triton, which is not installed; pip install triton, or backend='auto'")
    return backend


def compile_for_cpu(backend: str) -> None:
    """Compile the loops for CPU gradients: in the background for "auto", immediately for "compiled".

    Raises:
        RuntimeError: the backend is "compiled" and cannot be compiled.
    """
    if backend == "compiled":
        cpu_compiled.LOOPS.wait()
    elif backend == "auto" and cpu_compiled.is_installed():
        cpu_compiled.LOOPS.start()


def _best_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu" if cpu_compiled.LOOPS.made is None else "compiled"
    if device.type == "cuda" and _triton_is_installed() and not _triton_failed:
        return "cuda"
    return "torch"


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


_has_autocast: Final = cache(torch.amp.is_autocast_available)
_COMPILER: Final = {"cuda": "Triton", "compiled": "numba"}
_WITHOUT_COMPILER: Final = {"cuda": "torch", "compiled": "cpu"}  # the backends that "auto" falls back to
_triton_failed: list[Exception] = []  # the error after which "auto" no longer uses Triton in this process


def _run(function: str, backend: str, gradients: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call a function of a backend; if its kernels fail, "auto" falls back to one without a compiler and warns once."""
    device = gradients[0].device
    casts = _has_autocast(device.type) and torch.is_autocast_enabled(device.type)
    if casts or torch.is_grad_enabled():  # by the user: a measurement needs plain arithmetic
        with torch.no_grad(), torch.autocast(device.type, enabled=False) if casts else nullcontext():
            return _run(function, backend, gradients, *args, **kwargs)
    name = resolve_backend(backend, device, "gradients[0]")
    try:
        return getattr(_module(name), function)(gradients, *args, **kwargs)
    except torch.cuda.OutOfMemoryError:
        raise  # not caused by the kernels, and the fallback needs more memory than they do
    except Exception as error:
        raise_interruption(error)
        if backend != "auto" or name not in _WITHOUT_COMPILER:
            raise
        failure = error
    plain = _WITHOUT_COMPILER[name]
    result = getattr(_module(plain), function)(gradients, *args, **kwargs)  # if this raises, no kernel was at fault
    if name == "cuda":
        _triton_failed.append(failure)
    else:
        cpu_compiled.LOOPS.fail(failure)
    warnings.warn(
        f"the {_COMPILER[name]} kernels failed ({why_not(failure)}); "
        f"measuring gradients with backend={plain!r} from now on",
        RuntimeWarning,
        stacklevel=4,
    )
    return result


def why_not(failure: Exception) -> str:
    """Explain why kernels could not be compiled or used, including the missing dependency if known."""
    if "C compiler" in str(failure):
        return "Triton needs a C compiler but finds none: install gcc, or name another in the environment variable CC"
    if isinstance(failure, subprocess.CalledProcessError):
        return f"Triton's C compiler failed, which needs Python's headers, as in python3-dev: {failure!r}"
    return repr(failure)


@cache
def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{BACKENDS[name]}")
