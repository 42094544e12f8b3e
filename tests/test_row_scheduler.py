"""No row of the package is lost, and no row of the user is lost, moved or changed, against a model of W&B's rules."""

from __future__ import annotations

import logging
import random
import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from offline import history
from user_programs import STYLES, OpenRow, OwnRow, random_program, split_rows, user_rows

from wandb_gradwatch.sinks import _row_queue
from wandb_gradwatch.sinks._row_scheduler import RowScheduler, row_scheduler_of


class ModelRun:
    """A W&B run by the model of W&B's rules in user_programs.py, with the public `log` and `step` only."""

    def __init__(self, start: int = 0) -> None:
        self.core = OpenRow(start)
        self.starting_step = start
        self.settings = SimpleNamespace(mode="offline")

    def log(self, data: Any, step: Any = None, commit: Any = None) -> None:
        if not isinstance(data, dict):
            raise TypeError("wandb.log must be passed a dictionary")
        self.core.log(data, step, commit)

    @property
    def step(self) -> int:
        return self.core.cur

    def finish(self) -> None:
        self.core.close()


class ModelRunWithLog(ModelRun):
    """Add the private method that all log calls of the SDK pass through."""

    def _log(self, data: Any, step: Any = None, commit: Any = None) -> None:
        super().log(data, step, commit)

    def log(self, data: Any, step: Any = None, commit: Any = None) -> None:
        self._log(data, step=step, commit=commit)


def play(run: Any, program: list[Any], max_waiting: int = 64) -> None:
    """Run a program and finish the run, like a training script."""
    row_scheduler = RowScheduler(run)
    owner = object()
    with patch.object(_row_queue, "MAX_WAITING", max_waiting):
        for kind, *arguments in program:
            if kind == "own":
                row_scheduler.put(owner, OwnRow(arguments))
            else:
                data, step, commit = arguments
                run.log(data, step=step, commit=commit)
        run.finish()


def own_logged(run: Any) -> list[int]:
    return split_rows([*run.core.rows, (run.core.cur, run.core.open or {})])[1]


def own_numbers(program: list[Any]) -> list[int]:
    return [action[1] for action in program if action[0] == "own"]


@pytest.mark.parametrize("run_class", [ModelRun, ModelRunWithLog])
@pytest.mark.parametrize("style", STYLES)
def test_every_own_row_arrives_once_in_order_and_user_rows_are_as_without_us(style: str, run_class: Any) -> None:
    for seed in range(100):
        rng = random.Random(f"{style} {seed}")
        program = random_program(rng, style=style)
        run = run_class(start=rng.choice((0, 0, 17)))
        expected = user_rows(program, run.core.cur)
        play(run, program, max_waiting=rng.choice((1, 3, 64)))
        user, own = split_rows(run.core.rows)
        assert user == expected, (style, seed)
        assert own == own_numbers(program), (style, seed)


def test_the_fuzz_sees_what_a_library_that_commits_its_rows_does() -> None:
    # Shows that the check of the test above can fail.
    program = random_program(random.Random(0), style="implicit")
    run = ModelRun()
    for kind, *arguments in program:
        run.log(*arguments) if kind == "log" else run.log({"own": str(arguments[0])})
    run.finish()
    assert split_rows(run.core.rows)[0] != user_rows(program)


def test_the_fuzz_sees_what_two_rows_in_one_open_row_do() -> None:
    program = [("own", 0), ("own", 1), ("log", {"u": 1}, None, None)]
    run = ModelRun()
    for kind, *arguments in program:
        run.log(*arguments) if kind == "log" else run.log({"own": str(arguments[0])}, commit=False)
    run.finish()
    assert split_rows(run.core.rows)[1] == [1]


def test_a_row_joins_the_row_that_the_user_logs_at_the_same_step_of_training() -> None:
    run = ModelRunWithLog()
    program: list[Any] = []
    for step in range(5):
        program += [("own", step), ("log", {"loss": step}, step, None)]
    play(run, program)
    assert run.core.rows == [(step, {"loss": step, "own": str(step)}) for step in range(5)]


