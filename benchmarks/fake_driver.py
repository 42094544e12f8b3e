"""A fake CUDA driver for Triton: it compiles for a chosen GPU, and passes each launch to a function of the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

_PTX_OF: dict[bytes, str] = {}  # by machine code; global, because Triton keeps kernels longer than a test its driver
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_Launch = Callable[[str, int, tuple[Any, ...]], None]


class FakeDriver:
    """The functions of a driver that Triton calls.

    Args:
        capability: the compute capability of the GPU: 90 is that of an H100.
        launch: called with the PTX, the number of programs and the arguments of each launch.
    """

    def __init__(self, capability: int, launch: _Launch = lambda *_: None) -> None:
        self._capability, self._launch = capability, launch
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32},
            load_binary=self._load,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # so that Triton does not reuse kernels that were compiled for another GPU

    def get_current_stream(self, _: int) -> int:
        return 0

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        loaded = (None, _PTX_OF[binary], 0, 0, 1024)  # the last since Triton 3.4
        return loaded if _VERSION >= (3, 4) else loaded[:4]

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        names = src.fn.arg_names
        constants = {key[0] if isinstance(key, tuple) else key for key in src.constants}
        given = [place for place, name in enumerate(names) if place not in constants and name not in constants]

        def run(x: int, y: int, z: int, stream: int, ptx: str, *rest: Any) -> None:
            arguments = rest[-len(names) :] if len(rest) - 4 == len(names) else rest[4:]
            if len(arguments) == len(names):
                arguments = tuple(arguments[place] for place in given)
            self._launch(ptx, x, tuple(arguments))

        return run


@contextlib.contextmanager
def installed(fake: FakeDriver) -> Iterator[FakeDriver]:
    """Make Triton use this driver inside the context."""
    initialise, before = CompiledKernel.__init__, dict(vars(driver))

    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        _PTX_OF[self.asm["cubin"]] = self.asm["ptx"]

    CompiledKernel.__init__ = remembering
    driver.set_active(fake)
    try:
        yield fake
    finally:
        CompiledKernel.__init__ = initialise
        vars(driver).clear()
        vars(driver).update(before)
