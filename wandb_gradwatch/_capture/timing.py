"""Device time of the monitor's own work, for `max_overhead`: by events that are asked and never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from .._measure.events import Event

_MAX_UNREAD: Final = 256  # pairs; a device further behind than that is not measured until it has caught up


class DeviceTimer:
    """Adds up what CUDA devices spend between pairs of events on their current streams.

    Work that is queued meanwhile on another stream is not told apart from a pause of this one. Other devices than CUDA
    have no time here: on the CPU the host's is all there is.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] = lambda: Event(timed=True),
        stream_of: Callable[[torch.device], Any] = torch.cuda.current_stream,
    ) -> None:
        self._make_event, self._stream_of = make_event, stream_of
        self._seconds: dict[torch.device, float] = {}
        self._unread: dict[torch.device, deque[tuple[Any, Any]]] = {}
        self._free: dict[torch.device, list[tuple[Any, Any]]] = {}  # an event belongs to the device it was first on

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Time what is queued in here on the device's current stream."""
        return self._on(device) if device.type == "cuda" else nullcontext()

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        unread = self._unread.setdefault(device, deque())
        if len(unread) >= _MAX_UNREAD:
            yield
            return
        free = self._free.setdefault(device, [])
        start, end = free.pop() if free else (self._make_event(), self._make_event())
        stream = self._stream_of(device)
        start.record(stream)
        yield
        end.record(stream)
        unread.append((start, end))

    def seconds(self) -> float:
        """What has passed so far, on the device that spent most: they work side by side."""
        for device, unread in self._unread.items():
            while unread and unread[0][1].query():
                start, end = unread.popleft()
                self._seconds[device] = self._seconds.get(device, 0.0) + start.elapsed_time(end) / 1e3
                self._free[device].append((start, end))
        return max(self._seconds.values(), default=0.0)
