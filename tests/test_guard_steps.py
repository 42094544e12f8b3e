"""The guard covers every step, also between samples, whatever the optimizer."""

from __future__ import annotations

import contextlib
import copy
import io
import math

import pytest
import torch
from gradients import Chosen, of, step, watch
from test_guard import OPTIMIZERS, batches, clean_state, guarded_state
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wandb_gradwatch import SkipGuard
from wandb_gradwatch.sinks._history_row import HistoryRow

FUSED = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, fused=True),
}


class HostReads(TorchDispatchMode):
    """Count operations that make the host wait for a device: reading a tensor's value, or a copy to the CPU."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.reads = []
        for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name, original):
        def method(tensor, *args):
            self.reads.append(name)
            return original(tensor, *args)

        return method

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal):
            self.reads.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def host_reads(monkeypatch):
    return HostReads(monkeypatch)


def small_training(make, guard, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    watcher, sink = watch(model, guard=guard, **{"log_every": 100, **options})

    def one_step(batch):
        optimizer.zero_grad()
        (model(batch) + batch.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()

    return watcher, sink, one_step


def reads_of(host_reads, make, guard, *, sample_every=1):
    """Return the host's reads in 40 steps that follow five warm-up steps."""
    # Compile before the first step: until then torch and numpy measure, and read sums that are on the host anyway.
    pytest.importorskip("numba")
    watcher, _, one_step = small_training(make, guard, sample_every=sample_every, backend="compiled")
    with contextlib.ExitStack() as stack:
        for number, batch in batches({25}):
            if number == 5:
                stack.enter_context(host_reads)
                host_reads.reads.clear()
            if number == 45:
                break
            one_step(batch)
    reads = list(host_reads.reads)
    watcher.remove()
    return reads


@pytest.mark.parametrize("sample_every", [1, 10])
@pytest.mark.parametrize("make", [OPTIMIZERS["sgd momentum"], FUSED["adamw"]], ids=["sgd", "fused"])
def test_a_guard_costs_one_read_a_step(host_reads, make, sample_every):
    # Without replay, because a replay reads values on the host.
    assert reads_of(host_reads, make, SkipGuard(replay=False), sample_every=sample_every) == ["tolist"] * 40


KINDS = OPTIMIZERS | {f"fused {name}": make for name, make in FUSED.items()}
# Every optimizer in a plain loop; the other loops with three, two of which skip steps with a loss scaler themselves.
TRAININGS = [(name, {}) for name in KINDS]
TRAININGS += [
    (name, loop)
    for loop in ({"accumulate": 4}, {"closure": True}, {"scaled": True})
    for name in ("adam", "fused adamw", "fused sgd momentum")
]


@pytest.mark.parametrize("options", [{}, {"sample_every": 10}], ids=["sampled", "between two samples"])
@pytest.mark.parametrize(("kind", "loop"), TRAININGS, ids=str)
def test_poison_leaves_no_trace(kind, loop, options):
    make = KINDS[kind]
    torch.testing.assert_close(guarded_state(make, **loop, **options), clean_state(make, **loop), rtol=0, atol=0)


