"""Lightning: correct statistics in every logger, under their own step, in all kinds of training."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from frameworks import batches, loss_of
from lightning_programs import Notes, Regression, approx, fitted, numbered, pl
from torch import nn
from torch.utils.data import DataLoader

from wandb_gradwatch.integrations.lightning import GradWatchCallback
from wandb_gradwatch.sinks import MemorySink

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


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
    module, callback = Regression(accumulate=accumulate), GradWatchCallback(sample_every=1, per_layer=True)
    trainer, notes = fitted(module, 6, callback, max_epochs=2, accumulate_grad_batches=accumulate, **more)
    expected, steps = module.expected, 6 // accumulate  # steps per epoch
    assert len(expected.norms) == 2 * steps
    # Steps count batches that end with an update, from 0, like the Trainer's own axis.
    assert notes.series("train/grad_norm") == numbered(expected.norms)
    assert notes.series("train/grad_mean") == numbered(expected.means)
    assert notes.series("train/grad_std") == numbered(expected.stds)
    assert notes.series("train/grad_norm/net/2/weight") == numbered(expected.layer_norms(2))
    first, second = sum(expected.norms[:steps]) / steps, sum(expected.norms[steps:]) / steps
    assert notes.series("train_epoch/grad_norm") == [(steps - 1, approx(first)), (2 * steps - 1, approx(second))]
    assert trainer.callback_metrics["train_epoch/grad_norm"] == approx(second)
    assert trainer.callback_metrics["train/grad_norm"] == approx(expected.norms[-1])
    assert not [key for key in trainer.callback_metrics if key.startswith("train/grad_norm/")]


@pytest.mark.parametrize(("callback_every", "trainer_every"), [(2, 2), (5, 1), (1, 5), (3, 2)])
def test_each_value_is_logged_once_under_its_own_step(callback_every: int, trainer_every: int) -> None:
    """log_dict would log the value when the Trainer logs: late, repeatedly, or never."""
    module, callback = Regression(), GradWatchCallback(sample_every=1, log_every_n_steps=callback_every)
    trainer, notes = fitted(module, 12, callback, log_every_n_steps=trainer_every)
    due = range(callback_every - 1, 12, callback_every)
    assert notes.series("train/grad_norm") == [(step, approx(module.expected.norms[step])) for step in due]
    assert trainer.callback_metrics["train/grad_norm"] == approx(module.expected.norms[due[-1]])


def test_the_cadence_is_the_trainers_where_none_is_given_and_0_is_never() -> None:
    _, by_trainer = fitted(Regression(), 8, log_every_n_steps=4)
    assert [step for step, _ in by_trainer.series("train/grad_norm")] == [3, 7]
    module = Regression()
    _, never = fitted(module, 8, GradWatchCallback(sample_every=1, log_every_n_steps=0))
    assert never.series("train/grad_norm") == []
    assert never.series("train_epoch/grad_norm") == [(7, approx(sum(module.expected.norms) / 8))]


def test_where_not_every_step_is_measured_the_first_one_after_each_nth_is_logged() -> None:
    module = Regression()
    _, notes = fitted(module, 12, GradWatchCallback(sample_every=5, log_every_n_steps=2))
    # Steps 5 and 10 are sampled (batches 4 and 9): each is the first one at or after a multiple of 2.
    assert notes.series("train/grad_norm") == [(batch, approx(module.expected.norms[batch])) for batch in (4, 9)]


def test_prefixes_and_switches() -> None:
    switched = {"step_prefix": "s-", "epoch_prefix": "e-", "track_epochs": False, "track_sparsity": False}
    _, notes = fitted(Regression(), 2, GradWatchCallback(sample_every=1, **switched))
    keys = {key for _, metrics in notes.calls for key in metrics if "grad" in key}
    assert keys == {"s-grad_norm", "s-grad_mean", "s-grad_std"}


def test_every_logger_gets_every_number(tmp_path: Any) -> None:
    loggers = [Notes(), pl.loggers.CSVLogger(tmp_path), Notes()]
    fitted(Regression(), 3, GradWatchCallback(sample_every=1, per_layer=True), notes=loggers)
    first = [call for call in loggers[0].calls if any("grad" in key for key in call[1])]
    assert len(first) == 4  # three steps, one epoch
    assert first == [call for call in loggers[2].calls if any("grad" in key for key in call[1])]
    (written,) = tmp_path.rglob("metrics.csv")
    assert "train_epoch/grad_norm/net/0/bias" in written.read_text().splitlines()[0]


def test_bf16_gradients_are_those_of_the_optimizer() -> None:
    """Autocast rounds the forward to 8 bits, so the norms are compared with autograd's own, not with float64."""
    module, seen = Regression(), []
    module.on_before_optimizer_step = lambda optimizer: seen.append(  # type: ignore[method-assign]
        float(torch.cat([p.grad.flatten().double() for p in module.parameters()]).norm())
    )
    _, notes = fitted(module, 4, precision="bf16-mixed", gradient_clip_val=0.01)
    assert notes.series("train/grad_norm") == numbered(seen)


