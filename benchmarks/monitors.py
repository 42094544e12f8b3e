"""The monitors that are compared: none, minimal ones, those of other packages, and this package.

A monitor is attached to a model and a W&B run, is called after every backward and step, and returns the values that the
training loop logs for it beside the loss.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import Snapshot
from wandb_gradwatch.sinks import Sink, WandbSink
from wandb_gradwatch.sinks._history_row import NUM_LOGGED_BINS
from wandb_gradwatch.snapshot import keys

LOG_EVERY = 50  # the default of watch()
WARM_UP = 3  # steps between attaching a monitor and its first measured block


class Attached:
    """A monitor at work on one model; this one does nothing."""

    def after_backward(self) -> dict[str, Any]:
        """Return values to log; called when all gradients are complete."""
        return {}

    def samples_and_rows(self) -> tuple[set[int], set[int]]:
        """Return the steps that it sampled and those in which it wrote a row, counted from 1 since it was attached."""
        return set(), set()

    def close(self) -> None:
        """Restore the model."""


Attach = Callable[[nn.Module, Any, int], Attached]  # model, run, steps of a cycle


@dataclass(frozen=True)
class Monitor:
    """A row of the table.

    Args:
        name: the name in the table.
        attach: a function that starts the monitor, given the model, the run and the steps of a cycle.
        every: the number of steps of a cycle in a real training.
        row_at: the step of a cycle that writes a row, counted back from the cycle's end; None: every step or none.
        settles: the monitor chooses its samples by their cost. It is attached until its cadence is stable before the
            first block, and reports its samples afterwards.
        statistics: the statistics of gradients that it logs.
        samples: whether steps without a row are sampled too.
        needs: the packages that it requires.
        device: the only device type that it supports; "" for all.
    """

    name: str
    attach: Attach
    every: int = 1
    row_at: int | None = None
    settles: bool = False
    statistics: str = ""
    samples: bool = True
    needs: str = ""
    device: str = ""

    def runs_on(self, device_type: str) -> bool:
        is_installed = not self.needs or importlib.util.find_spec(self.needs) is not None
        return is_installed and self.device in ("", device_type)


class _AfterBackward(Attached):
    def __init__(self, model: nn.Module, look: Callable[[nn.Module], dict[str, Any]]) -> None:
        self._model, self._look = model, look

    @torch.no_grad()
    def after_backward(self) -> dict[str, Any]:
        return self._look(self._model)


def _look(function: Callable[[nn.Module], dict[str, Any]]) -> Attach:
    return lambda model, run, steps: _AfterBackward(model, function)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _one_pass(model: nn.Module) -> dict[str, Any]:
    torch._foreach_norm(gradients(model))
    return {}


def _total_norm(model: nn.Module) -> dict[str, Any]:
    norms = torch._foreach_norm(gradients(model))
    return {"grad_norm": torch.stack(norms).norm().item()}


def _norm_of_each(model: nn.Module) -> dict[str, Any]:
    return {f"norm/{name}": p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


_METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda t: t.norm(),
    "mean": lambda t: t.mean(),
    "std": lambda t: t.std(unbiased=False),
    "min": lambda t: t.min(),
    "max": lambda t: t.max(),
    "abs_max": lambda t: t.abs().max(),
    "zeros": lambda t: (t == 0).float().mean(),
    "nan": lambda t: torch.isnan(t).sum(),
    "inf": lambda t: torch.isinf(t).sum(),
}


def _every_metric(model: nn.Module) -> dict[str, Any]:
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values |= {f"{key}/{name}": metric(parameter.grad).item() for key, metric in _METRICS.items()}
            values[f"param_norm/{name}"] = parameter.norm().item()
    return values


def _lightning(model: nn.Module) -> dict[str, Any]:
    from lightning.pytorch.utilities import grad_norm

    return {key: float(value) for key, value in grad_norm(model, norm_type=2).items()}


class _WandbWatch(Attached):
    def __init__(self, model: nn.Module, run: Any, log: str, every: int) -> None:
        self._model, self._run = model, run
        run.watch(model, log=log, log_freq=every)

    def close(self) -> None:
        self._run.unwatch(self._model)


class _ModuleMonitor(Attached):
    def __init__(self, model: nn.Module) -> None:
        from torch_module_monitor import ModuleMonitor

        self._monitor = ModuleMonitor(monitor_step_fn=lambda step: True, logger=logging.getLogger("silent"))
        for key in ("norm", "mean", "std", "abs_max", "zeros"):
            self._monitor.add_gradient_metric(key, _METRICS[key])
        for key in ("norm", "mean", "std"):
            self._monitor.add_parameter_metric(key, _METRICS[key])
        self._monitor.set_module(model)
        self._step = 0
        self._monitor.begin_step(self._step)

    def after_backward(self) -> dict[str, Any]:
        self._monitor.monitor_gradients()
        self._monitor.monitor_parameters()
        self._monitor.end_step()
        values: dict[str, Any] = self._monitor.get_step_metrics()
        self._step += 1
        self._monitor.begin_step(self._step)
        return values

    def close(self) -> None:
        self._monitor.end_step()
        self._monitor.activation_hooks.remove_all_hooks()


class _RowOfWandb(Attached):
    """Log rows with this package's keys and constant values: the part of a row's cost that is W&B's own."""

    def __init__(self, model: nn.Module, run: Any, *, histograms: bool) -> None:
        import wandb

        rng = np.random.default_rng(0)
        names = tuple(name for name, _ in model.named_parameters())
        families = [
            keys.layer_keys(family, names) for family in keys.LAYER_FAMILIES if family not in keys.ONCE_NOT_ZERO
        ]
        on_request = {*keys.MODEL_DETAILS.values(), *keys.GRAD_ABS_QUANTILES}
        on_request |= {keys.forecast_key(each, what) for each in keys.FORMATS for what in keys.FORECASTS}
        of_model = [key for key in keys.MODEL_KEYS if key not in on_request]
        of_all = [*of_model, *(key for family in families for key in family)]
        self._row: dict[str, Any] = dict(zip(of_all, rng.standard_normal(len(of_all)).tolist(), strict=True))
        for key in keys.layer_keys(keys.GRADIENT_HISTOGRAMS, names) if histograms else ():
            counts, edges = np.histogram(rng.standard_normal(1000), NUM_LOGGED_BINS)
            self._row[key] = wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
        self._run = run

    def after_backward(self) -> dict[str, Any]:
        self._run.log(self._row, commit=False)
        return {}


