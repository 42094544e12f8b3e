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
- With `sync_tensorboard`, W&B's process makes the user's rows out of event files, seconds later and after the run's end
  too: rows of ours go into the open row at once, merged with what it holds of ours until W&B has closed it.

Rows of several watchers that are of one step share a place.

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
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from .._interruptions import raise_interruption
from ._row_queue import Row, RowQueue

logger = logging.getLogger("wandb_gradwatch")

MAX_WAITING: Final = 64  # rows; above it neighbours merge. With 256 histograms each these are about 35 MB.
_ATTRIBUTE: Final = "_wandb_gradwatch_placement"
_MEDIA_COUNTERS: Final = ("_local_step", "_step")  # of W&B's versions


class OpenRow:
    """What is known of the row that W&B holds open; changes only when it is told of a call or a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.has_own = False  # a row of ours is in it already
        self.timestamp: float | None = None  # one that the user gave for it

    def is_left_by(self, step: int | None) -> bool:
        """Whether a call with this step closes the row and opens a later one."""
        return step is not None and step > self.step

    def note_call(self, step: int | None, closes: bool, *, own: bool = False) -> None:
        """A call that W&B does not drop, which closes the row that it goes to or not, has been made; own: with ours."""
        if step is not None:
            self.note_step(step)
        self.has_own |= own
        if closes:
            self.note_step(self.step + 1)

    def note_step(self, step: int) -> None:
        """This step is open now: a larger one than before is another row."""
        if step > self.step:
            self.step, self.has_own, self.timestamp = step, False, None


def row_scheduler_of(run: Any) -> RowScheduler:
    """The row scheduler of a run that goes on: one for its whole life, whoever watches into it."""
    existing = vars(run).get(_ATTRIBUTE)
    if existing is None:
        # vars(), because a run refuses unknown attributes once it is initialised.
        existing = vars(run)[_ATTRIBUTE] = RowScheduler(run)
    return existing  # type: ignore[no-any-return]


class RowScheduler:
    """The rule that finds a place for the rows that wait, and the one who logs them.

    Owns the run's log call while it lasts, what waits (`RowQueue`), what is known of the open row (`OpenRow`), and
    who is to be called before the end.
    """

    def __init__(self, run: Any, max_waiting: int = MAX_WAITING) -> None:
        self.ended = False
        self.defined: set[str] = set()  # metric names and globs that this run knows already
        self.num_user_calls = 0
        self._run = run
        self._pid = os.getpid()
        self._shared = run.settings.mode == "shared"  # there the server orders rows: every writer just logs
        self._from_event_files = _syncs_tensorboard() and not self._shared
        self._in_open_row: dict[object, Row] = {}  # by owner, where rows come from event files
        self._waiting = RowQueue(max_waiting)
        self._open = OpenRow(run.starting_step)
        # Held from looking at the open row to the end of the log call. Re-entrant, because a signal handler may log or
        # finish the run in the middle of anything here.
        self._log_lock = threading.RLock()
        self._before_end: list[Callable[[], object]] = []
        self._forget_exit: Callable[[], None] = lambda: None
        self._is_placing = False  # the next part is being logged
        self._calls_at_last_put = -1
        self._seconds = 0.0
        self._log: Callable[..., None] = getattr(run, "_log", run.log)
        self._sees_calls = hasattr(run, "_log") and not self._shared
        self._asks_step = not self._shared
        self._look_at_step()
        if self._sees_calls:
            # There `run.step` is the SDK's own count, which drifts: the mirror knows better.
            self._asks_step = self._asks_step and "_step" not in vars(run)
            run._log = self._user_log
        self._forget_exit = _call_before_the_end(run, self.end)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, owner: object, row: Row, *, commit: bool = False) -> None:
        """Take a row; it is logged when it can be without touching the user's rows, at the latest when the run ends.

        Rows of one owner may merge, and keep their order. With `commit` it is logged now, as a step of its own, for
        users who never log: it moves the steps of those who do.
        """
        if self._from_event_files and not commit:
            self._put_into_open_row(owner, row)
            return
        self._waiting.put(owner, row)
        if commit or self._shared:
            self._log_all()
        elif not self._sees_calls or (
            self._calls_at_last_put == self.num_user_calls and self._waiting.has_several_of(owner)
        ):
            self._log_where_nothing_of_ours_is()
        self._calls_at_last_put = self.num_user_calls

    def before_end(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call back once when the run ends, while rows can still be put, unless the returned function is called."""
        self._before_end.append(callback)

        def forget() -> None:
            if callback in self._before_end:
                self._before_end.remove(callback)

        return forget

    def _place(self, *, step: int | None = None, commit: bool = False) -> None:
        """Log the part whose turn it is, if there is one.

        In the middle of this a signal handler may log, which places nothing, or end the run, which logs the same part
        again: into the same open row, with the same keys.
        """
        part = self._waiting.next_part()
        if part is None or self._is_placing:
            return
        self._is_placing = True
        try:
            self._log_part(part, step, commit)
        finally:
            self._is_placing = False
        self._waiting.remove(part)
        self._open.note_call(step, commit, own=True)

    def _log_part(self, part: dict[str, Any], step: int | None, commit: bool) -> None:
        if self._open.timestamp is not None and (step is None or step == self._open.step):
            part = {**part, "_timestamp": self._open.timestamp}
        # W&B names media files after a counter, which our log calls would move.
        counters = {name: vars(self._run)[name] for name in _MEDIA_COUNTERS if name in vars(self._run)}
        self._log(part, step=step, commit=commit)
        if not commit:
            vars(self._run).update(counters)

    def _put_into_open_row(self, owner: object, row: Row) -> None:
        """Log a row without a commit; what the open row holds of this owner is merged into it, and replaced."""
        with self._log_lock:
            self._look_at_step()
            if not self._open.has_own:
                self._in_open_row.clear()
            merged = self._in_open_row[owner].merge(row) if owner in self._in_open_row else row
            for part in merged.parts():
                self._log_part(part, None, commit=False)
            self._in_open_row[owner] = merged
            # W&B may have closed the row in between. If it has, the next row is merged with this one in vain: nothing
            # is lost in either case.
            self._look_at_step()
            self._open.has_own = True

    def _log_all(self) -> None:
        with self._log_lock:
            if self._is_placing:
                self._is_placing = self._open.has_own = False
            if self._waiting.next_part() is not None and self._open.has_own:
                self._look_at_step()
            while self._waiting.next_part() is not None:
                if self._open.has_own:
                    self._log({}, commit=True)
                    self._open.note_call(None, True)
                self._place(commit=True)

    def _log_where_nothing_of_ours_is(self) -> None:
        """Place a row without waiting for the user's next call, as none may come that we see."""
        if not self._log_lock.acquire(blocking=False):
            return  # a log call is under way in another thread: it is the call that was missing
        try:
            # Always: a row placed under an old step would look like one that was closed since.
            self._look_at_step()
            if not self._open.has_own:
                self._place()
        finally:
            self._log_lock.release()

    def _user_log(self, data: Any, step: Any = None, commit: Any = None, **more: Any) -> None:
        """Stand in for `run._log`: place what waits around a call of the user, which passes unchanged."""
        if self.ended or os.getpid() != self._pid:  # in a forked child nobody may ever release the lock
            return self._log(data, step=step, commit=commit, **more)
        with self._log_lock:
            self.num_user_calls += 1
            heeded_step = _step_for_wandb(step)
            closes = heeded_step is None if commit is None else bool(commit)
            dropped = heeded_step is not None and heeded_step < self._open.step
            if self._waiting and not dropped:
                self._guarded(self._place_before, data, heeded_step, closes)
            self._log(data, step=step, commit=commit, **more)
            if not dropped:
                self._guarded(self._place_after, data, heeded_step, closes)

    def _place_before(self, data: Any, step: int | None, closes: bool) -> None:
        valid = isinstance(data, Mapping) and all(isinstance(key, str) for key in data)
        if not valid or self._is_placing or self._waiting.next_part() is None:
            return  # it will raise, it is a signal handler's in the middle of a placing, or nothing waits
        jumps = self._open.is_left_by(step)
        if step is not None and jumps and self._waiting.has_several():
            self._fill_steps_before(step)
        if closes and (jumps or not self._open.has_own):
            self._place(step=step if jumps else None)

    def _fill_steps_before(self, step: int) -> None:
        """Give waiting rows the steps that the user skips; the newest waits for the row that the user is to open."""
        self._look_at_step()
        free = self._open.step + 1 if self._open.has_own else self._open.step
        while free < step and self._waiting.has_several():
            self._place(step=free)
            free += 1

    def _place_after(self, data: Any, step: int | None, closes: bool) -> None:
        # After a jump the open row may be closed by the next jump, as users with step= do, so this is the row's turn.
        opened = self._open.is_left_by(step) and not closes
        self._open.note_call(step, closes)
        self._open.timestamp = None if closes else data.get("_timestamp")
        if opened:
            self._place()

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
        self._open.note_step(step)

    def _guarded(self, place: Callable[..., None], *call: Any) -> None:
        """Our failure is not the user's failure: say it once, and leave the user's calls alone from then on."""
        if self.ended:
            return
        began = time.perf_counter()
        try:
            place(*call)
        except Exception as error:
            raise_interruption(error)
            if not self.ended:  # by a signal handler, in the middle of this
                logger.exception("Gradients are no longer logged to W&B: placing a row failed. Training goes on.")
                self._stop()
        self._seconds += time.perf_counter() - began

    def pop_seconds(self) -> float:
        """What placing rows in the user's calls has taken since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

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
        self._before_end.clear()
        self._forget_exit()
        if self._sees_calls and vars(self._run).get("_log") == self._user_log:
            del vars(self._run)["_log"]


def _call_before_the_end(run: Any, end: Callable[[], None]) -> Callable[[], None]:
    """Call `end`, which must be idempotent, when the run is about to end, on both ways there.

    run.finish(), wandb.finish(), `with wandb.init()` and a second wandb.init() run the teardown hooks. A script
    that just ends, sys.exit(), an exception and Ctrl-C do not: there, atexit calls the newest handler first, so
    ours, registered after wandb.init(), runs before the one that ends W&B's process. (A handler of the user's own
    that logs, registered between wandb.init() and us, runs after ours: its rows follow ours.) The returned function
    takes the exit handler back, once `end` has been called.
    """
    pid = os.getpid()

    def end_at_exit() -> None:
        if os.getpid() == pid:  # a forked child inherits the handler, but not the run
            end()

    atexit.register(end_at_exit)
    try:
        from wandb.sdk.wandb_run import TeardownHook, TeardownStage

        run._teardown_hooks.append(TeardownHook(end, TeardownStage.EARLY))
    except (ImportError, AttributeError):
        name = "_finish" if hasattr(run, "_finish") else "finish"
        finish = getattr(run, name)

        def finish_after_our_end(*args: Any, **kwargs: Any) -> Any:
            end()
            return finish(*args, **kwargs)

        vars(run)[name] = finish_after_our_end
    return lambda: atexit.unregister(end_at_exit)


def _syncs_tensorboard() -> bool:
    """Whether W&B's process reads TensorBoard's event files and makes rows of them."""
    import wandb

    return bool(wandb.patched.get("tensorboard"))


def _step_for_wandb(step: Any) -> int | None:
    """The step that W&B makes of the one that the user gave; None for its own."""
    if step is None or _syncs_tensorboard():  # W&B ignores the user's steps then
        return None
    try:
        return int(step)
    except (TypeError, ValueError):
        return None  # the user's call is about to say so
