"""Between samples the hooks are off and steps are only counted; steps and samples are the same as without rests."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.multiprocessing  # registers tensors with the pickler
from gradients import Chosen, of, samples, step, watch

SGD = torch.optim.SGD
STEPS = 60


class Sharpened(SGD):
    """Calls the inherited step() twice in its own step(), like SAM and Lookahead."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.0)
        self.inner = SGD(self.param_groups[0]["params"], lr=0.0)

    def step(self, closure=None):
        self.inner.step()
        self.inner.step()


def plain(model: Chosen, make=lambda parameters: SGD(parameters, lr=0.0)) -> Iterator[None]:
    optimizer = make(model.parameters())
    for number in range(1, STEPS + 1):
        yield step(model, optimizer, a=[number], b=[1])


def nested(model: Chosen) -> Iterator[None]:
    yield from plain(model, Sharpened)


def accumulated(model: Chosen) -> Iterator[None]:
    optimizer = SGD(model.parameters(), lr=0.0)
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        for part in (1, 2, 3):
            model.loss(a=[number * part], b=[1]).backward()
        yield optimizer.step()


def closure(model: Chosen) -> Iterator[None]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.0, max_iter=3)
    for number in range(1, STEPS + 1):

        def evaluate(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.loss(a=[number], b=[1])
            loss.backward()
            return loss

        yield optimizer.step(evaluate)


def together(model: Chosen) -> Iterator[None]:
    optimizers = [SGD([model.a], lr=0.0), SGD([model.b], lr=0.0)]
    for number in range(1, STEPS + 1):
        model.zero_grad()
        model.loss(a=[number], b=[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield


def in_turn(model: Chosen) -> Iterator[None]:
    optimizers = {"a": SGD([model.a], lr=0.0), "b": SGD([model.b], lr=0.0)}
    for number in range(1, STEPS + 1):
        name = "ab"[number % 2]
        model.zero_grad()
        model.loss(**{name: [number]}).backward()
        yield optimizers[name].step()


def in_turn_and_frozen_in_between(model: Chosen) -> Iterator[None]:
    """Like CycleGAN and pix2pix: the discriminator is frozen while the generator trains."""
    optimizers = {"a": SGD([model.a], lr=0.0), "b": SGD([model.b], lr=0.0)}
    for number in range(1, STEPS + 1):
        name = "ab"[number % 2]
        model.b.requires_grad_(name == "b")
        optimizers[name].zero_grad()
        model.loss(**{name: [number]}).backward()
        yield optimizers[name].step()


def five_and_then_one(model: Chosen) -> Iterator[None]:
    """Five updates of a critic per update of the other model; each resets and computes only its own gradients."""
    first, second = SGD([model.a], lr=0.0), SGD([model.b], lr=0.0)
    for number in range(1, STEPS + 1):
        name, optimizer = ("a", first) if number % 6 else ("b", second)
        optimizer.zero_grad()
        model.loss(**{name: [number]}).backward()
        yield optimizer.step()


def now_and_then_together(model: Chosen) -> Iterator[None]:
    """The second optimizer steps only in every third iteration, after the first one."""
    first, second = SGD([model.a], lr=0.0), SGD([model.b], lr=0.0)
    for number in range(1, STEPS + 1):
        model.zero_grad()
        model.loss(a=[number], b=[1]).backward()
        first.step()
        if number % 3 == 0:
            second.step()
        yield


def now_and_then_first(model: Chosen) -> Iterator[None]:
    """The second optimizer steps only in every third iteration, before the first one."""
    first, second = SGD([model.a], lr=0.0), SGD([model.b], lr=0.0)
    for number in range(1, STEPS + 1):
        model.zero_grad()
        model.loss(**({"a": [number]} | ({"b": [1]} if number % 3 == 0 else {}))).backward()
        if number % 3 == 0:
            second.step()
        yield first.step()


def one_alone_and_then_both(model: Chosen) -> Iterator[None]:
    """The second optimizer is created and first steps in the middle of the training."""
    first, second = SGD([model.a], lr=0.0), None
    for number in range(1, STEPS + 1):
        model.zero_grad()
        model.loss(a=[number], b=[1]).backward()
        first.step()
        if number >= STEPS // 2:
            second = second or SGD([model.b], lr=0.0)
            second.step()
        yield


def another_optimizer(model: Chosen) -> Iterator[None]:
    for made in (1, 2):
        optimizer = SGD(model.parameters(), lr=0.0)
        for number in range(1, STEPS // 2 + 1):
            yield step(model, optimizer, a=[made * number], b=[1])


def skipped(model: Chosen) -> Iterator[None]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    optimizer = SGD(model.parameters(), lr=0.0)
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=[float("inf") if number in (8, 19, 33) else number], b=[1])).backward()
        scaler.step(optimizer)
        yield scaler.update()


def scaled_and_skipped_later(model: Chosen) -> Iterator[None]:
    """The first scaler is created in the middle of a rest."""
    optimizer = SGD(model.parameters(), lr=0.0)
    for number in range(1, STEPS // 2 + 1):
        yield step(model, optimizer, a=[number], b=[1])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for number in range(STEPS // 2 + 1, STEPS + 1):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=[float("inf") if number in (32, 33, 42) else number], b=[1])).backward()
        scaler.step(optimizer)
        yield scaler.update()


def in_backward(model: Chosen) -> Iterator[None]:
    for parameter in (model.a, model.b):
        optimizer = SGD([parameter], lr=0.0)

        def update(_: torch.Tensor, optimizer: SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for number in range(1, STEPS + 1):
        yield model.loss(a=[number], b=[1]).backward()


def by_hand(model: Chosen, *, to_none: bool = True, parts: tuple[int, ...] = (1,)) -> Iterator[None]:
    for number in range(1, STEPS + 1):
        model.zero_grad(set_to_none=to_none)
        for part in parts:
            model.loss(a=[number * part], b=[1]).backward()
        yield


def by_hand_zeroed(model: Chosen) -> Iterator[None]:
    yield from by_hand(model, to_none=False)


def by_hand_accumulated(model: Chosen) -> Iterator[None]:
    yield from by_hand(model, parts=(1, 2, 3))


def by_hand_accumulated_and_zeroed(model: Chosen) -> Iterator[None]:
    yield from by_hand(model, to_none=False, parts=(1, 2, 3))


def by_hand_and_asked_for(model: Chosen) -> Iterator[None]:
    """torch.autograd.grad() reaches the parameters too, but accumulates nothing."""
    for _ in by_hand(model):
        torch.autograd.grad(model.loss(a=[5], b=[5]), [model.a, model.b])
        yield


def by_hand_and_frozen_later(model: Chosen) -> Iterator[None]:
    for number, done in enumerate(by_hand(model), 1):
        model.b.requires_grad_(number < STEPS // 2)
        yield done


def by_hand_and_then_not(model: Chosen) -> Iterator[None]:
    optimizer = None
    for number, done in enumerate(by_hand(model), 1):
        if number >= STEPS // 2:
            optimizer = optimizer or SGD(model.parameters(), lr=0.0)
            optimizer.step()
        yield done


LOOPS_WITHOUT_STEPS = [
    in_backward,
    by_hand,
    by_hand_zeroed,
    by_hand_accumulated,
    by_hand_accumulated_and_zeroed,
    by_hand_and_asked_for,
    by_hand_and_frozen_later,
    by_hand_and_then_not,
]

LOOPS = [
    plain,
    nested,
    accumulated,
    closure,
    together,
    now_and_then_together,
    now_and_then_first,
    in_turn,
    in_turn_and_frozen_in_between,
    five_and_then_one,
    one_alone_and_then_both,
    another_optimizer,
    skipped,
    scaled_and_skipped_later,
]


def watched(loop, every):
    torch.manual_seed(0)
    model = Chosen(a=1, b=1)
    watcher, sink = watch(model, sample_every=every, log_every=20)
    rests = 0
    for _ in loop(model):
        rests += watcher._sampler.rest.is_on
    # The last step of a GAN or of a loop by hand closes at the next backward, or at the end.
    assert watcher.step in (STEPS, STEPS - 1)
    watcher.remove()
    assert watcher.step == STEPS
    assert model.a._backward_hooks is None
    return samples(watcher, sink), rests


@pytest.mark.parametrize("loop", [*LOOPS, *LOOPS_WITHOUT_STEPS])
def test_every_loop_has_the_same_steps_and_samples_with_rests(loop):
    all_of_them, none = watched(loop, 1)
    some, rests = watched(loop, 7)
    assert none == 0
    assert (rests > STEPS / 4) is (loop in LOOPS or loop is by_hand_and_then_not)  # without an optimizer hooks stay on
    assert list(all_of_them.steps) == list(range(1, STEPS + 1))
    assert list(some.steps) == list(range(7, STEPS + 1, 7))
    at = slice(6, None, 7)
    for statistic in ("grad_norm", "num_inf", "total_grad_norm"):
        np.testing.assert_array_equal(getattr(some, statistic), getattr(all_of_them, statistic)[at])


@pytest.mark.parametrize("every", [2, 4, 5, 10])
@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_optimizer_that_steps_more_rarely_shifts_no_sample(every, period, is_first):
    """Samples may be taken at its steps only, or never at one: what the steps between show must not be forgotten."""
    model = Chosen(a=1, b=1)
    often, rarely = SGD([model.a], lr=0.0), SGD([model.b], lr=0.0)
    watcher, sink = watch(model, sample_every=every, log_every=every)
    for number in range(1, STEPS + 1):
        model.zero_grad()
        model.loss(a=[number], b=[1]).backward()
        steps = [often, rarely] if number % period == 0 else [often]
        for optimizer in reversed(steps) if is_first else steps:
            optimizer.step()
    snapshot = samples(watcher, sink)
    assert watcher.step == STEPS
    assert snapshot.steps.tolist() == list(range(every, STEPS + 1, every))
    assert snapshot.grad_norm[:, 0].tolist() == snapshot.steps.tolist()
    # The very first step of an optimizer may come too late for its sample.
    assert snapshot.present[1:, 1].tolist() == [number % period == 0 for number in snapshot.steps[1:].tolist()]


def test_deleted_optimizers_leave_nothing_behind_in_what_rests_remember():
    """A new optimizer for each step, as for a few-shot task."""
    model = Chosen(a=1)
    watcher, _ = watch(model, sample_every=5)
    for _ in range(40):
        step(model, SGD(model.parameters(), lr=0.0), a=[1])
    assert watcher.step == 40
    assert len(watcher._sampler.rest._pausing) <= 1


def test_a_watcher_that_begins_in_the_rest_of_another_one_sees_every_step_of_their_optimizer():
    first, second = Chosen(a=1), Chosen(a=1)
    optimizer = SGD([*first.parameters(), *second.parameters()], lr=0.0)
    resting, sink = watch(first, sample_every=10)
    for number in range(1, 25):
        step(first, optimizer, a=[number])
    assert resting._sampler.rest.is_on
    other, other_sink = watch(second, sample_every=1)
    for number in range(25, 41):
        optimizer.zero_grad()
        (first.loss(a=[number]) + second.loss(a=[number])).backward()
        optimizer.step()
        assert (resting.step, other.step) == (number, number - 24)
    assert samples(resting, sink).total_grad_norm.tolist() == [10, 20, 30, 40]
    assert samples(other, other_sink).total_grad_norm.tolist() == list(range(25, 41))


def test_a_watcher_that_is_removed_in_a_rest_is_freed():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, sample_every=1000)
    for _ in range(20):
        step(model, optimizer, a=[1])
    sampler = weakref.ref(watcher._sampler)
    assert sampler().rest.is_on
    watcher.remove()
    del watcher, sink
    gc.collect()
    assert sampler() is None


def test_hooks_are_off_in_a_rest_and_on_for_the_sample():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, sample_every=10)
    num_hooks = []
    for _ in range(30):
        step(model, optimizer, a=[1])
        num_hooks.append(len(model.a._backward_hooks or ()))
    # The first three steps show which steps make a sample. Hooks are back after the step before a sample.
    assert num_hooks == [1] * 3 + [0] * 5 + [1] + ([0] * 9 + [1]) * 2 + [0]
    assert watcher.step == 30
    assert list(samples(watcher, sink).steps) == [10, 20, 30]
    assert not model.a._backward_hooks


def test_hooks_that_rested_are_put_back_and_not_registered_anew(monkeypatch):
    registered = []
    register = torch.Tensor.register_hook
    monkeypatch.setattr(torch.Tensor, "register_hook", lambda *args: registered.append(args[1]) or register(*args))
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, sample_every=10)
    for number in range(1, 31):
        step(model, optimizer, a=[number], b=[1])
    # At the samples 10, 20 and 30 the gradient of a is the step number and that of b is 1.
    assert samples(watcher, sink).grad_norm.tolist() == [[10, 1], [20, 1], [30, 1]]
    assert len(registered) == 2


def is_bare(parameter):
    """Return whether the parameter has no hooks, and no empty holder of hooks that the autograd engine would visit."""
    return parameter._backward_hooks is None and parameter._post_accumulate_grad_hooks is None


def test_in_a_rest_and_at_the_end_parameters_are_as_if_never_watched():
    """The empty holder that torch keeps after a hook is removed costs almost 1 us per parameter in each backward."""
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model, sample_every=10)
    rests = 0
    for _ in range(30):
        step(model, optimizer, a=[1], b=[1])
        is_resting = watcher._sampler.rest.is_on
        assert [is_bare(model.a), is_bare(model.b)] == [is_resting] * 2
        rests += is_resting
    assert rests > 15
    for _ in range(9):  # the hooks are back for sample 40
        step(model, optimizer, a=[1], b=[1])
    assert not is_bare(model.a)
    watcher.remove()
    assert is_bare(model.a)
    assert is_bare(model.b)


def test_tensor_hooks_of_others_work_on_through_rests_and_after_the_end():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    model.a.register_hook(lambda gradient: 2 * gradient)
    watcher, sink = watch(model, sample_every=10)
    later = []
    for number in range(1, 31):
        if number == 15:  # in a rest
            later.append(model.a.register_hook(lambda gradient: 3 * gradient))
        step(model, optimizer, a=[1])
        assert model.a.grad.item() == (2 if number < 15 else 6)
    assert samples(watcher, sink).total_grad_norm.tolist() == [2, 6, 6]
    later[0].remove()
    step(model, optimizer, a=[1])
    assert model.a.grad.item() == 2


def test_what_torch_visits_is_left_there_where_several_threads_train():
    """The engine may visit a parameter's hooks in another thread: it would crash if the holder were removed."""
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model, sample_every=10)
    for _ in range(9):
        other = threading.Thread(target=step, args=(model, optimizer), kwargs={"a": [1]})
        other.start()
        other.join()
    for _ in range(5):
        step(model, optimizer, a=[1])
    assert watcher._sampler.rest.is_on
    assert model.a._backward_hooks == {}
    watcher.remove()
    assert model.a._backward_hooks == {}


def test_gradients_that_are_only_asked_for_are_no_backward():
    """torch also calls tensor hooks in autograd.grad(), which accumulates no gradients."""
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for number in range(1, 5):
        optimizer.zero_grad()
        for _ in range(number):
            torch.autograd.grad(model.loss(a=[100], b=[100]), [model.a, model.b])
        model.loss(a=[3 * number]).backward()
        torch.autograd.grad(model.loss(a=[100], b=[100]), [model.b])
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [3, 6, 9, 12]
    assert np.isnan(of(snapshot, "b", "grad_norm")).all()


def test_a_hooked_parameter_is_sent_to_another_process_without_a_warning(recwarn):
    model = Chosen(a=1)
    watch(model)
    assert model.a._backward_hooks
    ForkingPickler.dumps(model.a.detach().requires_grad_())  # without hooks, as the control
    ForkingPickler.dumps(model.a)
    assert not [str(one.message) for one in recwarn if "hook" in str(one.message)]


def test_parameter_groups_that_are_taken_away_in_a_rest_stop_nothing():
    model = Chosen(a=1, b=1)
    optimizer = SGD([{"params": [model.a]}, {"params": [model.b]}], lr=0.0)
    watcher, sink = watch(model, sample_every=10)
    for number in range(1, 31):
        if number == 16:
            assert watcher._sampler.rest.is_on
            del optimizer.param_groups[0]
        model.zero_grad()
        model.loss(b=[number]).backward()
        optimizer.step()
    assert watcher.step == 30
    assert samples(watcher, sink).total_grad_norm.tolist() == [10, 20, 30]


def test_gradients_made_in_inference_mode_are_none_of_a_rest_s_business():
    """Such gradients have no version counter: reading it raises, and during a rest outside the error boundary."""
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, sample_every=10)
    for number in range(1, 31):
        if number <= 10:
            step(model, optimizer, a=[number])
        else:
            with torch.inference_mode():
                model.a.grad = torch.tensor([float(number)])
            optimizer.step()
    assert watcher.step == 30
    assert samples(watcher, sink).total_grad_norm.tolist() == [10, 20, 30]