@pytest.mark.parametrize("commit", [None, False])
def test_a_key_of_ours_that_the_users_open_row_has_keeps_the_users_value(commit: bool | None, caplog: Any) -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("gradwatch", OwnRow([1]))
    run.log({"own": "the user's"}, step=1, commit=commit)
    row_scheduler.put("gradwatch", OwnRow([2]))
    run.log({"loss": 1.0}, step=2)
    run.finish()
    assert dict(run.core.rows) == {1: {"own": "the user's"}, 2: {"own": "2", "loss": 1.0}}
    assert "'own' is logged by the script, too" in caplog.text


def test_steps_that_the_user_skips_take_the_rows_that_wait() -> None:
    run = ModelRunWithLog()
    play(run, [("log", {"loss": 0}, 0, None), ("own", 0), ("own", 1), ("own", 2), ("log", {"loss": 1}, 10, None)])
    assert run.core.rows == [(0, {"loss": 0, "own": "0"}), (1, {"own": "1"}), (10, {"loss": 1, "own": "2"})]


def test_neighbours_of_one_owner_merge_when_too_many_rows_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_row_queue, "MAX_WAITING", 4)
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    first, second = object(), object()
    for number in range(50):
        row_scheduler.put(first, OwnRow([number]))
        row_scheduler.put(second, OwnRow([100 + number]))
        assert len(row_scheduler.waiting) <= 5  # four, and the one that is being placed
    run.finish()
    own = split_rows(run.core.rows)[1]
    assert [number for number in own if number < 100] == list(range(50))
    assert [number for number in own if number >= 100] == list(range(100, 150))


def test_merged_windows_are_of_similar_length() -> None:
    run = ModelRunWithLog()
    play(run, [("own", number) for number in range(64)], max_waiting=8)
    lengths = [len(row["own"].split(",")) for _, row in run.core.rows]
    # 64 windows in at most 10 rows. Merging the shortest neighbours makes no row longer than 4 times the mean of 8.
    assert len(lengths) <= 10
    assert max(lengths) <= 32


def test_a_row_of_two_parts_takes_two_places() -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put(self_owner := object(), OwnRow([0], num_parts=2))
    run.log({"loss": 0})
    run.log({"loss": 1})
    row_scheduler.put(self_owner, OwnRow([1]))
    run.finish()
    assert run.core.rows == [(0, {"own": "0", "loss": 0}), (1, {"own_more": "0", "loss": 1}), (2, {"own": "1"})]


def test_the_placement_belongs_to_the_run() -> None:
    run = ModelRunWithLog()
    first = row_scheduler_of(run)
    first.put("watcher", OwnRow([0]))
    second = row_scheduler_of(run)
    second.put("another watcher", OwnRow([1]))
    run.log({"loss": 0})
    run.finish()
    assert first is second
    assert split_rows(run.core.rows) == ([(0, {"loss": 0})], [0, 1])


class EventFiles(ModelRunWithLog):
    """A run whose rows wandb-core makes from TensorBoard's event files, at any time."""

    def rows_from_files(self, *losses: int) -> None:
        for loss in losses:
            self.core.log({"loss": loss})


@pytest.mark.parametrize("at_the_end", [0, 3], ids=["all rows during the run", "some after our last word"])
def test_rows_join_those_from_event_files_whenever_they_come(monkeypatch: pytest.MonkeyPatch, at_the_end: int) -> None:
    """The user's rows keep their steps. All rows of the package arrive, and not only at the end of the run."""
    monkeypatch.setattr("wandb_gradwatch.sinks._row_scheduler._syncs_tensorboard", lambda: True)
    run = EventFiles()
    row_scheduler = RowScheduler(run)
    for number in range(6):
        row_scheduler.put("watcher", OwnRow([number]))
        if number % 2:
            run.rows_from_files(10 * number, 10 * number + 1)  # several rows at a time
            arrived = split_rows(run.core.rows)[1]
            assert arrived == list(range(number + 1))
    row_scheduler.end()
    run.rows_from_files(*range(at_the_end))
    run.finish()
    user, own = split_rows(run.core.rows)
    assert user == list(enumerate({"loss": loss} for loss in (10, 11, 30, 31, 50, 51, *range(at_the_end))))
    assert own == list(range(6))


