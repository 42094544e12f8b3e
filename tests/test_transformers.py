"""Hugging Face Trainer and Accelerate: correct statistics under the Trainer's own steps."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, loss_of, small_model
from offline import history
from torch import nn

import wandb_gradwatch
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import MemorySink
from wandb_gradwatch.snapshot import Snapshot

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from wandb_gradwatch.integrations.transformers import GradWatchCallback  # noqa: E402

FLOAT32 = 1e-5  # float32 gradients against float64 ones

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")


class Net(nn.Module):
    """The small model with the interface of the Trainer: it returns a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()
        self.expected = Recomputed(self.net)
        self.seen: list[torch.Tensor] = []
        self.accumulate = 1

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(x)
            if len(self.seen) == self.accumulate:
                self.expected.look(self.seen)
                self.seen = []
        return {"loss": loss_of(self.net, x)}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Return the rows of the batches, one by one."""

    def __init__(self, count: int) -> None:
        self.rows = batches(count).flatten(0, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[index]}


def trainer_of(
    folder: Path, callbacks: list[Any], *, model: nn.Module | None = None, count: int = 6, **more: Any
) -> Trainer:
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(output_dir=str(folder), **options | more)
    model = Net() if model is None else model
    if isinstance(model, Net):
        model.accumulate = arguments.gradient_accumulation_steps
    trainer = InOrder(model=model, args=arguments, train_dataset=Rows(count), callbacks=callbacks)
    trainer.model_accepts_loss_kwargs = False  # the Trainer itself divides the loss by the micro-batches
    return trainer


def trained(*arguments: Any, **more: Any) -> Trainer:
    trainer = trainer_of(*arguments, **more)
    trainer.train()
    return trainer


class InOrder(Trainer):
    """A Trainer that takes the data in order, so that the test knows each batch."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def logged(trainer: Trainer, key: str = "gradwatch/grad_norm") -> list[tuple[int, float]]:
    return [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=FLOAT32, abs=1e-7)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_steps_agree_with_float64_before_clipping(accumulate: int, max_grad_norm: float, tmp_path: Path) -> None:
    memory = MemorySink()
    trainer = trained(
        tmp_path,
        [GradWatchCallback(sample_every=1, per_layer=True, sinks=[memory])],
        gradient_accumulation_steps=accumulate,
        max_grad_norm=max_grad_norm,
        num_train_epochs=2,
    )
    expected = trainer.model.expected
    assert len(expected.norms) == 12 // accumulate
    assert logged(trainer) == [(step, approx(norm)) for step, norm in enumerate(expected.norms, 1)]
    assert logged(trainer, "gradwatch/grad_norm/net/2/weight") == [
        (step, approx(norm)) for step, norm in enumerate(expected.layer_norms(2), 1)
    ]
    samples = memory.merged()
    received = [min(norm, max_grad_norm) if max_grad_norm else norm for norm in expected.norms]
    assert samples.total_grad_norm_clipped.tolist() == pytest.approx(received, rel=1e-4)


def test_the_cadence_is_the_trainers_where_none_is_given(tmp_path: Path) -> None:
    trainer = trained(tmp_path, [GradWatchCallback(sample_every=1)], logging_steps=2)
    assert [step for step, _ in logged(trainer)] == [2, 4, 6]
    trainer = trained(tmp_path, [GradWatchCallback(sample_every=1, log_every=3)], logging_strategy="epoch")
    assert [step for step, _ in logged(trainer)] == [3, 6]
    # Log the first sample at or after each second step. With a plain logging_steps=2 sample 3 would be missing.
    trainer = trained(tmp_path, [GradWatchCallback(sample_every=3)], logging_steps=2)
    assert [step for step, _ in logged(trainer)] == [3, 6]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_gradients_are_those_of_the_optimizer(precision: str, tmp_path: Path) -> None:
    """Autocast rounds the forward, so the norms are compared with those of autograd's own gradients before clipping."""

    class Look(TrainerCallback):
        norms: list[float] = []  # noqa: RUF012

        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            gradients = [p.grad.double().flatten() for p in model.parameters()]
            self.norms.append(float(torch.cat(gradients).norm()))

    look = Look()
    trainer = trained(tmp_path, [GradWatchCallback(sample_every=1), look], max_grad_norm=0.0, **{precision: True})
    assert logged(trainer) == [(step, approx(norm)) for step, norm in enumerate(look.norms, 1)]


