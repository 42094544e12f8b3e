"""find_nonfinite() names the first operation that makes NaN or Inf, with its module and line, and changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wandb_gradwatch
from wandb_gradwatch import MemorySink, find_nonfinite, trace_nonfinite
from wandb_gradwatch.metrics import Activations

INF = float("inf")


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0  # bad: custom


def zeros(x):
    return 0 * x


def log_after_a_module_of_no_model(x):
    return nn.Identity()(zeros(x)).log()  # bad


def log_of_zero(x):
    return zeros(x).log()  # bad


def root_of_zero(x):
    return zeros(x).sqrt()  # bad: d sqrt(0) = 1 / (2 sqrt(0))


def zero_by_zero(x):
    return zeros(x) / zeros(x)  # bad


def normalised_zero(x):
    y = zeros(x)
    return y / y.norm()  # bad: 0 / 0


def norm_by_hand(x):
    return zeros(x).square().sum().sqrt() * x  # bad: the derivative of a norm at 0


def overflow(x, dtype=torch.float16):
    return (zeros(x) + 100).to(dtype).exp().float()  # bad: e^100 = 2.7e43, float16 ends at 65504, bfloat16 at 3.4e38


def masked_row(x):
    y = x.masked_fill(torch.ones_like(x, dtype=torch.bool), -INF)
    return y.softmax(-1)  # bad: 0 / 0


def deviation_of_one(x):
    return x - x[:1].std(0)  # bad: divided by 1 - 1


def custom(x):
    return Divides.apply(x)


def in_place(x):
    y = zeros(x)
    y.log_()  # bad
    return y


def masked_away(x):
    y = zeros(x)
    return torch.where(y > 0, y.log(), 0.0)  # bad: its derivative is 0 times 1 / 0


def masked_nan(x):
    y = zeros(x) - 1
    return torch.where(y > 0, y.sqrt(), 0.0)  # bad: sqrt(-1), whose derivative meets the NaN again


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(2, 2), function

    def forward(self, x):
        return self.function(self.linear(x))


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Layer(functional.relu), Layer(function)]), nn.Linear(2, 2)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale


X = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]])


def line_of(function, mark="# bad"):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if mark in line)


CASES = [
    (log_of_zero, "aten.log", "forward"),
    (log_after_a_module_of_no_model, "aten.log", "forward"),
    (root_of_zero, "aten.sqrt", "backward"),
    (zero_by_zero, "aten.div", "forward"),
    (normalised_zero, "aten.div", "forward"),
    (norm_by_hand, "aten.sqrt", "backward"),
    (overflow, "aten.exp", "forward"),
    (functools.partial(overflow, dtype=torch.bfloat16), "aten.exp", "forward"),
    (masked_row, "aten._softmax", "forward"),
    (deviation_of_one, "aten.std", "forward"),
    (in_place, "aten.log_", "forward"),
    (masked_away, "aten.log", "backward"),
    (masked_nan, "aten.sqrt", "forward"),
    (custom, "aten.div", "backward"),
]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(("function", "operation", "direction"), CASES)
def test_operation_module_direction_and_line_are_exact(function, operation, direction):
    finding = find_nonfinite(Model(function), X)
    assert (finding.operation, finding.module, finding.direction) == (operation, "blocks.1", direction)
    assert finding.file == __file__
    source = Divides.backward if function is custom else getattr(function, "func", function)
    assert finding.line == line_of(source)
    assert f"test_nonfinite.py:{finding.line}" in finding.text


def test_the_ranges_of_the_inputs_and_the_way_to_the_loss_are_told():
    # 0 * x is 0 in all six elements, and -0 where x is negative.
    finding = find_nonfinite(Model(log_of_zero), X, lambda output: output.square().mean())
    (read,) = finding.inputs
    assert (read.shape, read.dtype, read.minimum, read.maximum) == ((3, 2), "float32", 0.0, 0.0)
    assert (read.num_zero, read.num_negative, read.num_nonfinite) == (6, 0, 0)
    assert "6 Inf of 6 (at (0, 0), (0, 1), (1, 0), ...)" in finding.text
    assert "reached head, the model itself, then the loss" in finding.text
    assert str(finding) == finding.text


def spoilt(model, name, value):
    with torch.no_grad():
        dict([*model.named_parameters(), *model.named_buffers()])[name].view(-1)[0] = value
    return model


@pytest.mark.parametrize(
    ("model", "inputs", "operation", "module", "named"),
    [
        (
            spoilt(Model(functional.relu), "blocks.1.linear.weight", INF),
            X,
            "parameter",
            "blocks.1.linear",
            "1 Inf of 4",
        ),
        (spoilt(nn.BatchNorm1d(2), "running_mean", float("nan")), X, "buffer", "", "buffer running_mean holds 1 NaN"),
        (Model(functional.relu), X / torch.tensor([[1.0, 0.0]]), "input", "", "3 Inf of 6"),
    ],
)
def test_what_is_bad_to_begin_with_is_named(model, inputs, operation, module, named):
    finding = find_nonfinite(model, inputs)
    assert (finding.operation, finding.module) == (operation, module)
    assert named in finding.text


def test_a_bad_target_is_found_in_the_loss_outside_of_the_model():
    target = torch.full_like(X, INF)
    finding = find_nonfinite(Model(functional.relu), X, lambda output: functional.mse_loss(output, target))
    assert (finding.operation, finding.module, finding.direction) == ("aten.mse_loss", None, "forward")
    assert finding.inputs[1].num_nonfinite == 6


def causal(x):
    scores = (x @ x.T).masked_fill(torch.ones(3, 3).triu(1).bool(), -INF)
    return scores.softmax(-1) @ x


def added_mask(x):
    mask = torch.full((3, 3), -INF).triu(1)
    return (x @ x.T + mask).softmax(-1) @ x


def pooled(x):
    return functional.max_pool1d(x, 2, padding=1)


def unused_log(x):
    return torch.where(x > INF, (0 * x).detach().log(), x)


def test_what_holds_nothing_finite_has_no_range():
    finding = find_nonfinite(Model(masked_row), X)
    shape = "x".join(map(str, X.shape))
    assert f"It read {shape} of float32, {X.numel()} not finite." in finding.text


@pytest.mark.parametrize("function", [functional.relu, causal, added_mask, pooled, unused_log])
def test_intended_infinities_are_no_finding(function):
    assert find_nonfinite(Model(function), X) is None


OUTSIDE, INFINITE = torch.tensor([0.0, -INF]), torch.tensor([0.0, INF])  # made before anything is traced


@pytest.mark.parametrize("loss", [lambda y: y.masked_fill(OUTSIDE < 0, -INF) + 1, lambda y: y + OUTSIDE])
def test_intended_infinities_that_reach_the_loss_are_no_finding(loss):
    assert find_nonfinite(nn.Linear(2, 2), X, loss) is None


def test_an_infinity_from_outside_is_no_mask():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)  # Inf - Inf makes a NaN
    with torch.no_grad(), trace_nonfinite(model) as trace:
        model(INFINITE.masked_fill(INFINITE == 0, -INF))
    assert trace.finding.operation == "aten.masked_fill"


@pytest.mark.parametrize(
    ("loss", "operation", "num_inputs"),
    [
        (lambda y: torch.log(0 * y.detach(), out=torch.empty_like(y)), "aten.log", 2),
        (lambda y: torch.empty_like(y, dtype=torch.half).copy_(1e30 * (1 + y.square())), "aten.copy_", 1),
    ],
)
def test_what_is_overwritten_before_it_is_read_is_no_cause(loss, operation, num_inputs):
    torch.use_deterministic_algorithms(True)  # fills memory that is not initialised with NaN
    try:
        finding = find_nonfinite(nn.Linear(2, 2), X, loss)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (finding.operation, len(finding.inputs)) == (operation, num_inputs)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class TakesBatch(Model):
    def forward(self, batch):
        return {"logits": (super().forward(batch.x),)}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Model(log_of_zero), (X, 2.0)),
        (Model(log_of_zero), {"x": X, "scale": 2.0}),
        (TakesBatch(log_of_zero), Batch(X)),
        (torch.compile(Model(log_of_zero), backend="aot_eager"), X),
        (nn.DataParallel(Model(log_of_zero)), X),
        (Model(lambda x: checkpoint(log_of_zero, x, use_reentrant=False)), X),
        (Model(lambda x: checkpoint(log_of_zero, x, use_reentrant=True)), X),
    ],
    ids=["tuple", "dict", "dataclass", "compiled", "wrapped", "checkpoint", "re-entrant checkpoint"],
)
def test_inputs_and_wrappers_of_all_kinds(model, inputs):
    finding = find_nonfinite(model, inputs)
    assert (finding.operation, finding.module, finding.line) == ("aten.log", "blocks.1", line_of(log_of_zero))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_derivative_inside_of_a_checkpoint_is_found(reentrant):
    model = Model(lambda x: checkpoint(root_of_zero, x, use_reentrant=reentrant))
    finding = find_nonfinite(model, X)
    assert (finding.operation, finding.direction, finding.line) == ("aten.sqrt", "backward", line_of(root_of_zero))


def test_operations_near_the_end_of_a_half_precision_format_are_listed():
    def near(x):
        y = (0 * x + 20000).half()  # 65504 / 4 = 16376 is exceeded
        return (y * 4 + y / 2).float()  # 80000 is not representable, and 10000 is not near

    finding = find_nonfinite(Model(near), X)
    assert finding.operation == "aten.mul"
    assert "Within a factor of 4 of the largest number of their format: aten._to_copy in blocks.1" in finding.text
    assert "aten.div" not in finding.text


class Noisy(Model):
    """Everything that a forward can change: batch norm's buffers, random numbers; and a mode that is not the usual."""

    def __init__(self, function):
        super().__init__(function)
        self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.head.eval()

    def forward(self, x):
        return super().forward(self.dropout(self.norm(x)))


