"""Simulated GPUs: `pytest -p pretend_gpu` runs code for "cuda" on the CPU and reports where the host would wait.

Tensors of class Pretend compute on the CPU and report cuda:0 or cuda:1 as their device. The Python code for CUDA runs
with its real results, and these rules of CUDA are checked:

- Operations that make the host wait (`item()`, a list or a mask as an index, a copy from memory that is not pinned)
  are recorded in `GPU.waits`, and raise after `torch.cuda.set_sync_debug_mode("error")`.
- Operations on tensors of the host and of a device, or of two devices, are errors, and so are launches of a kernel
  while another device is current.
- A stream must not touch memory that another stream writes without waiting for that stream (pretend_streams.py).
- The target of an asynchronous copy to the host holds NaN until an event after the copy is complete, which the event
  reports at the second query. The source of an asynchronous copy to the device must not change before that.

Not simulated: the kernels on a real device (Triton's interpreter runs them), the streams of a backward, CUDA operations
that wait but are not listed below, and the time that anything takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from pretend_streams import STREAMS, Stream
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

CUDA: Final = torch.device("cuda", 0)
OTHER: Final = torch.device("cuda", 1)

# Names of Python functions that make the host wait, because they read values of the device.
_READ_BY_THE_HOST: Final = {
    *["item", "tolist", "cpu", "nonzero", "masked_select", "unique", "unique_consecutive", "equal", "allclose"],
    *[
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__contains__",
        "__repr__",
        "is_nonzero",
        "bincount",
        "coalesce",
    ],
}
# Names of ATen operations that do so and are called by functions of other names.
_READ_UNDERNEATH: Final = {
    *["_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "is_nonzero"],
    *["equal", "bincount", "argwhere", "_coalesce", "repeat_interleave", "histc"],
}


# Functions without a deterministic CUDA implementation for floating point.
_NOT_DETERMINISTIC: Final = {"cumsum", "histc", "median", "kthvalue", "put_"}


@dataclass
class _Copy:
    """An asynchronous copy that the device has not finished; `done` finishes it."""

    done: Callable[[], None]


class _Thread(threading.local):
    device: torch.device = CUDA  # the current one


@dataclass
class _Machine:
    mode: str = "default"
    waits: list[str] = field(default_factory=list)
    pending: list[_Copy] = field(default_factory=list)
    num_questions: int = 0  # number of Event.query() calls
    num_pinned: int = 0  # number of allocations of pinned memory
    is_capturing: bool = False

    def wait(self, what: str) -> None:
        """Record that the host waits for the device; raise or warn as set_sync_debug_mode() says."""
        self.waits.append(what)
        if self.mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        if self.mode == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=2)

    def finish(self, number: int | None = None) -> None:
        """Finish the first `number` pending copies, by default all."""
        number = len(self.pending) if number is None else number
        if number == len(self.pending):
            STREAMS.host_has_seen_all()
        finished, self.pending = self.pending[:number], self.pending[number:]
        for copy in finished:
            copy.done()


GPU: Final = _Machine()
THREAD: Final = _Thread()


class _Underneath(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READ_UNDERNEATH and isinstance(next(tree_iter(args)), Tensor):
            GPU.wait(f"aten.{name}")
        return func(*args, **(kwargs or {}))


def pretend(tensor: Tensor, device: torch.device = CUDA) -> Pretend:
    """Turn a tensor into a Pretend in place, on the device."""
    if not isinstance(tensor, Pretend):
        tensor.__class__ = Pretend
        tensor._where = device  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def _plain(tensor: Tensor) -> Tensor:
    """Return a plain tensor that shares the memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


