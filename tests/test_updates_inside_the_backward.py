"""Updates that hooks on parameters make inside the backward without a torch optimizer, as in LOMO."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gradients import Chosen, of, samples, watch

RATE = 0.5


def update(parameters):
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-RATE)
                parameter.grad = None


def as_soon_as_it_is_there(model):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: update([one]))
    return lambda: None


def when_the_next_one_comes(model):
    """LOMO's way: each hook uses what came before it, and the last gradient is used after the backward."""
    everything = functools.partial(update, list(model.parameters()))
    for parameter in model.parameters():
        parameter.register_hook(lambda _: everything())
    return everything


WAYS = pytest.mark.parametrize(
    "fuse", [as_soon_as_it_is_there, when_the_next_one_comes], ids=lambda fuse: fuse.__name__
)


def train(model, after_backward, numbers, and_then=lambda: None):
    for number in numbers:
        model.loss(a=[3 * number, 4 * number], b=[12 * number], c=[84 * number]).backward()
        after_backward()
        and_then()


@WAYS
@pytest.mark.parametrize("watch_first", [True, False])
@pytest.mark.parametrize("sample_every", [1, 2])
def test_every_backward_is_a_step_and_measured_from_the_second_on(fuse, watch_first, sample_every, said):
    model = Chosen(a=2, b=1, c=1)
    if watch_first:
        watcher, sink = watch(model, sample_every=sample_every)
        after_backward = fuse(model)
    else:
        after_backward = fuse(model)
        watcher, sink = watch(model, sample_every=sample_every)
    train(model, after_backward, range(1, 7))
    assert watcher.step == 6
    snapshot = samples(watcher, sink)
    steps = list(range(sample_every, 7, sample_every))
    assert snapshot.steps.tolist() == steps
    # 3, 4, 12, 84: 5, 13 and 85 are the norms of the first two, three and four
    np.testing.assert_equal(snapshot.total_grad_norm, [85 * step if step > 1 else np.nan for step in steps])
    np.testing.assert_equal(of(snapshot, "a", "grad_norm"), [5 * step if step > 1 else np.nan for step in steps])
    assert np.isnan(snapshot.total_grad_norm_clipped).all()  # what the hooks do to it is not seen
    assert np.isnan(snapshot.clip_ratio)
    assert model.a.tolist() == [1 - RATE * 21 * 3, 1 - RATE * 21 * 4]  # 1 + ... + 6 = 21
    told = [text for text in said() if "hooks on the parameters take the gradients away" in text]
    assert len([text for text in told if "times in all" not in text]) == 1


@WAYS
def test_two_backwards_of_each_update_are_one_sample_where_the_user_says_so(fuse, said):
    """The last counts: LOMO's first one finds the norm that it clips by. Before the first mark, each counts."""
    model = Chosen(a=2, b=1, c=1)
    after_backward = fuse(model)
    watcher, sink = watch(model)
    for number in range(1, 5):
        train(model, after_backward, [100, number])
        watcher.mark_step()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_equal(snapshot.total_grad_norm, [np.nan, 85, 170, 255, 340])  # the first tells how it is done
    assert not [text for text in said() if "no optimizer step" in text]


@pytest.mark.parametrize("numbers", [[1], [1, 2]])
def test_what_there_is_of_a_short_training_is_told(numbers):
    model = Chosen(a=2, b=1, c=1)
    after_backward = as_soon_as_it_is_there(model)
    watcher, sink = watch(model)
    train(model, after_backward, numbers)
    assert samples(watcher, sink).steps.tolist() == numbers


def test_the_hooks_of_others_keep_their_order_and_can_be_removed():
    model = Chosen(a=1, b=1)
    called = []
    handles = [
        model.a.register_post_accumulate_grad_hook(lambda _, number=number: called.append(number)) for number in (1, 2)
    ]
    as_soon_as_it_is_there(model)
    watcher, _ = watch(model)
    for _ in range(2):
        model.loss(a=[1], b=[1]).backward()
    assert called == [1, 2, 1, 2]
    handles[0].remove()
    model.loss(a=[1], b=[1]).backward()
    assert called == [1, 2, 1, 2, 2]
    watcher.remove()
    assert len(model.a._post_accumulate_grad_hooks) == 2


