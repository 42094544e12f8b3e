"""Lightning: right numbers in every logger, under their own step, in every kind of training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, loss_of, small_model
from offline import history
from torch import nn
from torch.utils.data import DataLoader

from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import MemorySink

pl = pytest.importorskip("lightning.pytorch")
other = pytest.importorskip("pytorch_lightning")  # comes with it; before the callback, which is made for both then

from lightning.pytorch.loggers import CSVLogger, WandbLogger  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from wandb_gradwatch.integrations.lightning import GradWatchCallback  # noqa: E402

# float32 gradients against float64 ones: a few units in the last place of sums over 49 elements.
FLOAT32 = 1e-5

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


class Notes(Logger):
    """A logger that keeps every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []

    name = version = "notes"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.calls.append((step, dict(metrics)))

    def series(self, key: str) -> list[tuple[int, float]]:
        return [(step, metrics[key]) for step, metrics in self.calls if key in metrics]


class Regression(pl.LightningModule):
    """Trains the small model, and keeps what float64 says of each of its optimizer steps."""

    def __init__(self, *, accumulate: int = 1, lr: float = 0.05) -> None:
        super().__init__()
        self.net = small_model()
        self.lr = lr
        self._accumulate = accumulate
        self._seen: list[torch.Tensor] = []
        self.expected = Recomputed(self.net)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._seen.append(batch)
        if len(self._seen) == self._accumulate:
            self.expected.look(self._seen)
            self._seen = []
        loss = loss_of(self.net, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(count: int, *, workers: int = 0) -> DataLoader[torch.Tensor]:
    return DataLoader(batches(count), batch_size=None, num_workers=workers)


def trainer_of(callback: Any, *, notes: Any = None, **more: Any) -> Any:
    options = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": notes if notes is not None else False,
        "log_every_n_steps": 1,
    }
    callbacks = callback if isinstance(callback, list) else [callback]
    return pl.Trainer(callbacks=callbacks, **options | more)


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=FLOAT32, abs=1e-7)


# ---- numbers


@pytest.mark.parametrize(
    ("accumulate", "more"),
    [
        pytest.param(1, {}, id="plain"),
        pytest.param(1, {"gradient_clip_val": 0.01}, id="clip"),
        pytest.param(1, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, id="clip-value"),
        pytest.param(3, {"gradient_clip_val": 0.01}, id="accumulate-clip"),
    ],
)
def test_steps_and_epochs_agree_with_float64(accumulate: int, more: dict[str, Any]) -> None:
    notes, module = Notes(), Regression(accumulate=accumulate)
    trainer = trainer_of(
        GradWatchCallback(per_layer=True), notes=notes, max_epochs=2, accumulate_grad_batches=accumulate, **more
    )
    trainer.fit(module, loader(6))
    expected, steps = module.expected, 6 // accumulate  # of an epoch
    assert len(expected.norms) == 2 * steps
    # Steps count batches that ended in an update, from 0: the Trainer's own axis.
    assert notes.series("train/grad_norm") == list(enumerate(approx(n) for n in expected.norms))
    assert notes.series("train/grad_mean") == list(enumerate(approx(n) for n in expected.means))
    assert notes.series("train/grad_std") == list(enumerate(approx(n) for n in expected.stds))
    assert notes.series("train/grad_norm/net/2/weight") == list(enumerate(approx(n) for n in expected.layer_norms(2)))
    first, second = sum(expected.norms[:steps]) / steps, sum(expected.norms[steps:]) / steps
    assert notes.series("train_epoch/grad_norm") == [(steps - 1, approx(first)), (2 * steps - 1, approx(second))]
    assert trainer.callback_metrics["train_epoch/grad_norm"] == approx(second)
    assert trainer.callback_metrics["train/grad_norm"] == approx(expected.norms[-1])
    assert not [key for key in trainer.callback_metrics if key.startswith("train/grad_norm/")]


