"""Clipping, and what must not be taken for clipping: a change of unit, rounding noise, a replaced gradient."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gradients import Chosen, of, samples, watch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_before
from windows import row, window

import wandb_gradwatch
from wandb_gradwatch._measure.change import change_between, is_limit
from wandb_gradwatch.sinks._history_row import HistoryRow
from wandb_gradwatch.snapshot import Snapshot

SGD = torch.optim.SGD
GRADIENTS = {"a": [3.0, -4.0, 1.0, 0.5], "b": [12.0, -2.0, 0.0]}
Change = Callable[[Chosen, int], object]


Make = Callable[[Chosen, Callable[[], None]], torch.optim.Optimizer]


def before_the_step(model: Chosen, change: Callable[[], None]) -> torch.optim.Optimizer:
    optimizer = SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: change())
    return optimizer


def changing(base: type[torch.optim.Optimizer], change: Callable[[], None]) -> type[torch.optim.Optimizer]:
    class Changing(base):  # type: ignore[misc, valid-type]
        def step(self, closure: None = None) -> None:
            change()
            super().step(closure)

    return Changing


def inside_it(model: Chosen, change: Callable[[], None]) -> torch.optim.Optimizer:
    if hasattr(SGD.step, "hooked"):  # torch adds the hooks when the first SGD is made
        SGD.step = SGD.step.__wrapped__
    return changing(SGD, change)(model.parameters(), lr=0.0)  # type: ignore[call-arg]


def inside_it_with_hooks(model: Chosen, change: Callable[[], None]) -> torch.optim.Optimizer:
    SGD(model.parameters(), lr=0.0)
    return changing(SGD, change)(model.parameters(), lr=0.0)  # type: ignore[call-arg]


def two_classes_above(model: Chosen, change: Callable[[], None]) -> torch.optim.Optimizer:
    return changing(changing(SGD, change), lambda: None)(model.parameters(), lr=0.0)  # type: ignore[call-arg]


def before_an_inner_optimizer(model: Chosen, change: Callable[[], None]) -> torch.optim.Optimizer:
    class Holds(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.inner = SGD(model.parameters(), lr=0.0)
            super().__init__(model.parameters(), {})

        def step(self, closure: None = None) -> None:
            change()
            self.inner.step()

    return Holds()


INSIDE: list[Make] = [inside_it, inside_it_with_hooks, two_classes_above, before_an_inner_optimizer]
WHERE = pytest.mark.parametrize("make", [before_the_step, *INSIDE], ids=lambda make: make.__name__)


def trained(
    change: Change,
    *,
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
    make: Make = before_the_step,
    **options: object,
) -> Snapshot:
    """Train with `change` between backward and update; in step n the gradients are n times GRADIENTS."""
    model = Chosen(a=4, b=3, dtype=dtype)
    number = 0

    def change_them() -> None:
        change(model, number)

    optimizer = make(model, change_them)
    watcher, sink = watch(model, **options)
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        model.loss(**{name: [number * one for one in values] for name, values in GRADIENTS.items()}).backward()
        optimizer.step()
    return samples(watcher, sink)


def norm(number: int = 1, *names: str) -> float:
    return number * math.sqrt(sum(one**2 for name in names or GRADIENTS for one in GRADIENTS[name]))


def multiply(model: Chosen, factor: float) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def by_hand(model: Chosen, limit: float) -> None:
    total = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    multiply(model, float(limit / total))


def each(model: Chosen, limit: float) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], limit)


def clamp_and_scale(model: Chosen) -> None:
    for parameter in model.parameters():
        parameter.grad.copy_(parameter.grad.clamp(-1.5, 1.5) * 0.25)


CLIPPINGS: dict[str, Change] = {
    "of the model": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "imported before watch()": lambda model, _: imported_before(model.parameters(), 0.123),
    "of each parameter": lambda model, _: each(model, 0.7),
    "of elements": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.75),
    "of elements, by hand": lambda model, _: [p.grad.clamp_(-0.75, 0.75) for p in model.parameters()],
    "of elements, then of the rest": lambda model, _: clamp_and_scale(model),
    "by hand, to a limit": lambda model, _: by_hand(model, 0.25),
    "of one parameter only": lambda model, _: model.b.grad.mul_(0.3),
    "to a limit that moves": lambda model, number: nn.utils.clip_grad_norm_(model.parameters(), 0.4711 * number),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CLIPPINGS)
@WHERE
def test_one_factor_for_each_parameter_or_for_the_model_or_a_limit_of_elements_is_clipping(make, kind, dtype):
    if kind == "by hand, to a limit" and dtype != torch.float32:
        pytest.skip("the norm that is left is no round number in 8 bits: unknown, see below")
    if kind == "imported before watch()" and not hasattr(nn.utils, "clip_grads_with_norm_"):
        pytest.skip("before torch 2.6 a clipping function that was imported by name cannot be seen: unknown, see below")
    snapshot = trained(CLIPPINGS[kind], dtype=dtype, make=make)
    assert snapshot.clipped.tolist() == [1] * 4
    assert not snapshot.changed.any()
    assert snapshot.total_grad_norm == pytest.approx([norm(number) for number in range(1, 5)])
    left = Chosen(a=4, b=3, dtype=dtype)  # what the same clipping leaves where nothing is watched
    for index, number in enumerate(range(1, 5)):
        for name, values in GRADIENTS.items():
            getattr(left, name).grad = torch.tensor([number * one for one in values], dtype=dtype)
        CLIPPINGS[kind](left, number)
        received = torch.cat([p.grad.double() for p in left.parameters()]).norm().item()
        assert snapshot.total_grad_norm_clipped[index] == pytest.approx(received, rel=1e-5)


def add_noise(model: Chosen, _: int) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter), alpha=0.5)


def overwrite(model: Chosen, number: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.linspace(-1, 0.5, parameter.numel()) / (number + index)


def project(model: Chosen, _: int) -> None:
    """Like PCGrad: remove the component along another gradient, which shortens the gradient."""
    other = torch.tensor([1.0, -1.0, 2.0, 0.0])
    model.a.grad = model.a.grad - (model.a.grad @ other) / (other @ other) * other


def reuse(model: Chosen, _: int) -> None:
    """Like LookSAM: add a part of an earlier gradient."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5).add_(torch.arange(parameter.numel()) * 0.1)


