"""Lightning: failures, subclasses of the callback, the W&B logger, and both packages of Lightning."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, loss_of, small_model
from lightning_programs import Notes, Regression, approx, fitted, loader, numbered, other, pl, trainer_of
from offline import history
from torch import nn
from torch.utils.data import DataLoader

from wandb_gradwatch.integrations.lightning import GradWatchCallback
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import MemorySink

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


def test_a_frozen_model_is_said_once_and_watched_when_it_thaws(caplog: pytest.LogCaptureFixture) -> None:
    class Thaws(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net.requires_grad_(False)
            self.extra = nn.Parameter(torch.ones(()), requires_grad=False)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.net.requires_grad_(True)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return loss if loss.requires_grad else None

    module = Thaws()
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        _, notes = fitted(module, 6)
    assert [r.message for r in caplog.records].count(
        "wandb_gradwatch: the model has no trainable parameter; watching begins when it has one."
    ) == 1
    # Callbacks run before the module's hook, so the first watched batch is the next one.
    assert notes.series("train/grad_norm") == [(b, approx(module.expected.norms[b])) for b in (3, 4, 5)]


def test_a_batch_without_a_loss_has_no_number(caplog: pytest.LogCaptureFixture) -> None:
    class Skips(Regression):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    module = Skips()
    _, notes = fitted(module, 3)
    assert notes.series("train/grad_norm") == [(b, approx(module.expected.norms[b])) for b in (0, 2)]


def test_an_explosion_is_judged_before_clipping_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    alerts: list[Alert] = []
    callback = GradWatchCallback(sample_every=1, explosion_threshold=1e-3, on_alert=alerts.append)
    trainer_of(callback, gradient_clip_val=1e-4).fit(Regression(), loader(2))
    assert [alert.title for alert in alerts] == ["Exploding gradient"]
    assert "above explosion_threshold=0.001" in alerts[0].text
    assert "ERROR: Step 1: " in capsys.readouterr().err


@pytest.mark.parametrize("where", ["in the batch", "in one layer's gradient"])
def test_a_nan_is_an_alert_of_its_own_step_and_no_part_of_the_epoch(where: str) -> None:
    alerts: list[Alert] = []
    data, backwards = batches(4), itertools.count()
    # The guard keeps the weights finite.
    module, callback = Regression(), GradWatchCallback(sample_every=1, on_alert=alerts.append, guard="skip")
    if where == "in the batch":
        data[2] = torch.nan
    else:  # the other parameters have a finite norm, but the step is skipped
        module.net[0].weight.register_hook(lambda grad: grad + torch.nan if next(backwards) == 2 else grad)
    _, notes = fitted(module, DataLoader(data, batch_size=None), callback)
    assert [(alert.title, alert.step) for alert in alerts] == [("NaN gradient", 3)]
    assert "net.0.weight" in [layer.name for layer in alerts[0].incident.layers]
    healthy = [module.expected.norms[batch] for batch in (0, 1, 3)]
    assert notes.series("train_epoch/grad_norm") == [(3, approx(sum(healthy) / 3))]


def test_without_a_threshold_a_norm_that_is_huge_from_the_start_is_told() -> None:
    alerts: list[Alert] = []
    module = Regression(lr=0.0)
    with torch.no_grad():
        module.net[2].bias += 1e12  # a loss of 1e24, gradients of 1e12
    fitted(module, 3, GradWatchCallback(sample_every=1, on_alert=alerts.append))
    assert "exploding_gradient" in {kind for alert in alerts for kind in alert.incident.kinds}


def test_an_exception_leaves_nothing_behind() -> None:
    class Breaks(Regression):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise RuntimeError("broken batch")
            return super().training_step(batch, batch_idx)

    module, memory = Breaks(), MemorySink()
    callback = GradWatchCallback(sample_every=1, sinks=[memory])
    with pytest.raises(RuntimeError, match="broken batch"):
        trainer_of(callback).fit(module, loader(4))
    assert callback.watcher is None
    assert all(not p._backward_hooks for p in module.parameters())
    samples = memory.merged()
    assert samples.total_grad_norm.tolist() == approx(module.expected.norms)


def test_two_fits_with_one_callback_are_two_trainings() -> None:
    callback = GradWatchCallback(sample_every=1)
    for _ in range(2):
        module = Regression()
        _, notes = fitted(module, 3, callback)
        assert notes.series("train/grad_norm") == numbered(module.expected.norms)
        assert len(notes.series("train_epoch/grad_norm")) == 1


def test_the_steps_of_a_rate_finder_are_none_of_the_training(tmp_path: Any) -> None:
    from lightning.pytorch.callbacks import LearningRateFinder

    module, memory = Regression(), MemorySink()
    finder = LearningRateFinder(num_training_steps=6, update_attr=False)
    callbacks = (GradWatchCallback(sample_every=1, sinks=[memory]), finder)
    _, notes = fitted(module, 4, *callbacks, default_root_dir=tmp_path)
    norms = module.expected.norms
    assert len(norms) > 4  # the first norms are those of the finder
    assert notes.series("train/grad_norm") == numbered(norms[-4:])
    assert notes.series("train_epoch/grad_norm") == [(3, approx(sum(norms[-4:]) / 4))]
    samples = memory.merged()
    assert samples.steps.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("more", [{"fast_dev_run": 2}, {"barebones": True}], ids=["fast_dev_run", "barebones"])
def test_trainers_without_loggers(more: dict[str, Any]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[GradWatchCallback(sample_every=1, log_every_n_steps=1)],
        **({"enable_progress_bar": False, "enable_model_summary": False} if "barebones" not in more else {}), **more,
    )  # fmt: skip
    module = Regression()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    trainer.fit(module, loader(2))
    assert trainer.callback_metrics["train/grad_norm"] == approx(module.expected.norms[1])


def test_training_is_untouched() -> None:
    def trained(callbacks: list[Any]) -> list[torch.Tensor]:
        module = Regression(accumulate=2)
        trainer_of(callbacks, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1).fit(module, loader(4))
        return [p.detach().clone() for p in module.parameters()]

    for with_us, without in zip(trained([GradWatchCallback(sample_every=1, per_layer=True)]), trained([]), strict=True):
        assert torch.equal(with_us, without)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            {"log_every_n_steps": -1},
            ValueError,
            r"log_every_n_steps=-1 must be a number of steps, 0 for never, or None",
        ),
        ({"log_every_n_steps": True}, ValueError, r"log_every_n_steps=True must be a number of steps"),
        ({"explosion_threshold": 0}, ValueError, r"explosion_threshold=0 must be a positive number or None"),
        ({"explosion_threshold": "8"}, ValueError, r"explosion_threshold='8' must be a positive number or None"),
        ({"step_prefix": 3}, TypeError, r"step_prefix=3 must be a string or None"),
        ({"epoch_prefix": ["e/"]}, TypeError, r"epoch_prefix=\['e/'\] must be a string or None"),
        ({"track_epochs": None}, TypeError, r"GradWatchCallback\(\): track_epochs=None must be True or False"),
        ({"per_layer": "no"}, TypeError, r"GradWatchCallback\(\): per_layer='no' must be True or False"),
        ({"track_sparsity": 1}, TypeError, r"GradWatchCallback\(\): track_sparsity=1 must be True or False"),
        ({"run": "mine"}, TypeError, r"run='mine' must be what wandb.init\(\) returns"),
        ({"log_evry": 1}, TypeError, r"GradWatchCallback got an unexpected argument 'log_evry'"),
        ({"log_every": 1}, TypeError, r"unexpected argument 'log_every'"),
    ],
)
def test_wrong_arguments_raise_at_once(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GradWatchCallback(**arguments)


class MaxNorm(GradWatchCallback):
    """Log the largest norm of the epoch, and a number of the user."""

    def compute_batch_stats(self, sample: Any) -> dict[str, float]:
        return {**super().compute_batch_stats(sample), "twice": 2 * float(sample.total_grad_norm[0])}

    def init_epoch_stats(self) -> dict[str, Any]:
        return {"largest": 0.0}

    def update_epoch_stats(self, epoch_stats: dict[str, Any], batch_stats: Mapping[str, float]) -> None:
        epoch_stats["largest"] = max(epoch_stats["largest"], batch_stats["grad_norm"])

    def compute_epoch_stats(self, epoch_stats: Mapping[str, Any]) -> dict[str, float]:
        return {"grad_norm_max": epoch_stats["largest"]}


def test_a_subclass_changes_what_is_computed() -> None:
    module = Regression()
    _, notes = fitted(module, 5, MaxNorm())
    assert notes.series("train/twice") == numbered(2 * norm for norm in module.expected.norms)
    assert notes.series("train_epoch/grad_norm_max") == [(4, approx(max(module.expected.norms)))]
    assert notes.series("train_epoch/grad_norm") == []


def test_a_subclass_sets_its_prefixes() -> None:
    class Named(GradWatchCallback):
        step_prefix = "mine/"

        @property
        def epoch_prefix(self) -> str:  # type: ignore[override]
            return f"{self.step_prefix}epoch/"

    _, notes = fitted(Regression(), 1, Named(track_sparsity=False))
    prefixes = {key.rpartition("grad_")[0] for _, metrics in notes.calls for key in metrics if "grad" in key}
    assert prefixes == {"mine/", "mine/epoch/"}


def test_an_error_in_a_subclass_is_the_users() -> None:
    class Broken(GradWatchCallback):
        def compute_batch_stats(self, sample: Any) -> dict[str, float]:
            raise KeyError("my layer")

    with pytest.raises(KeyError, match="my layer"):
        trainer_of(Broken()).fit(Regression(), loader(2))


def test_the_wandb_run_gets_our_rows_and_keeps_lightnings(start_run: Callable[..., Any]) -> None:
    run = start_run()
    notes, module = Notes(), Regression()
    loggers = [pl.loggers.WandbLogger(experiment=run), notes]
    fitted(module, 6, GradWatchCallback(sample_every=1, log_every_n_steps=2), notes=loggers)
    run.finish()
    rows, norms = history(run), module.expected.norms
    ours = [row for row in rows if "gradwatch/step" in row]
    assert [row["gradwatch/step"] for row in ours] == [2, 4, 6]
    assert [row["gradwatch/grad_norm"] for row in ours] == approx(norms[1::2])
    assert [row["train/grad_norm"] for row in ours] == approx(norms[1::2])
    assert [row["grad_norm/net/2/weight"] for row in ours] == approx(module.expected.layer_norms(2)[1::2])
    assert [row["trainer/global_step"] for row in rows if "loss" in row] == list(range(6))
    assert [row["train_epoch/grad_norm"] for row in rows if "train_epoch/grad_norm" in row] == [approx(sum(norms) / 6)]
    assert notes.series("train/grad_norm") == [(b, approx(norms[b])) for b in (1, 3, 5)]


def test_many_parameters_are_grouped_in_wandb_as_by_watch(start_run: Callable[..., Any]) -> None:
    run, module = start_run(), Regression()
    module.unused = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(150))
    trainer_of(GradWatchCallback(log_every_n_steps=1), notes=pl.loggers.WandbLogger(experiment=run)).fit(
        module, loader(2)
    )
    run.finish()
    [row] = [row for row in history(run) if row.get("gradwatch/step") == 2]
    series = [key for key in row if key.startswith("grad_norm/")]
    assert series
    assert not any(key.startswith("grad_norm/net/0/weight") for key in series)


def test_0_steps_leaves_only_alerts_and_epochs_in_wandb(start_run: Callable[..., Any]) -> None:
    run = start_run()
    callback = GradWatchCallback(sample_every=1, log_every_n_steps=0, explosion_threshold=1e-3)
    trainer_of(callback, notes=pl.loggers.WandbLogger(experiment=run)).fit(Regression(), loader(3))
    run.finish()
    rows = history(run)
    assert [row for row in rows if "gradwatch/grad_norm" in row] == []
    assert len([row for row in rows if "train_epoch/grad_norm" in row]) == 1


def test_pytorch_lightning_takes_the_same_callback() -> None:
    class Module(other.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()
            self.expected = Recomputed(self.net)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.expected.look([batch])
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module = Module()
    trainer = other.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[GradWatchCallback(sample_every=1, log_every_n_steps=1)],
    )  # fmt: skip
    trainer.fit(module, loader(3))
    assert trainer.callback_metrics["train/grad_norm"] == approx(module.expected.norms[-1])


def test_the_callback_is_one_of_each_package_that_is_in_use() -> None:
    assert issubclass(GradWatchCallback, pl.Callback)
    assert issubclass(GradWatchCallback, other.Callback)


def test_two_callbacks_of_one_trainer_share_the_rows_of_a_run(offline_run: Any) -> None:
    callbacks = [GradWatchCallback(include=kind, sample_every=1) for kind in ("weight", "bias")]
    logger = pl.loggers.WandbLogger(experiment=offline_run)
    trainer_of(callbacks, notes=logger, log_every_n_steps=2).fit(Regression(), loader(8))
    offline_run.finish()
    rows = [row for row in history(offline_run) if "gradwatch/step" in row]
    # Every second of 8 steps. If rows waited for the Trainer's rows, half of them would come at the end of the run.
    assert [row["gradwatch/step"] for row in rows] == [2, 4, 6, 8]
    for row in rows:
        assert row["train/grad_norm"] == row["gradwatch/grad_norm"]
        assert row["train/callback1/grad_norm"] == row["gradwatch/callback1/grad_norm"] != row["gradwatch/grad_norm"]
