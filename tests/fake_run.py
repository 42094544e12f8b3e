"""Synthetic snapshots and W&B runs with every key of the package: a small GPT whose training goes wrong.

The scenario: norms vary smoothly with depth. The dead ratio of `blocks/3/mlp/fc/weight` grows from the start.
`embed/position` is frozen until step 100. Norms rise a thousandfold around step 260. `blocks/2/attn/qkv/weight` has NaN
at step 265, where the loss scale is halved and AMP skips the step. A guard skips step 262.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from offline import records

from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._judgement.verdict import verdict_of
from wandb_gradwatch._measure.columns import AS_LEFT, NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS, Column, bins_of
from wandb_gradwatch._measure.probe_values import MetricHistogram
from wandb_gradwatch._pipeline.recorder import FlightRecorder
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks._wandb_run import WandbSink
from wandb_gradwatch.snapshot import Snapshot, keys

GPT_NAMES = (
    "embed.token",
    "embed.position",
    *(
        f"blocks.{block}.{layer}"
        for block in range(12)
        for layer in (
            *("ln_1.weight", "attn.qkv.weight", "attn.proj.weight"),
            *("ln_2.weight", "mlp.fc.weight", "mlp.proj.weight"),
        )
    ),
    "norm.weight",
    "head.weight",
)
MODULE = "blocks.0.mlp"  # its output has histograms
LEAKING, FROZEN, BROKEN = "blocks.3.mlp.fc.weight", "embed.position", "blocks.2.attn.qkv.weight"

ALERTS = (
    Alert(
        "Exploding gradient",
        "Gradient norm 1.3e+03 at step 260 is 9.8 standard deviations above its running mean of 1.2.\n"
        "Worst: head.weight 610, blocks.0.attn.qkv.weight 212, blocks.1.attn.qkv.weight 198.\n"
        "Probable cause: the learning rate is too high. Remedy: lower it, warm up for longer, or clip the norm to 1.",
        260,
        "WARN",
    ),
    Alert(
        "NaN gradient",
        "12 elements of blocks.2.attn.qkv.weight are NaN at step 265.\n"
        "Probable cause: the explosion 5 steps before. Remedy: lower the learning rate, or skip the step.",
        265,
        "ERROR",
    ),
)


INCIDENTS = tuple(
    Incident(
        kind,
        alert.title,
        alert.level,
        alert.step,
        alert.step,
        alert.step,
        alert.text.partition("\n")[0],
        recovered_step=270,
        cause="learning_rate_too_high",
        cause_text=cause,
        remedy="lower the learning rate",
        layers=(Layer(layer, 610.0, 1.0),),
    )
    for alert, kind, cause, layer in zip(
        ALERTS,
        ("exploding_gradient", "nan_gradient"),
        ("the learning rate is too high", "the explosion 5 steps before"),
        ("head.weight", "blocks.2.attn.qkv.weight"),
        strict=True,
    )
)


def fake_snapshots(
    names: Sequence[str] = GPT_NAMES, *, num_flushes: int = 40, log_every: int = 10, seed: int = 0
) -> Iterator[Snapshot]:
    """Yield the windows of the scenario, one snapshot each."""
    rng = np.random.default_rng(seed)
    size = rng.integers(1, 64, len(names)) * 1000.0
    depth = np.linspace(0, 1, len(names))
    for flush in range(num_flushes):
        steps = np.arange(flush * log_every + 1, (flush + 1) * log_every + 1)
        rows = np.stack([_sample(int(step), names, size, depth, rng) for step in steps])
        yield Snapshot(
            steps=steps,
            names=tuple(names),
            rows=rows,
            histogram=np.stack([_histogram(rows[-1, p], rng) for p in range(len(names))]),
            histogram_steps=(int(steps[-1]),),
            loss_scale=np.where(steps < 265, 65536.0, 32768.0),
            skipped=steps == 265,
            overhead_ratio=0.004 + 0.001 * rng.random(),
            metrics={key: np.full(log_every, value) for key, value in _metrics(int(steps[-1]), names, rng)}
            | {keys.NUM_GUARDED_STEPS: (steps == 262).astype(np.float64)}
            | {keys.NUM_NONFINITE_LOSS: np.zeros(log_every)}
            | {keys.LOSS: 4 * np.exp(-steps / 200) + 3 * np.exp(-(((steps - 262) / 4) ** 2))},
            metric_histograms={
                f"activation/{MODULE}/histogram": MetricHistogram(_histogram(rows[-1, 0], rng), -1.0, 1.0),
                f"{keys.PARAMETER_HISTOGRAMS}/{names[0]}": MetricHistogram(_histogram(rows[-1, 0], rng), -1.0, 1.0),
            },
        )


def _metrics(step: int, names: Sequence[str], rng: np.random.Generator) -> Iterator[tuple[str, float]]:
    """Yield values as of watch(metrics=...): growing activations, a head whose entropy collapses, shrinking updates."""
    for block in range(4):
        module = f"blocks.{block}"
        yield f"activation/{module}/norm", 100.0 * (1 + block) * (1 + step / 400)
        yield f"activation/{module}/mean", 0.01 * (block - 1.5) * np.sin(step / 50)
        yield f"activation/{module}/std", 1.0 + 0.3 * block
        yield f"activation/{module}/dead_ratio", 0.1 * block * step / 400
        yield f"activation/{module}/num_nonfinite", 12.0 if block == 2 and 260 < step <= 270 else 0.0
        for head in range(4):
            collapse = np.exp(-step / 100) if (block, head) == (3, 1) else 1.0
            yield f"attention/{module}.attn/head_{head}/entropy_ratio", 0.9 * collapse
            yield f"attention/{module}.attn/head_{head}/query_abs_max", 2.0 + step / 100
            yield f"attention/{module}.attn/head_{head}/key_abs_max", 2.0 + step / 200
            yield f"attention/{module}.attn/head_{head}/logit_max", 4.0 + step / 50
        yield f"router/{module}.gate/load_max_ratio", 1.2 + 0.1 * block
        yield f"router/{module}.gate/dead_experts", float(block == 3)
        yield f"router/{module}.gate/entropy_ratio", 0.9 - 0.1 * block - step / 1000
        yield f"noise_scale/{module}/noise_scale", 50.0 + step
        yield f"noise_scale/{module}/cosine", 0.2
        yield f"ranks/rank_{block}/seconds", 0.1 * (1 + (block == 3))
        yield f"ranks/rank_{block}/local_norm", 1.0 + 0.1 * rng.random()
        yield f"ranks/rank_{block}/loss", 2.0 + 0.1 * rng.random()
        yield f"ranks/rank_{block}/apart", float(block == 2 and step > 260)
    for end, factor in {"": 1.0, "_low": 0.5, "_high": 2.0}.items():
        yield f"noise_scale/total/noise_scale{end}", factor * (50.0 + step)
    for name in names:
        yield f"update/{name}/norm", 0.1 * np.exp(rng.normal() / 4 - step / 200)
        yield f"update/{name}/ratio", 1e-3 * np.exp(rng.normal() / 2 - step / 200)
        yield f"optimizer_state/{name}/stale_ratio", np.exp(rng.normal() / 8)
        yield f"optimizer_state/{name}/update_rms", 0.3
        yield f"optimizer_state/{name}/coherence", 0.1
    yield f"parameter/{names[-1]}/relative_difference", step / 1000
    yield f"parameter/{names[-1]}/largest_singular_value", 1.0 + step / 100
    yield f"parameter/{names[-1]}/stable_rank", 30.0 - step / 100
    yield f"gradient/{names[-1]}/kurtosis", 3.0 - step / 100


def _sample(step: int, names: Sequence[str], size: Any, depth: Any, rng: np.random.Generator) -> Any:
    accident = 1000.0 * np.exp(-(((step - 260) / 4.0) ** 2))
    trend = 0.4 + 1.6 * np.exp(-step / 60)
    norm = (
        trend * 10 ** (-1.5 * np.sin(3 * depth) ** 2) * np.exp(0.25 * rng.standard_normal(len(names))) * (1 + accident)
    )
    rows = np.zeros((len(names), NUM_COLUMNS))
    for p, name in enumerate(names):
        row = rows[p]
        if name == FROZEN and step < 100:
            row[:] = np.nan
            continue
        spread = norm[p] / np.sqrt(size[p])
        dead = min(0.9, step / 400) if name == LEAKING else 0.01 * rng.random()
        row[Column.NUM_ELEMENTS] = size[p]
        row[Column.NUM_NAN] = 12 if name == BROKEN and step == 265 else 0
        row[[Column.NUM_ZERO, Column.NUM_DEAD]] = np.floor(dead * size[p])
        row[Column.GRAD_SUM] = rng.normal() * norm[p]
        row[Column.GRAD_SUM_SQ] = norm[p] ** 2
        row[Column.GRAD_MIN], row[Column.GRAD_MAX] = -4 * spread, 4.2 * spread
        row[Column.GRAD_ABS_MIN_NONZERO] = 1e-4 * spread
        row[Column.PARAM_SUM_SQ] = (0.02 * np.sqrt(size[p])) ** 2 * 30 * (1 + step / 500)
    total = np.sqrt(np.nansum(rows[:, Column.GRAD_SUM_SQ]))
    rows[:, RECEIVED_COLUMNS] = rows[:, AS_LEFT]
    rows[:, Column.RECEIVED_SUM_SQ] *= min(1.0, 2.0 / total) ** 2
    return rows


def _histogram(row: Any, rng: np.random.Generator) -> Any:
    """Return the counts of a heavy-tailed distribution, like that of a real gradient."""
    if np.isnan(row[Column.NUM_ELEMENTS]):
        return np.zeros(NUM_BINS, dtype=np.int64)
    spread = np.sqrt(row[Column.GRAD_SUM_SQ] / row[Column.NUM_ELEMENTS])
    values = rng.standard_t(5, 1000) * spread * 0.8
    values = np.clip(values, row[Column.GRAD_MIN], row[Column.GRAD_MAX])
    counts = np.bincount(bins_of(values), minlength=NUM_BINS)
    return np.rint(counts * row[Column.NUM_ELEMENTS] / 1000).astype(np.int64)


def write_fake_run(
    directory: Path,
    *,
    names: Sequence[str] = GPT_NAMES,
    num_flushes: int = 40,
    alerts: Sequence[Alert] = ALERTS,
    with_table: bool = True,
    finish: bool = True,
) -> Path:
    """Log the scenario to an offline W&B run through the real sink and return the run's directory.

    Args:
        directory: the directory in which wandb/ is created.
        names: the names of the parameters.
        num_flushes: the number of windows, each of 10 steps.
        alerts: sent before the first window that ends at or after their step.
        with_table: log the flight recorder of the window with the NaN as a table, at the end.
        finish: finish the run. Otherwise the run stays open, and the caller ends it with `wandb.finish()`.
    """
    run = wandb.init(
        project="demo",
        name="gpt-lr-accident",
        dir=str(directory),
        mode="offline",
        config={"lr": 3e-4},
        settings=wandb.Settings(silent=True, console="off"),
    )
    run_directory = Path(run.dir).parent
    of_model = dict.fromkeys(keys.MODEL_DETAILS, "^$")  # of no layer
    sink = WandbSink(run, details=of_model | {keys.PRECISION: ""})
    waiting = list(alerts)
    recorder = FlightRecorder(max_samples=10)
    for snapshot in fake_snapshots(names, num_flushes=num_flushes):
        while waiting and waiting[0].step <= snapshot.steps[-1]:
            sink.alert(waiting.pop(0))
        sink.write(snapshot)
        run.log({"loss": 0.5 + 4 * float(np.exp(-snapshot.steps[-1] / 150))})
        if snapshot.steps[0] <= 265:
            recorder.add(snapshot)
    told = [incident for incident, alert in zip(INCIDENTS, ALERTS, strict=True) if alert in alerts]
    num_steps = 10 * num_flushes
    sink.verdict(verdict_of(told, num_steps=num_steps, num_measured=num_steps))
    if with_table:
        columns, rows = recorder.table()
        run.log({"gradwatch/flight_recorder": wandb.Table(columns=columns, data=rows)})
    sink.close()
    if finish:
        run.finish()
        records(run)  # wait for the file's end record, which can come after finish()
    return run_directory