CHANGES: dict[str, Change] = {
    "noise": add_noise,
    "overwritten": overwrite,
    "projected": project,
    "reused": reuse,
    "longer": lambda model, _: multiply(model, 2.0),
    "turned round": lambda model, _: multiply(model, -0.5),
}


@pytest.mark.parametrize("kind", CHANGES)
@WHERE
def test_what_no_clipping_does_is_a_change_after_the_backward_and_has_a_number_of_its_own(make, kind):
    snapshot = trained(CHANGES[kind], make=make)
    assert snapshot.clip_ratio == 0
    assert snapshot.changed.all()
    row_of = HistoryRow.of(snapshot).scalars()
    assert (row_of["gradwatch/clip_ratio"], row_of["gradwatch/changed_ratio"]) == (0, 1)
    # The norms after the backward, and those that the optimizer received.
    assert snapshot.total_grad_norm == pytest.approx([norm(number) for number in range(1, 5)])
    assert not np.any(np.isclose(snapshot.total_grad_norm_clipped, snapshot.total_grad_norm, rtol=1e-4)) or (
        kind == "turned round"
    )


class OwnUpdate(torch.optim.Optimizer):
    """An update of its own, before which the gradients may be changed in place, or replaced."""

    def __init__(self, model: Chosen, change: str) -> None:
        super().__init__(model.parameters(), {})
        self.change = change

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if self.change == "in place":
                parameter.grad.mul_(0.1)
            elif self.change == "replaced":
                parameter.grad = parameter.grad * 0.1
            elif self.change == "clipped":
                nn.utils.clip_grad_norm_([parameter], 0.5)
            parameter.sub_(parameter.grad, alpha=0.0)
            if self.change == "taken away afterwards":
                parameter.grad = None


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_what_a_step_has_used_is_missing_where_it_cannot_be_seen_which_is_said_once(change, said):
    snapshot = trained(lambda *_: None, make=lambda model, _: OwnUpdate(model, change), rules=None)
    assert snapshot.total_grad_norm == pytest.approx([norm(number) for number in range(1, 5)])
    assert np.isnan(snapshot.grad_norm_clipped).all()
    assert np.isnan(snapshot.clip_ratio)
    assert not {"gradwatch/grad_norm_clipped", "gradwatch/clip_ratio"} & HistoryRow.of(snapshot).scalars().keys()
    (text,) = [text for text in said() if "times in all" not in text]
    assert "OwnUpdate.step() changes gradients (a, b)" in text