class Stop(TrainerCallback):
    """Simulate the end of the process after a checkpoint."""

    def on_save(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("killed")


@pytest.mark.parametrize("save_steps", [2, 3, 4], ids=["mid-epoch", "epoch-end", "next-epoch"])
def test_steps_go_on_after_a_resume(save_steps: int, tmp_path: Path) -> None:
    through = trained(tmp_path / "through", [], count=3, num_train_epochs=3)
    saving = {"save_strategy": "steps", "save_steps": save_steps, "num_train_epochs": 3}
    with pytest.raises(RuntimeError, match="killed"):
        trainer_of(tmp_path, [GradWatchCallback(sample_every=1), Stop()], count=3, **saving).train()
    memory = MemorySink()
    trainer = trainer_of(tmp_path, [GradWatchCallback(sample_every=1, sinks=[memory])], count=3, num_train_epochs=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_steps}"))
    norms = through.model.expected.norms
    # The checkpoint has the log of the first half, to which the second half is added.
    assert logged(trainer) == [(step, approx(norm)) for step, norm in enumerate(norms, 1)]
    samples = memory.merged()
    assert samples.steps.tolist() == list(range(save_steps + 1, 10))


@pytest.mark.parametrize("content", ["a partial copy", {"of": "another version"}])
def test_a_file_that_cannot_be_read_does_not_stop_a_resumed_training(
    content: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, [GradWatchCallback(sample_every=1)], save_strategy="steps", save_steps=2)
    file = tmp_path / "checkpoint-2" / "gradwatch.pt"
    if isinstance(content, str):
        file.write_text(content)
    else:
        torch.save(content, file)
    trainer = trainer_of(tmp_path, [GradWatchCallback(sample_every=1)])
    trainer.train(resume_from_checkpoint=str(file.parent))
    assert f"{file} could not be read" in caplog.text
    assert trainer.state.global_step > 2


def test_a_watcher_of_a_training_that_raised_is_replaced(tmp_path: Path) -> None:
    callback = GradWatchCallback(sample_every=1)
    model = Net()
    with pytest.raises(RuntimeError, match="killed"):
        trainer_of(tmp_path, [callback, Stop()], model=model, save_strategy="steps", save_steps=1).train()
    old = callback.watcher
    assert old is not None
    trainer = trainer_of(tmp_path, [callback], model=model, count=2)
    begin = len(model.expected.norms)
    trainer.train()
    assert logged(trainer) == [(step, approx(n)) for step, n in enumerate(model.expected.norms[begin:], 1)]
    assert callback.watcher is None
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("variable", "options", "gradients", "parameters"),
    [
        (None, {}, True, False),
        ("false", {}, True, False),  # disables the Trainer's own wandb.watch
        ("gradients", {}, True, False),
        ("parameters", {}, False, True),
        ("all", {}, True, True),
        ("all", {"log": "gradients"}, True, False),
    ],
)
def test_wandb_watch_says_of_what_there_are_histograms(
    variable: str | None,
    options: dict[str, Any],
    gradients: bool,
    parameters: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("WANDB_WATCH", variable)
    sink = MemorySink()
    trainer_of(tmp_path, [GradWatchCallback(sinks=[sink], **options)], count=1).train()
    [snapshot] = sink.snapshots
    found = {key.partition("/")[0] for key in snapshot.metric_histograms}
    assert (snapshot.histogram is not None, found == {"parameters"}) == (gradients, parameters)


def test_a_frozen_model_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Thaw(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 2:
                model.net.requires_grad_(True)

    model = Net()
    model.net.requires_grad_(False)
    model.dummy = nn.Parameter(torch.zeros(()), requires_grad=False)
    forward = model.forward
    model.forward = lambda x: {"loss": forward(x)["loss"] + torch.zeros((), requires_grad=True)}  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        trainer = trainer_of(tmp_path, [Thaw(), GradWatchCallback(sample_every=1)], model=model, count=4)
        trainer.optimizer = optimizer
        trainer.train()
    said = [record.message for record in caplog.records if "no trainable parameter" in record.message]
    assert len(said) == 1
    assert logged(trainer) == [(step, approx(model.expected.norms[step - 1])) for step in (3, 4)]


def test_training_is_untouched(tmp_path: Path) -> None:
    def weights(callbacks: list[Any]) -> list[torch.Tensor]:
        trainer = trained(tmp_path, callbacks, gradient_accumulation_steps=2, optim="adamw_torch")
        return [p.detach().clone() for p in trainer.model.parameters()]

    for with_us, without in zip(weights([GradWatchCallback(sample_every=1, per_layer=True)]), weights([]), strict=True):
        assert torch.equal(with_us, without)


def test_an_explosion_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alerts: list[Alert] = []

    @wandb_gradwatch.rule(title="Too large", level="ERROR")
    def too_large(snapshot: Snapshot) -> str | None:
        return f"Step {snapshot.steps[0]}: before clipping" if snapshot.total_grad_norm[0] > 1e-3 else None

    callback = GradWatchCallback(sample_every=1, rules=[too_large], on_alert=alerts.append)
    trainer_of(tmp_path, [callback], max_grad_norm=1e-4).train()
    assert [alert.title for alert in alerts] == ["Too large"]
    assert capsys.readouterr().err.count("ERROR: Step 1: ") == 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"log_every": 0}, ValueError, r"log_every=0 must be a number of optimizer steps, at least 1, or None"),
        ({"log_every": True}, ValueError, r"log_every=True must be a number of optimizer steps"),
        ({"per_layer": "no"}, TypeError, r"GradWatchCallback\(\): per_layer='no' must be True or False"),
        ({"run": "mine"}, TypeError, r"run='mine' must be what wandb.init\(\) returns"),
        ({"sampel_every": 1}, TypeError, r"GradWatchCallback got an unexpected argument 'sampel_every'"),
    ],
)
def test_wrong_arguments_raise_at_once(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GradWatchCallback(**arguments)


def test_the_trainers_own_run_gets_our_rows_and_keeps_its(start_run: Callable[..., Any], tmp_path: Path) -> None:
    run = start_run(reinit="finish_previous")  # the only kind that becomes wandb.run
    trainer = trained(tmp_path, [GradWatchCallback(sample_every=1, log_every=2)], report_to=["wandb"], logging_steps=2)
    run.finish()
    rows = history(run)
    ours = [row for row in rows if "gradwatch/step" in row]
    expected = trainer.model.expected.norms
    assert [row["gradwatch/step"] for row in ours] == [2, 4, 6]
    assert [row["gradwatch/grad_norm"] for row in ours] == approx(expected[1::2])
    theirs = [row for row in rows if "train/loss" in row]
    assert [row["train/global_step"] for row in theirs] == [2, 4, 6]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(lambda v: self.second(torch.tanh(self.first(v))), x)}  # type: ignore[arg-type]


