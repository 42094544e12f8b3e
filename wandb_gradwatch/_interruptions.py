"""Exceptions that a signal handler raises in the middle of the monitor's code."""

import signal
import threading
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any


def raise_interruption(error: BaseException) -> None:
    """Raise the error again if one of the user's signal handlers raised it (a time limit, a preemption).

    Like Ctrl-C it is meant for the training; only by chance did the monitor's code run when the signal came.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    codes = set(_codes_of_handlers())
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


def _codes_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of functools.partial
        if not hasattr(handler, "__code__"):  # neither function nor method: SIG_DFL, or an object with __call__
            handler = vars(type(handler)).get("__call__")
        if isinstance(code := getattr(handler, "__code__", None), CodeType):
            yield code
