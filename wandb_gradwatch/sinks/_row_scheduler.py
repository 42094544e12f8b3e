"""Insert our rows into a user's run such that no row is lost, and no row of the user is moved or changed.

W&B keeps one open row. A log call with a smaller step is dropped. A call with a larger step closes the open row and
opens a row at that step. The keys of a call are then merged into the open row, which the call closes if it commits:
with `commit=True`, or with neither `step=` nor `commit=False`. A library that commits a row of its own therefore shifts
or drops rows of the user, and a library that merges two of its rows into one open row loses the first.

Therefore, while the user can still log, we never commit, and never use a step that the user could still use:

- If a call of the user is about to close the open row, the oldest queued row is merged into the open row. If the call
  logs plain numbers, one call logs both: the exchange with W&B's process is a quarter of the cost of a row.
- If a call of the user skips steps, queued rows use the skipped steps, which the user cannot use any more.
- Otherwise rows stay queued; if the queue grows too long, neighbouring rows are merged.
- When the run ends, the user logs no more, and the rest of the queue is committed row by row.
- With `sync_tensorboard`, W&B's process makes the user's rows from event files, seconds later and even after the end of
  the run. Our rows then go into the open row at once, merged with our rows that are in it, until W&B closes it.

Rows of several watchers with the same step share one W&B row.

Our value of the loss is left out where the user logs a loss: W&B's own tools read the first key with "loss" in it in
the first rows of a run, and must find the user's key. Ours is therefore logged only from the row FIRST_ROWS on, until
the user logs such a key; or in all rows that are logged at once or at the run's end, if the user has logged nothing.

A process that is killed (SIGKILL, SIGTERM without a handler, os._exit) loses the queued rows, as it loses W&B's own
open row. No queued row could be logged earlier: W&B keeps only closed rows, and the user may still use every step from
the open row's on.

The open row is known in two ways. A mirror of W&B's rule follows `run._log`, through which every log call of the
process passes. `run.step` queries W&B itself: it corrects the mirror where an error would lose a row (the mirror does
not see other processes that log), and replaces the mirror if `_log` does not exist. Where W&B's process hangs, there is
no answer, and the rows stay queued: what we log would fill the socket that the user's own calls need.
"""

import atexit
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final

from .._boundary import Boundary, Call, around, entry_point
from .._interruptions import raise_interruption
from .._judgement.verdict import Verdict
from ..snapshot import keys
from ._definitions import MetricDefinitions
from ._row_queue import OpenRow, Row, RowQueue, plain_values

logger = logging.getLogger("wandb_gradwatch")

FIRST_ROWS: Final = 10  # of W&B's history
PATIENCE: Final = 0.1  # seconds that the training waits for an answer of W&B's process, once while it hangs
_ATTRIBUTE: Final = "_wandb_gradwatch_placement"
_MEDIA_COUNTERS: Final = ("_local_step", "_step")  # the names in different versions of W&B


@dataclass(frozen=True, slots=True)
class _UsersRow:
    """A log call of the user."""

    data: Any
    step: int | None  # that W&B uses; None: W&B counts by itself
    closes: bool  # the row that is open after it
    has_options: bool  # a step of its own, or arguments that only W&B knows

    @classmethod
    def of(cls, data: Any = None, step: Any = None, commit: Any = None, **more: Any) -> "_UsersRow":
        heeded_step = _step_for_wandb(step)
        closes = heeded_step is None if commit is None else bool(commit)
        return cls(data, heeded_step, closes, step is not None or bool(more))

    @property
    def is_valid(self) -> bool:
        """Whether the call will not raise."""
        return isinstance(self.data, Mapping) and all(isinstance(key, str) for key in self.data)

    @property
    def may_be_joined(self) -> bool:
        """Whether a row of ours may be logged in the same call: it is of plain numbers."""
        is_plain = not self.has_options and type(self.data) is dict
        return is_plain and all([type(value) in (float, int) for value in self.data.values()])


