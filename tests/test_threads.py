"""Several trainings in one process, each in its own thread, and forked children: none touches another's tensors."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from gradients import Chosen, of, samples, step, watch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

SGD = torch.optim.SGD


def test_two_models_in_two_threads():
    models = [Chosen(a=1), Chosen(a=1)]
    watched = [watch(model) for model in models]
    steps = 30

    def work(model, gradient):
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            step(model, optimizer, a=[gradient])

    threads = [threading.Thread(target=work, args=(model, 3 + index)) for index, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (watcher, sink) in enumerate(watched):
        assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [3 + index] * steps


class TouchedGradients(TorchFunctionMode):
    """Record the ids of tensors whose `.grad` or hooks are read or written."""

    def __init__(self):
        super().__init__()
        self.ids = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        descriptor = getattr(function, "__self__", None)
        if descriptor in (torch.Tensor.grad, torch.Tensor._backward_hooks):
            self.ids.add(id(args[0]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps_before", [0, 1, 20], ids=["at first", "awake", "resting"])
def test_another_models_optimizer_touches_no_gradient(steps_before):
    """An optimizer may step in another thread while this model's backward writes to `.grad`: that could crash."""
    model, other = Chosen(a=1), Chosen(a=1)
    watch(model, sample_every=1000)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(steps_before):
        step(model, optimizer, a=[1])
    with TouchedGradients() as touched:
        for _ in range(3):
            step(other, SGD(other.parameters(), lr=0.1), a=[1])
    assert id(other.a) in touched.ids, "the mode sees what torch itself reads"
    assert id(model.a) not in touched.ids


class Waits(torch.autograd.Function):
    """The identity; its backward waits for an event."""

    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait()
        return gradient, None


@contextmanager
def trained_elsewhere(model, *, in_a_backward):
    """Inside the context another thread is in the middle of a step, in its second backward or after it."""
    arrived, may_go_on = threading.Event(), threading.Event()

    def wait():
        arrived.set()
        assert may_go_on.wait(60)

    def backwards():
        model.loss(a=[1.0]).backward()
        model.zero_grad()
        loss = model.loss(a=[2.0])
        (Waits.apply(loss, wait) if in_a_backward else loss).backward()
        if not in_a_backward:
            wait()

    thread = threading.Thread(target=backwards)
    thread.start()
    assert arrived.wait(60)
    yield
    may_go_on.set()
    thread.join(60)
    assert not thread.is_alive()