def test_loss_scaling_and_an_overflow_leave_true_numbers() -> None:
    """With a real scaler gradients are 65536 times too large after the backward; one batch overflows."""
    data = batches(5)
    data[2] *= 1e38  # its loss is inf
    module, memory = Regression(), MemorySink()
    callback, batched = GradWatchCallback(sample_every=1, sinks=[memory]), DataLoader(data, batch_size=None)
    _, notes = fitted(module, batched, callback, plugins=[_scaling()], gradient_clip_val=0.01)
    expected = module.expected.norms
    healthy = [0, 1, 3, 4]
    logged = dict(notes.series("train/grad_norm"))
    assert {step: logged[step] for step in healthy} == {step: approx(expected[step]) for step in healthy}
    samples = memory.merged()
    assert samples.skipped.tolist() == [False, False, True, False, False]
    # After the overflow the scaler halves its scale.
    assert samples.loss_scale.tolist() == [65536.0, 65536.0, 65536.0, 32768.0, 32768.0]
    # The skipped step makes no update and is not part of the mean.
    mean = sum(expected[step] for step in healthy) / 4
    assert notes.series("train_epoch/grad_norm") == [(4, approx(mean))]


def test_a_fused_optimizer_that_unscales_by_itself_leaves_true_numbers() -> None:
    """Lightning does not unscale for fused optimizers: its hooks get gradients that are 65536 times too large."""

    class Fused(Regression):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)

    module = Fused()
    _, notes = fitted(module, 4, plugins=[_scaling()])
    norms = module.expected.norms
    assert notes.series("train/grad_norm") == numbered(norms)
    assert notes.series("train_epoch/grad_norm") == [(3, approx(sum(norms) / 4))]


def _scaling() -> Any:
    """A loss scale as on a GPU, but with float32."""
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    plugin = pl.plugins.precision.MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    plugin.forward_context = contextlib.nullcontext
    return plugin


@pytest.mark.parametrize(("accumulate", "scaled"), [(1, False), (3, False), (1, True)])
def test_the_loss_is_that_of_the_training_step_averaged_over_micro_batches(accumulate: int, scaled: bool) -> None:
    """Lightning divides the loss by the micro-batches and multiplies it by the loss scale before callbacks get it."""
    sink, module = MemorySink(), Regression(accumulate=accumulate, lr=0.0)
    more: dict[str, Any] = {"plugins": [_scaling()]} if scaled else {"accumulate_grad_batches": accumulate}
    fitted(module, 6, GradWatchCallback(sinks=[sink], sample_every=1), **more)
    losses = [loss_of(module.net.double(), batch.double()).item() for batch in batches(6)]  # the model stays as it is
    expected = [sum(losses[i : i + accumulate]) / accumulate for i in range(0, 6, accumulate)]
    assert sink.merged().metrics["gradwatch/loss"].tolist() == approx(expected)


class Gan(pl.LightningModule):
    """Manual optimization with two optimizers in turn; the user clips the first one's gradients."""

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
    """The cadence counts batches: every second optimizer step would always be the generator's."""
    module = Gan()
    options = {"log_every_n_steps": every, "per_layer": True, "group_by": lambda name: name.split(".")[0]}
    _, notes = fitted(module, 4, GradWatchCallback(sample_every=1, **options))
    due = range(every - 1, 4, every)
    assert notes.series("train/grad_norm/critic") == [(b, approx(module.norms[b][0])) for b in due]
    assert notes.series("train/grad_norm/generator") == [(b, approx(module.norms[b][1])) for b in due]
    both = {b: (module.norms[b][0] ** 2 + module.norms[b][1] ** 2) ** 0.5 for b in due}
    assert notes.series("train/grad_norm") == [(b, approx(both[b])) for b in due]
    # The epoch's mean covers all eight optimizer steps, each with the norm of its own parameters.
    mean = sum(sum(pair) for pair in module.norms) / 8
    assert notes.series("train_epoch/grad_norm") == [(3, approx(mean))]


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

    module = Split()
    _, notes = fitted(module, 4)
    assert notes.series("train/grad_norm") == numbered(module.expected.norms)


def test_lbfgs_counts_one_step_of_its_first_evaluation() -> None:
    class Lbfgs(Regression):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if len(self.expected.norms) <= batch_idx:  # the first of several evaluations of this batch
                return super().training_step(batch, batch_idx)
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    module = Lbfgs()
    _, notes = fitted(module, 3)
    assert notes.series("train/grad_norm") == numbered(module.expected.norms)
