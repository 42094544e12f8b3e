"""Queued rows are logged before a script or a run ends, however it ends. Some endings run in their own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offline import history, records
from processes import script
from user_programs import OwnRow, split_rows

from wandb_gradwatch.sinks._row_scheduler import row_scheduler_of

_SCRIPT = """
import os, signal, sys, wandb
from wandb_gradwatch.sinks._row_scheduler import row_scheduler_of
from user_programs import OwnRow

run = wandb.init(project="loopback")
placement = row_scheduler_of(run)
placement.before_end("watcher", lambda: placement.put("watcher", OwnRow([4])))
for number in range(4):
    placement.put("watcher", OwnRow([number]))
run.log({"loss": 0})
run.log({"loss": 1}, commit=False)
"""

_ENDINGS = {  # ending -> the script's last lines, and the exit code in W&B
    "the script just ends": ("", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "an exception": ("raise ValueError('the training failed')", 1),
    # Set the handler, because Python inherits an ignored SIGINT from the starting process, such as `nohup ... &`.
    "Ctrl-C": ("signal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)", 255),
    "a forked child exits": ("if os.fork() == 0: sys.exit(0)\nos.wait()", 0),
}


@pytest.mark.parametrize("ending", _ENDINGS)
def test_a_script_may_end_in_any_way_and_its_exit_code_is_its_own(ending: str, tmp_path: Path) -> None:
    line, exit_code = _ENDINGS[ending]
    (tmp_path / "script.py").write_text(_SCRIPT + line)
    ended = script(tmp_path / "script.py", folder=tmp_path)
    user, own = split_rows([(row["_step"], row) for row in history(tmp_path)])
    assert user == [(0, {"loss": 0}), (1, {"loss": 1})]
    assert own == [0, 1, 2, 3, 4]  # 4 is the row of the last flush
    assert "wandb_gradwatch" not in ended.stderr  # no traceback of the package
    (exit_record,) = [record for record in records(tmp_path) if record["type"] == "exit"]
    assert exit_record["exit"].get("exit_code", 0) == exit_code


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
def test_rows_of_tensorboards_files_keep_their_steps(tmp_path: Path) -> None:
    """W&B reads the event files after the script's end here: rows of the package must not have taken their steps."""
    pytest.importorskip("tensorboard")
    of_user = {}
    (tmp_path / "script.py").write_text(_TENSORBOARD)
    for how in ("plain", "watched"):
        (folder := tmp_path / how).mkdir()
        ended = script(tmp_path / "script.py", how, folder=folder)
        assert ended.returncode == 0, ended.stderr
        rows = history(folder)
        of_user[how] = [tuple(row.get(key) for key in ("_step", "global_step", "loss")) for row in rows]
    assert of_user["plain"] == [(step, 100 * step, step) for step in range(6)]
    assert of_user["watched"] == of_user["plain"]
    assert max(row.get("gradwatch/step", 0) for row in rows) == 6