def test_an_update_that_leaves_its_gradients_or_is_torchs_has_used_what_it_got(said):
    def nesterov(model: Chosen, _: object) -> torch.optim.Optimizer:  # it adds the momentum to the gradients, in place
        return SGD(model.parameters(), lr=0.0, momentum=0.9, nesterov=True, foreach=True)

    makes: list[Make] = [nesterov, *(lambda m, _, how=how: OwnUpdate(m, how) for how in ("", "taken away afterwards"))]
    for make in makes:
        snapshot = trained(lambda *_: None, make=make)
        assert snapshot.total_grad_norm_clipped == pytest.approx([norm(number) for number in range(1, 5)])
    assert not said()


def test_what_torch_clips_inside_a_step_is_seen_whatever_the_update_is(said):
    snapshot = trained(lambda *_: None, make=lambda model, _: OwnUpdate(model, "clipped"))
    assert snapshot.total_grad_norm == pytest.approx([norm(number) for number in range(1, 5)])
    assert snapshot.grad_norm_clipped == pytest.approx(np.full((4, 2), 0.5), rel=1e-5)
    assert snapshot.clip_ratio == 1
    assert not said()


def test_steps_that_are_looked_into_run_as_often_as_unwatched_and_are_left_as_they_were():
    """The user's own hooks on the optimizer run once per step, and no class keeps a wrapper."""
    model, calls = Chosen(a=1), []
    optimizer = inside_it(model, lambda: calls.append("change"))
    before = SGD.step
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    watcher, _ = watch(model)
    for _ in range(3):
        model.loss(a=[1]).backward()
        optimizer.step()
    assert SGD.step is not before
    watcher.remove()
    assert SGD.step is before
    assert calls == ["before", "change", "after"] * 3


def test_noise_before_clipping_is_both_and_noise_after_it_leaves_the_ratio_unknown():
    def noise_then_clip(model: Chosen, number: int) -> None:
        add_noise(model, number)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def clip_then_noise(model: Chosen, number: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        add_noise(model, number)

    before, after = trained(noise_then_clip), trained(clip_then_noise)
    assert before.changed.all()
    assert before.clip_ratio == 1
    assert after.changed.all()
    assert np.isnan(after.clip_ratio)


def test_rows_without_such_steps_have_no_changed_ratio():
    assert "gradwatch/changed_ratio" not in HistoryRow.of(trained(CLIPPINGS["of the model"])).scalars()


TOKENS = [3, 17, 8, 30]


def multiply_through_data(model: Chosen, factor: float) -> None:
    for parameter in model.parameters():
        parameter.grad.data.mul_(factor)  # like fairseq: the version counter does not change


@pytest.mark.parametrize("limit", [1.0, 1e9])
@pytest.mark.parametrize(("said", "by"), [(False, multiply), (True, multiply), (False, multiply_through_data)])
def test_averages_over_tokens_are_before_clipping_what_clip_grad_norm_returns(said, by, limit):
    returned = []

    def average_then_clip(model: Chosen, number: int) -> None:
        by(model, 1 / TOKENS[number - 1])
        returned.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))

    options = {"loss_scale": lambda step: TOKENS[step - 1]} if said else {}
    snapshot = trained(average_then_clip, histogram_every=1, **options)
    # Steps 1 to 4: 13.24 times 1/3, 2/17, 3/8, 4/30 is 4.4, 1.6, 5.0, 1.8, all above 1.
    assert snapshot.total_grad_norm == pytest.approx(returned, rel=1e-6)
    assert snapshot.clip_ratio == float(limit == 1.0)
    assert not snapshot.changed.any()
    assert snapshot.total_grad_norm_clipped == pytest.approx([min(one, limit) for one in returned], rel=1e-5)
    low, high = snapshot.quantile(0.0), snapshot.quantile(1.0)
    assert (low >= snapshot.grad_min.min(axis=0) - 1e-6).all()
    assert (high <= snapshot.grad_max.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize("kind", ["number", "tensor", "function of a number", "function of a tensor"])
def test_a_loss_scale_is_a_number_a_tensor_or_a_function_of_the_step(kind):
    tensor = torch.tensor(0.0)
    asked = []
    given: object = {
        "number": 7.0,
        "tensor": tensor,
        "function of a number": lambda step: asked.append(step) or TOKENS[step - 1],
        "function of a tensor": lambda step: torch.tensor([TOKENS[step - 1]]),
    }[kind]
    scale_of = (lambda number: 7) if kind == "number" else (lambda number: TOKENS[number - 1])
    model = Chosen(a=2)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, loss_scale=given)
    for number in range(1, 5):
        optimizer.zero_grad()
        tensor.fill_(scale_of(number))
        (model.loss(a=[3, 4]) * scale_of(number)).backward()
        multiply(model, 1 / scale_of(number))
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm == pytest.approx([5] * 4, rel=1e-6)
    assert snapshot.total_grad_norm_clipped == pytest.approx([5] * 4, rel=1e-6)
    assert snapshot.clip_ratio == 0
    assert snapshot.loss_scale.tolist() == [scale_of(number) for number in range(1, 5)]
    assert asked in ([], [1, 2, 3, 4])


