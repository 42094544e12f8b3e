"""Failures around a training: the server, the disk, the clock, processes, and the user's own callbacks.

In every test the training continues, W&B gets the user's rows unchanged and each row of the package once, and each kind
of failure is reported once.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import Chosen, only, step
from offline import history
from processes import Ended, script

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch._pipeline import pipeline
from wandb_gradwatch.rules import Alert

STEPS, LOG_EVERY = 40, 5
FLUSHED = list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))


def train(run: Any, **options: Any) -> wandb_gradwatch.Watcher:
    """Train 40 watched steps with the gradient {3, 4} and log a loss per step; the watcher is not removed."""
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher = wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=LOG_EVERY, **options)
    for number in range(STEPS):
        step(model, optimizer, a=[3, 4])
        run.log({"loss": float(number)}, step=number)
    return watcher


def assert_complete(rows: list[dict[str, Any]]) -> None:
    """Check that the user's rows are unchanged, and that each row of the package is correct and arrived once."""
    assert [(row["_step"], row["loss"]) for row in rows if "loss" in row] == [(n, float(n)) for n in range(STEPS)]
    ours = [row for row in rows if "gradwatch/grad_norm" in row]
    assert [row["gradwatch/step"] for row in ours] == FLUSHED
    assert {row["gradwatch/grad_norm"] for row in ours} == {5.0}  # 9 + 16 = 25


@pytest.mark.parametrize("trouble", ["500", "drop", "hang"])
def test_no_row_is_lost_or_doubled_by_a_server_in_trouble(
    start_run: Any, loopback: Any, said: Any, trouble: Any
) -> None:
    run = start_run(server=loopback)
    loopback.fault("*", trouble)
    watcher = train(run)  # completes although the server never answers
    assert watcher.step == STEPS
    loopback.heal()
    run.finish()
    assert_complete(loopback.runs[run.id].history)
    assert said() == []


@pytest.mark.parametrize("trouble", ["500", "drop"])
def test_an_alert_gets_through_a_server_in_trouble(start_run: Any, loopback: Any, trouble: Any) -> None:
    run = start_run(server=loopback)
    loopback.fault("NotifyScriptableRunAlert", trouble, times=1)
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=LOG_EVERY):
        for number in range(10):
            step(model, optimizer, a=[3, float("nan")] if number == 4 else [3, 4])
            run.log({"loss": 0.0})
    run.finish()
    recorded = loopback.runs[run.id]
    assert [alert["title"] for alert in recorded.alerts] == ["NaN gradient"]
    assert len([row for row in recorded.history if "gradwatch/grad_norm" in row]) == 2


def test_an_alert_does_not_wait_for_a_server_that_hangs(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback)
    loopback.fault("*", "hang")
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher = wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=LOG_EVERY)
    for number in range(20):  # if logging waited, the test would reach its time limit
        step(model, optimizer, a=[3, float("nan")] if number == 4 else [3, 4])
        run.log({"loss": 0.0})
    assert watcher.step == 20
    loopback.heal()
    watcher.remove()
    run.finish()
    recorded = loopback.runs[run.id]
    assert [alert["title"] for alert in recorded.alerts] == ["NaN gradient"]
    assert len([row for row in recorded.history if "gradwatch/grad_norm" in row]) == 4


def test_a_server_that_is_gone_costs_nothing_but_the_upload(start_run: Any, said: Any) -> None:
    from loopback import LoopbackServer

    with LoopbackServer() as server:
        run = start_run(server=server, settings={"finish_timeout": 1.0})
    train(run)
    run.finish()
    assert_complete(history(run))
    assert said() == []


_SCRIPT = """
import os, signal, sys
import torch, wandb, wandb_gradwatch

run = wandb.init(project="loopback")
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)
if WATCHED:
    wandb_gradwatch.watch(model, sample_every=1, log_every=5)
BEFORE
for number in range(40):
    optimizer.zero_grad()
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    optimizer.step()
    run.log({"loss": float(number)}, step=number)
print("trained", model.weight.tolist(), flush=True)
AFTER
"""


