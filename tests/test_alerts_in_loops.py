"""Alerts of real training loops come when their sample arrives; those about the wiring within a step or two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gradients import Chosen, only, step, watch
from torch import nn
from torch.optim import SGD


def test_a_sample_is_judged_when_it_arrives_and_not_with_the_ones_after_it() -> None:
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, rules=[only("parameters_unchanged")], log_every=1000)
    for _ in range(11):
        step(model, optimizer, a=[1, 1])
    # the tenth sample whose parameters are those of the one before; without a query, wait or flush by the user
    assert [(alert.incident.kind, alert.step) for alert in sink.alerts] == [("parameters_unchanged", 11)]
    watcher.remove()


def net(*, hidden: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return nn.functional.mse_loss(model(x), x[:, :2].sin())


def run(
    model: nn.Module, advance: Callable[[int], object], *, steps: int = 15, **options: object
) -> list[tuple[str, int]]:
    """Return the kinds and steps of a loop's alerts."""
    watcher, sink = watch(model, **({"rules": None} | options))
    for number in range(1, steps + 1):
        advance(number)
    watcher.remove()
    return [(alert.incident.kind, alert.step) for alert in sink.alerts]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def test_a_head_that_was_replaced_after_the_optimizer_was_built_is_told_at_step_2() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    model[2] = nn.Linear(8, 2)
    watcher, sink = watch(model, rules=None)
    for number in range(1, 5):
        train(model, optimizer, number)
    watcher.remove()
    (alert,) = sink.alerts
    assert (alert.incident.kind, alert.step) == ("not_in_optimizer", 2)
    assert "2.weight, 2.bias" in alert.text


def test_a_layer_that_is_replaced_or_unfrozen_later_is_told_too_where_the_optimizer_is_not() -> None:
    for change in ("replaced", "unfrozen", "given to the optimizer too"):
        model = net()
        model[0].requires_grad_(change != "unfrozen")
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)

        def advance(
            number: int, change: str = change, model: nn.Sequential = model, optimizer: SGD = optimizer
        ) -> None:
            if number == 20:
                if change == "unfrozen":
                    model[0].requires_grad_(True)
                else:
                    model[0] = nn.Linear(4, 8)
                if change == "given to the optimizer too":
                    optimizer.add_param_group({"params": list(model[0].parameters())})
            model.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()

        # Observed from the sample of step 21 on, and certain if nothing has changed the parameter two samples later.
        told = [] if "optimizer" in change else [("not_in_optimizer", 23)]
        assert run(model, advance, steps=30) == told, change


def test_parameters_that_a_later_optimizer_updates_are_in_good_hands() -> None:
    model = net()
    first, second = SGD(model[0].parameters(), lr=0.01), SGD(model[2].parameters(), lr=0.01)

    def in_turn(number: int) -> None:
        model.zero_grad()
        loss_of(model, number).backward()
        (second if number % 5 == 0 else first).step()

    assert run(model, in_turn) == []


@pytest.mark.parametrize("without_a_trace", [False, True])
def test_parameters_that_the_user_updates_are_in_good_hands(without_a_trace: bool) -> None:
    """A write through `.data`, as GaLore's, does not change the parameter's version."""
    by_hand = net()
    optimizer = SGD(by_hand[0].parameters(), lr=0.01)

    def partly_by_hand(number: int) -> None:
        by_hand.zero_grad()
        loss_of(by_hand, number).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in by_hand[2].parameters():
                written = parameter.data if without_a_trace else parameter
                written -= 0.01 * parameter.grad

    assert run(by_hand, partly_by_hand) == []


def test_the_optimizer_of_a_model_that_was_rebuilt_is_told_at_step_1() -> None:
    optimizer = SGD(net().parameters(), lr=0.01)
    model = net()
    assert run(model, lambda number: train(model, optimizer, number)) == [("optimizer_without_the_model", 1)]


@pytest.mark.parametrize("is_told", [True, False])
def test_an_optimizer_that_a_checkpoint_leaves_without_the_model_is_told_at_the_next_step(is_told: bool) -> None:
    model = net()
    optimizer = [SGD(model.parameters(), lr=0.01)]

    def resumed(number: int) -> None:
        if number == 8:  # new tensors, which the optimizer does not hold
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            if not is_told:
                optimizer[0] = SGD(model.parameters(), lr=0.01)
        train(model, optimizer[0], number)

    assert run(model, resumed) == ([("optimizer_without_the_model", 9)] if is_told else [])