def test_lora_wrapped_after_the_callback_was_made(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    alerts: list[Alert] = []
    memory = MemorySink()
    callback = GradWatchCallback(sample_every=1, per_layer=True, sinks=[memory], on_alert=alerts.append)
    base = TwoLayers()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["first"]))
    norms: list[float] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            norms.append(
                math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.requires_grad))
            )

    trainer = trained(tmp_path, [callback, Look()], model=model, count=4, max_grad_norm=0.0)
    assert logged(trainer) == [(step, approx(norm)) for step, norm in enumerate(norms, 1)]
    samples = memory.merged()
    present = [name for p, name in enumerate(samples.names) if not math.isnan(samples.grad_norm[0, p])]
    assert [name.rsplit(".", 3)[-3] for name in present] == ["lora_A", "lora_B"]
    # B starts at 0, so A's gradient is exactly 0 in the first step, which is correct and raises no alert.
    assert samples.grad_norm[0, samples.names.index(present[0])] == 0.0
    assert alerts == []


def test_lora_wrapped_after_training_began() -> None:
    peft = pytest.importorskip("peft")
    memory = MemorySink()
    base = TwoLayers()
    data = batches(6)
    with wandb_gradwatch.watch(base, sinks=[memory], sample_every=1, log_every=1):
        optimizer = torch.optim.SGD(base.parameters(), lr=0.05)
        norms = [_step(base, optimizer, x) for x in data[:3]]
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["first"]))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        norms += [_step(model, optimizer, x) for x in data[3:]]
    samples = memory.merged()
    # The wrapper froze all parameters with hooks, so no hook reported the first backward of the new ones. Their
    # gradient before clipping is missing in that step; the received gradient is known.
    assert [step for step in range(6) if math.isnan(samples.total_grad_norm[step])] == [3]
    seen = [0, 1, 2, 4, 5]
    assert samples.total_grad_norm[seen].tolist() == approx([norms[step] for step in seen])
    assert samples.total_grad_norm_clipped.tolist() == approx(norms)
    assert sorted(name.rsplit(".", 3)[-3] for name in samples.names if "lora" in name) == ["lora_A", "lora_B"]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    model(x=x)["loss"].backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.requires_grad and p.grad is not None]
    optimizer.step()
    return float(torch.cat(gradients).norm())