@pytest.mark.parametrize(("callback_every", "trainer_every"), [(2, 2), (5, 1), (1, 5), (3, 2)])
def test_each_value_is_logged_once_under_its_own_step(callback_every: int, trainer_every: int) -> None:
    """log_dict would write it when the Trainer writes: late, again and again, or never."""
    notes, module = Notes(), Regression()
    trainer = trainer_of(
        GradWatchCallback(log_every_n_steps=callback_every), notes=notes, log_every_n_steps=trainer_every
    )
    trainer.fit(module, loader(12))
    due = range(callback_every - 1, 12, callback_every)
    assert notes.series("train/grad_norm") == [(step, approx(module.expected.norms[step])) for step in due]
    assert trainer.callback_metrics["train/grad_norm"] == approx(module.expected.norms[due[-1]])


def test_the_cadence_is_the_trainers_where_none_is_given_and_0_is_never() -> None:
    by_trainer, never = Notes(), Notes()
    trainer_of(GradWatchCallback(), notes=by_trainer, log_every_n_steps=4).fit(Regression(), loader(8))
    assert [step for step, _ in by_trainer.series("train/grad_norm")] == [3, 7]
    module = Regression()
    trainer_of(GradWatchCallback(log_every_n_steps=0), notes=never).fit(module, loader(8))
    assert never.series("train/grad_norm") == []
    assert never.series("train_epoch/grad_norm") == [(7, approx(sum(module.expected.norms) / 8))]


def test_prefixes_and_switches() -> None:
    notes = Notes()
    callback = GradWatchCallback(step_prefix="s-", epoch_prefix="e-", track_epochs=False, track_sparsity=False)
    trainer_of(callback, notes=notes).fit(Regression(), loader(2))
    keys = {key for _, metrics in notes.calls for key in metrics if "grad" in key}
    assert keys == {"s-grad_norm", "s-grad_mean", "s-grad_std"}


def test_every_logger_gets_every_number(tmp_path: Any) -> None:
    loggers = [Notes(), CSVLogger(tmp_path), Notes()]
    trainer_of(GradWatchCallback(per_layer=True), notes=loggers).fit(Regression(), loader(3))
    first = [call for call in loggers[0].calls if any("grad" in key for key in call[1])]
    assert len(first) == 4  # three steps, one epoch
    assert first == [call for call in loggers[2].calls if any("grad" in key for key in call[1])]
    (written,) = tmp_path.rglob("metrics.csv")
    assert "train_epoch/grad_norm/net/0/bias" in written.read_text().splitlines()[0]


def test_bf16_gradients_are_those_of_the_optimizer() -> None:
    """Autocast rounds the forward to 8 bits, so float64 cannot say the gradient; autograd's own is compared."""
    notes, module = Notes(), Regression()
    seen: list[float] = []
    module.on_before_optimizer_step = lambda optimizer: seen.append(  # type: ignore[method-assign]
        float(torch.cat([p.grad.flatten().double() for p in module.parameters()]).norm())
    )
    trainer_of(GradWatchCallback(), notes=notes, precision="bf16-mixed", gradient_clip_val=0.01).fit(module, loader(4))
    assert notes.series("train/grad_norm") == [(step, approx(norm)) for step, norm in enumerate(seen)]


def test_loss_scaling_and_an_overflow_leave_true_numbers() -> None:
    """A real scaler: gradients are 65536 times too large at the end of the backward; one batch overflows."""
    data = batches(5)
    data[2] *= 1e38  # its loss is inf
    notes, module, memory = Notes(), Regression(), MemorySink()
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=65536.0))
    plugin.forward_context = _no_autocast  # type: ignore[method-assign]
    trainer = trainer_of(
        GradWatchCallback(sinks=[memory]), notes=notes, plugins=[plugin], gradient_clip_val=0.01, max_epochs=1
    )
    trainer.fit(module, DataLoader(data, batch_size=None))
    expected = module.expected.norms
    healthy = [0, 1, 3, 4]
    logged = dict(notes.series("train/grad_norm"))
    assert {step: logged[step] for step in healthy} == {step: approx(expected[step]) for step in healthy}
    samples = memory.merged()
    assert samples is not None
    assert samples.skipped.tolist() == [False, False, True, False, False]
    # After the overflow the scaler halves its scale.
    assert samples.loss_scale.tolist() == [65536.0, 65536.0, 65536.0, 32768.0, 32768.0]
    # The skipped step made no update and is no part of the mean.
    mean = sum(expected[step] for step in healthy) / 4
    assert notes.series("train_epoch/grad_norm") == [(4, approx(mean))]