class Pretend(Tensor):
    """A tensor on the CPU that reports a GPU as its device."""

    _is_param = False
    _where = CUDA

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._where

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            gradient = Tensor.grad.__get__(self)  # type: ignore[attr-defined]
        return None if gradient is None else pretend(gradient, self._where)

    def record_stream(self, _: Any) -> None:  # type: ignore[override]
        """Do nothing: there is no caching allocator that could reuse the memory too early."""

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        assert gradient is None or isinstance(gradient, Pretend), "a gradient on the host for a tensor on the device"
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.grad.__set__(self, gradient)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "backward":  # hooks run inside, and their tensors must be Pretend too
            with torch._C.DisableTorchFunctionSubclass():
                root = args[0].view_as(args[0])
            return root.backward(*args[1:], **kwargs)
        if name == "copy_":
            return _copy(*args, **kwargs)
        if name == "to":
            return _move(args[0], *args[1:], **kwargs)
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name in _NOT_DETERMINISTIC and args[0].is_floating_point():
            assert not torch.are_deterministic_algorithms_enabled(), (
                f"{name} does not have a deterministic implementation"
            )
        if name in _READ_BY_THE_HOST:
            GPU.wait(name)
            GPU.finish()
        if name == "cpu":
            return _plain(args[0]).clone()
        if name in ("__getitem__", "__setitem__"):
            _check_index(args[1])
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        where = [t for t in tensors if not isinstance(t, Pretend)]
        assert not where, f"{name}: expected all tensors on the device, but {where[0].shape} is on the host"
        devices = {t.device for t in tensors}
        assert len(devices) == 1 or name.startswith("_foreach"), f"{name}: tensors are on {devices}"
        device = _known_device(kwargs.pop("device", None) or tensors[0].device)
        # Under a dispatch mode, operations on lists do not increase the version counters of their tensors.
        looks = contextlib.nullcontext() if name.startswith(("_foreach", "_fused", "_amp")) else _Underneath()
        with torch._C.DisableTorchFunctionSubclass(), looks:
            result = func(*args, **kwargs)
        if device.type != "cuda":
            return result
        result = tree_map_only(Tensor, lambda t: pretend(t, device), result)
        if len(devices) == 1:
            _queue(name, tensors, [t for t in tree_iter((result, kwargs.get("out"))) if isinstance(t, Tensor)])
        return result


def _queue(name: str, arguments: list[Tensor], results: list[Tensor]) -> None:
    """Queue an operation on its device's current stream, unless it only makes views."""
    if not arguments or (name.startswith("_") and name not in ("__setitem__",) and not name.startswith("__i")):
        return
    in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")
    with torch._C.DisableTorchFunctionSubclass():
        addresses = {t.untyped_storage().data_ptr() for t in arguments if t.layout is torch.strided}
        fresh = [t for t in results if t.layout is torch.strided and t.untyped_storage().data_ptr() not in addresses]
    if in_place:
        STREAMS.touch(arguments[0].device, arguments[1:], [arguments[0]], name)
    elif fresh:
        STREAMS.touch(arguments[0].device, arguments, fresh, name)


def _known_device(device: Any) -> torch.device:
    """Return the device, which for plain "cuda" is the current one."""
    device = torch.device(device)
    return THREAD.device if device.type == "cuda" and device.index is None else device


def _check_index(index: Any) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list | range) or (isinstance(part, Tensor) and not isinstance(part, Pretend)):
            GPU.wait("an index made on the host")
        if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
            GPU.wait("a mask as an index")


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Do what copy_ does; an asynchronous copy to the host is finished later."""
    to_device, from_device = isinstance(target, Pretend), isinstance(source, Pretend)
    where = target.device if to_device else source.device
    if to_device or from_device:
        STREAMS.touch(where, [source] if from_device else [], [target] if to_device else [], "copy_")
    if to_device != from_device:
        host = source if to_device else target
        if not (non_blocking and getattr(host, "pinned", False)):
            GPU.wait("a copy that is not asynchronous, or not from or to pinned memory")
            GPU.finish()
        elif to_device:
            seen = _plain(source).clone()

            def still_the_same() -> None:
                assert torch.equal(seen, source), "memory was written to while the device was still to read it"

            GPU.pending.append(_Copy(still_the_same))
        else:
            sent = _plain(source).clone()
            target.fill_(float("nan") if target.is_floating_point() else -(2**40))
            GPU.pending.append(_Copy(lambda: _TENSOR["copy_"](target, sent)))
            return target
    with torch._C.DisableTorchFunctionSubclass():
        _TENSOR["copy_"](target, source)
    return target


def _move(tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    """Do what to() does; without a device argument the tensor stays on its device."""
    device: Any = kwargs.pop("device", None)
    rest = list(args)
    if rest and (isinstance(rest[0], str | torch.device)):
        device = rest.pop(0)
    elif rest and isinstance(rest[0], Tensor):
        device, rest[0] = rest[0].device, rest[0].dtype
    here = isinstance(tensor, Pretend)
    target = _known_device(device) if device is not None else tensor.device
    there = target.type == "cuda"
    with torch._C.DisableTorchFunctionSubclass():
        result = _TENSOR["to"](tensor, *rest, **kwargs)
        moved = result if result is not tensor or target == tensor.device else result.clone()
    if here and there:
        if moved is not tensor:
            STREAMS.touch(tensor.device, [tensor], [], "to")
            if target != tensor.device:  # torch orders such a copy on both devices
                STREAMS.current(target.index).wait_stream(STREAMS.current(tensor.device.index))
            STREAMS.touch(target, [], [moved], "to")
        return pretend(moved, target)
    if not here and not there:
        return moved
    with torch._C.DisableTorchFunctionSubclass():
        moved = result.clone()
    if here and non_blocking:  # torch copies to new pinned memory, which is not valid yet
        return _on_its_way(pretend(moved, tensor.device))
    if not non_blocking or not getattr(tensor, "pinned", False):
        GPU.wait("to() that is not asynchronous, or not from pinned memory")
        GPU.finish()
    if there:
        pretend(moved, target)
        STREAMS.touch(target, [], [moved], "to")
    return moved


def _on_its_way(source: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        target = torch.empty(source.shape, dtype=source.dtype)
    target.pinned = True  # type: ignore[attr-defined]
    return _copy(target, source, non_blocking=True)


_TENSOR: Final[dict[str, Any]] = {name: getattr(Tensor, name) for name in ("to", "copy_", "cuda", "pin_memory")}
_FACTORIES: Final = [
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "randn",
    "rand",
    "randint",
    "scalar_tensor",
    "as_tensor",
]


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _device_of_context() -> torch.device | None:
    """Return the device of the innermost `with torch.device(...)`; torch.get_default_device() would make a tensor."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return modes[-1].device if modes else None


