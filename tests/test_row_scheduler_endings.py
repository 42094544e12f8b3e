"""However a script or a run ends, what waits is logged first. The endings that need a process of their own get one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offline import history, records
from user_programs import OwnRow, split_rows

import wandb_gradwatch
from wandb_gradwatch.sinks._row_scheduler import row_scheduler_of

_SCRIPT = """
import os, signal, sys, types, wandb
package = sys.modules["wandb_gradwatch"] = types.ModuleType("wandb_gradwatch")
package.__path__ = [{package}]  # without its top level, which takes torch
from wandb_gradwatch.sinks._row_scheduler import row_scheduler_of
from user_programs import OwnRow

run = wandb.init(project="loopback")
placement = row_scheduler_of(run)
placement.before_end(lambda: placement.put("watcher", OwnRow([4])))
for number in range(4):
    placement.put("watcher", OwnRow([number]))
run.log({"loss": 0})
run.log({"loss": 1}, commit=False)
"""

_PACKAGE = str(Path(wandb_gradwatch.__file__).parent)
_ENDINGS = {
    "the script just ends": ("", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "an exception": ("raise ValueError('the training failed')", 1),
    # The handler is set, because Python ignores the signal where whoever started it does, as `nohup ... &` does.
    "Ctrl-C": ("signal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)", 1),
    "a forked child exits": ("if os.fork() == 0: sys.exit(0)\nos.wait()", 0),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, script_environment: Any
) -> dict[str, tuple[subprocess.CompletedProcess[str], Path]]:
    """Run all scripts side by side: starting Python and wandb is what takes the time."""
    started = {}
    for ending, (line, _) in _ENDINGS.items():
        directory = tmp_path_factory.mktemp("ending")
        environment = script_environment(WANDB_DIR=str(directory))
        script = _SCRIPT.replace("{package}", repr(_PACKAGE)) + line
        process = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True, cwd=directory
        )
        started[ending] = (process, directory)
    done = {}
    for ending, (process, directory) in started.items():
        _, errors = process.communicate()
        done[ending] = (subprocess.CompletedProcess(process.args, process.returncode, stderr=errors), directory)
    return done


@pytest.mark.parametrize("ending", _ENDINGS)
def test_a_script_may_end_in_any_way(ending: str, ended: Any) -> None:
    process, directory = ended[ending]
    user, own = split_rows([(row["_step"], row) for row in history(directory)])
    assert user == [(0, {"loss": 0}), (1, {"loss": 1})]
    assert own == [0, 1, 2, 3, 4]  # 4 is the last flush
    assert "wandb_gradwatch" not in process.stderr  # no traceback of ours


@pytest.mark.parametrize("ending", _ENDINGS)
def test_the_exit_code_is_the_script_s_own(ending: str, ended: Any) -> None:
    _, directory = ended[ending]
    (exit_record,) = [record for record in records(directory) if record["type"] == "exit"]
    assert exit_record["exit"].get("exit_code", 0) == (255 if ending == "Ctrl-C" else _ENDINGS[ending][1])


def _put_four(run: Any) -> None:
    for number in range(4):
        row_scheduler_of(run).put("watcher", OwnRow([number]))
    run.log({"loss": 0})


def _assert_complete(run: Any) -> None:
    user, own = split_rows([(row["_step"], row) for row in history(run)])
    assert user == [(0, {"loss": 0})]
    assert own == [0, 1, 2, 3]


def test_run_finish(start_run: Any) -> None:
    run = start_run()
    _put_four(run)
    run.finish()
    _assert_complete(run)


def test_wandb_finish(start_run: Any) -> None:
    import wandb

    run = start_run(reinit="finish_previous")
    _put_four(run)
    wandb.finish()
    _assert_complete(run)


def test_leaving_the_with_block(start_run: Any) -> None:
    with start_run() as run:
        _put_four(run)
    _assert_complete(run)


def test_leaving_the_with_block_by_an_exception(start_run: Any) -> None:
    run = start_run()
    _put_four(run)
    with pytest.raises(ZeroDivisionError, match="the training failed"), run:
        raise ZeroDivisionError("the training failed")
    _assert_complete(run)


def test_a_second_init_ends_the_first_run(start_run: Any) -> None:
    first = start_run(reinit="finish_previous")
    _put_four(first)
    second = start_run(reinit="finish_previous")
    assert row_scheduler_of(first).ended
    assert not row_scheduler_of(second).ended
    _assert_complete(first)


@pytest.mark.parametrize("end", [lambda run: run.finish(), lambda run: run.__exit__(None, None, None)])
def test_without_teardown_hooks_finish_itself_is_watched(
    start_run: Any, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    import wandb.sdk.wandb_run

    run = start_run()
    monkeypatch.delattr(wandb.sdk.wandb_run, "TeardownHook")
    _put_four(run)
    end(run)
    _assert_complete(run)


_TENSORBOARD = """
import sys, wandb, wandb_gradwatch, torch

run = wandb.init(project="loopback", mode="offline", sync_tensorboard=True)
from torch.utils.tensorboard import SummaryWriter

writer = SummaryWriter("events")
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
if sys.argv[1] == "watched":
    wandb_gradwatch.watch(model, sample_every=1, log_every=1, rules=[])
for step in range(6):
    model.weight.grad = None
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    writer.add_scalar("loss", step, 100 * step)
writer.close()
run.finish()
"""


@pytest.mark.slow  # W&B waits for the files
def test_rows_of_tensorboards_files_keep_their_steps(tmp_path: Path, script_environment: Any) -> None:
    """W&B reads the files after the script's last word here: nothing of ours may have taken steps before."""
    pytest.importorskip("tensorboard")
    of_user, scripts = {}, {}
    for how in ("plain", "watched"):  # side by side: most of it is W&B waiting for the files
        (directory := tmp_path / how).mkdir()
        environment = script_environment(WANDB_DIR=str(directory))
        scripts[how] = subprocess.Popen([sys.executable, "-c", _TENSORBOARD, how], env=environment, cwd=directory)
    for how, script in scripts.items():
        assert script.wait(90) == 0
        rows = history(tmp_path / how)
        of_user[how] = [tuple(row.get(key) for key in ("_step", "global_step", "loss")) for row in rows]
    assert of_user["plain"] == [(step, 100 * step, step) for step in range(6)]
    assert of_user["watched"] == of_user["plain"]
    assert max(row.get("gradwatch/step", 0) for row in rows) == 6