@pytest.fixture
def accelerator() -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test's Trainer has initialised it
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_in_two_lines(accelerator: Any) -> None:
    memory = MemorySink()
    model = small_model()
    expected = Recomputed(model)
    data = batches(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=None))
    watcher = wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, log_every=2)
    for index, x in enumerate(loader):
        if index % 2 == 0:
            expected.look(data[index : index + 2])
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    watcher.remove()
    accelerator.end_training()
    samples = memory.merged()
    assert samples.steps.tolist() == [1, 2, 3, 4]
    assert samples.total_grad_norm.tolist() == approx(expected.norms)
    assert samples.total_grad_norm_clipped.tolist() == pytest.approx([0.05] * 4, rel=1e-4)


def test_the_log_history_can_be_written(tmp_path: Path) -> None:
    """The Trainer saves its state, with that of callbacks, as JSON."""
    trainer = trained(tmp_path, [GradWatchCallback(sample_every=1, per_layer=True)], count=2)
    trainer.save_state()
    saved = json.loads((tmp_path / "trainer_state.json").read_text())
    assert saved["log_history"] == trainer.state.log_history


@pytest.mark.parametrize(("accumulate", "factor"), [(1, 1.0), (2, 1.0), (2, 3.0)])
def test_the_loss_is_that_of_each_step_averaged_over_its_micro_batches(
    accumulate: int, factor: float, tmp_path: Path
) -> None:
    """The loss is that of the Trainer's compute_loss, which may differ from the one that the model returns."""
    sink, model = MemorySink(), Net()
    callback = GradWatchCallback(sinks=[sink], sample_every=1)
    trainer = trainer_of(
        tmp_path,
        [callback],
        model=model,
        count=4,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.0,  # the model does not change, so its losses can be recomputed
    )
    of_model = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: factor * of_model(*args, **kwargs)  # type: ignore[method-assign]
    trainer.train()
    losses = [factor * loss_of(model.net.double(), batch.double()).item() for batch in batches(4)]
    expected = [sum(losses[i : i + accumulate]) / accumulate for i in range(0, 4, accumulate)]
    assert sink.merged().metrics["gradwatch/loss"].tolist() == approx(expected)
    assert not any(module._forward_hooks for module in model.modules())  # no hooks are left on the model