def test_a_fused_optimizer_that_unscales_by_itself_leaves_true_numbers() -> None:
    """Lightning does not unscale for it: at on_before_optimizer_step the gradients are 65536 times too large."""

    class Fused(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)

    notes, module = Notes(), Fused()
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=65536.0))
    plugin.forward_context = _no_autocast  # type: ignore[method-assign]
    trainer_of(GradWatchCallback(), notes=notes, plugins=[plugin]).fit(module, loader(4))
    norms = module.expected.norms
    assert notes.series("train/grad_norm") == list(enumerate(approx(norm) for norm in norms))
    assert notes.series("train_epoch/grad_norm") == [(3, approx(sum(norms) / 4))]


def _no_autocast() -> Any:
    import contextlib

    return contextlib.nullcontext()


# ---- several optimizers


class Gan(pl.LightningModule):
    """Two optimizers in turn, by hand, the first one clipped by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)
        self.norms: list[tuple[float, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        fake = self.generator(batch)

        of_critic.zero_grad()
        self.manual_backward(self.critic(fake.detach()).mean() - self.critic(batch).square().mean())
        critic_norm = _norm(self.critic)
        self.clip_gradients(of_critic, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        of_critic.step()

        of_generator.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        self.norms.append((critic_norm, _norm(self.generator)))
        of_generator.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


def _norm(module: nn.Module) -> float:
    gradients = [p.grad.double().flatten() for p in module.parameters() if p.grad is not None]
    return float(torch.cat(gradients).norm())


@pytest.mark.parametrize("every", [1, 2])
def test_a_gan_logs_both_networks_of_a_batch_before_clipping(every: int) -> None:
    """Every second optimizer step would be the generator's alone: the cadence counts batches."""
    notes, module = Notes(), Gan()
    trainer_of(GradWatchCallback(log_every_n_steps=every, per_layer=True, group_by=_network), notes=notes).fit(
        module, loader(4)
    )
    due = range(every - 1, 4, every)
    assert notes.series("train/grad_norm/critic") == [(b, approx(module.norms[b][0])) for b in due]
    assert notes.series("train/grad_norm/generator") == [(b, approx(module.norms[b][1])) for b in due]
    both = {b: (module.norms[b][0] ** 2 + module.norms[b][1] ** 2) ** 0.5 for b in due}
    assert notes.series("train/grad_norm") == [(b, approx(both[b])) for b in due]
    # The epoch's mean is over all eight optimizer steps, each with the norm of its own parameters.
    mean = sum(sum(pair) for pair in module.norms) / 8
    assert notes.series("train_epoch/grad_norm") == [(3, approx(mean))]


def _network(name: str) -> str:
    return name.split(".")[0]


def test_two_optimizers_after_one_backward_are_one_step() -> None:
    class Split(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net[0], self.net[2])]

    notes, module = Notes(), Split()
    trainer_of(GradWatchCallback(), notes=notes).fit(module, loader(4))
    assert notes.series("train/grad_norm") == list(enumerate(approx(n) for n in module.expected.norms))


def test_lbfgs_counts_one_step_of_its_first_evaluation() -> None:
    class Lbfgs(Regression):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if len(self.expected.norms) <= batch_idx:  # the first of several evaluations of this batch
                return super().training_step(batch, batch_idx)
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    notes, module = Notes(), Lbfgs()
    trainer_of(GradWatchCallback(), notes=notes).fit(module, loader(3))
    assert notes.series("train/grad_norm") == list(enumerate(approx(n) for n in module.expected.norms))


# ---- what may go wrong


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

    notes, module = Notes(), Thaws()
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        trainer_of(GradWatchCallback(), notes=notes, max_epochs=1).fit(module, loader(6))
    assert [r.message for r in caplog.records].count(
        "wandb_gradwatch: the model has no trainable parameter; watching begins when it has one."
    ) == 1
    # Callbacks hear of a batch before the module does: the first one that is watched is the next.
    assert notes.series("train/grad_norm") == [(b, approx(module.expected.norms[b])) for b in (3, 4, 5)]


def test_a_batch_without_a_loss_has_no_number(caplog: pytest.LogCaptureFixture) -> None:
    class Skips(Regression):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    notes, module = Notes(), Skips()
    trainer_of(GradWatchCallback(), notes=notes).fit(module, loader(3))
    assert notes.series("train/grad_norm") == [(b, approx(module.expected.norms[b])) for b in (0, 2)]


