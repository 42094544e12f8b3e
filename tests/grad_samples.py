"""Samples of real trainings for tests, computed from `p.grad` in float64 numpy, without the package's capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from wandb_gradwatch._measure.columns import NUM_BINS, NUM_COLUMNS, Column, bins_of
from wandb_gradwatch.snapshot import Snapshot, keys
from wandb_gradwatch.snapshot._shapes import merge_snapshots


def row_of(grad: np.ndarray, parameter: np.ndarray | None = None) -> np.ndarray:
    """Return the row of one gradient, computed from the definitions of the columns: [C]."""
    values = np.asarray(grad, dtype=np.float64).ravel()
    finite = values[np.isfinite(values)]
    magnitude = np.abs(finite)
    num_nan, num_inf, sum_sq = np.isnan(values).sum(), np.isinf(values).sum(), (finite**2).sum()
    weights = np.zeros(0) if parameter is None else np.asarray(parameter, dtype=np.float64).ravel()
    weights_sq = np.nan if parameter is None else (weights[np.isfinite(weights)] ** 2).sum()
    expected = {
        "NUM_ELEMENTS": values.size,
        "NUM_NAN": num_nan,
        "NUM_INF": num_inf,
        "NUM_ZERO": (values == 0).sum(),
        "NUM_DEAD": (values == 0).sum(),
        "GRAD_SUM": finite.sum(),
        "GRAD_SUM_SQ": sum_sq,
        "GRAD_MIN": finite.min(initial=np.inf),
        "GRAD_MAX": finite.max(initial=-np.inf),
        "GRAD_ABS_MIN_NONZERO": magnitude[magnitude > 0].min(initial=np.inf),
        "RECEIVED_SUM_SQ": sum_sq,
        "RECEIVED_NUM_NAN": num_nan,
        "RECEIVED_NUM_INF": num_inf,
        "PARAM_SUM_SQ": weights_sq,
        "PARAM_NUM_NONFINITE": (~np.isfinite(weights)).sum(),
    }
    return np.array([expected[column.name] for column in Column], dtype=np.float64)


def sample_of(
    grads: dict[str, np.ndarray | list[float] | None],
    *,
    step: int = 1,
    parameters: dict[str, np.ndarray] | None = None,
    histogram: bool = False,
    loss_scale: float = float("nan"),
    skipped: bool = False,
    trainable: list[bool] | None = None,
) -> Snapshot:
    """Return a snapshot with one sample of these gradients by name; None is a missing gradient."""
    rows = np.full((1, len(grads), NUM_COLUMNS), np.nan)
    counts = np.zeros((len(grads), NUM_BINS), dtype=np.int64)
    for index, (name, grad) in enumerate(grads.items()):
        if grad is None:
            continue
        values = np.asarray(grad, dtype=np.float64).ravel()
        rows[0, index] = row_of(values, None if parameters is None else parameters[name])
        counts[index] = np.bincount(bins_of(values[np.isfinite(values)]), minlength=NUM_BINS)
    return Snapshot(
        steps=np.array([step]),
        names=tuple(grads),
        rows=rows,
        histogram=counts if histogram else None,
        histogram_steps=(step,) if histogram else (),
        loss_scale=np.array([loss_scale]),
        skipped=np.array([skipped]),
        trainable=None if trainable is None else np.array(trainable),
    )


def of_norms(norms: Iterable[float], *, start: int = 1, name: str = "w") -> Snapshot:
    """Return samples of one parameter with one element: gradients of these norms, and a value that changes a little."""
    rows = np.stack(
        [row_of(np.array([g]), np.array([1.0 + 1e-9 * (place % 2)])) for place, g in enumerate(norms, start)]
    )
    rows = rows[:, None]
    return Snapshot(steps=np.arange(start, start + len(rows)), names=(name,), rows=rows)


def measured(snapshot: Snapshot, **metrics: list[float]) -> Snapshot:
    """Return the snapshot with the loss, or the learning rate, of each sample added."""
    named = {getattr(keys, name.upper()): np.array(values) for name, values in metrics.items()}
    return replace(snapshot, metrics={**snapshot.metrics, **named})


def together(samples: Iterable[Snapshot]) -> Snapshot:
    """Concatenate samples to one snapshot."""
    return merge_snapshots(list(samples))


def random_samples(seed: int, num: int = 60) -> list[Snapshot]:
    """Return random samples with missing, zero, NaN, Inf, tiny and huge gradients, skipped steps, and late names."""
    rng = np.random.default_rng(seed)
    samples = []
    for step in range(1, num + 1):
        grads: dict[str, np.ndarray | None] = {}
        for index in range(3 + (step > num // 2)):
            for part, size in (("weight", 6), ("bias", 2)):
                values = rng.normal(0, 10.0 ** rng.integers(-12, 12 if rng.random() < 0.1 else 1), size)
                draw = rng.random()
                values[0] = np.nan if draw < 0.03 else np.inf if draw < 0.06 else values[0]
                grads[f"{index}.{part}"] = None if draw > 0.95 else values * (draw < 0.9)
        scale = float(rng.choice([np.nan, 1024.0, 0.25]))
        parameters = {name: rng.normal(0, 1, 4) * (rng.random() < 0.9) for name in grads}
        skipped = bool(rng.random() < 0.3)
        samples.append(sample_of(grads, step=step, parameters=parameters, loss_scale=scale, skipped=skipped))
    return samples


@dataclass
class Training:
    """A small training loop that takes a sample of every step.

    Args:
        loss: a function from the model and the step, counted from 1, to a scalar.
        change_gradients: called with the model and the step after the backward, to plant a fault or to clip.
        losses: filled by `run`, one number per step.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.nn.Module, int], torch.Tensor]
    change_gradients: Callable[[torch.nn.Module, int], None] = lambda model, step: None
    losses: list[float] = field(default_factory=list)

    def run(self, num_steps: int, *, scheduler: torch.optim.lr_scheduler.LRScheduler | None = None) -> Snapshot:
        """Train and return all samples; the last step has a histogram."""
        samples = []
        for step in range(1, num_steps + 1):
            self.optimizer.zero_grad()
            loss = self.loss(self.model, step)
            loss.backward()
            self.losses.append(loss.item())
            self.change_gradients(self.model, step)
            samples.append(take_sample(self.model, step, histogram=step == num_steps))
            self.optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return together(samples)


def take_sample(model: torch.nn.Module, step: int, *, histogram: bool = False) -> Snapshot:
    """Return a sample of a model's gradients and parameters."""
    with torch.no_grad():
        named = dict(model.named_parameters())
        return sample_of(
            {name: None if p.grad is None else p.grad.double().numpy() for name, p in named.items()},
            step=step,
            parameters={name: p.double().numpy() for name, p in named.items()},
            trainable=[p.requires_grad for p in named.values()],
            histogram=histogram,
        )
