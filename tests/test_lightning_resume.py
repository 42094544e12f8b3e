"""Lightning: a training resumed from a checkpoint logs what the uninterrupted training logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import Recomputed, batches
from lightning_programs import Notes, Regression, approx, loader, pl, trainer_of
from torch.utils._pytree import tree_flatten

from wandb_gradwatch.integrations.lightning import GradWatchCallback
from wandb_gradwatch.sinks import MemorySink

NUM_BATCHES = 6  # per epoch

pytestmark = [
    pytest.mark.skipif(
        tuple(map(int, pl.__version__.split(".")[:2])) < (2, 5),
        reason="before 2.5 Lightning's own count of batches is one off after a resume",
    ),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*is not supported for partial.*"),
]


class KilledError(RuntimeError):
    """Simulates the end of the process right after a checkpoint."""


class Saver(pl.Callback):  # type: ignore[misc]
    """Write a checkpoint at one moment, and end the training there.

    Args:
        path: the path of the checkpoint.
        moment: the name of the hook.
        when: (epoch, batch) of the checkpoint.
    """

    def __init__(self, path: Path, moment: str, when: tuple[int, int]) -> None:
        self.path, self.moment, self.when = path, moment, when

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.moment == "on_train_batch_end" and self.when == (trainer.current_epoch, batch_idx):
            self._save(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.moment == "on_validation_end" and self.when[0] == trainer.current_epoch and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.moment == "on_train_epoch_end" and self.when[0] == trainer.current_epoch:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.path)
        raise KilledError


class ResumableData:
    """A loader of batches in order that resumes at a checkpoint, because Lightning saves its state."""

    def __init__(self, data: torch.Tensor) -> None:
        self._batches = data
        self._begin = self._given = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self._begin = self._begin, 0
        for place in range(begin, len(self._batches)):
            self._given = place + 1
            yield self._batches[place]

    def state_dict(self) -> dict[str, int]:
        return {"begin": self._given % len(self._batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = state["begin"]


class Validated(Regression):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", batch.mean())


def uninterrupted(epochs: int) -> list[float]:
    module = Regression()
    trainer_of([], max_epochs=epochs).fit(module, loader(NUM_BATCHES))
    return module.expected.norms


@pytest.mark.parametrize(
    ("moment", "when"),
    [
        pytest.param("on_train_batch_end", (1, 2), id="mid-epoch"),
        pytest.param("on_train_batch_end", (0, 0), id="first-batch"),
        pytest.param("on_train_batch_end", (1, 5), id="last-batch"),
        pytest.param("on_validation_end", (1, 5), id="validation-end"),
        pytest.param("on_train_epoch_end", (1, 5), id="epoch-end"),
    ],
)
def test_a_resumed_training_has_the_numbers_of_one_that_ran_through(
    moment: str, when: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.ckpt"
    before = Notes()
    validated = {"num_sanity_val_steps": 0} if moment == "on_validation_end" else {}
    validation = (loader(1),) if validated else ()
    kind = Validated if validated else Regression
    with pytest.raises(KilledError):
        trainer_of(
            [GradWatchCallback(sample_every=1), Saver(path, moment, when)], notes=before, max_epochs=3, **validated
        ).fit(kind(), ResumableData(batches(NUM_BATCHES)), *validation)

    after, memory = Notes(), MemorySink()
    trainer_of(GradWatchCallback(sample_every=1, sinks=[memory]), notes=after, max_epochs=3, **validated).fit(
        kind(), ResumableData(batches(NUM_BATCHES)), *validation, ckpt_path=path
    )
    norms = uninterrupted(3)
    begin = when[0] * NUM_BATCHES + when[1] + 1  # the first batch after the checkpoint
    assert [value for _, value in after.series("train/grad_norm")] == approx(norms[begin:])
    means = [sum(norms[e * NUM_BATCHES : (e + 1) * NUM_BATCHES]) / NUM_BATCHES for e in range(3)]
    # Lightning may not call the end of an epoch again whose last batch is in the checkpoint; it must be logged anyway.
    is_logged = moment == "on_train_epoch_end"
    ended = [e for e in range(3) if (e + 1) * NUM_BATCHES > begin - (not is_logged)]
    expected = [((e + 1) * NUM_BATCHES - 1, approx(means[e])) for e in ended]
    assert after.series("train_epoch/grad_norm") == expected
    samples = memory.merged()
    assert samples.steps.tolist() == list(range(begin + 1, 3 * NUM_BATCHES + 1))  # steps continue, too


def test_the_steps_axis_goes_on_after_a_mid_epoch_resume(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.ckpt"
    with pytest.raises(KilledError):
        trainer_of([GradWatchCallback(sample_every=1), Saver(path, "on_train_batch_end", (0, 2))], notes=Notes()).fit(
            Regression(), loader(NUM_BATCHES)
        )
    after, own = Notes(), []
    module = Regression()
    module.on_train_batch_end = lambda *_: own.append(trainer.fit_loop.epoch_loop._batches_that_stepped)  # type: ignore[method-assign]
    trainer = trainer_of(GradWatchCallback(sample_every=1), notes=after)
    trainer.fit(module, loader(NUM_BATCHES), ckpt_path=path)
    # The expected steps are those of the Trainer's own rows.
    assert [step for step, _ in after.series("train/grad_norm")] == [step for step, _ in after.series("loss")]
    assert [step for step, _ in after.series("train/grad_norm")] == own


def assert_equal(one: Any, other: Any) -> None:
    """Compare plain values and tensors, also where they are NaN."""
    for here, there in zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=True):
        np.testing.assert_array_equal(here, there)


def test_the_state_is_plain_and_a_copy(tmp_path: Path) -> None:
    """Lightning loads checkpoints with weights_only=True: numbers, strings, lists, dicts, tensors."""
    callback = GradWatchCallback(sample_every=1)
    trainer = trainer_of(callback, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(Regression(), loader(3))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    loaded = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"][callback.state_key]
    assert loaded["watched"]["step"] == 3
    assert_equal(loaded, callback.state_dict())
    other = GradWatchCallback(sample_every=1)
    other.load_state_dict(loaded)
    other._epoch["stats"]["grad_norm"] = (99, 0.0)
    assert_equal(loaded, callback.state_dict())


def test_the_rules_remember_what_was_usual(tmp_path: Path) -> None:
    """A spike right after a resume is compared with the steps before the checkpoint."""
    path, alerts = tmp_path / "checkpoint.ckpt", []
    with pytest.raises(KilledError):
        trainer_of([GradWatchCallback(sample_every=1), Saver(path, "on_train_batch_end", (0, 29))]).fit(
            Regression(lr=1e-4), loader(40)
        )

    class Spikes(Regression):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (1000.0 if batch_idx == 30 else 1.0)

    trainer_of(GradWatchCallback(sample_every=1, on_alert=alerts.append)).fit(
        Spikes(lr=1e-4), loader(40), ckpt_path=path
    )
    # Sent at the spike, and again as an error when the update has moved the parameters far.
    assert {(alert.title, alert.step) for alert in alerts} == {("Exploding gradient", 31)}


def run_named(name: str) -> SimpleNamespace:
    """What of a W&B run a callback needs before a training."""
    return SimpleNamespace(id=name, disabled=False, define_metric=lambda *_: None)


def test_state_keys_differ_with_every_argument_and_are_the_same_in_every_process() -> None:
    arguments: list[dict[str, Any]] = [
        {},
        {"log_every_n_steps": 3},
        {"step_prefix": "a/"},
        {"epoch_prefix": "b/"},
        {"track_epochs": False},
        {"per_layer": True},
        {"track_sparsity": False},
        {"explosion_threshold": 7.0},
        {"include": "weight"},
        {"guard": "skip"},
        {"group_by": str.upper},
    ]
    assert len({GradWatchCallback(**each).state_key for each in arguments}) == len(arguments)
    # Sinks and runs are not part of the state: a training resumed with other sinks, or in another run, restores it.
    elsewhere = GradWatchCallback(sinks=[MemorySink()], on_alert=print, run=run_named("another"))
    assert elsewhere.state_key == GradWatchCallback().state_key


def test_two_callbacks_that_only_log_elsewhere_need_another_prefix() -> None:
    here, there = map(run_named, ("here", "there"))
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `GradWatchCallback`"):
        trainer_of([GradWatchCallback(run=here), GradWatchCallback(run=there)])
    trainer_of([GradWatchCallback(run=here), GradWatchCallback(run=there, step_prefix="there/")])


def test_two_callbacks_of_one_trainer_watch_side_by_side() -> None:
    weights, biases = MemorySink(), MemorySink()
    callbacks = [
        GradWatchCallback(include="weight", sinks=[weights], sample_every=1),
        GradWatchCallback(include="bias", sinks=[biases], sample_every=1),
    ]
    trainer_of(callbacks).fit(Regression(), loader(4))
    for memory, kind in ((weights, "weight"), (biases, "bias")):
        merged = memory.merged()
        assert merged.steps.tolist() == [1, 2, 3, 4]
        assert all(name.endswith(kind) for name in merged.names)


def test_recomputed_is_a_second_opinion() -> None:
    """The checks of this file can fail: another batch has another norm."""
    module = Regression()
    looks = Recomputed(module.net)
    first, second = loader(2)
    looks.look([first])
    looks.look([second])
    assert looks.norms[0] != approx(looks.norms[1])