def test_one_factor_for_everything_that_leaves_no_round_norm_is_no_known_clipping_and_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        snapshot = trained(lambda model, number: multiply(model, 1 / TOKENS[number - 1]))
    assert np.isnan(snapshot.clip_ratio)
    assert "gradwatch/clip_ratio" not in HistoryRow.of(snapshot).scalars()
    told = [text for text in caplog.messages if "every gradient was multiplied by 0.333" in text]
    assert len([text for text in told if "times in all" not in text]) == 1  # and once more at the end, with the count
    assert "loss_scale=" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (0, ValueError, "loss_scale=0 must be above 0"),
        (math.inf, ValueError, "loss_scale=inf must be above 0, and finite"),
        (True, TypeError, "loss_scale=True must be a number, a tensor with one element, or a function of the step"),
        (torch.ones(2), TypeError, "must be a number, a tensor with one element, or a function of the step"),
        ("1024", TypeError, "loss_scale='1024' must be a number"),
    ],
)
def test_a_loss_scale_that_is_none_is_refused(wrong, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(")):
        watch(Chosen(a=1), loss_scale=wrong)


def test_what_a_loss_scale_function_raises_reaches_the_training_loop():
    model = Chosen(a=1)
    watch(model, loss_scale=lambda step: TOKENS[step + 100])
    with pytest.raises(IndexError, match="out of range"):
        model.loss(a=[1.0]).backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_scale": lambda step: 1.0 if step < 3 else 0}, "loss_scale(3) = 0 must be a number above 0, and finite"),
        ({"loss_scale": lambda step: 1.0 if step < 3 else None}, "loss_scale(3) = None must be a number above 0"),
        ({"loss_scale": lambda step: 1.0 if step < 3 else "2"}, "loss_scale(3) = '2' must be a number above 0"),
        (
            {"sample_every": lambda step: 1 if step < 3 else None},
            "sample_every(3) = None must be a whole number, at least",
        ),
        (
            {"sample_every": lambda step: [1, 1, 1][step]},
            "sample_every(3) raised IndexError('list index out of range')",
        ),
    ],
)
def test_a_function_that_no_longer_answers_ends_the_watching_in_words(options, words, caplog):
    model = Chosen(a=1)
    watcher, sink = watch(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        model.loss(a=[1.0]).backward()
        optimizer.step()
    assert model.a.item() == -1
    assert repr(watcher).endswith("removed)")
    assert sink.merged().steps.tolist() == [1, 2]
    assert f"has stopped watching; training goes on: {words}" in caplog.text
    assert "Traceback" not in caplog.text


def master_step(model: Chosen, masters: list[Tensor], optimizer: torch.optim.Optimizer, **how: float | None) -> None:
    """Train one step of a half-precision model with float32 master weights; `how`: the loss scale and the limit."""
    scale, limit = how.get("scale") or 1.0, how.get("limit")
    model.zero_grad()
    (model.loss(a=[3.0, 4.0], b=[12.0]) * scale).backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad = parameter.grad.float() / (1.0 if how.get("inside") else scale)
    if limit is not None:
        nn.utils.clip_grad_norm_(masters, limit)
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("limit", [None, 0.5, 0.4711])
@pytest.mark.parametrize("reordered", [False, True])
def test_what_master_weights_receive_is_seen(scale, limit, reordered):
    model = Chosen(a=2, b=1, dtype=torch.float16)
    masters = [parameter.detach().clone().float().requires_grad_() for parameter in model.parameters()]
    optimizer = SGD(masters[::-1] if reordered else masters, lr=0.01)
    watcher, sink = watch(model, optimizer=optimizer, loss_scale=scale)
    for _ in range(3):
        master_step(model, masters, optimizer, scale=scale, limit=limit)
    snapshot = samples(watcher, sink)
    received = 13 if limit is None else limit  # 13 is the norm of 3, 4 and 12
    assert snapshot.total_grad_norm == pytest.approx([13] * 3)
    assert snapshot.total_grad_norm_clipped == pytest.approx([received] * 3, rel=1e-5)
    assert snapshot.clip_ratio == (limit is not None)
    assert of(snapshot, "b", "grad_norm_clipped") == pytest.approx([12 * received / 13] * 3, rel=1e-5)


def test_a_loss_scale_that_the_optimizer_divides_out_in_its_step_is_no_change():
    model = Chosen(a=2, b=1, dtype=torch.float16)
    masters = [parameter.detach().clone().float().requires_grad_() for parameter in model.parameters()]
    optimizer = SGD(masters, lr=0.0)
    watcher, sink = watch(model, optimizer=optimizer, loss_scale=256.0)
    for _ in range(3):
        master_step(model, masters, optimizer, scale=256.0, inside=1.0)
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm_clipped == pytest.approx([13] * 3)
    assert snapshot.clip_ratio == 0
    assert not snapshot.changed.any()


def test_masters_that_match_nothing_leave_what_was_received_missing():
    model = Chosen(a=2, b=1)
    flat = torch.ones(3, requires_grad=True)
    optimizer = SGD([flat], lr=0.0)
    watcher, sink = watch(model, optimizer=optimizer)
    model.loss(a=[3.0, 4.0], b=[12.0]).backward()
    flat.grad = torch.cat([parameter.grad for parameter in model.parameters()]) / 26
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [13]
    assert np.isnan(snapshot.total_grad_norm_clipped).all()
    assert np.isnan(snapshot.clip_ratio)


def test_gradients_that_are_none_once_the_masters_have_them_are_there():
    model = Chosen(a=2)
    master = model.a.detach().clone().requires_grad_()
    optimizer = SGD([master], lr=0.0)
    watcher, sink = watch(model, optimizer=optimizer)
    model.loss(a=[3.0, 4.0]).backward()
    master.grad, model.a.grad = model.a.grad, None
    optimizer.step()
    assert samples(watcher, sink).total_grad_norm.tolist() == [5]
    assert not sink.alerts


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("limit", [None, 0.4711])
def test_clipping_is_seen_in_a_loop_without_an_optimizer(limit, set_to_none):
    model = Chosen(a=2)
    watcher, sink = watch(model)
    for _ in range(6):
        model.zero_grad(set_to_none=set_to_none)
        model.loss(a=[3.0, 4.0]).backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.01)
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [5] * 6
    if limit is not None:
        assert snapshot.clip_ratio == 1
        assert snapshot.total_grad_norm_clipped == pytest.approx([limit] * 6, rel=1e-5)
    else:  # only the received gradients of the last update are known, because they still exist
        assert not np.any(snapshot.clipped[:-1] == 1)
        assert np.isnan(snapshot.total_grad_norm_clipped[:-1]).all()