def test_rows_that_are_merged_because_of_event_files_are_told_once_with_what_keeps_them_apart(
    monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    monkeypatch.setattr("wandb_gradwatch.sinks._row_scheduler._syncs_tensorboard", lambda: True)
    run = EventFiles()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("watcher", OwnRow([0]))
    assert said() == []
    for number in range(1, 4):
        row_scheduler.put("watcher", OwnRow([number]))
    (message,) = said()
    assert "rows of gradients are merged into one" in message
    assert "sinks=[wandb_gradwatch.WandbSink(commit=True)]" in message
    for number in range(4, 7):
        row_scheduler.put("watcher", OwnRow([number]), commit=True)
    run.finish()
    assert [row["own"] for _, row in run.core.rows] == ["0,1,2,3", "4", "5", "6"]


def test_a_row_from_event_files_that_is_closed_while_ours_is_logged_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row closes between reading the step and the log call: the package's row joins the next row and is kept."""
    monkeypatch.setattr("wandb_gradwatch.sinks._row_scheduler._syncs_tensorboard", lambda: True)
    run = EventFiles()
    row_scheduler = RowScheduler(run)
    log = row_scheduler._log
    for number in range(3):
        row_scheduler.put("watcher", OwnRow([number]))
        monkeypatch.setattr(row_scheduler, "_log", lambda *a, **k: (run.rows_from_files(1), log(*a, **k)))
    run.finish()
    assert set(split_rows(run.core.rows)[1]) == {0, 1, 2}


def test_commit_logs_at_once() -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("watcher", OwnRow([0]), commit=True)
    row_scheduler.put("watcher", OwnRow([1]), commit=True)
    assert run.core.rows == [(0, {"own": "0"}), (1, {"own": "1"})]


def test_rows_closed_behind_our_back_are_noticed() -> None:
    # Another process logs to the run: W&B's step advances without a log call in this process.
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("watcher", OwnRow([0]))
    row_scheduler.put("watcher", OwnRow([1]))  # the second one without a user's call in between: places the first
    run.core.log({"theirs": 1})
    row_scheduler.put("watcher", OwnRow([2]))
    run.core.log({"theirs": 2})
    run.finish()
    assert run.core.rows[:2] == [(0, {"own": "0", "theirs": 1}), (1, {"own": "1", "theirs": 2})]
    assert split_rows(run.core.rows)[1] == [0, 1, 2]


def test_steps_closed_behind_our_back_are_not_taken_for_free_ones() -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    for _ in range(5):
        run.core.log({"theirs": 1})  # steps 0 to 4, which the scheduler does not see
    row_scheduler.put("watcher", OwnRow([0]))
    row_scheduler.put("watcher", OwnRow([1]))
    row_scheduler.put("watcher", OwnRow([2]))
    run.log({"loss": 1}, step=9)
    run.finish()
    assert split_rows(run.core.rows)[1] == [0, 1, 2]


def test_a_run_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelRunWithLog()
    asked = []

    def no_answer(_: Any) -> int:
        asked.append(1)
        raise TimeoutError("timed out")

    monkeypatch.setattr(ModelRunWithLog, "step", property(no_answer))
    play(run, random_program(random.Random(1), style="jumps"))
    assert len(asked) == 1


@pytest.mark.parametrize("from_event_files", [False, True])
@pytest.mark.parametrize("run_class", [ModelRun, ModelRunWithLog])
def test_the_training_does_not_wait_for_a_process_of_wandb_that_hangs(
    run_class: Any, from_event_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread of the user asks for the step, and no row is logged until the process goes on; then all are."""
    monkeypatch.setattr("wandb_gradwatch.sinks._row_scheduler._syncs_tensorboard", lambda: from_event_files)
    goes_on, asked_in = threading.Event(), set()
    goes_on.set()

    class Hanging(run_class):  # type: ignore[misc]
        @property
        def step(self) -> int:
            asked_in.add(threading.current_thread())
            assert goes_on.wait(20)
            return super().step

    run = Hanging()
    row_scheduler = RowScheduler(run)
    with monkeypatch.context() as patch:
        patch.setattr("wandb_gradwatch.sinks._row_scheduler.PATIENCE", 0.0)
        for number in range(6):
            goes_on.clear() if number in (1, 4) else goes_on.set()
            row_scheduler.put("watcher", OwnRow([2 * number]))
            row_scheduler.put("watcher", OwnRow([2 * number + 1]))
            if from_event_files:
                run.core.log({"loss": number})
                continue
            logged = len(own_logged(run))
            run.log({"loss": number}, step=3 * number)
            assert goes_on.is_set() or len(own_logged(run)) == logged
    goes_on.set()
    row_scheduler._look_at_step(waits=True)
    row_scheduler.put("watcher", OwnRow([12]))
    run.finish()
    user, own = split_rows(run.core.rows)
    assert [data["loss"] for _, data in user] == list(range(6))
    assert set(own) == set(range(13))
    assert threading.main_thread() not in asked_in


def test_a_run_that_ends_where_no_thread_starts_asks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    play(run := ModelRun(), [("own", 0), ("own", 1), ("log", {"u": 1}, 7, None)])
    assert split_rows(run.core.rows) == ([(7, {"u": 1})], [0, 1])


def test_a_user_call_that_fails_raises_and_changes_nothing() -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("watcher", OwnRow([0]))
    with pytest.raises(TypeError, match=r"wandb\.log must be passed a dictionary"):
        run.log(["not a dict"], step=7)
    assert run.core == OpenRow()
    run.log({"loss": 0})
    run.finish()
    assert run.core.rows == [(0, {"loss": 0, "own": "0"})]


def test_our_failure_is_said_once_and_leaves_the_user_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(OwnRow):
        def parts(self) -> list[dict[str, Any]]:
            raise ZeroDivisionError("a bug of ours")

    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("watcher", Broken([0]))
    with caplog.at_level(logging.ERROR, logger="wandb_gradwatch"):
        for step in range(5):
            run.log({"loss": step})
        run.finish()
    assert run.core.rows == [(step, {"loss": step}) for step in range(5)]
    assert [record.message for record in caplog.records] == [
        "wandb_gradwatch: a part of a row could not be logged to W&B and is left out; other rows and the training go on"
    ]


class Table:
    """A value that is written to a file when it is logged."""


class RowWithTable(OwnRow):
    def parts(self) -> list[dict[str, Any]]:
        return [part | {"table": Table()} for part in super().parts()]


class FullDisk(ModelRunWithLog):
    def _log(self, data: Any, step: Any = None, commit: Any = None) -> None:
        if any(isinstance(value, Table) for value in data.values()):
            raise OSError("No space left on device")
        super()._log(data, step, commit)


@pytest.mark.parametrize(
    ("from_event_files", "commit", "row_with_table"),
    [(False, commit, row) for commit in (False, True) for row in (0, 2, 4)] + [(True, True, 2), (True, False, 0)],
)
@pytest.mark.parametrize("users_log", [{"loss": 1.0}, {"loss": [1.0]}, None], ids=["joined", "apart", "never"])
def test_a_table_that_cannot_be_written_is_left_out_and_no_row_is(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    from_event_files: bool,
    commit: bool,
    users_log: Any,
    row_with_table: int,
) -> None:
    monkeypatch.setattr("wandb_gradwatch.sinks._row_scheduler._syncs_tensorboard", lambda: from_event_files)
    run = FullDisk()
    row_scheduler = RowScheduler(run)
    for number in range(5):
        row = RowWithTable if number == row_with_table else OwnRow
        row_scheduler.put("watcher", row([number]), commit=commit)
        if users_log is not None:
            run.log(users_log)
    run.finish()
    user, own = split_rows(run.core.rows)
    assert own == list(range(5))
    assert [data for _, data in user] == [users_log] * (0 if users_log is None else 5)
    left_out = [record.message for record in caplog.records if "left out" in record.message]
    assert left_out == [
        "wandb_gradwatch: a part of a row could not be logged to W&B and is left out; other rows and the training go on"
    ]


def test_what_placing_takes_in_the_users_calls_is_told_once_and_without_their_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class SlowRun(ModelRunWithLog):
        def _log(self, data: Any, step: Any = None, commit: Any = None) -> None:
            now[0] += 3.0 if "loss" in data else 0.25
            super()._log(data, step, commit)

    run = SlowRun()
    row_scheduler = RowScheduler(run)
    row_scheduler.put(object(), OwnRow([1]))
    run.log({"loss": [1.0]})  # not a plain number, so a call of its own
    assert (now[0], row_scheduler.pop_seconds(), row_scheduler.pop_seconds()) == (3.25, 0.25, 0.0)


def test_the_end_gives_the_run_back_as_it_was() -> None:
    run = ModelRunWithLog()
    before = set(vars(run))
    row_scheduler = RowScheduler(run)
    assert "_log" in vars(run)
    run.finish()
    assert "_log" not in vars(run)
    assert row_scheduler.ended
    assert before <= set(vars(run))


def test_a_last_flush_is_asked_for_before_the_end() -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.before_end("watcher", lambda: row_scheduler.put("watcher", OwnRow([7])))
    run.log({"loss": 0})
    run.finish()
    assert run.core.rows == [(0, {"loss": 0}), (1, {"own": "7"})]


def test_a_last_flush_that_fails_does_not_take_the_waiting_rows_with_it(said: Any) -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("watcher", OwnRow([0]))
    row_scheduler.before_end("watcher", lambda: 1 / 0)
    run.finish()
    assert run.core.rows == [(0, {"own": "0"})]
    assert said() == ["wandb_gradwatch: the last gradients were not all logged to W&B."]


def test_a_last_flush_that_was_taken_back_is_not_called() -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.before_end("watcher", lambda: pytest.fail("called"))
    row_scheduler.forget("watcher")
    run.finish()


def test_a_signal_handler_may_finish_the_run_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The handler of SIGUSR1 (preemption) runs inside put(), which holds its lock while rows merge.
    class Interrupting(OwnRow):
        def merge(self, later: OwnRow) -> OwnRow:
            signal.raise_signal(signal.SIGUSR1)
            return super().merge(later)

    run = ModelRunWithLog()
    monkeypatch.setattr(_row_queue, "MAX_WAITING", 1)
    row_scheduler = RowScheduler(run)
    before = signal.signal(signal.SIGUSR1, lambda *_: run.finish())
    try:
        row_scheduler.put("watcher", Interrupting([0]))
        row_scheduler.put("watcher", Interrupting([1]))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert split_rows(run.core.rows)[1] == [0, 1]


@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("does", ["log", "jump", "finish"])
def test_a_signal_handler_may_log_or_finish_while_a_row_is_placed(comes: str, does: str, caplog: Any) -> None:
    class Interrupted(ModelRunWithLog):
        signals = finished = False

        def _log(self, data: Any, step: Any = None, commit: Any = None) -> None:
            interrupts, self.signals = "own" in data and not self.signals, self.signals or "own" in data
            if interrupts and comes == "before":
                signal.raise_signal(signal.SIGUSR1)
            if self.finished:
                raise RuntimeError("the run is finished")
            super()._log(data, step, commit)
            if interrupts and comes == "after":
                signal.raise_signal(signal.SIGUSR1)

        def handle(self, *_: Any) -> None:
            if does != "finish":
                self.log({"preempted": True}, step=10**9 if does == "jump" else None, commit=True)
            else:
                self.finish()
                self.finished = True

    run = Interrupted()
    row_scheduler = RowScheduler(run)
    before = signal.signal(signal.SIGUSR1, run.handle)
    try:
        for number in range(3):
            row_scheduler.put(f"watcher {number}", OwnRow([number]))
        with nullcontext() if does != "finish" else pytest.raises(RuntimeError, match="the run is finished"):
            for step in range(4):
                run.log({"loss": step})
    finally:
        signal.signal(signal.SIGUSR1, before)
    run.finish()
    user, own = split_rows(run.core.rows)
    assert own == [0, 1, 2]
    losses: list[dict[str, Any]] = [{"loss": step} for step in range(4 if does != "finish" else comes == "after")]
    if does != "finish":
        losses.insert(comes == "after", {"preempted": True})  # the first call logs the first loss with the row
    assert [data for _, data in user if data] == losses
    assert (run.signals, caplog.records) == (True, [])


def test_a_timestamp_that_the_user_gave_stays() -> None:
    run = ModelRunWithLog()
    row_scheduler = RowScheduler(run)
    row_scheduler.put("watcher", OwnRow([0]))
    run.log({"loss": 0, "_timestamp": 123.0}, step=5)
    run.log({"loss": 1}, step=6)
    assert run.core.rows[-1] == (5, {"loss": 0, "_timestamp": 123.0, "own": "0"})


@pytest.mark.parametrize("seed", range(3))
def test_offline_files_hold_the_rows_of_the_model(start_run: Any, seed: int) -> None:
    programs, runs = [], []
    for style in STYLES:
        program = random_program(random.Random(f"{style} {seed}"), style=style)
        run = start_run()
        play(run, program, max_waiting=random.Random(seed).choice((3, 64)))
        programs.append(program)
        runs.append(run)
    for program, run, style in zip(programs, runs, STYLES, strict=True):
        user, own = split_rows([(row["_step"], row) for row in history(run)])
        assert user == user_rows(program), style
        assert own == own_numbers(program), style


def test_the_server_receives_the_rows_of_the_model(start_run: Any, loopback: Any) -> None:
    for style in ("jumps", "no_commit", "mixed"):
        program = random_program(random.Random(style), style=style)
        run = start_run(server=loopback)
        play(run, program)
        user, own = split_rows([(row["_step"], row) for row in loopback.runs[run.id].history])
        assert user == user_rows(program), style
        assert own == own_numbers(program), style


def test_three_threads_may_log(start_run: Any) -> None:
    run = start_run()
    row_scheduler = RowScheduler(run)

    def user(name: str) -> None:
        for number in range(40):
            run.log({name: number})

    threads = [threading.Thread(target=user, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for number in range(40):
        row_scheduler.put("watcher", OwnRow([number]))
    for thread in threads:
        thread.join()
    run.finish()
    user_part, own = split_rows([(row["_step"], row) for row in history(run)])
    assert own == list(range(40))
    assert [step for step, _ in user_part] == list(range(120))  # each call made its own row, and no step is lost
    for name in ("a", "b", "c"):
        assert [data[name] for _, data in user_part if name in data] == list(range(40))


def test_media_files_keep_the_names_that_they_have_without_us(start_run: Any) -> None:
    import wandb

    def paths(with_us: bool) -> list[str]:
        run = start_run()
        if with_us:
            row_scheduler = RowScheduler(run)
        for step in (3, 9, 12):
            if with_us:
                for number in range(2):
                    row_scheduler.put("watcher", OwnRow([number]))
            run.log({"page": wandb.Html(f"<p>{step}</p>")}, step=step, commit=step == 12 or None)
        run.finish()
        return [row["page.path"] for row in history(run) if "page.path" in row]

    assert paths(with_us=True) == paths(with_us=False)