class RowScheduler:
    """Logs queued rows to a W&B run by the rules at the top of this file, and calls back before the run's end."""

    def __init__(self, run: Any) -> None:
        self.ended = False
        self.last_steps: dict[str, int] = {}  # by namespace: the step of the newest row, of any training in this run
        self.verdicts: dict[object, Verdict] = {}  # the newest of each sink, of any training in this run
        self.has_told_repeated = False  # that two trainings in this run have the same steps
        self._has_told_shared = False  # that the script logs a key of ours, too
        self._has_told_left_out = False
        self._has_told_merged = False
        self.num_user_calls = 0
        self._user_logs_a_loss = False
        self._boundary = Boundary(self._failed)
        self._run = run
        self._pid = os.getpid()
        self._shared = run.settings.mode == "shared"  # in this mode the server orders the rows of all writers
        self._from_event_files = _syncs_tensorboard() and not self._shared
        self._in_open_row: dict[object, Row] = {}  # our rows in the open row by owner; used with event files only
        self._may_be_later = False  # the row that contains them may have a later step than the mirror's
        self.waiting = RowQueue(self._left_out)
        self._definitions = MetricDefinitions(run)
        self._open = OpenRow(run.starting_step)
        # Held from reading the open row's state to the end of the log call. Re-entrant, because a signal handler can
        # log or finish the run at any point in this code.
        self._log_lock = threading.RLock()
        self._before_end: dict[object, list[Callable[[], object]]] = {}  # by owner
        self._is_placing = False  # whether the next part is being logged
        self._joined_at: int | None = None  # the open row's step, if the part is being logged in a call of the user
        self._calls_at_last_put = -1
        self.is_starved = False  # the user has logged nothing between the last two rows, so that rows are queued
        self._seconds = 0.0
        self._log: Callable[..., None] = getattr(run, "_log", run.log)
        self._log_between = around(self._log, before=self._log_begins, after=self._log_ends)
        self._sees_calls = hasattr(run, "_log") and not self._shared
        self._asks_step = not self._shared
        self._answer: Future[int] | None = None  # of the last query of `run.step`
        self._look_at_step(waits=True)
        self._forget_exit = _call_before_the_end(run, self.end)
        if self._sees_calls:
            # If a run has `_step`, `run.step` is a count of the SDK that drifts: the mirror is more reliable.
            self._asks_step = self._asks_step and "_step" not in vars(run)
            run._log = self._user_log

    @property
    def is_unanswered(self) -> bool:
        """Whether W&B's process has not answered the last query, so that it probably hangs."""
        return self._answer is not None and not self._answer.done()

    def put(self, owner: object, row: Row, *, commit: bool = False) -> None:
        """Queue a row. It is logged as soon as the user's rows stay as they are, at the latest when the run ends.

        Rows of one owner keep their order and may be merged. With `commit`, the row is logged at once as a step of its
        own. That is for scripts that never log: it shifts the steps of scripts that do.
        """
        try:
            if self._from_event_files and not commit:
                self._put_into_open_row(owner, row)
            else:
                self._put_into_queue(owner, row, commit)
        except Exception as error:
            raise_interruption(error)
            self._left_out(error)

    def _put_into_queue(self, owner: object, row: Row, commit: bool) -> None:
        self.waiting.put(owner, row)
        has_called = self._calls_at_last_put != self.num_user_calls
        self._calls_at_last_put = self.num_user_calls
        self.is_starved = not has_called and self.waiting.has_several_of(owner)
        if commit or self._shared:
            self._log_all()
        elif not self._sees_calls or self.is_starved:
            self._log_where_nothing_of_ours_is()

    def before_end(self, owner: object, callback: Callable[[], object]) -> None:
        """Register a callback for once before the run ends, when `put` still works."""
        self._before_end.setdefault(owner, []).append(callback)

    def forget(self, owner: object) -> None:
        """Remove the callbacks of an owner; its queued rows are still logged."""
        self._before_end.pop(owner, None)

    def _place(self, *, step: int | None = None, commit: bool = False, joins: Call | None = None) -> None:
        """Log the next part, if there is one; if it `joins` a call of the user's and they share no key, in one call.

        A signal handler that logs in the middle of this method places no part. One that ends the run logs the same part
        again, into the same open row and with the same keys.
        """
        part = self.waiting.next_part()
        if part is None or self._is_placing:
            return
        self._is_placing = True
        try:
            logged = part if self._logs_our_loss(commit) else _without_loss(part)
            self._definitions.add(logged)
            data = {} if joins is None else joins.found.data
            if joins is not None and logged.keys().isdisjoint([*data, *self._open.users]):
                self._joined_at = self._open.step
                self._log({**logged, **data}, step=None, commit=True)
                joins.is_made = True
                self.waiting.remove(part)
                return
            self._log_part(logged, step, commit)
        except BaseException as error:
            self._remove_if_joined()
            if isinstance(error, Exception):
                self.waiting.keep_plain_values(part)
            raise
        finally:
            self._is_placing, self._joined_at = False, None
        self.waiting.remove(part)
        self._open.note_call(step, commit, own=True)

    def _remove_if_joined(self) -> None:
        """Remove the part whose call was interrupted if W&B has logged it: its row is closed, so it must not return."""
        part, joined_at = self.waiting.next_part(), self._joined_at
        if part is not None and joined_at is not None and self._look_at_step() and self._open.step > joined_at:
            self.waiting.remove(part)

    def _logs_our_loss(self, commit: bool) -> bool:
        """Whether a row that is logged now may have our value of the loss; see the top of this file."""
        if self._user_logs_a_loss or not self._sees_calls or self._from_event_files:
            return False
        return self._open.num_earlier >= FIRST_ROWS if self.num_user_calls else commit

    def _log_part(self, part: dict[str, Any], step: int | None, commit: bool) -> None:
        if step is None or step == self._open.step:
            if shared := part.keys() & self._open.users:
                if not self._has_told_shared:
                    self._has_told_shared = True
                    text = "%r is logged by the script, too: in rows that have it from there, ours is left out."
                    logger.warning(f"wandb_gradwatch: {text}", min(shared))
                part = {key: value for key, value in part.items() if key not in shared}
            if self._open.timestamp is not None:
                part = {**part, "_timestamp": self._open.timestamp}
        # W&B names media files by a counter: restore it, so that our log calls do not change the names of user files.
        counters = {name: vars(self._run)[name] for name in _MEDIA_COUNTERS if name in vars(self._run)}
        self._log(part, step=step, commit=commit)
        if not commit:
            vars(self._run).update(counters)

    def _put_into_open_row(self, owner: object, row: Row) -> None:
        """Log a row without a commit, merged with the owner's row that is in the open row, which it replaces."""
        with self._log_lock:
            if self._look_at_step() and not (self._open.has_own or self._may_be_later):
                self._in_open_row.clear()
            merged = row
            if owner in self._in_open_row:
                merged = self._in_open_row[owner].merge(row)
                self._tell_merged()
            for part in map(_without_loss, merged.parts()):
                self._definitions.add(part)
                try:
                    self._log_part(part, None, commit=False)
                except Exception as error:
                    raise_interruption(error)
                    self._left_out(error)
                    self._log_part(plain_values(part), None, commit=False)
            self._in_open_row[owner] = merged
            # W&B may have closed the row in between. Then the next row is merged with this one without need, but no row
            # is lost.
            self._may_be_later = not self._look_at_step()
            self._open.has_own = True

    def _tell_merged(self) -> None:
        if not self._has_told_merged:
            self._has_told_merged = True
            text = (
                "W&B reads the rows of this run from TensorBoard's event files, seconds or minutes after they are "
                "written. Until then rows of gradients are merged into one, so that your rows keep their steps. For "
                "each row by itself use watch(..., sinks=[wandb_gradwatch.WandbSink(commit=True)]): W&B's own step "
                "then counts these rows, too; global_step stays as it is."
            )
            logger.warning("wandb_gradwatch: %s", text)

    def _log_all(self) -> None:
        with self._log_lock:
            if self._is_placing:
                self._remove_if_joined()
                self._is_placing = self._open.has_own = False
            if self.waiting.next_part() is not None and self._open.has_own:
                self._look_at_step()
            while self.waiting.next_part() is not None:
                if self._open.has_own:
                    self._log({}, commit=True)
                    self._open.note_call(None, True)
                try:
                    self._place(commit=True)
                except Exception as error:
                    raise_interruption(error)
                    self._left_out(error)

    def _log_where_nothing_of_ours_is(self) -> None:
        """Place a row, if the open row has none of ours, without waiting for a call of the user that we can see."""
        if not self._log_lock.acquire(blocking=False):
            return  # another thread is in a log call of the user, which places the row
        try:
            # Read the step in every case: a row of ours noted under an outdated step would seem to be closed already.
            if self._look_at_step() and not self._open.has_own:
                self._place()
        finally:
            self._log_lock.release()

    def _user_log(self, *args: Any, **kwargs: Any) -> Any:
        """Replacement of `run._log`: place queued rows before and after the user's call, which passes unchanged."""
        if os.getpid() != self._pid:  # a forked child may have inherited a lock that is never released
            return self._log(*args, **kwargs)
        with self._log_lock:
            return self._log_between(*args, **kwargs)

    @entry_point()
    def _log_begins(self, call: Call) -> None:
        """Place rows before the user's call, or one in the same call with the user's data."""
        began = time.perf_counter()
        user = call.found = _UsersRow.of(*call.args, **call.kwargs)
        self.num_user_calls += not self.ended
        if not (self._user_logs_a_loss or self._is_dropped(user)):
            self._user_logs_a_loss = _has_loss(user.data)
        # A call in the middle of a placing comes from a signal handler.
        may_place = self.waiting and user.is_valid and not (self._is_dropped(user) or self._is_placing)
        if may_place and not self.is_unanswered:
            jumps = self._open.is_left_by(user.step)
            if user.step is not None and jumps and self.waiting.has_several() and self._look_at_step():
                # Queued rows take the steps that the user skips; the newest is kept for the row that the user opens.
                free = self._open.step + self._open.has_own
                while free < user.step and self.waiting.has_several():
                    self._place(step=free)
                    free += 1
            if user.closes and (jumps or not self._open.has_own):
                self._place(step=user.step if jumps else None, joins=call if user.may_be_joined else None)
        self._seconds += time.perf_counter() - began

    @entry_point()
    def _log_ends(self, call: Call) -> None:
        """Place a row after the user's call."""
        began, user = time.perf_counter(), call.found
        if user is None or self._is_dropped(user):
            return
        # Users who pass step= close a row by the next jump, so a row of ours must join the row that a jump has opened.
        opened = self._open.is_left_by(user.step) and not user.closes
        self._open.note_call(user.step, user.closes)
        self._open.timestamp = None if user.closes else user.data.get("_timestamp")
        if not user.closes:
            self._open.users.update(user.data)
        if opened and not self.is_unanswered:
            self._place()
        self._seconds += time.perf_counter() - began

    def _is_dropped(self, user: "_UsersRow") -> bool:
        """Whether W&B drops this call, as its step is over. After the end of the run no call matters."""
        return self.ended or (user.step is not None and user.step < self._open.step)

    def _failed(self, error: Exception) -> None:
        """After an error while rows were placed: the user's log calls still work, and other rows are logged."""
        if not self.ended:  # a signal handler may have ended the run meanwhile
            self._left_out(error)

    def _look_at_step(self, *, waits: bool = False) -> bool:
        """Query W&B for the step of the open row, and return whether it is known now; True if only the mirror is used.

        A larger step than the mirror's means that rows were closed unseen. `run.step` waits up to 30 s for W&B's
        process, so a thread reads it. Until the thread has an answer, no other query is made. With `waits`, this method
        waits as long as `run.step` does, otherwise for PATIENCE. Cost: one exchange with W&B's process, 0.5 to 2 ms.
        """
        if not self._asks_step:
            return True
        if self.is_unanswered:
            return False
        answer = self._answer = Future()
        try:
            threading.Thread(target=self._read_step, args=[answer], name="gradwatch-step", daemon=True).start()
        except RuntimeError:  # since Python 3.12, no thread starts while the interpreter exits: waiting does no harm
            self._read_step(answer)
        if not wait([answer], None if waits else PATIENCE).done:
            return False
        if (error := answer.exception()) is None:
            self._open.note_step(answer.result())
        else:  # after one failure only the mirror is used
            logger.debug("run.step does not answer: %s", error)
            self._asks_step = False
        return True

    def _read_step(self, answer: Future[int]) -> None:
        try:
            answer.set_result(self._run.step)
        except Exception as error:
            answer.set_exception(error)

    def _left_out(self, error: Exception) -> None:
        """Log once that a part of a row could not be logged."""
        if not self._has_told_left_out:
            self._has_told_left_out = True
            text = "a part of a row could not be logged to W&B and is left out; other rows and the training go on"
            logger.error(f"wandb_gradwatch: {text}", exc_info=error)

    def pop_seconds(self) -> float:
        """Seconds spent placing rows during the user's calls since the last call of `pop_seconds`."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @entry_point()
    def end(self, _: object = None) -> None:
        """Log all queued rows and restore the run's log method. Idempotent; never raises."""
        if self.ended:
            return
        callbacks, self._before_end = self._before_end, {}
        for log in (*itertools.chain(*callbacks.values()), self._log_all):
            try:
                log()
            except Exception:
                logger.exception("wandb_gradwatch: the last gradients were not all logged to W&B.")
        self._stop()

    def _stop(self) -> None:
        self.ended = True
        self.waiting.clear()
        self._before_end.clear()
        self._forget_exit()
        if self._sees_calls and vars(self._run).get("_log") == self._user_log:
            del vars(self._run)["_log"]