def test_an_explosion_is_judged_before_clipping_and_said(caplog: pytest.LogCaptureFixture) -> None:
    alerts: list[Alert] = []
    callback = GradWatchCallback(explosion_threshold=1e-3, on_alert=alerts.append)
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        trainer_of(callback, gradient_clip_val=1e-4).fit(Regression(), loader(2))
    assert [alert.title for alert in alerts] == ["Exploding gradient"]
    assert "above the threshold 0.001" in alerts[0].text
    assert any("Exploding gradient" in record.message for record in caplog.records)


def test_a_nan_is_an_alert_of_its_own_step_and_no_part_of_the_epoch() -> None:
    alerts: list[Alert] = []
    data = batches(4)
    data[2] = torch.nan
    notes, module = Notes(), Regression()
    # The guard keeps the weights whole.
    trainer_of(GradWatchCallback(on_alert=alerts.append, guard="skip"), notes=notes).fit(
        module, DataLoader(data, batch_size=None)
    )
    assert [(alert.title, alert.step) for alert in alerts] == [("NaN gradient", 3)]
    assert "net.0.weight" in alerts[0].text
    healthy = [module.expected.norms[batch] for batch in (0, 1, 3)]
    assert notes.series("train_epoch/grad_norm") == [(3, approx(sum(healthy) / 3))]


def test_without_a_threshold_nothing_is_too_large() -> None:
    alerts: list[Alert] = []
    module = Regression(lr=0.0)
    with torch.no_grad():
        module.net[2].bias += 1e12  # a loss of 1e24, gradients of 1e12: above the default threshold, 1e8
    trainer_of(GradWatchCallback(explosion_threshold=None, on_alert=alerts.append)).fit(module, loader(2))
    assert alerts == []
    trainer_of(GradWatchCallback(on_alert=alerts.append)).fit(module, loader(2))
    assert [alert.title for alert in alerts] == ["Exploding gradient"]


def test_an_exception_leaves_nothing_behind() -> None:
    class Breaks(Regression):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise RuntimeError("broken batch")
            return super().training_step(batch, batch_idx)

    module, memory = Breaks(), MemorySink()
    callback = GradWatchCallback(sinks=[memory])
    with pytest.raises(RuntimeError, match="broken batch"):
        trainer_of(callback).fit(module, loader(4))
    assert callback.watcher is None
    assert all(not p._post_accumulate_grad_hooks for p in module.parameters())
    samples = memory.merged()
    assert samples is not None
    assert samples.total_grad_norm.tolist() == approx(module.expected.norms)


def test_two_fits_with_one_callback_are_two_trainings() -> None:
    callback = GradWatchCallback()
    for _ in range(2):
        notes, module = Notes(), Regression()
        trainer_of(callback, notes=notes).fit(module, loader(3))
        assert notes.series("train/grad_norm") == list(enumerate(approx(n) for n in module.expected.norms))
        assert len(notes.series("train_epoch/grad_norm")) == 1


def test_the_steps_of_a_rate_finder_are_none_of_the_training(tmp_path: Any) -> None:
    from lightning.pytorch.callbacks import LearningRateFinder

    notes, module, memory = Notes(), Regression(), MemorySink()
    finder = LearningRateFinder(num_training_steps=6, update_attr=False)
    trainer_of([GradWatchCallback(sinks=[memory]), finder], notes=notes, default_root_dir=tmp_path).fit(
        module, loader(4)
    )
    norms = module.expected.norms
    assert len(norms) > 4  # those of the finder came first
    assert notes.series("train/grad_norm") == list(enumerate(approx(norm) for norm in norms[-4:]))
    assert notes.series("train_epoch/grad_norm") == [(3, approx(sum(norms[-4:]) / 4))]
    samples = memory.merged()
    assert samples is not None
    assert samples.steps.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("more", [{"fast_dev_run": 2}, {"barebones": True}], ids=["fast_dev_run", "barebones"])