class _Ours(Attached):
    def __init__(self, model: nn.Module, run: Any, **arguments: Any) -> None:
        self._steps = _Steps()
        self._watcher = wandb_gradwatch.watch(model, sinks=[WandbSink(run), self._steps], **arguments)

    def after_backward(self) -> dict[str, Any]:
        self._steps.step += 1
        return {}

    def samples_and_rows(self) -> tuple[set[int], set[int]]:
        rows = self._steps.rows.copy()
        self._watcher.flush()  # the row of this flush belongs to no step
        return self._steps.samples, rows

    def close(self) -> None:
        self._watcher.remove()


class _Steps(Sink):
    """Record the steps that were sampled, and those in which a row was written."""

    def __init__(self) -> None:
        self.step = 0
        self.samples: set[int] = set()
        self.rows: set[int] = set()

    def write(self, snapshot: Snapshot) -> None:
        self.samples.update(snapshot.steps.tolist())
        self.rows.add(self.step)


def _ours_every_step(**arguments: Any) -> Attach:
    # The first window ends with the warm-up, the next ones with the cycles, which have all kinds of real steps.
    return lambda model, run, steps: _Ours(
        model, run, sample_every=1, log_every=steps, start_step=steps - WARM_UP, **arguments
    )


def _ours_by_default(**arguments: Any) -> Attach:
    return lambda model, run, steps: _Ours(model, run, **arguments)  # an exact log_every is not charged to the budget


_EACH = "gradient norm of each parameter"
_MANY = "9 of each gradient, 1 of each parameter"
_OURS = "11 of each gradient, 2 of each parameter"
_NONE = "none: `run.log` of numbers that are there"
_BY_DEFAULT = f"{_OURS}, of the steps that 1 % of the time allows"

