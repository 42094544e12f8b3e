"""CUDA events that may be asked while another thread of the program captures a graph.

Such a capture forbids every thread what might disturb it, asking an event too: the capture would fail, and it is the
user's. A thread that says that it knows what it does may ask: none of our events is recorded inside a capture.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Event:
    """What is used of `torch.cuda.Event`.

    Args:
        timed: it can say how long after another one it came.
    """

    def __init__(self, *, timed: bool = False) -> None:
        self._event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def record(self, stream: Any) -> None:
        """Queue it on a stream."""
        self._event.record(stream)

    def query(self) -> bool:
        """Whether the device has come to it."""
        with _allowed_while_others_capture():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        with _allowed_while_others_capture():
            self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this one to another, when the device has come to both."""
        with _allowed_while_others_capture():
            return float(self._event.elapsed_time(end._event))


@contextmanager
def _allowed_while_others_capture() -> Iterator[None]:
    exchange = exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # the mode before is in `mode` now
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def exchange_capture_mode() -> Callable[[Any], int] | None:
    """The driver's function that sets what captures forbid this thread; None where there is none: CPU, ROCm."""
    if not torch.version.cuda:
        return None
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        exchange: Callable[[Any], int] = driver.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver
        return None
    return exchange