def test_trainers_without_loggers(more: dict[str, Any]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[GradWatchCallback(log_every_n_steps=1)],
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

    for with_us, without in zip(trained([GradWatchCallback(per_layer=True)]), trained([]), strict=True):
        assert torch.equal(with_us, without)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            {"log_every_n_steps": -1},
            ValueError,
            r"log_every_n_steps=-1 must be a number of steps, 0 for never, or None",
        ),
        ({"explosion_threshold": 0}, ValueError, r"explosion_threshold=0 must be a positive number or None"),
        ({"log_evry": 1}, TypeError, r"GradWatchCallback got an unexpected argument 'log_evry'"),
        ({"log_every": 1}, TypeError, r"unexpected argument 'log_every'"),
    ],
)
def test_wrong_arguments_raise_at_once(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GradWatchCallback(**arguments)


# ---- subclasses


class MaxNorm(GradWatchCallback):
    """The largest norm of the epoch, and a number of the user's own."""

    def compute_batch_stats(self, sample: Any) -> dict[str, float]:
        return {**super().compute_batch_stats(sample), "twice": 2 * float(sample.total_grad_norm[0])}

    def init_epoch_stats(self) -> dict[str, Any]:
        return {"largest": 0.0}

    def update_epoch_stats(self, epoch_stats: dict[str, Any], batch_stats: Mapping[str, float]) -> None:
        epoch_stats["largest"] = max(epoch_stats["largest"], batch_stats["grad_norm"])

    def compute_epoch_stats(self, epoch_stats: Mapping[str, Any]) -> dict[str, float]:
        return {"grad_norm_max": epoch_stats["largest"]}


def test_a_subclass_changes_what_is_computed() -> None:
    notes, module = Notes(), Regression()
    trainer_of(MaxNorm(), notes=notes).fit(module, loader(5))
    assert notes.series("train/twice") == [(b, approx(2 * n)) for b, n in enumerate(module.expected.norms)]
    assert notes.series("train_epoch/grad_norm_max") == [(4, approx(max(module.expected.norms)))]
    assert notes.series("train_epoch/grad_norm") == []


def test_a_subclass_sets_its_prefixes() -> None:
    class Named(GradWatchCallback):
        step_prefix = "mine/"

        @property
        def epoch_prefix(self) -> str:  # type: ignore[override]
            return f"{self.step_prefix}epoch/"

    notes = Notes()
    trainer_of(Named(track_sparsity=False), notes=notes).fit(Regression(), loader(1))
    assert {key.rpartition("grad_")[0] for _, metrics in notes.calls for key in metrics if "grad" in key} == {
        "mine/",
        "mine/epoch/",
    }


def test_an_error_in_a_subclass_is_the_users() -> None:
    class Broken(GradWatchCallback):
        def compute_batch_stats(self, sample: Any) -> dict[str, float]:
            raise KeyError("my layer")

    with pytest.raises(KeyError, match="my layer"):
        trainer_of(Broken()).fit(Regression(), loader(2))


# ---- W&B


def test_the_wandb_run_gets_our_rows_and_keeps_lightnings(start_run: Callable[..., Any]) -> None:
    run = start_run()
    notes, module = Notes(), Regression()
    loggers = [WandbLogger(experiment=run), notes]
    trainer_of(GradWatchCallback(log_every_n_steps=2), notes=loggers, log_every_n_steps=1).fit(module, loader(6))
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


def test_0_steps_leaves_only_alerts_and_epochs_in_wandb(start_run: Callable[..., Any]) -> None:
    run = start_run()
    callback = GradWatchCallback(log_every_n_steps=0, explosion_threshold=1e-3)
    trainer_of(callback, notes=WandbLogger(experiment=run)).fit(Regression(), loader(3))
    run.finish()
    rows = history(run)
    assert [row for row in rows if "gradwatch/step" in row] == []
    assert len([row for row in rows if "train_epoch/grad_norm" in row]) == 1


# ---- both packages, or none


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
        enable_model_summary=False, callbacks=[GradWatchCallback(log_every_n_steps=1)],
    )  # fmt: skip
    trainer.fit(module, loader(3))
    assert trainer.callback_metrics["train/grad_norm"] == approx(module.expected.norms[-1])


def test_the_callback_is_one_of_each_package_that_is_in_use() -> None:
    assert issubclass(GradWatchCallback, pl.Callback)
    assert issubclass(GradWatchCallback, other.Callback)