@pytest.mark.parametrize("function", [functional.relu, root_of_zero])
def test_nothing_is_changed(function):
    model = Noisy(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    functional.relu(model(X)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = copy.deepcopy([model.state_dict(), gradients, torch.get_rng_state(), len(calls)])
    modes = [module.training for module in model.modules()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        find_nonfinite(model, X)
    after = [model.state_dict(), [p.grad for p in model.parameters()], torch.get_rng_state(), len(calls)]
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), after[0].values(), strict=True))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before[1], after[1], strict=True))
    assert torch.equal(before[2], after[2])
    assert before[3] == after[3]
    assert [module.training for module in model.modules()] == modes
    assert not nn.modules.module._global_forward_pre_hooks
    optimizer.zero_grad()
    functional.relu(model(X)).sum().backward()  # the hooks are back
    assert len(calls) == 2 * before[3]


def test_a_watcher_takes_no_notice():
    model, memory = Model(functional.relu), MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wandb_gradwatch.watch(model, sinks=[memory], metrics=[Activations()], sample_every=1) as watcher:
        for scale in (1.0, 1e6):
            optimizer.zero_grad()
            model(X).sum().backward()
            find_nonfinite(model, scale * X)
            optimizer.step()
        snapshot = watcher.flush()
    assert snapshot.steps.tolist() == [1, 2]
    assert snapshot.num_nan.sum() == 0
    # The input's largest element is 3: had the search been seen, outputs of the order of 1e6 would be here.
    assert max(values.max() for name, values in snapshot.metrics.items() if name.endswith("/max")) < 1e3