def state_of(model, optimizer):
    return (
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        copy.deepcopy(optimizer.state_dict()),
    )


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_first_step_that_is_withheld_creates_no_state(make):
    model = Chosen(a=2)
    optimizer = make(model.parameters())
    watcher, _ = watch(model, guard="skip")
    before = state_of(model, optimizer)
    step(model, optimizer, a=[math.nan, 1])
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)
    watcher.remove()


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_that_are_not_watched_are_withheld_with_the_others(watched, fused):
    model, optimizer, _ = watched(dict(a=1, b=1), fused=fused, include="a", guard="skip")
    step(model, optimizer, a=[math.nan], b=[1])
    assert (model.a.item(), model.b.item()) == (1, 1)
    step(model, optimizer, a=[1], b=[1])
    assert (model.a.item(), model.b.item()) == (0, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_master_weights_are_withheld_too(fused):
    """The optimizer holds master copies, which have their own gradients."""
    model = Chosen(a=1, dtype=torch.bfloat16)
    master = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([master], lr=1.0, fused=fused)
    watcher, _ = watch(model, optimizer=optimizer, guard="skip")
    for gradient in (1, math.nan, 1):
        model.zero_grad()
        model.loss(a=[gradient]).backward()
        master.grad = model.a.grad.float()
        optimizer.step()
    watcher.remove()
    assert master.item() == -1  # 1 - 1 - 1


@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False), (False, True)])
def test_optimizers_of_one_backward_are_withheld_together(fused):
    """Only the first optimizer's gradients are bad: both updates are skipped, and counted as one step."""
    model = Chosen(a=1, b=1)
    optimizers = [
        torch.optim.SGD([parameter], lr=1.0, fused=is_fused)
        for parameter, is_fused in zip((model.a, model.b), fused, strict=True)
    ]
    guard = SkipGuard()
    watcher, sink = watch(model, guard=guard)
    for gradient in (1, math.nan, 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.loss(a=[gradient], b=[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
    watcher.remove()
    assert (model.a.item(), model.b.item()) == (-1, -1)  # 1 - 1 - 1, twice
    assert sink.merged().metrics["gradwatch/num_guarded_steps"].tolist() == [0, 1, 0]
    assert guard.num_skipped == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("guards", [("skip", "skip"), ("skip", None), (None, "skip")], ids=str)
def test_a_guard_of_one_of_two_watchers_hides_no_gradient_from_the_other_and_skips_one_step(guards, fused):
    """The gradients of both models, which one optimizer updates, are NaN in the second of four steps."""
    models = Chosen(a=1), Chosen(a=1)
    optimizer = torch.optim.SGD([model.a for model in models], lr=1.0, fused=fused)
    watched = [watch(model, guard=guard, rules=None) for model, guard in zip(models, guards, strict=True)]
    for gradient in (1, math.nan, 1, 1):
        optimizer.zero_grad()
        (models[0].loss(a=[gradient]) + models[1].loss(a=[gradient])).backward()
        optimizer.step()
    assert [model.a.item() for model in models] == [-2, -2]  # 1 - 1 - 1 - 1
    assert not hasattr(optimizer, "found_inf")
    for watcher, sink in watched:
        watcher.remove()
        assert [(alert.title, alert.step) for alert in sink.alerts] == [("NaN gradient", 2)]
        assert sink.merged().num_nan[:, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("fused", [False, True])
def test_after_the_step_everything_is_where_it_was(watched, fused):
    model, optimizer, _ = watched(dict(a=1), fused=fused, guard="skip")
    step(model, optimizer, a=[math.nan])
    assert model.a.grad.isnan()
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raises_leaves_nothing_behind(watched, fused):
    model, optimizer, _ = watched(dict(a=1), fused=fused, guard="skip")
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, optimizer, a=[math.nan])
    hook.remove()
    step(model, optimizer, a=[1])
    assert model.a.item() == 0  # 1 - 1: with a found_inf left behind it would be 1, with the old gradient NaN
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_keeps_what_it_has_found(fused):
    """Gradients overflow in step 2: the scaler halves its scale and skips the step, which the guard does not count."""
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    guard = SkipGuard()
    watcher, sink = watch(model, guard=guard)
    for gradient in (1, math.inf, 1):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=[gradient])).backward()
        scaler.step(optimizer)
        scaler.update()
    watcher.remove()
    assert model.a.item() == -1  # 1 - 1 - 1
    assert scaler.get_scale() == 4
    assert sink.merged().skipped.tolist() == [False, True, False]
    assert (guard.num_skipped, guard.num_in_a_row) == (0, 0)


def test_withheld_steps_between_two_samples_are_counted_in_the_next(watched):
    model, optimizer, sink = watched(dict(a=1), guard="skip", sample_every=5, log_every=10)
    for number in range(1, 21):
        step(model, optimizer, a=[math.nan if number in (3, 4, 12) else 1])
    assert [int(s) for s in sink.merged().steps] == [5, 10, 15, 20]
    assert sink.merged().metrics["gradwatch/num_guarded_steps"].tolist() == [2, 0, 1, 0]
    rows = [HistoryRow.of(snapshot).scalars()["gradwatch/num_guarded_steps"] for snapshot in sink.snapshots]
    assert rows == [2, 1]
    assert of(sink.merged(), "a", "grad_norm").tolist() == [1, 1, 1, 1]


def test_a_function_is_asked_at_every_step(watched):
    asked = []
    model, optimizer, _ = watched(
        dict(a=1), guard=lambda s: asked.append((int(s.steps[-1]), s.param_norm[-1, 0])), sample_every=3
    )
    for _ in range(4):
        step(model, optimizer, a=[-1])
    assert asked == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_function_that_raises_reaches_the_training_loop():
    """A guard that silently stopped working would be worse than no guard."""
    model = Chosen(a=1)
    watcher, _ = watch(model, guard=lambda snapshot: snapshot.no_such_thing)
    with pytest.raises(AttributeError, match="no_such_thing"):
        step(model, torch.optim.SGD(model.parameters(), lr=1.0), a=[1])
    watcher.remove()


def test_inside_the_backward_only_what_is_not_finite_is_withheld():
    """Each parameter has its own step, so a layer's norm is not compared with those of other layers."""
    model = Chosen(a=1, b=1)
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step() or setattr(p, "grad", None))
    watcher, _ = watch(model, guard="skip")
    for number in range(10):
        model.loss(a=[math.nan if number == 8 else 1], b=[1e6]).backward()
    watcher.remove()
    assert model.a.item() == 1 - 9


