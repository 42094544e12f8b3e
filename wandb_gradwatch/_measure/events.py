"""CUDA events that can be queried while another thread captures a graph.

During a capture CUDA forbids all threads calls that might disturb it, including event queries: the user's capture would
fail. A thread may opt out. That is safe here, because none of our events is recorded inside a capture.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

import torch

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Event:
    """The part of `torch.cuda.Event` that is used.

    Args:
        timed: enable elapsed_time().
    """

    def __init__(self, *, timed: bool = False) -> None:
        self._event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def record(self, stream: Any) -> None:
        """Record the event on a stream."""
        self._event.record(stream)

    def query(self) -> bool:
        """Return whether the device has reached the event."""
        with _allowed_while_others_capture():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""
        with _allowed_while_others_capture():
            self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to another; the device must have reached both."""
        with _allowed_while_others_capture():
            return float(self._event.elapsed_time(end._event))


@contextmanager
def _allowed_while_others_capture() -> Iterator[None]:
    exchange, mode = exchange_capture_mode(), ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # `mode` now holds the previous mode
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def exchange_capture_mode() -> Callable[[Any], object]:
    """Return the driver's function that sets a thread's capture mode; one that does nothing without a CUDA driver."""
    if torch.version.cuda:
        with suppress(OSError, AttributeError):  # no driver
            driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            return driver.cuThreadExchangeStreamCaptureMode
    return lambda mode: None