@pytest.mark.parametrize("make", [SGD, torch.optim.Adam])
def test_a_forgotten_zero_grad_is_told_at_step_2(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=1e-4)

    def advance(number: int) -> None:
        loss_of(model, number).backward()
        optimizer.step()

    assert run(model, advance, steps=5) == [("gradients_not_reset", 2)]


def test_gradients_that_are_no_longer_reset_are_told_within_50_samples() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=1e-4)

    def advance(number: int) -> None:
        if number <= 20:
            optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()

    assert ("gradients_not_reset", 51) in run(model, advance, steps=60)


@pytest.mark.parametrize(("is_assigned", "told"), [(True, []), (False, [("gradients_not_reset", 2)])])
def test_a_gradient_that_is_assigned_after_the_backward_need_not_be_reset(
    is_assigned: bool, told: list[tuple[str, int]]
) -> None:
    """GradNorm assigns the gradient of the losses' weights, which the backward of the network does not reach."""
    model = Chosen(a=8, b=8)
    first, second = SGD([model.a], lr=0.01), SGD([model.b], lr=0.01)

    def advance(number: int) -> None:
        first.zero_grad()
        (model.a.square().sum() + (0.0 if is_assigned else 1.0) * model.b.square().sum()).backward()
        first.step()
        if is_assigned:
            model.b.grad = torch.full((8,), float(number))
        second.step()

    assert [found for found in run(model, advance, steps=6) if found[0] == "gradients_not_reset"] == told


def test_a_forgotten_zero_grad_of_sparse_gradients_is_told_at_step_2() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-4)

    def advance(number: int) -> None:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    assert ("gradients_not_reset", 2) in run(model, advance, steps=5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_before_the_step_are_one_alert_with_the_cause_that_is_certain(set_to_none: bool) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)

    def advance(number: int) -> None:
        loss_of(model, number).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()

    assert run(model, advance) == [("no_gradient", 1)]


def zero_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


@pytest.mark.parametrize(
    "reset",
    [nn.Module.zero_grad, lambda model: model.zero_grad(set_to_none=False), zero_through_data],
    ids=["None", "0", "data"],
)
@pytest.mark.parametrize("backwards", [1, 3])
def test_gradients_that_are_reset_in_any_way_and_accumulated_on_purpose_are_silent(
    reset: Callable[[nn.Module], None], backwards: int
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)

    def advance(number: int) -> None:
        for micro_batch in range(backwards):
            loss_of(model, number + micro_batch).backward()
        optimizer.step()
        reset(model)

    assert run(model, advance) == []


def test_two_networks_that_train_in_turn_and_leave_gradients_with_each_other_are_silent() -> None:
    models = {"g": net(), "d": net()}
    optimizers = {name: SGD(model.parameters(), lr=0.01) for name, model in models.items()}

    def advance(number: int) -> None:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
            (loss_of(models["g"], number) + loss_of(models["d"], number)).backward()  # into both, each time
            optimizer.step()

    assert run(models, advance) == []


def test_a_generator_that_is_reset_in_a_backward_that_no_hook_tells_of_is_silent() -> None:
    """Five steps of the critic per step of the generator, whose gradients stay unchanged during the critic's steps."""
    models = {"critic": net(), "generator": net()}
    optimizers = {name: SGD(model.parameters(), lr=0.01) for name, model in models.items()}

    def advance(number: int) -> None:
        for reached in (*[["critic"]] * 5, ["generator", "critic"]):
            optimizers[reached[0]].zero_grad()
            torch.stack([loss_of(models[name], number) for name in reached]).sum().backward()
            optimizers[reached[0]].step()

    assert run(models, advance, sample_every=5) == []


def test_a_discriminator_that_is_frozen_whenever_its_samples_are_judged_has_had_gradients() -> None:
    models = {"generator": net(), "discriminator": net()}
    optimizers = {name: SGD(model.parameters(), lr=0.01) for name, model in models.items()}

    def advance(number: int) -> None:
        for name, optimizer in optimizers.items():
            models["discriminator"].requires_grad_(name == "discriminator")
            optimizer.zero_grad()
            loss_of(models[name], number).backward()
            optimizer.step()

    assert run(models, advance, steps=120) == []