@pytest.mark.parametrize("place", ["begins", "ends"])
def test_an_exception_in_a_rest_is_reported_once_and_training_goes_on(place, monkeypatch, caplog):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=1.0)
    watcher, sink = watch(model, sample_every=10)
    for _ in range(45):  # samples 10 to 40 were alike: the hooks rest until 50
        step(model, optimizer, a=[1])

    def broken(*_):
        raise ZeroDivisionError("in a rest")

    monkeypatch.setattr(f"wandb_gradwatch._capture.rest.Rest.{place}", broken)
    for _ in range(15):
        step(model, optimizer, a=[1])
    assert model.a.item() == 1 - 60
    assert [record.levelno for record in caplog.records if "stopped watching" in record.message] == [logging.ERROR]
    assert sink.merged().steps.tolist() == [10, 20, 30, 40]
    watcher.remove()


def test_a_step_that_raised_hides_no_other_optimizer_for_good():
    model = Chosen(a=1)
    first, second = SGD(model.parameters(), lr=0.0), SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)
    watcher, _ = watch(model, sample_every=1000)
    for _ in range(10):
        step(model, first, a=[1])
    rest = watcher._sampler.rest
    assert rest.begins(first)  # the step raises, so ends() is never called
    passed = [rest.begins(second) for _ in range(200)]
    assert passed[0]  # the second step may be nested in the first one
    assert not passed[-1]


@pytest.mark.parametrize("steps_before", [3, 20], ids=["awake", "resting"])
def test_a_model_that_cannot_be_walked_any_more_stops_the_watcher_and_not_the_training(steps_before, said):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model, sample_every=10)
    for _ in range(steps_before):
        step(model, optimizer, a=[1])

    def scan() -> None:
        raise RuntimeError("planted")

    watcher._sampler.parts.registry.scan = scan
    for _ in range(20):
        step(model, optimizer, a=[1])
    assert [message for message in said() if "has failed and stopped watching" in message] != []
    watcher.remove()
    assert not model.a._backward_hooks
