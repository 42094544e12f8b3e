"""A step that the guard skips for NaN or Inf is run once more; the alert names the operation that made it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging

import pytest
import torch
from test_nonfinite import Model, line_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wandb_gradwatch
from wandb_gradwatch import MemorySink, SkipGuard


def log_of_some(x):
    scale = (x.abs().sum() < 1e3).to(x.dtype)  # 1 for an ordinary batch, 0 for a large one
    return ((x.abs() + 1) * scale).log()  # bad


class Fails(Model):
    """A large batch makes log(0) in blocks.1; ordinary ones do not. Dropout makes the forward random."""

    def __init__(self):
        super().__init__(log_of_some)
        self.blocks[0].function = torch.abs  # keeps a large batch large for any weights
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        return super().forward(self.dropout(x))


GOOD = torch.tensor([[1.0, -0.5], [0.5, 0.25]])
BAD = 1e6 * GOOD


def train(batches, *, guard="skip", model=None, optimizer=torch.optim.SGD, loss=None, micro=1, wrap=None, **options):
    """Train and return the final parameters, the alerts, and the recorder's notes by step."""
    torch.manual_seed(0)
    model = Fails() if model is None else model
    called = model if wrap is None else wrap(model)
    stepper, memory = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3), MemorySink()
    loss = loss or (lambda output: output.square().mean())
    options = {"sample_every": 1, "guard": guard, **options}
    watcher = wandb_gradwatch.watch(called, sinks=[memory], **options)
    for number, batch in enumerate(batches, 1):
        loss(called(batch)).backward()
        if number % micro == 0:
            stepper.step()
            stepper.zero_grad()
    watcher.flush()
    notes = watcher._dispatcher.recorder.notes
    watcher.remove()
    return [p.detach().clone() for p in model.parameters()], memory.alerts, notes


def found_in(notes):
    return {step: note["first_bad_operation"] for step, note in notes.items() if "first_bad_operation" in note}