ASKED = {
    "flush": lambda watcher: watcher.flush(),
    "wait": lambda watcher: watcher.wait(),
    "state_dict": lambda watcher: watcher.state_dict(),
    "latest": lambda watcher: watcher.latest,
    "remove": lambda watcher: watcher.remove(),
    "the end of the script": lambda watcher: watcher._script_ends(),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("in_a_backward", [True, False])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_what_is_asked_in_another_thread_than_the_one_that_trains_touches_no_gradient(
    asked, has_optimizer, in_a_backward
):
    """Also between backwards: torch crashes if one thread resets `.grad` while another reads it."""
    model = Chosen(a=1)
    watcher, _ = watch(model)
    if has_optimizer:
        step(model, SGD(model.parameters(), lr=0.1), a=[1])
    with trained_elsewhere(model, in_a_backward=in_a_backward), TouchedGradients() as touched:
        ASKED[asked](watcher)
    assert id(model.a) not in touched.ids
    assert model.a.grad.tolist() == [2]


@pytest.mark.parametrize("before", [2, 20], ids=["awake", "resting"])
def test_threads_that_train_the_models_of_one_watcher_at_once_end_it(before, caplog):
    """The process would crash, because a backward writes to `.grad` without Python's global interpreter lock."""
    here, elsewhere = Chosen(a=1), Chosen(a=1)
    watcher, _ = watch([here, elsewhere], sample_every=1 if before == 2 else 1000)
    optimizer, touched = SGD(here.parameters(), lr=0.1), TouchedGradients()
    for _ in range(before):
        step(here, optimizer, a=[1])

    def train():
        with touched:
            step(elsewhere, SGD(elsewhere.parameters(), lr=0.1), a=[1])

    def train_in_a_thread():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(60)

    Waits.apply(here.loss(a=[1.0]), train_in_a_thread).backward()
    optimizer.step()
    assert id(elsewhere.a) in touched.ids
    assert id(here.a) not in touched.ids
    assert repr(watcher).endswith("removed)")
    assert "call watch() once for each model that has its own thread" in caplog.text
    assert "Traceback" not in caplog.text


def test_what_a_thread_has_left_when_it_ended_is_looked_at():
    """The control for the test above: the same last update by hand is found from its gradients."""
    model = Chosen(a=1)
    watcher, sink = watch(model)

    def by_hand():
        for number in (1, 2, 3, 4):
            model.zero_grad()
            model.loss(a=[number]).backward()

    thread = threading.Thread(target=by_hand)
    thread.start()
    thread.join(60)
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [1, 2, 3, 4]


def test_a_model_that_goes_in_the_middle_of_its_backward():
    model = Chosen(a=1)
    watcher, sink = watch(model)
    step(model, SGD(model.parameters(), lr=0.1), a=[3])
    with trained_elsewhere(model, in_a_backward=True):
        del model
        gc.collect()
    assert repr(watcher) == "Watcher(1 parameters, removed)"
    assert [snapshot.total_grad_norm.tolist() for snapshot in sink.snapshots] == [[3]]


def test_whatever_another_thread_asks_no_sample_is_lost_split_or_out_of_order():
    model = Chosen(a=1, b=1)
    watcher, sink = watch(model, log_every=2)
    trained = threading.Event()
    raised = []

    def ask():
        questions = [watcher.wait, watcher.flush, watcher.state_dict, watcher.summary, lambda: watcher.latest]
        while not trained.is_set():
            for question in questions:
                try:
                    question()
                except Exception as error:
                    raised.append(error)

    asking = threading.Thread(target=ask)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads as often as possible
    try:
        asking.start()
        optimizer = SGD(model.parameters(), lr=0.0)
        for _ in range(400):
            step(model, optimizer, a=[3], b=[4])
    finally:
        trained.set()
        asking.join()
        sys.setswitchinterval(interval)
    snapshot = samples(watcher, sink)
    assert not raised
    assert snapshot.steps.tolist() == list(range(1, 401))
    np.testing.assert_array_equal(snapshot.grad_norm, np.tile([3.0, 4.0], (400, 1)))


def removed_elsewhere(watcher):
    thread = threading.Thread(target=watcher.remove)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def global_hook(register):
    return lambda optimizer, act: register(lambda *_: act())


class Groups(list):
    """Parameter groups that call a function when they are read."""

    act: Callable[[], None] = staticmethod(lambda: None)

    def __iter__(self):
        act, self.act = self.act, lambda: None
        act()
        return super().__iter__()


def while_looked_at(optimizer, act):
    optimizer.param_groups = Groups(optimizer.param_groups)
    optimizer.param_groups.act = act


MOMENTS = {
    "a global hook": global_hook(register_optimizer_step_pre_hook),
    "a global hook after the step": global_hook(register_optimizer_step_post_hook),
    "its own hook": lambda optimizer, act: optimizer.register_step_pre_hook(lambda *_: act()),
    "its own hook after the step": lambda optimizer, act: optimizer.register_step_post_hook(lambda *_: act()),
    "while its groups are looked at": while_looked_at,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("first", ["watched", "hooked"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_the_last_watcher_may_go_while_an_optimizer_steps(moment, first, is_ours):
    """torch raises if its hooks change while it iterates over them."""
    model, stepped = Chosen(a=1), Chosen(a=1)
    stepped = model if is_ours else stepped
    optimizer = SGD(stepped.parameters(), lr=1.0)
    handle = None
    if first == "hooked":
        handle = MOMENTS[moment](optimizer, lambda: removed_elsewhere(watcher))
    watcher, _ = watch(model)
    if first == "watched":
        handle = MOMENTS[moment](optimizer, lambda: removed_elsewhere(watcher))
    step(stepped, optimizer, a=[1])
    step(stepped, optimizer, a=[1])
    assert stepped.a.tolist() == [-1]
    assert repr(watcher).endswith("removed)")
    assert len(optimizer._optimizer_step_pre_hooks) == (moment == "its own hook")
    if handle is not None:
        handle.remove()
    watch(model)[0].remove()
    assert not _global_optimizer_pre_hooks


class Interrupted(SGD):
    """An optimizer that calls a function after the hooks, before it reads its gradients."""

    act = staticmethod(lambda: None)

    def _init_group(self, *args):
        self.act()
        return super()._init_group(*args)


def test_a_step_that_is_withheld_stays_withheld_though_its_watcher_goes_elsewhere():
    model = Chosen(a=1)
    watcher, _ = watch(model, guard="skip")
    optimizer = Interrupted(model.parameters(), lr=1.0)
    step(model, optimizer, a=[1])
    optimizer.act = lambda: removed_elsewhere(watcher)
    step(model, optimizer, a=[math.nan])
    assert model.a.tolist() == [0]
    assert model.a.grad.isnan().all(), "it is given back"


def test_a_watcher_that_traces_may_come_and_go_while_another_model_steps():
    model, other = Chosen(a=1), Chosen(a=1)
    watcher, _ = watch(model)
    optimizer = SGD(model.parameters(), lr=1.0)

    def come_and_go(*_):
        watch(other, on_nonfinite="trace")[0].remove()

    handles = [register_optimizer_step_pre_hook(come_and_go), register_optimizer_step_pre_hook(lambda *_: None)]
    step(model, optimizer, a=[1])
    for handle in handles:
        handle.remove()
    assert model.a.tolist() == [0]
    watcher.remove()


def test_an_optimizer_of_another_model_without_gradients_is_no_fault():
    """In parallel with a first step of this optimizer: only then its gradients may be unused."""
    model, other = Chosen(a=1), Chosen(a=1)
    watcher, sink = watch(model)
    optimizer, of_other = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(a=[1]).backward()
        of_other.step()
        optimizer.step()
    watcher.remove()
    assert not sink.alerts


@pytest.mark.parametrize("by_hand", [None, 4.0])
def test_a_loss_scale_is_that_of_the_models_own_scaler(by_hand):
    scaled, other = Chosen(a=1), Chosen(a=1)
    watched = [watch(scaled), watch(other, loss_scale=by_hand)]
    optimizers = [SGD(model.parameters(), lr=0.0) for model in (scaled, other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        scaler.scale(scaled.loss(a=[3])).backward()
        scaler.step(optimizers[0])
        scaler.update()
        (other.loss(a=[5]) * (by_hand or 1)).backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for (watcher, sink), value, scale in zip(watched, (3, 5), (1024, by_hand or math.nan), strict=True):
        found = samples(watcher, sink)
        assert of(found, "a", "grad_norm").tolist() == [value] * 3
        assert found.metrics["gradwatch/loss"].tolist() == [value] * 3
        np.testing.assert_array_equal(found.loss_scale, [scale] * 3)


def in_a_child(act: Callable[[], object]) -> int:
    """Run a function in a forked child without output, and return the child's exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.parametrize("options", [{}, {"guard": "skip"}, {"on_nonfinite": "trace"}], ids=str)
def test_a_forked_child_trains_ends_and_watches_without_its_parents_watcher(options, capfd):
    model = nn.Linear(1, 1)
    watcher, sink = watch(model, rules=None, **options)
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(number, value):
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.full((1, 1), value)).sum().backward()
            optimizer.step()

    train(12, 1.0)

    def child():
        train(80, float("nan"))
        assert watcher.step == 12
        assert watcher._parts.replay is None or not watcher._parts.replay._forwards
        watcher._script_ends()
        assert not model.weight._backward_hooks
        again, own_sink = watch(model)
        train(3, 1.0)
        again.remove()
        assert own_sink.merged().steps.tolist() == [1, 2, 3]

    assert in_a_child(child) == 0
    # The line at the end of the child's own watcher.
    assert capfd.readouterr() == ("", "wandb_gradwatch: no alert in 3 of 3 steps measured.\n")
    train(1, 1.0)
    assert samples(watcher, sink).steps.tolist() == list(range(1, 14))
    assert not sink.alerts