@pytest.mark.parametrize("limit", [None, 0.5])
def test_an_update_with_copies_of_the_gradients_leaves_what_it_received_unknown_in_every_sample(limit):
    """Keras' optimizers clip copies; after the last update the gradients are still there, and tell nothing of it."""
    model = Chosen(a=4, b=3)
    watcher, sink = watch(model)
    for _ in range(20):
        model.zero_grad()
        model.loss(**GRADIENTS).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                used = parameter.grad if limit is None else parameter.grad.clamp(-limit, limit)
                parameter -= 0.0 * used
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm == pytest.approx([norm()] * 20)
    assert np.isnan(snapshot.total_grad_norm_clipped).all()
    assert np.isnan(snapshot.clip_ratio)


def test_clipping_by_hand_is_seen_where_the_user_says_when_a_step_is_made():
    model = Chosen(a=2)
    watcher, sink = watch(model)
    for _ in range(3):
        model.zero_grad()
        model.loss(a=[3.0, 4.0]).backward()
        model.a.grad.mul_(0.1)  # to 0.5
        watcher.mark_step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm_clipped == pytest.approx([0.5] * 3)
    assert snapshot.clip_ratio == 1


def test_the_functions_of_torch_are_as_they_were_when_nothing_is_watched():
    modules = (nn.utils, nn.utils.clip_grad)
    names = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_")
    wandb_gradwatch.unwatch()
    before = [getattr(module, name, None) for module in modules for name in names]
    models = [Chosen(a=1), Chosen(a=1)]
    watchers = [watch(model)[0] for model in models]
    assert [getattr(module, name, None) for module in modules for name in names] != before
    for watcher in watchers:
        watcher.remove()
    assert [getattr(module, name, None) for module in modules for name in names] == before