def row_scheduler_of(run: Any) -> RowScheduler:
    """The row scheduler of an active run. All watchers that log to the run share it."""
    if _ATTRIBUTE not in vars(run):  # vars(), because an initialised run rejects unknown attributes
        vars(run)[_ATTRIBUTE] = RowScheduler(run)
    return vars(run)[_ATTRIBUTE]  # type: ignore[no-any-return]


def _call_before_the_end(run: Any, end: Callable[..., None]) -> Callable[[], None]:
    """Call `end`, which must be idempotent, before the run ends, whether by a call or by the end of the script.

    run.finish(), wandb.finish(), `with wandb.init()` and a second wandb.init() call `run._finish`. The normal end of a
    script, sys.exit(), an exception and Ctrl-C do not. In those cases, atexit calls the newest handler first, so
    our handler, registered after wandb.init(), runs before the handler that ends W&B's process. (If the user registers
    a handler that logs between wandb.init() and watch(), it runs after ours, and its rows follow ours.) The returned
    function unregisters the exit handler; call it after `end`.
    """
    pid = os.getpid()

    def end_at_exit() -> None:
        if os.getpid() == pid:  # a forked child inherits the handler but not the run
            end()

    name = "_finish" if hasattr(run, "_finish") else "finish"
    vars(run)[name] = around(getattr(run, name), before=end)
    atexit.register(end_at_exit)
    return lambda: atexit.unregister(end_at_exit)


def _syncs_tensorboard() -> bool:
    """Whether W&B's process makes rows from TensorBoard's event files."""
    import wandb

    return bool(wandb.patched.get("tensorboard"))


def _without_loss(part: dict[str, Any]) -> dict[str, Any]:
    """Return the part without our value of the loss."""
    return {key: value for key, value in part.items() if not keys.is_loss(key)}


def _has_loss(data: object) -> bool:
    """Whether data of a log call has a key that other tools take for a loss, also below another key."""
    items = data.items() if isinstance(data, Mapping) else ()
    return any(keys.OF_A_LOSS in str(key).lower() or _has_loss(value) for key, value in items)


def _step_for_wandb(step: Any) -> int | None:
    """The step that W&B uses for a call with `step`; None if W&B counts by itself."""
    if step is None or _syncs_tensorboard():  # with TensorBoard, W&B ignores the user's steps
        return None
    try:
        return int(step)
    except (TypeError, ValueError):
        return None  # the user's call is about to raise
