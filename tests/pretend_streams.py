"""Streams of the simulated GPU, with detection of races between streams.

A stream is a counter of operations in order. Each stream has a vector clock: the operations of other streams that are
certainly complete, from `wait_stream`, `wait_event` and waits of the host. An access to memory that another stream has
used, with a write among the two, is a race if the other operation is not in the clock.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

_Progress = dict["Stream", int]


class Stream:
    """The part of `torch.cuda.Stream` that the package uses."""

    _numbers = itertools.count(7)

    def __init__(self, device: torch.device | int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", device if isinstance(device, int) else device.index or 0)
        self.cuda_stream = next(self._numbers)
        self.done = 0  # number of operations queued so far
        self.knows: _Progress = {}

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.progress())

    def wait_event(self, event: Any) -> None:
        self.wait(event.progress)

    def synchronize(self) -> None:
        STREAMS.host_has_seen(self.progress())

    def progress(self) -> _Progress:
        """Return the number of operations of each stream that precede this stream's next operation."""
        return {**self.knows, self: self.done}

    def wait(self, progress: _Progress) -> None:
        _learn(self.knows, progress)


def _learn(known: _Progress, news: _Progress) -> None:
    for stream, done in news.items():
        known[stream] = max(known.get(stream, 0), done)


class _Memory:
    """The last accesses to a storage. Keeps the storage alive, so that its address is not reused."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.written: tuple[Stream, int] | None = None
        self.read: _Progress = {}


class Streams:
    """The current stream of each device, and the accesses to memory."""

    _MAX_KEPT: Final = 5000

    def __init__(self) -> None:
        self._current: dict[int, Stream] = {}
        self._host_knows: _Progress = {}
        self._memory: dict[int, _Memory] = {}

    def current(self, index: int) -> Stream:
        if index not in self._current:
            self._current[index] = Stream(index)
        return self._current[index]

    @contextlib.contextmanager
    def made_current(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.current(stream.device.index)
        self._current[stream.device.index] = stream
        try:
            yield
        finally:
            self._current[stream.device.index] = before

    def host_has_seen(self, progress: _Progress) -> None:
        """Note that operations queued from now on, on any stream, come after `progress`."""
        _learn(self._host_knows, progress)

    def host_has_seen_all(self) -> None:
        for memory in self._memory.values():
            if memory.written is not None:
                _learn(self._host_knows, dict([memory.written]))
            _learn(self._host_knows, memory.read)

    def touch(self, device: torch.device, reads: list[Tensor], writes: list[Tensor], what: str) -> None:
        """Queue an operation on the device's current stream.

        Raises:
            AssertionError: the operation races with one on another stream.
        """
        stream = self.current(device.index)
        stream.done += 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                memory = self._of(tensor)
                if memory is None:
                    continue
                before = dict([memory.written]) if memory.written is not None else {}
                if is_write:
                    _learn(before, memory.read)
                for other, done in before.items():
                    seen = max(stream.knows.get(other, 0), self._host_knows.get(other, 0))
                    assert other is stream or seen >= done, (
                        f"{what} on stream {stream.cuda_stream} races with stream {other.cuda_stream}, "
                        f"on memory of shape {[*tensor.shape]}"
                    )
                if is_write:
                    memory.written, memory.read = (stream, stream.done), {}
                else:
                    memory.read[stream] = stream.done

    def _of(self, tensor: Tensor) -> _Memory | None:
        if tensor.layout is not torch.strided:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address:
            return None
        if address not in self._memory:
            if len(self._memory) >= self._MAX_KEPT:
                del self._memory[next(iter(self._memory))]
            self._memory[address] = _Memory(storage)
        return self._memory[address]


STREAMS: Final = Streams()