def test_the_users_own_step_can_be_traced(caplog):
    model = Model(root_of_zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace_nonfinite(model) as trace:
        model(X).sum().backward()
        optimizer.step()
    assert (trace.finding.operation, trace.finding.line) == ("aten.sqrt", line_of(root_of_zero))
    assert "aten.sqrt in blocks.1" in caplog.text
    with trace_nonfinite(Model(functional.relu)) as trace:
        assert trace.finding is None
    assert trace.finding is None


@pytest.mark.parametrize(
    ("kind", "operation"), [("foreach", "aten._foreach_addcdiv"), ("fused", "aten._fused_adam"), (None, "aten.addcdiv")]
)
def test_a_nan_that_the_optimizer_makes_is_found(kind, operation):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0, **({kind: True} if kind else {}))
    with trace_nonfinite(model) as trace:
        (0 * model(X)).sum().backward()
        optimizer.step()  # 0 / (sqrt(0) + 0)
    assert trace.finding.operation.startswith(operation)
    assert trace.finding.module is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_nonfinite(len, X), r"find_nonfinite\(model\) needs a torch.nn.Module"),
        (lambda: find_nonfinite(nn.Linear(2, 2), X, lambda output: 1.0), "must return a tensor, but returned float"),
        (lambda: trace_nonfinite(None).__enter__(), r"trace_nonfinite\(model\) needs a torch.nn.Module"),
    ],
)
def test_wrong_arguments_say_what_is_needed(call, message):
    with pytest.raises(TypeError, match=message):
        call()