MONITORS = (
    Monitor("nothing, again (A against A)", lambda model, run, steps: Attached()),
    Monitor("one `_foreach_norm`, result dropped", _look(_one_pass)),
    Monitor("one total norm, `.item()`", _look(_total_norm), statistics="one number"),
    Monitor("a loop, `.item()` of each norm", _look(_norm_of_each), statistics=_EACH),
    Monitor("a loop, `.item()` of each metric", _look(_every_metric), statistics=_MANY),
    Monitor("Lightning `grad_norm`", _look(_lightning), statistics=_EACH, needs="lightning"),
    Monitor(
        "torch-module-monitor",
        lambda model, run, steps: _ModuleMonitor(model),
        statistics="5 of each gradient, 3 of each parameter",
        needs="torch_module_monitor",
    ),
    Monitor(
        '`wandb.watch`, "gradients", every step',
        lambda model, run, steps: _WandbWatch(model, run, "gradients", 1),
        statistics="histogram of each gradient",
    ),
    Monitor(
        '`wandb.watch`, "all", every step',
        lambda model, run, steps: _WandbWatch(model, run, "all", 1),
        statistics="histogram of each gradient and parameter",
    ),
    Monitor(
        '`wandb.watch`, "gradients", every 100',
        lambda model, run, steps: _WandbWatch(model, run, "gradients", steps),
        every=100,
        row_at=-1 - WARM_UP,
        statistics="histogram of each gradient",
        samples=False,
    ),
    Monitor(
        '`wandb.watch`, "all", every 100',
        lambda model, run, steps: _WandbWatch(model, run, "all", steps),
        every=100,
        row_at=-1 - WARM_UP,
        statistics="histogram of each gradient and parameter",
        samples=False,
    ),
    Monitor(
        '`wandb.watch`, default ("gradients", every 1000)',
        lambda model, run, steps: _WandbWatch(model, run, "gradients", steps),
        every=1000,
        row_at=-1 - WARM_UP,
        statistics="histogram of each gradient",
        samples=False,
    ),
    Monitor("**wandb_gradwatch**, default", _ours_by_default(), settles=True, statistics=_BY_DEFAULT),
    Monitor(
        "**wandb_gradwatch**, default, without numba",
        _ours_by_default(backend="cpu"),
        settles=True,
        statistics=_BY_DEFAULT,
        device="cpu",
    ),
    Monitor(
        "**wandb_gradwatch**, every step",
        _ours_every_step(),
        every=LOG_EVERY,
        row_at=-1,
        statistics=f"{_OURS}; every 50 steps a row with histograms",
    ),
    Monitor(
        "**wandb_gradwatch**, every step, without numba",
        _ours_every_step(backend="cpu"),
        every=LOG_EVERY,
        row_at=-1,
        statistics=f"{_OURS}; every 50 steps a row with histograms",
        device="cpu",
    ),
    Monitor(
        "**wandb_gradwatch**, histograms every step",
        _ours_every_step(histogram_every=1),
        every=LOG_EVERY,
        row_at=-1,
        statistics=f"{_OURS}, histogram; every 50 steps a row",
    ),
    Monitor(
        "**wandb_gradwatch**, histograms every step, without numba",
        _ours_every_step(histogram_every=1, backend="cpu"),
        every=LOG_EVERY,
        row_at=-1,
        statistics=f"{_OURS}, histogram; every 50 steps a row",
        device="cpu",
    ),
    Monitor(
        "**wandb_gradwatch**, a row every step",
        lambda model, run, steps: _Ours(model, run, sample_every=1, log_every=1, histogram_every=0),
        statistics=_OURS,
    ),
    Monitor(
        "**wandb_gradwatch**, a row with histograms every step",
        lambda model, run, steps: _Ours(model, run, sample_every=1, log_every=1),
        statistics=f"{_OURS}, histogram",
    ),
    Monitor(
        "W&B's part of a row every step",
        lambda model, run, steps: _RowOfWandb(model, run, histograms=False),
        statistics=_NONE,
    ),
    Monitor(
        "W&B's part of a row with histograms every step",
        lambda model, run, steps: _RowOfWandb(model, run, histograms=True),
        statistics=_NONE,
    ),
)
