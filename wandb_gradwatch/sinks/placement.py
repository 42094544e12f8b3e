"""Where our rows go among the rows of a user's run: none of ours is lost, none of the user's is lost, moved or changed.

W&B keeps one open row at a step. A log call with a larger step closes the row and opens that step; one with a smaller
step is dropped; then its keys merge into the open row, and the row closes if the call commits (without `step=` it does,
unless `commit=False`). A library that commits a row of its own therefore shifts or drops rows of the user, and one that
merges two rows of its own into the same open row loses the first.

So, while the user may still log, we never commit, and never take a step that the user could still use:

- A user's call is about to close the open row: the oldest waiting row joins it.
- A user's call jumps over steps: waiting rows take the steps in between, which nobody can use any more.
- Otherwise rows wait, and neighbours merge when too many do.
- When the run ends, nobody logs any more, and the rest is committed row by row.

A process that is killed (SIGKILL) loses the rows that wait, as it loses W&B's own open row.

Two views of the open row exist. We mirror W&B's rule at `run._log`, which every log call of the process passes
through. `run.step`, which asks W&B itself, checks the mirror where a wrong one would lose a row (another process that
logs is not seen), and replaces it where `_log` does not exist.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

logger = logging.getLogger("wandb_gradwatch")

MAX_WAITING: Final = 64  # rows; above it neighbours merge. With 256 histograms each these are about 35 MB.
_ATTRIBUTE: Final = "_wandb_gradwatch_placement"


class Row(Protocol):
    """A row that waits; it becomes one or several dictionaries only when a place is found."""

    def merge(self, later: Any) -> Any:
        """This row and a later one of the same owner as one."""

    def parts(self) -> list[dict[str, Any]]:
        """What to log, in order; each part takes a place of its own."""


@dataclass
class _Waiting:
    owner: object
    row: Row
    num_windows: int = 1


def placement_of(run: Any) -> Placement:
    """The placement of a run: one for the run's whole life, whoever watches into it.

    Args:
        run: a `wandb.Run` that is neither finished nor disabled.
    """
    existing = vars(run).get(_ATTRIBUTE)
    if existing is None:
        # vars(), because a run refuses unknown attributes once it is initialised.
        existing = vars(run)[_ATTRIBUTE] = Placement(run)
    return existing  # type: ignore[no-any-return]


class Placement:
    """The rows that wait for a place in one run, and the rule that finds it.

    Args:
        run: a `wandb.Run`.
        max_waiting: how many rows may wait before neighbours of one owner are merged.
    """

    def __init__(self, run: Any, max_waiting: int = MAX_WAITING) -> None:
        self.ended = False
        self.defined: set[str] = set()  # metric names and globs that this run knows already
        self.num_user_calls = 0
        self._run = run
        self._max_waiting = max_waiting
        self._pid = os.getpid()
        self._shared = run.settings.mode == "shared"  # there the server orders rows: every writer just logs
        self._waiting: deque[_Waiting] = deque()
        self._parts: deque[dict[str, Any]] = deque()  # of the row whose placing has begun
        # Never held while logging, so that put() never waits for a log call. Both are re-entrant, because a signal
        # handler may log or finish the run in the middle of anything here.
        self._waiting_lock = threading.RLock()
        self._log_lock = threading.RLock()  # held from looking at the open row to the end of the log call
        self._before_end: list[Callable[[], object]] = []
        self._calls_at_last_put = -1
        self._cur = run.starting_step  # the open row's step
        self._own_in_open = False  # the open row holds a row of ours already
        self._open_timestamp: float | None = None  # one that the user gave for the open row
        self._log: Callable[..., None] = getattr(run, "_log", run.log)
        self._sees_calls = hasattr(run, "_log") and not self._shared
        self._asks_step = not self._shared
        self._look_at_step()
        if self._sees_calls:
            # There `run.step` is the SDK's own count, which drifts: the mirror knows better.
            self._asks_step = self._asks_step and "_step" not in vars(run)
            run._log = self._user_log
        self._watch_the_end()

    # ---- in

    @property
    def num_waiting(self) -> int:
        """Rows that have no place yet."""
        return len(self._waiting) + (1 if self._parts else 0)

    def put(self, owner: object, row: Row, *, commit: bool = False) -> None:
        """Take a row; it is logged when it can be without touching the user's rows, at the latest when the run ends.

        Args:
            owner: rows of the same owner may merge, and keep their order.
            commit: log it now, as a step of its own. For users who never log: it moves the steps of those who do.
        """
        with self._waiting_lock:
            self._waiting.append(_Waiting(owner, row))
            if len(self._waiting) > self._max_waiting:
                self._merge_neighbours()
        if commit or self._shared:
            self._log_all()
        elif not self._sees_calls or (self._calls_at_last_put == self.num_user_calls and self.num_waiting > 1):
            self._log_where_nothing_of_ours_is()
        self._calls_at_last_put = self.num_user_calls

    def before_end(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once when the run ends, while rows can still be put: the moment of a last flush.

        Returns:
            A function that takes the request back.
        """
        self._before_end.append(callback)

        def forget() -> None:
            if callback in self._before_end:
                self._before_end.remove(callback)

        return forget

    def _merge_neighbours(self) -> None:
        """Merge the two neighbours of one owner that together hold the fewest windows; the oldest of equals."""
        last_of: dict[int, int] = {}
        best: tuple[int, int, int] | None = None
        for index, waiting in enumerate(self._waiting):
            previous = last_of.get(id(waiting.owner))
            last_of[id(waiting.owner)] = index
            if previous is None:
                continue
            num_windows = self._waiting[previous].num_windows + waiting.num_windows
            if best is None or num_windows < best[0]:
                best = (num_windows, previous, index)
        if best is None:
            return  # as many owners as rows
        num_windows, previous, index = best
        earlier, later = self._waiting[previous], self._waiting[index]
        merged = _Waiting(later.owner, earlier.row.merge(later.row), num_windows)
        if index < len(self._waiting) and self._waiting[previous] is earlier:  # else a signal handler ended the run
            self._waiting[index] = merged
            del self._waiting[previous]

    # ---- out

    def _next_part(self) -> dict[str, Any] | None:
        """The part whose turn it is; it stays in line until it is logged."""
        while not self._parts:
            with self._waiting_lock:
                if not self._waiting:
                    return None
                row = self._waiting.popleft().row
            self._parts.extend(row.parts())
        return self._parts[0]

    def _several_wait(self) -> bool:
        self._next_part()
        return len(self._parts) + len(self._waiting) > 1

    def _place(self, *, step: int | None = None, commit: bool = False) -> None:
        """Log the part whose turn it is, if there is one."""
        part = self._next_part()
        if part is None:
            return
        if self._open_timestamp is not None and (step is None or step == self._cur):
            part = {**part, "_timestamp": self._open_timestamp}
        local_step = self._local_step()
        self._log(part, step=step, commit=commit)
        # Only now: interrupted before, it is logged again, into the same open row, with the same keys.
        self._parts.popleft()
        self._mirror(step, commit, own=True)
        if not commit:
            self._restore_local_step(local_step)

    def _log_all(self) -> None:
        with self._log_lock:
            if self._shared:
                while (part := self._next_part()) is not None:
                    self._log(part)
                    self._parts.popleft()
                return
            if self._next_part() is not None and self._own_in_open:
                self._look_at_step()
            while self._next_part() is not None:
                if self._own_in_open:
                    self._log({}, commit=True)
                    self._mirror(None, True)
                self._place(commit=True)

    def _log_where_nothing_of_ours_is(self) -> None:
        """Place a row without waiting for the user's next call, as none may come that we see."""
        if not self._log_lock.acquire(blocking=False):
            return  # a log call is under way in another thread: it is the call that was missing
        try:
            # Always: a row placed under an old step would look like one that was closed since.
            self._look_at_step()
            if not self._own_in_open:
                self._place()
        finally:
            self._log_lock.release()

    # ---- the user's calls

    def _user_log(self, data: Any, step: Any = None, commit: Any = None, **more: Any) -> None:
        """Stand in for `run._log`: place what waits around a call of the user, which passes unchanged."""
        if self.ended or os.getpid() != self._pid:  # in a forked child nobody may ever release the lock
            return self._log(data, step=step, commit=commit, **more)
        with self._log_lock:
            self.num_user_calls += 1
            effective_step = self._effective_step(step)
            self._guarded(lambda: self._place_before(data, effective_step, commit))
            self._log(data, step=step, commit=commit, **more)
            self._guarded(lambda: self._place_after(data, effective_step, commit))

    def _place_before(self, data: Any, step: int | None, commit: bool | None) -> None:
        valid = isinstance(data, Mapping) and all(isinstance(key, str) for key in data)
        if not valid or (step is not None and step < self._cur) or self._next_part() is None:
            return  # it will raise, or be dropped, or nothing waits
        jumps = step is not None and step > self._cur
        if jumps and self._several_wait():
            self._fill_steps_before(step)  # type: ignore[arg-type]  # a jump has a step
        if _closes(step, commit) and (jumps or not self._own_in_open):
            self._place(step=step if jumps else None)

    def _fill_steps_before(self, step: int) -> None:
        """Give waiting rows the steps that the user skips; the newest waits for the row that the user is to open."""
        self._look_at_step()
        free = self._cur + 1 if self._own_in_open else self._cur
        while free < step and self._several_wait():
            self._place(step=free)
            free += 1

    def _place_after(self, data: Any, step: int | None, commit: bool | None) -> None:
        if step is not None and step < self._cur:
            return
        # After a jump the open row may be closed by the next jump, as users with step= do, so this is the row's turn.
        opened = step is not None and step > self._cur and not _closes(step, commit)
        self._mirror(step, commit)
        self._open_timestamp = None if _closes(step, commit) else data.get("_timestamp")
        if opened:
            self._place()

    def _mirror(self, step: int | None, commit: bool | None, *, own: bool = False) -> None:
        """W&B's rule, for a call that it does not drop."""
        if step is not None and step > self._cur:
            self._cur, self._own_in_open, self._open_timestamp = step, False, None
        self._own_in_open |= own
        if _closes(step, commit):
            self._cur, self._own_in_open, self._open_timestamp = self._cur + 1, False, None

    def _look_at_step(self) -> None:
        """Ask W&B for the open row's step: rows were closed that we did not see if it is larger than ours.

        Cost: one exchange with W&B's process, 0.5 to 2 ms.
        """
        if not self._asks_step:
            return
        try:
            step = self._run.step
        except Exception as error:  # it waits up to 30 s for an answer: once is enough, the mirror goes on alone
            logger.debug("run.step does not answer: %s", error)
            self._asks_step = False
            return
        if step > self._cur:
            self._cur, self._own_in_open, self._open_timestamp = step, False, None

    def _effective_step(self, step: Any) -> int | None:
        import wandb

        if step is None or wandb.patched.get("tensorboard"):  # with a patched TensorBoard W&B ignores the user's steps
            return None
        try:
            return int(step)
        except (TypeError, ValueError):
            return None  # the user's call is about to say so

    # W&B names media files after a counter that our log calls would move. The counter's attribute differs by version.
    def _local_step(self) -> tuple[str, int] | None:
        for name in ("_local_step", "_step"):
            if name in vars(self._run):
                return name, vars(self._run)[name]
        return None

    def _restore_local_step(self, local_step: tuple[str, int] | None) -> None:
        if local_step is not None:
            setattr(self._run, *local_step)

    def _guarded(self, place: Callable[[], None]) -> None:
        """Our failure is not the user's failure: say it once, and leave the user's calls alone from then on."""
        if self.ended:
            return
        try:
            place()
        except Exception:
            logger.exception("Gradients are no longer logged to W&B: placing a row failed. Training goes on.")
            self._stop()

    # ---- the end

    def _watch_the_end(self) -> None:
        """Learn of the run's end before W&B does, on both ways there.

        run.finish(), wandb.finish(), `with wandb.init()` and a second wandb.init() run the teardown hooks. A script
        that just ends, sys.exit(), an exception and Ctrl-C do not: there, atexit calls the newest handler first, so
        ours, registered after wandb.init(), runs before the one that ends W&B's process. (A handler of the user's own
        that logs, registered between wandb.init() and us, runs after ours: its rows follow ours.)
        """
        atexit.register(self._end_at_exit)
        try:
            from wandb.sdk.wandb_run import TeardownHook, TeardownStage

            self._run._teardown_hooks.append(TeardownHook(self.end, TeardownStage.EARLY))
        except (ImportError, AttributeError):
            name = "_finish" if hasattr(self._run, "_finish") else "finish"
            finish = getattr(self._run, name)

            def finish_after_our_end(*args: Any, **kwargs: Any) -> Any:
                self.end()
                return finish(*args, **kwargs)

            vars(self._run)[name] = finish_after_our_end

    def _end_at_exit(self) -> None:
        if os.getpid() == self._pid:  # a forked child inherits the handler, but not the run
            self.end()

    def end(self) -> None:
        """Log everything that waits, and give the run back as it was. Idempotent; never raises."""
        if self.ended:
            return
        callbacks, self._before_end = self._before_end, []
        for log in (*callbacks, self._log_all):
            try:
                log()
            except Exception:
                logger.exception("The last gradients were not all logged to W&B.")
        self._stop()

    def _stop(self) -> None:
        self.ended = True
        self._waiting.clear()
        self._parts.clear()
        self._before_end.clear()
        atexit.unregister(self._end_at_exit)
        if self._sees_calls and vars(self._run).get("_log") == self._user_log:
            del vars(self._run)["_log"]


def _closes(step: int | None, commit: bool | None) -> bool:
    return bool(commit) if commit is not None else step is None
