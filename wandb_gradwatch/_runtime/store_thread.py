"""Requests to the store of the process groups in a thread of their own: the training never waits for the store."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from torch.distributed.distributed_c10d import Store

logger: Final = logging.getLogger("wandb_gradwatch")

Request = Callable[[Store], bool]  # returns whether it is done; otherwise it is made again later

# Begun by all ranks together. One store serves them all, and answers about ten times as many: a rank that does wait for
# it, for an answer that it needs, waits for few others.
_PER_SECOND: Final = 2000
_AGAIN_SECONDS: Final = 0.1  # until a request that is not done is made again; doubled each time, up to:
_MOST_SECONDS: Final = 30.0
_END_SECONDS: Final = 0.3  # that the end waits for a request under way


class StoreThread:
    """Makes requests in order, over a connection of its own, until the store no longer answers.

    Args:
        store: what the requests get; cloned.
        rank: a request of rank r begins r / 2,000 seconds after it was asked for, because all ranks ask at once.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._delay = store, rank / _PER_SECOND
        self._asked: queue.SimpleQueue[tuple[str, Request]] = queue.SimpleQueue()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, name: str, request: Request) -> None:
        """Make a request soon, in place of one of this name that is not done. Returns at once; nothing after `end`."""
        if self._ends.is_set():
            return
        self._asked.put((name, request))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradwatch-store", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End the thread; requests that have not begun are dropped. Idempotent."""
        if self._ends.is_set():
            return
        self._ends.set()
        if self._thread is not None:
            self._asked.put(("", lambda _: True))  # wakes it
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the process with the store has ended, as at the end of a training
            clone = getattr(self._store, "clone", None)
            own = self._store if clone is None else clone()
            undone: dict[str, Request] = {}
            seconds = _AGAIN_SECONDS
            while not self._ends.is_set():
                try:
                    name, request = self._asked.get(timeout=seconds if undone else None)
                    undone[name], seconds = request, _AGAIN_SECONDS
                    self._ends.wait(self._delay)
                except queue.Empty:
                    seconds = min(2 * seconds, _MOST_SECONDS)
                for name, request in list(undone.items()):
                    if not self._ends.is_set() and self._is_done(request, own):
                        del undone[name]

    @staticmethod
    def _is_done(request: Request, store: Store) -> bool:
        try:
            return request(store)
        except RuntimeError:  # of the store
            raise
        except Exception:  # ours: the training goes on, and this request is not answered
            logger.exception("wandb_gradwatch: a request to the store of the ranks failed; training goes on")
            return True
