"""Trainings as people run them on a GPU: compiled, with CUDA graphs, autocast, every metric, and large tensors.

Skipped without a GPU: nothing here can be simulated.
"""

from __future__ import annotations

import contextlib
import gc
import warnings

import numpy as np
import pytest
import torch
from gradients import samples, watch
from test_metrics_no_sync import Model as Attending
from test_metrics_no_sync import everything
from torch import nn

from wandb_gradwatch import find_nonfinite
from wandb_gradwatch._watch import wait_for_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_name() == "a pretended GPU", reason="needs a CUDA device"
    ),
]


def layers(width=64, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]).cuda()


@contextlib.contextmanager
def no_waits():
    """Raise where the host waits for the device, after the kernels have been compiled."""
    wait_for_kernels()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def true_norms(model):
    """Return the norm of each gradient in float64: [P]."""
    return [parameter.grad.double().norm().item() for parameter in model.parameters()]


def train(model, steps, forward=None, make=torch.optim.AdamW, width=64):
    """Train; return the true norms of each step: [S, P]."""
    optimizer, truth = make(model.parameters(), lr=1e-3), []
    for step in range(steps):
        batch = torch.randn(16, width, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        optimizer.zero_grad()
        (forward or model)(batch).square().mean().backward()
        truth.append(true_norms(model))
        optimizer.step()
    return truth


def test_every_metric_is_measured_without_a_wait():
    torch.manual_seed(0)
    model = Attending().cuda()
    for module in model.modules():  # its mask is no buffer
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    watcher, sink = watch(model, metrics=everything(model), log_every=1000)

    def step():
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(2, 5, 8, device="cuda")
            output = model.own(model.gate(x))
            model.multi(output, output, output, need_weights=False)[0].square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    with no_waits():
        for _ in range(5):
            step()
    assert watcher.step == 9
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == list(range(1, 10))
    assert sum(np.isfinite(values).any() for values in snapshot.metrics.values()) > 50


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_has_the_norms_of_its_gradients(mode):
    model = layers()
    compiled = torch.compile(model, mode=mode)
    watcher, sink = watch(compiled)

    def forward(batch):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(batch)

    truth = train(model, 8, forward)
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == list(range(1, 9))
    np.testing.assert_allclose(snapshot.grad_norm, truth, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_channels_last_convolutions_under_autocast(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)
    )
    model = model.cuda().to(memory_format=torch.channels_last)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cuda", init_scale=1024.0)
    watcher, sink = watch(model)
    truth = []
    for _ in range(6):
        images = torch.randn(4, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = model(images).square().mean()
        scaler.scale(loss).backward()
        truth.append(np.array(true_norms(model)) / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    np.testing.assert_allclose(samples(watcher, sink).grad_norm, truth, rtol=1e-5)


def test_a_gradient_of_more_than_two_to_the_31_elements():
    size, free = 2**31 + 4099, torch.cuda.mem_get_info()[0]
    if free < 20 * 2**30:
        pytest.skip("needs 20 GiB of memory")
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16, device="cuda"))
    watcher, sink = watch(model, histogram_every=1)
    model.weight.grad = torch.ones_like(model.weight)
    model.weight.grad[-3:] = torch.tensor([0.0, -2.0, float("nan")], dtype=torch.bfloat16)
    torch.optim.SGD(model.parameters(), lr=0.0, foreach=False).step()
    snapshot = samples(watcher, sink)
    # size - 3 ones, a zero, a -2 and a NaN, which no statistic but its own count includes.
    assert snapshot.num_elements.tolist() == [[size]]
    assert snapshot.num_nan.tolist() == [[1]]
    assert snapshot.grad_norm.item() == pytest.approx((size - 3 + 4) ** 0.5, rel=1e-6)
    assert snapshot.grad_mean.item() * (size - 1) == pytest.approx(size - 3 - 2, rel=1e-9)
    assert snapshot.zero_ratio.item() * (size - 1) == pytest.approx(1, rel=1e-6)
    assert snapshot.histogram.sum() == size - 1


def test_the_memory_of_the_device_is_given_back():
    def allocated():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    model = layers(width=512)
    train(model, 3, width=512)
    for parameter in model.parameters():
        parameter.grad = None
    before = allocated()
    peaks = []
    for _ in range(3):
        watcher, sink = watch(model, log_every=10)
        train(model, 25, width=512)
        samples(watcher, sink)
        del watcher, sink
        for parameter in model.parameters():
            parameter.grad = None
        peaks.append(allocated())
    # Plans of known lists of tensors stay; nothing is added by the second and the third watcher.
    assert peaks[0] - before < 2**20
    assert peaks[1:] == [peaks[0]] * 2


def test_the_first_bad_operation_is_found_on_the_gpu():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return (self.inner(x) * 0).log()

    finding = find_nonfinite(nn.Sequential(nn.Linear(4, 4), Bad()).cuda(), torch.randn(2, 4, device="cuda"))
    assert finding is not None
    assert finding.operation == "aten.log"
    assert finding.module == "1"


def test_the_default_stays_within_its_budget_on_a_tiny_model_and_measures_without_a_wait():
    model = layers()
    watcher, sink = watch(model, sample_every=None)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(16, 64, device="cuda")

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(300):
        step()
    with no_waits():
        for _ in range(2000):
            step()
    assert watcher.step == 2300
    snapshot = samples(watcher, sink)
    assert 10 < len(snapshot) < 2300
    assert np.isfinite(snapshot.total_grad_norm).all()


def test_the_hosts_work_costs_nothing_while_the_device_is_behind():
    model = layers()
    watcher, sink = watch(model, sample_every=None, log_every=50)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(16, 64, device="cuda")
    for _ in range(300):
        torch.cuda._sleep(20_000_000)  # some 10 ms, which the host spends in item()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
    steps = samples(watcher, sink).steps.tolist()
    assert steps[-100:] == list(range(201, 301))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Muon if hasattr(torch.optim, "Muon") else None])
def test_what_people_train_with_prints_no_warning_of_ours(make):
    if make is None:
        pytest.skip("this torch has no Muon")
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False)).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watcher, sink = watch(model, rules=None)
        truth = train(model, 30, make=make)
        snapshot = samples(watcher, sink)
    np.testing.assert_allclose(snapshot.grad_norm, truth, rtol=1e-5)
    assert not sink.alerts