# wandb-core writes the run's file; the limit applies to every process, this one included.
_DISK_FULL = """
import psutil, resource
for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
"""

# name -> (whether it is watched, code before the training, code after it)
_SCRIPTS = {
    "a full disk, unwatched": (False, _DISK_FULL, ""),
    "a full disk": (True, _DISK_FULL, ""),
    "kill -9": (True, "", "os.kill(os.getpid(), signal.SIGKILL)"),
    "an exception": (True, "", "raise ValueError('the training failed')"),
    "the model goes first": (True, "", "del model, optimizer"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Path]]:
    """Run each script; return how each ended, and its folder."""
    done = {}
    for name, (watched, before, after) in _SCRIPTS.items():
        folder = tmp_path_factory.mktemp("ended")
        path = folder / "script.py"
        path.write_text(_SCRIPT.replace("WATCHED", str(watched)).replace("BEFORE", before).replace("AFTER", after))
        done[name] = script(path, folder=folder, WANDB_CONSOLE="off"), folder
    return done


def says_nothing_but_the_end(script: Ended) -> bool:
    """Whether the only words of the package are the line at the end of a healthy run."""
    lines = [line for line in script.stderr.splitlines() if "wandb_gradwatch" in line]
    return len(lines) == 1 and "no alert in 40 of 40 steps measured." in lines[0]


def test_a_full_disk_does_not_touch_the_training(ended: dict[str, tuple[Ended, Path]]) -> None:
    (plain, _), (watched, _) = ended["a full disk, unwatched"], ended["a full disk"]
    assert plain.stdout.startswith("trained"), plain.stderr
    assert (watched.stdout, watched.returncode) == (plain.stdout, plain.returncode)
    assert says_nothing_but_the_end(watched)


def test_kill_9_loses_no_more_than_wandb_does(ended: dict[str, tuple[Ended, Path]]) -> None:
    killed, folder = ended["kill -9"]
    assert killed.returncode == -9, killed.stderr
    rows = history(folder)
    # W&B keeps the rows that it received. Each of them has the package's values that were due: step 5 is in row 4.
    assert [row["loss"] for row in rows] == list(range(len(rows)))
    ours = [(row["_step"], row["gradwatch/step"]) for row in rows if "gradwatch/grad_norm" in row]
    assert ours == [(step - 1, step) for step in FLUSHED if step <= len(rows)]


@pytest.mark.parametrize(("name", "code"), [("an exception", 1), ("the model goes first", 0)])
def test_a_script_may_end_while_it_is_watched(ended: dict[str, tuple[Ended, Path]], name: str, code: int) -> None:
    script, folder = ended[name]
    assert script.returncode == code, script.stderr
    assert says_nothing_but_the_end(script)
    assert_complete(history(folder))


def test_a_forked_child_that_trains_on_logs_nothing_into_its_parents_run(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback)
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=LOG_EVERY)
    for number in range(STEPS):
        step(model, optimizer, a=[3, 4])
        run.log({"loss": float(number)}, step=number)
        if number == 12:
            child = os.fork()
            if child == 0:
                for _ in range(STEPS):
                    step(model, optimizer, a=[30, 40])
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    run.finish()
    assert_complete(loopback.runs[run.id].history)


