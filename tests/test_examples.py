"""Each example runs, and the W&B run that it makes holds what its docstring promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offline import records
from processes import ROOT, script

from wandb_gradwatch._page.history import RunHistory
from wandb_gradwatch._page.read import read_run

EXAMPLES = ROOT / "examples"
STEPS = 40  # of every example: two flushes with log_every=20, four with log_every=10


def run_example(name: str, folder: Path, **how: Any) -> tuple[str, RunHistory]:
    """Return what the example prints and the history of its only run; `how` is passed to processes.script."""
    done = script(EXAMPLES / f"{name}.py", folder=folder, STEPS=str(STEPS), **how)
    assert done.returncode == 0, done.stderr
    assert "wandb_gradwatch has failed" not in done.stderr
    (run,) = (path for path in (folder / "wandb").glob("offline-run-*") if path.is_dir())
    records(folder)  # wait for the file's end record, which can come after the end of the script
    return done.stdout, read_run(run)


def test_train_logs_every_layer_under_its_name(tmp_path: Path) -> None:
    printed, history = run_example("train", tmp_path)
    assert "final loss" in printed
    assert history.names == ["0/weight", "0/bias", "2/weight", "2/bias"]
    # Fewer steps than the default log_every: the only row is written at the end. Its step depends on the cost of a
    # sample on this machine.
    assert len(history.steps) == 1
    assert 1 <= history.steps[0] <= STEPS
    assert np.isfinite(history.values["gradwatch/grad_norm"]).all()


def test_accumulate_counts_optimizer_steps_and_sees_clipping(tmp_path: Path) -> None:
    printed, history = run_example("accumulate", tmp_path)
    # Four micro-batches per step, log_every=10: a row every tenth step, not every tenth backward.
    assert history.steps.tolist() == [10, 20, 30, 40]
    before, after = history.values["gradwatch/grad_norm"], history.values["gradwatch/grad_norm_clipped"]
    clipped = before > 0.2
    assert clipped.any(), "the example should clip; its limit is 0.2"
    # The optimizer receives 0.2, to the rounding of torch's own clip coefficient (max_norm / (norm + 1e-6)).
    np.testing.assert_allclose(after[clipped], 0.2, rtol=1e-4)
    assert f"step {STEPS}: norm {before[-1]:.3f} before clipping" in printed
    assert history.names == ["0", "2"]  # group_by="module"


def test_gan_keeps_the_two_models_apart(tmp_path: Path) -> None:
    _, history = run_example("gan", tmp_path)
    assert {name.split("/")[0] for name in history.names} == {"D", "G"}
    # Both optimizers step once in each iteration: two samples per iteration.
    assert history.steps[-1] == 2 * STEPS
    for name in history.names:
        assert np.isfinite(history.values[f"grad_norm/{name}"]).all(), name


def test_lora_watches_the_adapters_also_the_one_added_later(tmp_path: Path) -> None:
    printed, history = run_example("lora", tmp_path)
    assert "watched: 0.lora_A, 0.lora_B\n" in printed
    assert history.names == ["0/lora_A", "0/lora_B", "2/lora_A", "2/lora_B"]
    late = history.values["grad_norm/2/lora_B"]
    added = STEPS // 2
    assert np.isnan(late[history.steps <= added]).all()
    assert np.isfinite(late[history.steps > added + 1]).all()
    assert history.alerts == ()


def test_amp_logs_true_gradients_and_the_loss_scale(tmp_path: Path) -> None:
    printed, history = run_example("amp", tmp_path)
    scale = history.values["gradwatch/grad_scale"]
    # GradScaler begins at 65536 and doubles every 20 good steps (growth_interval): 65536 until step 20, then 131072.
    assert scale.tolist() == [65536.0, 65536.0, 131072.0, 131072.0]
    # A norm that includes the loss scale is at least 65536 times the true norm, which is near 1 in this regression.
    assert (history.values["gradwatch/grad_norm"] < 100).all()
    assert f"loss scale {scale[-1]:.0f}" in printed


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_log_one_run_of_whole_parameters(name: str, tmp_path: Path) -> None:
    printed, history = run_example(name, tmp_path, world=2)
    assert printed.count("final loss") == 1
    assert history.steps.tolist() == [10, 20, 30, 40]
    assert history.names == ["0/weight", "0/bias", "2/weight", "2/bias"]
    assert np.isfinite([history.first_of(f"grad_norm/{name}") for name in history.names]).all()
    if name == "ddp":
        assert np.isfinite(history.values["ranks/rank_1/local_norm"]).all()
        assert (history.values["ranks/all/apart"] == 0).all()
        assert re.search(r"rank [01] was the slowest in the last step", printed)


FRAMEWORKS = {"lightning_fit": "lightning", "ignite_loop": "ignite", "hf_trainer": "transformers"}
FRAMEWORKS |= {"accelerate_loop": "accelerate"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_logs_every_tenth_step(name: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS[name])
    _, history = run_example(name, tmp_path)
    assert history.steps.tolist() == [10, 20, 30, 40]
    assert (history.values["gradwatch/grad_norm"] > 0).all()


def test_every_example_is_short() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names, "no examples"
    lengths = {name: len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) for name in names}
    most = dict.fromkeys(names, 100) | {"everything_on.py": 125}  # its model needs attention and experts
    assert {name: length for name, length in lengths.items() if length >= most[name]} == {}