def test_a_gradient_that_a_hook_drops_beside_others_is_no_update():
    model = Chosen(a=2, b=1, c=1)
    model.a.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(a=[3, 4], b=[5], c=[12]).backward()
        optimizer.step()
    assert samples(watcher, sink).total_grad_norm.tolist() == [13] * 3


@WAYS
def test_an_optimizer_that_updates_in_hooks_and_is_never_stepped_is_measured_once_that_is_certain(fuse, said):
    """LOMO is a torch.optim.Optimizer. Fewer such backwards may be the micro-batches of a step to come."""
    model = Chosen(a=2, b=1, c=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)  # holds the parameters; the hooks make its updates
    after_backward = fuse(model)
    watcher, sink = watch(model)
    train(model, after_backward, range(1, 21))
    snapshot = samples(watcher, sink)
    # The 16th backward is the first that counts, and tells how it is done; the next ones are measured.
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_equal(snapshot.total_grad_norm, [np.nan, *(85 * number for number in range(17, 21))])
    assert not optimizer.state
    assert [text for text in said() if "hooks on the parameters take the gradients away" in text]


class OfOneParameter(torch.optim.SGD):
    """The same optimizer steps in the hook of each parameter, for that one, as those of optimi do."""

    def step(self, closure=None, parameter=None):
        update([parameter])


@pytest.mark.parametrize("sample_every", [1, 2])
def test_one_optimizer_that_steps_for_each_parameter_in_its_hook_is_one_sample(sample_every):
    model = Chosen(a=2, b=1, c=1)
    optimizer = OfOneParameter(model.parameters(), lr=RATE)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: optimizer.step(parameter=one))
    watcher, sink = watch(model, sample_every=sample_every)
    train(model, lambda: None, range(1, 13))
    assert watcher.step == 12
    snapshot = samples(watcher, sink)
    steps = list(range(sample_every, 13, sample_every))
    assert snapshot.steps.tolist() == steps
    np.testing.assert_equal(snapshot.total_grad_norm, [85 * step for step in steps])
    np.testing.assert_equal(of(snapshot, "a", "grad_norm"), [5 * step for step in steps])
    assert not sink.alerts


@WAYS
@pytest.mark.parametrize("sample_every", [1, 5])
def test_a_step_after_hooks_have_made_the_update_ends_a_sample_that_is_measured_from_the_second_on(
    fuse, sample_every, said
):
    """FlashOptim's gradient release: `step` is still called, and does nothing."""
    model = Chosen(a=2, b=1, c=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    after_backward = fuse(model)
    watcher, sink = watch(model, sample_every=sample_every)
    train(model, after_backward, range(1, 31), optimizer.step)
    assert watcher.step == 30
    snapshot = samples(watcher, sink)
    steps = list(range(sample_every, 31, sample_every))
    assert snapshot.steps.tolist() == steps
    expected = [np.nan, *(85 * step for step in steps[1:])]
    np.testing.assert_equal(snapshot.total_grad_norm, expected)
    assert np.isnan(snapshot.total_grad_norm_clipped).all()  # what the hooks do to it is not seen
    assert not sink.alerts
    assert len([text for text in said() if "hooks on the parameters take the gradients away" in text]) == 1


@pytest.mark.parametrize("num_micros", [1, 2])
def test_gradients_that_hooks_collect_and_the_loop_puts_back_are_no_update(num_micros, said):
    model = Chosen(a=2, b=1, c=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = {}

    def collect(parameter):
        kept[parameter] = kept.get(parameter, 0) + parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(collect)
    watcher, sink = watch(model)
    for _ in range(4):
        kept.clear()
        for _ in range(num_micros):
            model.loss(a=[3, 4], b=[12], c=[84]).backward()
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    assert samples(watcher, sink).steps.tolist() == [1, 2, 3, 4]
    assert not [text for text in said() if "hooks on the parameters take the gradients away" in text]