class Gradients(torch.utils.data.Dataset[list[float]]):
    """Forty equal samples; a worker process that loads them also copies the watched model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> list[float]:
        with torch.no_grad():
            assert float(self.model.a.sum()) == 2
        return [3.0, 4.0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_neither_log_nor_hang(start_run: Any, loopback: Any, method: str) -> None:
    run = start_run(server=loopback)
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=LOG_EVERY)
    loader = torch.utils.data.DataLoader(
        Gradients(model), batch_size=None, num_workers=1, multiprocessing_context=method
    )
    for number, gradient in enumerate(loader):
        step(model, optimizer, a=gradient)
        run.log({"loss": float(number)}, step=number)
    run.finish()
    assert_complete(loopback.runs[run.id].history)


def test_a_clock_that_jumps_moves_no_number(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    now = time.time
    calls = iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: now() + (-1) ** next(calls) * 86400.0)
    memory = MemorySink()
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with wandb_gradwatch.watch(
        model, sinks=[memory], rules=[only("inf_gradient")], sample_every=1, log_every=LOG_EVERY
    ):
        for number in range(STEPS):
            step(model, optimizer, a=[3, float("inf")] if number == 30 else [3, 4])
    merged = memory.merged()
    assert merged is not None
    assert merged.steps.tolist() == list(range(1, STEPS + 1))
    assert all(0 <= snapshot.overhead_ratio <= 1 for snapshot in memory.snapshots)
    assert [(alert.title, alert.step) for alert in memory.alerts] == [("Inf gradient", 31)]
    assert said() == []


class Broken(wandb_gradwatch.Sink):
    """A sink that raises in one of its methods, and counts its calls."""

    def __init__(self, method: str) -> None:
        self.method, self.calls = method, 0

    def _call(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            raise OSError(28, "No space left on device")

    def write(self, snapshot: Any) -> None:
        self._call("write")

    def alert(self, alert: Alert) -> None:
        self._call("alert")

    def close(self) -> None:
        self._call("close")


def with_nan(**options: Any) -> tuple[torch.Tensor, MemorySink]:
    """Train with NaN from the tenth step on; return the final parameters, and the contents of a working sink."""
    memory = MemorySink()
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)
    sinks = [*options.pop("sinks", []), memory]
    with wandb_gradwatch.watch(model, sinks=sinks, sample_every=1, log_every=LOG_EVERY, **options):
        for number in range(20):
            step(model, optimizer, a=[1, float("nan")] if number == 10 else [1, 1])
    return model.a.detach().clone(), memory


@pytest.mark.parametrize("method", ["write", "alert", "close"])
def test_a_sink_that_raises_is_dropped_and_said_once(said: Any, method: str) -> None:
    broken = Broken(method)
    parameters, memory = with_nan(sinks=[broken])
    assert parameters[1].isnan()
    assert parameters[0] == 1 - 20 * 2**-10
    assert broken.calls == 1
    assert [len(snapshot) for snapshot in memory.snapshots] == [5, 5, 5, 5]
    assert [alert.title for alert in memory.alerts] == ["NaN gradient"]
    assert said() == ["wandb_gradwatch: Broken failed and is dropped; training and the other sinks continue."]


def test_a_rule_that_raises_is_dropped_and_said_once(said: Any) -> None:
    calls = []

    def broken(snapshot: Any) -> None:
        calls.append(snapshot)
        raise ZeroDivisionError("a rule of the user's")

    _, memory = with_nan(rules=[broken, *wandb_gradwatch.rules.default_rules()])
    assert len(calls) == 1
    assert [alert.title for alert in memory.alerts] == ["NaN gradient"]
    assert [message.startswith("the rule") for message in said()] == [True]


def stop(alert: Alert) -> None:
    raise RuntimeError(f"stop: {alert.title}")


def test_a_row_is_not_lost_where_on_alert_raises_when_the_rules_look_at_the_flush() -> None:
    memory = MemorySink()
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)
    raised = []
    rules = [only("vanishing_gradient")]
    watcher = wandb_gradwatch.watch(model, sinks=[memory], rules=rules, sample_every=1, log_every=20, on_alert=stop)
    for _ in range(25):
        try:
            step(model, optimizer, a=[1e-9, 1e-9])  # far too small to trigger a closer look
        except RuntimeError as error:
            raised.append(str(error))
    watcher.remove()
    assert raised == ["stop: Vanishing gradient"]
    assert [snapshot.steps.tolist() for snapshot in memory.snapshots] == [list(range(1, 21)), list(range(21, 26))]


def test_a_sample_is_not_lost_where_on_alert_raises_about_it() -> None:
    memory = MemorySink()
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)
    with wandb_gradwatch.watch(model, sinks=[memory], rules=[], on_alert=stop):
        step(model, optimizer, a=[1, 1])
        model.loss(a=[1, 1]).backward()
        optimizer.zero_grad(set_to_none=False)  # the planted bug: reset before the step
        with pytest.raises(RuntimeError, match="stop: No gradient"):
            optimizer.step()
        step(model, optimizer, a=[1, 1])
    merged = memory.merged()
    assert merged is not None
    assert merged.steps.tolist() == [1, 2, 3]


def test_what_on_alert_raises_reaches_the_training_loop_and_watching_goes_on() -> None:
    memory = MemorySink()
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)
    raised = []
    with wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, log_every=LOG_EVERY, on_alert=stop):
        for number in range(20):
            try:
                step(model, optimizer, a=[1, float("nan")] if number == 10 else [1, 1])
            except RuntimeError as error:
                raised.append(str(error))
    assert raised == ["stop: NaN gradient"]
    merged = memory.merged()
    assert merged is not None
    assert merged.steps.tolist() == list(range(1, 21))


@pytest.mark.parametrize("asked", ["flush", "wait", "state_dict", "remove"])
def test_what_on_alert_raises_when_something_is_asked_is_raised_there_and_no_row_is_lost(asked: str) -> None:
    memory = MemorySink()
    model = Chosen(a=1)
    watcher = wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, on_alert=stop)
    for gradient in (1.0, 1.0, 1.0, 1.0, math.inf):  # updates by hand: the last one is measured when queried
        model.zero_grad()
        model.loss(a=[gradient]).backward()
    with torch.no_grad():
        model.a.sub_(1.0)
    with pytest.raises(RuntimeError, match="stop: Inf gradient"):
        getattr(watcher, asked)()
    watcher.remove()
    assert not model.a._backward_hooks
    merged = memory.merged()
    assert merged is not None
    assert merged.steps.tolist() == [1, 2, 3, 4, 5]
    assert [alert.title for alert in memory.alerts] == ["Inf gradient"]


@pytest.mark.parametrize("on_alert", [None, stop])
def test_what_a_hook_had_to_say_before_it_failed_is_said(
    monkeypatch: pytest.MonkeyPatch, on_alert: Any, said: Any
) -> None:
    memory = MemorySink()
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher = wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, on_alert=on_alert)
    step(model, optimizer, a=[1])

    def fail(*_: object) -> None:
        watcher._parts.notices.alert("No gradient", "found just before.", 2)
        watcher._parts.notices.say("a kind", "seen just before")
        raise RuntimeError("planted")

    monkeypatch.setattr(watcher._sampler._sample.fresh, "measure_present", fail)
    if on_alert is None:
        step(model, optimizer, a=[1])
        assert any("seen just before" in text for text in said())
    else:
        with pytest.raises(RuntimeError, match="stop: No gradient"):
            step(model, optimizer, a=[1])
    assert [(alert.title, alert.step) for alert in memory.alerts] == [("No gradient", 2)]
    merged = memory.merged()
    assert merged is not None
    assert merged.steps.tolist() == [1], "what there was is kept"
    step(model, optimizer, a=[1])


def test_samples_that_cannot_be_assembled_do_not_stop_the_training(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    memory = MemorySink()
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wandb_gradwatch.watch(model, sinks=[memory], sample_every=1)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(pipeline, "snapshot_of", fail)  # for the rules, and where the last samples are kept
    step(model, optimizer, a=[1])
    assert any("has failed and stopped watching" in text for text in said())
    assert any("could not write the last samples" in text for text in said())