def _factory(name: str) -> Callable[..., Tensor]:
    original = getattr(torch, name)

    def make(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = _device_of_context()
        on_device = _is_cuda(kwargs.get("device"))
        device = CUDA
        if on_device:
            device = _known_device(kwargs.pop("device"))
        pinned = kwargs.pop("pin_memory", False)
        if on_device and name in ("tensor", "as_tensor"):
            GPU.wait(f"torch.{name}(..., device='cuda')")
        with torch._C.DisableTorchFunction() if on_device else contextlib.nullcontext():
            result: Tensor = original(*args, **kwargs)
        if pinned:
            GPU.num_pinned += 1
            result.pinned = True  # type: ignore[attr-defined]
        return pretend(result, device) if on_device else result

    return make


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    devices = [a for a in (*args[:1], kwargs.get("device")) if isinstance(a, str | torch.device)]
    if isinstance(self, Pretend) or any(_is_cuda(device) for device in devices):
        return _move(self, *args, **kwargs)
    result: Tensor = _TENSOR["to"](self, *args, **kwargs)
    return result


def _copy_in_place(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(self, source, non_blocking)


def _cuda(self: Tensor, *_: Any, **kwargs: Any) -> Tensor:
    return self if isinstance(self, Pretend) else _move(self, device=CUDA, **kwargs)


def _pin(self: Tensor, *_: Any) -> Tensor:
    assert not isinstance(self, Pretend), "cannot pin memory of the device"
    GPU.num_pinned += 1
    result = self.clone()
    result.pinned = True  # type: ignore[attr-defined]
    return result


def _module_cuda(self: nn.Module, device: Any = CUDA) -> nn.Module:
    for tensor in (*self.parameters(), *self.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        pretend(tensor, _known_device(device))._is_param = is_parameter
        if tensor.grad is not None:
            pretend(tensor.grad, _known_device(device))
    return self


def _module_to(original: Any) -> Callable[..., nn.Module]:
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        devices = [a for a in (*args, kwargs.get("device")) if isinstance(a, str | torch.device) and _is_cuda(a)]
        if devices:
            return _module_cuda(self, devices[0])
        result: nn.Module = original(self, *args, **kwargs)
        return result

    return to


class Event:
    """An event that is complete at the second query, as if the device lagged behind."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._behind, self._questions, self._recorded = 0, 0, False
        self.progress: dict[Stream, int] = {}

    def record(self, stream: Any = None) -> None:
        self._behind, self._questions, self._recorded = len(GPU.pending), 0, True
        stream = stream or STREAMS.current(THREAD.device.index)
        device = getattr(self, "_device", stream.device)
        assert device == stream.device, f"an event of {device} is recorded on {stream.device}"
        self._device, self.progress = stream.device, stream.progress()
        self._pending = list(GPU.pending)
        self._at = time.perf_counter()

    def query(self) -> bool:
        GPU.num_questions += 1
        self._questions += 1
        if self._recorded and self._questions > 1:
            self._finish()
        return not self._recorded or self._questions > 1

    def synchronize(self) -> None:
        GPU.waits.append("Event.synchronize()")  # set_sync_debug_mode() does not detect it
        self._questions = 1
        self._finish()

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3

    def _finish(self) -> None:
        STREAMS.host_has_seen(self.progress)
        waiting = [copy for copy in GPU.pending if copy in self._pending]
        GPU.finish(GPU.pending.index(waiting[-1]) + 1 if waiting else 0)


class Graph:
    """The part of `torch.cuda.CUDAGraph` that Python sees: a capture runs everything, and a replay changes nothing."""

    def capture_begin(self, *_: Any, **__: Any) -> None:
        GPU.is_capturing = True

    def capture_end(self) -> None:
        GPU.is_capturing = False

    def replay(self) -> None:
        assert not GPU.is_capturing


@contextlib.contextmanager
def _captured(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


@contextlib.contextmanager
def _device_made_current(device: Any) -> Iterator[None]:
    before, THREAD.device = THREAD.device, _known_device(device)
    try:
        yield
    finally:
        THREAD.device = before


def _current_stream(device: Any = None) -> Stream:
    return STREAMS.current(_known_device(device or "cuda").index)


def _synchronize(*_: Any) -> None:
    GPU.waits.append("torch.cuda.synchronize()")
    GPU.finish()


def _grouped(original: Any) -> Callable[..., Any]:
    """Group Pretend tensors by device: torch's own code takes them for tensors on the CPU."""

    def group(lists: Any, with_indices: bool = False) -> Any:
        firsts = lists[0]
        devices = dict.fromkeys(t.device for t in firsts)
        groups = {}
        for device in devices:
            places = [place for place, t in enumerate(firsts) if t.device == device]
            part = [[each[place] for place in places] if each else [] for each in lists]
            with torch._C.DisableTorchFunctionSubclass():
                of_device = original(part, with_indices)
            for key, (values, indices) in of_device.items():
                groups[(device, *key[1:])] = (values, [places[index] for index in indices])
        return groups

    return group


def _in_the_interpreter(original: Any) -> Callable[..., Any]:
    """Pass plain tensors to Triton's interpreter, which would try to copy tensors of a GPU to the host."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Pretend)]
        for tensor in tensors:
            assert tensor.device == THREAD.device, f"a kernel is launched on {THREAD.device}, and reads {tensor.device}"
        if tensors:
            STREAMS.touch(THREAD.device, [], tensors, "a kernel")
        args, kwargs = tree_map_only(Pretend, _plain, (args, kwargs))
        return original(self, *args, **kwargs)

    return call


def install() -> None:
    """Replace torch's CUDA functions in this process, permanently."""
    import torch.optim.optimizer as optimizers
    import torch.utils._foreach_utils as foreach
    from torch.nn.utils import clip_grad

    for name in _FACTORIES:
        setattr(torch, name, _factory(name))
    for name, method in (("to", _to), ("copy_", _copy_in_place), ("cuda", _cuda), ("pin_memory", _pin)):
        setattr(Tensor, name, method)
    nn.Module.cuda = _module_cuda  # type: ignore[assignment, method-assign]
    nn.Module.to = _module_to(nn.Module.to)  # type: ignore[method-assign]
    for module in (optimizers, foreach, clip_grad):
        if hasattr(module, "_group_tensors_by_device_and_dtype"):
            module._group_tensors_by_device_and_dtype = _grouped(module._group_tensors_by_device_and_dtype)
        for kinds in ("_foreach_supported_types",):
            if Pretend not in getattr(module, kinds, [Pretend]):
                getattr(module, kinds).append(Pretend)
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_current_stream_capturing = lambda: GPU.is_capturing
    cuda.CUDAGraph, cuda.graph = Graph, _captured
    cuda.device_count, cuda.current_device = lambda: 2, lambda: THREAD.device.index
    # The CPU's random number generator replaces that of the device.
    cuda.get_rng_state, cuda.set_rng_state = (
        lambda *_: torch.get_rng_state(),
        lambda state, *_: torch.set_rng_state(state),
    )
    cuda.get_device_name = lambda *_: "a pretended GPU"
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.mem_get_info = lambda *_: (2**36, 2**36)
    cuda.Stream, cuda.current_stream, cuda.stream = Stream, _current_stream, STREAMS.made_current
    cuda.device = _device_made_current
    cuda.synchronize = _synchronize
    cuda.Event = Event
    cuda.is_bf16_supported = lambda *_: True
    cuda._sleep = lambda _: None
    cuda.empty_cache = lambda: None
    cuda.reset_peak_memory_stats = lambda *_: None
    cuda.max_memory_allocated = lambda *_: 0
    cuda.set_sync_debug_mode = lambda mode: setattr(GPU, "mode", mode)
    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter

        interpreter.GridExecutor.__call__ = _in_the_interpreter(interpreter.GridExecutor.__call__)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Fail if the host waits inside the context, including by Event.synchronize()."""
    before = len(GPU.waits)
    yield
    assert GPU.waits[before:] == []


def pytest_configure(config: Any) -> None:
    """Install the simulated GPUs: this module is a pytest plugin."""
    install()