def test_gradients_that_are_clipped_twice_are_measured_before_the_first_time():
    def twice(model: Chosen, _: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 2.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    snapshot = trained(twice)
    assert snapshot.total_grad_norm == pytest.approx([norm(number) for number in range(1, 5)])
    assert snapshot.total_grad_norm_clipped == pytest.approx([1] * 4, rel=1e-5)
    assert snapshot.clip_ratio == 1


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([3.0, -4.0], [3.0, -4.0], (False, False, 1.0)),
        ([3.0, -4.0], [1.5, -2.0], (True, False, 0.5)),
        ([3.0, -4.0, 1.0], [2.0, -2.0, 1.0], (True, False, None)),  # limited to 2
        ([3.0, -4.0, 1.0], [1.0, -1.0, 0.5], (True, False, None)),  # halved, then limited to 1
        ([3.0, -4.0, 1.0], [-1.5, 2.0, -0.5], (False, True, None)),
        ([3.0, -4.0, 1.0], [3.0, -4.0, 0.5], (False, True, None)),
        ([0.0, 0.0], [0.0, 0.0], (False, False, None)),
        ([0.0, 0.0], [0.0, 1.0], (False, True, None)),
        ([math.nan, 1.0], [math.nan, 0.5], (False, False, None)),  # unknown
    ],
)
def test_what_rows_tell_of_a_change(before, after, expected):
    change = change_between(np.array([row(before)]), np.array([row(after)]), eps=1e-7)
    factor = None if math.isnan(change.factor) else pytest.approx(change.factor)
    assert (change.shrunk, change.other, factor) == expected


def test_a_limit_is_a_number_of_two_digits():
    assert all(map(is_limit, (1.0, 0.5, 0.1, 25.0, 1e-3, 0.25 * (1 - 2e-7), 40.0)))
    assert not any(map(is_limit, (0.0, math.inf, math.nan, 0.4711, 1.001, 123.4)))


def test_a_hand_made_snapshot_tells_clipping_by_its_norms():
    assert window({"a": [3, 4]}).clip_ratio == 0


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("lasts", [1, 2])  # a spike that passes, and one that grows on
def test_a_spike_is_a_spike_of_a_training_that_clips_and_its_message_does_not_advise_to_begin_with_it(clips, lasts):
    model = Chosen(a=4, b=3)
    optimizer = SGD(model.parameters(), lr=1e-6)
    watcher, sink = watch(model, rules=None)
    for step in range(1, 60):
        factor = 50.0 * 30.0 ** (step - 40) if 40 <= step < 40 + lasts else 1.0
        optimizer.zero_grad()
        model.loss(**{name: [factor * one for one in values] for name, values in GRADIENTS.items()}).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    watcher.remove()
    kinds = {"gradient_spike", "exploding_gradient"}
    (told,) = [alert.incident for alert in sink.alerts if alert.incident.kind in kinds]
    assert (told.cause, told.level) == ("bad_batch", "INFO" if lasts == 1 else "ERROR")
    assert told.first_step in (40, 41)
    assert "clip" not in told.message