class LowRank(nn.Module):
    """Like LoRA: a trainable addition to a frozen layer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def low_rank():
    model = Fails().requires_grad_(False)
    for block in model.blocks:
        block.linear = LowRank(block.linear)
    return model


def checkpointed(*, use_reentrant):
    model = Fails()
    model.blocks[1].function = lambda x: checkpoint(log_of_some, x, use_reentrant=use_reentrant)
    return model


class Autocast(Fails):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class TakesDict(Fails):
    def forward(self, batch):
        return super().forward(batch["x"])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class TakesDataclass(Fails):
    def forward(self, batch):
        return super().forward(batch.x)


@pytest.mark.parametrize(
    ("model", "wrap", "batch"),
    [
        pytest.param(None, None, None, id="plain"),
        pytest.param(None, lambda model: torch.compile(model, backend="aot_eager"), None, id="compiled"),
        pytest.param(None, nn.DataParallel, None, id="DataParallel"),
        pytest.param(low_rank, None, None, id="LoRA"),
        pytest.param(lambda: checkpointed(use_reentrant=False), None, None, id="checkpointed"),
        pytest.param(lambda: checkpointed(use_reentrant=True), None, None, id="checkpointed, re-entrant"),
        pytest.param(Autocast, None, None, id="autocast"),
        pytest.param(TakesDict, None, lambda x: {"x": x}, id="dict"),
        pytest.param(TakesDataclass, None, Batch, id="dataclass"),
    ],
)
def test_the_alert_names_the_operation_its_module_and_its_line(model, wrap, batch):
    torch.manual_seed(0)
    batches = [batch(x) if batch else x for x in (GOOD, GOOD, BAD, GOOD)]
    _, alerts, notes = train(batches, wrap=wrap, model=model and model())
    (found,) = found_in(notes).items()
    assert found[0] == 3
    assert found[1].startswith(f"aten.log in blocks.1, test_replay.py:{line_of(log_of_some)}, made 4 Inf of 4")
    (told,) = [alert for alert in alerts if alert.title in ("NaN gradient", "Inf gradient")][:1]
    assert told.step == 3
    assert found[1].splitlines()[0].rstrip(".") in told.text.replace("\n", " ")
    assert found[1] in told.incident.text
    assert "the guard left this update out" in told.text


def test_training_is_bitwise_that_of_a_guard_that_does_not_look_again():
    batches = [GOOD, BAD, GOOD, GOOD, BAD, GOOD]
    with_replay, _, notes = train(batches)
    without, _, nothing = train(batches, guard=SkipGuard(replay=False))
    assert len(found_in(notes)) == 2
    assert found_in(nothing) == {}
    assert all(torch.equal(a, b) for a, b in zip(with_replay, without, strict=True))


def test_of_several_micro_batches_the_bad_one_is_run_again():
    _, _, notes = train([GOOD, GOOD, GOOD, BAD], micro=2)
    assert list(found_in(notes)) == [2]
    # Only the large batch makes log(0).
    assert "aten.log" in found_in(notes)[2]


def test_a_loss_that_made_it_is_named_as_outside_of_the_model():
    calls = iter(range(10))

    def zero(output):
        return (0 * output).square().sum().sqrt() if next(calls) == 2 else output.square().mean()

    _, _, notes = train([GOOD] * 4, loss=zero)
    # d sqrt(x) at 0 is infinite, and 0 times Inf is NaN: all 4 elements of the output's gradient.
    assert found_in(notes) == {
        3: "The gradient of the model's output held 4 NaN of 4 (at (0, 0), (0, 1), (1, 0), ...) when it came: "
        "it is the loss's, outside of the model.\n"
        "Remedy: look at the targets of this batch, and at logs, roots and divisions in the loss function."
    }


def test_an_episode_is_run_again_once_and_a_run_three_times():
    _, _, notes = train([GOOD, BAD, BAD, GOOD, BAD, GOOD, BAD, GOOD, BAD, GOOD])
    assert list(found_in(notes)) == [2, 5, 7]


def test_a_replay_that_raises_is_said_and_the_training_goes_on(caplog):
    class Once(Fails):
        def forward(self, x):
            if torch._C._len_torch_dispatch_stack():
                raise ValueError("not a second time")
            return super().forward(x)

    with caplog.at_level(logging.ERROR, logger="wandb_gradwatch"):
        parameters, alerts, _ = train([GOOD, BAD, GOOD, BAD], model=Once())
    assert caplog.text.count("could not run step 2 again") == 1
    assert "not a second time" in caplog.text
    assert any(alert.step == 2 for alert in alerts)
    assert all(torch.isfinite(parameter).all() for parameter in parameters)


def test_a_sparse_gradient_is_run_again_too(caplog):
    embedding, layer = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)

    def poison(weight):
        if weight.grad.coalesce().indices().max() == 3:
            weight.grad._values().fill_(torch.nan)

    embedding.weight.register_post_accumulate_grad_hook(poison)
    batches = [torch.tensor([1, 2])] * 4 + [torch.tensor([3, 3])] + [torch.tensor([1, 2])]
    _, alerts, _ = train(batches, model=nn.Sequential(embedding, layer))
    assert [(alert.title, alert.step) for alert in alerts] == [("NaN gradient", 5)]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_nothing_stays_on_the_model_and_it_can_be_copied():
    model = Fails()
    watcher = wandb_gradwatch.watch(model, sinks=[MemorySink()], guard="skip")
    twin = copy.deepcopy(model)
    functional.relu(twin(GOOD)).sum().backward()  # the hooks of a copy do nothing
    assert watcher._parts.replay._forwards == []
    with torch.no_grad():
        model(GOOD)
    model.eval()(GOOD)
    assert watcher._parts.replay._forwards == []  # the copy is not part of the training
    watcher.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Cautious(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return super().step(closure)


@pytest.mark.parametrize(("sample_every", "bad"), [(1, 2), (10, 60)])  # step 61 would only be counted
def test_without_a_guard_the_step_after_the_alert_is_traced(sample_every, bad):
    # The batch of step `bad` makes NaN. The optimizer sets non-finite elements to zero, so parameters stay finite.
    batches = [*[GOOD] * (bad - 1), BAD, BAD, GOOD]
    options = {"guard": None, "on_nonfinite": "trace", "optimizer": Cautious, "sample_every": sample_every}
    _, alerts, notes = train(batches, **options)
    assert min(alert.step for alert in alerts if alert.title in ("NaN gradient", "Inf gradient")) == bad
    (step,) = found_in(notes)
    assert step == bad + 1
    (found,) = [alert for alert in alerts if alert.title == "First bad operation"]
    assert found.step == bad + 1
    assert f"aten.log in blocks.1, test_replay.py:{line_of(log_of_some)}" in found.text


@pytest.mark.parametrize("options", [{"guard": "skip"}, {"on_nonfinite": "trace"}])
def test_what_a_gradient_scaler_leaves_out_is_run_again_once_its_scale_has_collapsed(options):
    model, memory = Fails(), MemorySink()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=8.0)
    watcher = wandb_gradwatch.watch(model, sinks=[memory], sample_every=1, **options)
    for batch in [GOOD, GOOD, *[BAD] * 7]:
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    watcher.remove()
    # The five skipped steps 3 to 7 raise the alert; the next skipped step is run again.
    told = [(alert.title, alert.step) for alert in memory.alerts]
    assert told == [("Loss scale collapse", 7), ("First bad operation", 8)]
    assert f"aten.log in blocks.1, test_replay.py:{line_of(log_of_some)}" in memory.alerts[-1].text


def test_the_reducer_of_distributed_data_parallel_takes_no_notice(single_rank):
    wrap = functools.partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
    batches = [GOOD, BAD, GOOD, GOOD, BAD, GOOD]
    with_replay, _, notes = train(batches, wrap=wrap)
    assert list(found_in(notes)) == [2, 5]
    without, *_ = train(batches, wrap=wrap, guard=SkipGuard(replay=False))
    assert all(torch.equal(a, b) for a, b in zip(with_replay, without, strict=True))


@pytest.fixture
def single_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_step_that_begins_with_nan_is_not_traced():
    _, _, notes = train([GOOD, BAD, BAD, GOOD], guard=None, on_nonfinite="trace")
    assert found_in(notes) == {}


def test_on_nonfinite_takes_one_word():
    with pytest.raises(ValueError, match=r"on_nonfinite='tell' must be \"trace\" or None"):
        wandb_gradwatch.watch(Fails(), sinks=[MemorySink()], on_nonfinite="tell")


def test_of_models_that_call_each_other_each_is_run_again_with_its_own_gradients():
    inner, outer, memory = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), MemorySink()
    nn.init.constant_(inner.weight, 1e-10)
    nn.init.constant_(outer.weight, 1.0)
    outer.forward = lambda x: (inner(x) * outer.weight) * 1e20
    watcher = wandb_gradwatch.watch([inner, outer], guard="skip", sinks=[memory], sample_every=1)
    stepper = torch.optim.SGD([inner.weight, outer.weight], lr=0.0)
    for scale in (1.0, 1e20):  # the second gradient of the output is 1e20, and 1e20 * 1e20 overflows in the derivative
        (outer(torch.ones(1, 1)) * scale).sum().backward()
        stepper.step()
        stepper.zero_grad()
    watcher.remove()
    assert "made 1 Inf of 1 (at (0, 0)) in its derivative (aten.mul)" in memory.alerts[-1].text