@pytest.mark.parametrize("fused", [False, True])
def test_a_guard_goes_on_where_it_stopped(fused):
    def training():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        guard = SkipGuard()
        return model, optimizer, guard, watch(model, guard=guard)[0]

    def train(model, optimizer, numbers):
        for number, batch in batches({33, 35, 50}):
            if number in numbers:
                optimizer.zero_grad()
                (model(batch) - 1).square().mean().backward()
                optimizer.step()

    model, optimizer, whole_guard, watcher = training()
    train(model, optimizer, range(60))
    watcher.remove()
    first, first_optimizer, _, watcher = training()
    train(first, first_optimizer, range(36))
    state = io.BytesIO()
    torch.save([first.state_dict(), first_optimizer.state_dict(), watcher.state_dict()], state)
    watcher.remove()
    resumed, resumed_optimizer, guard, watcher = training()
    loaded = torch.load(io.BytesIO(state.getvalue()), weights_only=True)
    for what, kept in zip((resumed, resumed_optimizer, watcher), loaded, strict=True):
        what.load_state_dict(kept)
    train(resumed, resumed_optimizer, range(36, 60))
    watcher.remove()
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert guard.num_skipped == whole_guard.num_skipped == 3
    assert guard.state_dict() == whole_guard.state_dict()


def test_an_overflow_that_only_the_loss_scaler_sees_is_skipped_all_the_same():
    """The overflow is in an unwatched parameter: the guard finds nothing, and must not reset the scaler's found_inf."""
    model = Chosen(a=1, b=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watcher, _ = watch(model, include="a", guard="skip")
    for gradient in (1, math.inf, 1):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=[1], b=[gradient])).backward()
        scaler.step(optimizer)
        scaler.update()
    watcher.remove()
    assert (model.a.item(), model.b.item()) == (-1, -1)  # 1 - 1 - 1
    assert scaler.get_scale() == 4


def test_a_guarded_step_between_two_samples_leaves_nothing_in_the_next(watched):
    model, optimizer, sink = watched(dict(a=1, b=1), lr=0.0, guard="skip", sample_every=2)
    step(model, optimizer, a=[1], b=[1])
    step(model, optimizer, a=[1])
    assert of(sink.merged(), "a", "grad_norm").tolist() == [1]
    assert math.isnan(of(sink.merged(), "b", "grad_norm")[0])