class Idle(SGD):
    """An optimizer whose steps change nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


# Ten samples without a change are needed after the one that they are compared with, or three where they are far apart:
# 40, 80, 120, 160. Of 1e-12 nothing is left beside 0.1.
@pytest.mark.parametrize(
    ("rate", "steps_idly", "every", "told_at", "cause"),
    [
        (0.0, False, 1, 11, "learning_rate_zero"),
        (0.0, False, 40, 160, "learning_rate_zero"),
        (1e-12, False, 1, 11, "learning_rate_zero"),
        (0.1, True, 1, 11, "updates_undone"),
    ],
)
def test_parameters_that_never_change_are_told_as_soon_as_it_is_certain_and_with_what_was_read(
    rate: float, steps_idly: bool, every: int, told_at: int, cause: str
) -> None:
    model = net()
    optimizer = (Idle if steps_idly else SGD)(model.parameters(), lr=rate)

    def advance(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()

    causes: list[str] = []
    told = run(
        model, advance, steps=170, sample_every=every, on_alert=lambda alert: causes.append(alert.incident.cause)
    )
    assert told == [("parameters_unchanged", told_at)]
    assert causes == [cause]


def test_an_optimizer_that_is_never_stepped_is_told_while_the_training_runs() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, rules=None)
    for number in range(1, 30):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        assert len(sink.alerts) == (number > 20)
    watcher.remove()
    assert [(alert.incident.kind, alert.incident.cause) for alert in sink.alerts] == [("no_gradient", "no_step")]


def test_lora_a_frozen_backbone_a_warm_up_from_0_and_lbfgs_that_has_converged_are_silent() -> None:
    frozen = net()
    frozen[0].requires_grad_(False)
    head = SGD(frozen[2].parameters(), lr=0.01)
    assert run(frozen, lambda number: train(frozen, head, number)) == []
    warm = net()
    optimizer = torch.optim.Adam(warm.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(epoch / 10, 1.0))
    assert run(warm, lambda number: (train(warm, optimizer, number), schedule.step())) == []
    fitted = net()
    lbfgs = torch.optim.LBFGS(fitted.parameters(), line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = loss_of(fitted)
        loss.backward()
        return loss

    assert run(fitted, lambda number: lbfgs.step(closure), steps=60) == []


def test_a_layer_that_only_an_earlier_stage_trained_has_not_lost_its_gradient() -> None:
    hint, model = nn.Linear(8, 2), net()
    both = nn.ModuleDict({"hint": hint, "model": model})
    optimizer = SGD([*model[:2].parameters(), *hint.parameters()], lr=0.1)

    def advance(number: int) -> None:
        nonlocal optimizer
        if number == 41:  # the hint keeps its last gradient, which the new optimizer does not reset
            optimizer = SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        output = hint(model[:2](x)) if number <= 40 else model(x)
        nn.functional.mse_loss(output, x[:, :2].sin()).backward()
        optimizer.step()

    assert run(both, advance, steps=100, sample_every=1) == []


def test_an_optimizer_of_other_tensors_is_one_incident() -> None:
    """Its steps are meant to be the updates: that nothing is updated by code either is no second fault."""
    model, other = net(), net()
    optimizer = SGD(other.parameters(), lr=0.1)

    def advance(number: int) -> None:
        model.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()

    causes: list[str] = []
    run(model, advance, steps=60, on_alert=lambda alert: causes.append(alert.incident.cause))
    assert causes == ["stale_optimizer"]


def test_nan_that_began_in_steps_that_were_not_measured_has_no_cause_that_could_be_known() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    watcher, sink = watch(model, rules=None, sample_every=10)
    for number in range(1, 41):
        optimizer.zero_grad()
        (loss_of(model, number) * (float("nan") if number == 33 else 1.0)).backward()
        optimizer.step()
    watcher.remove()
    [alert] = [alert for alert in sink.alerts if alert.incident.kind == "nan_gradient"]
    assert (alert.step, alert.incident.cause, alert.incident.rival) == (40, "unseen", "")
    assert "Steps 31 to 39 were not measured." in alert.text
