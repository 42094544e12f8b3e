"""Tests that need a GPU: correct statistics on it, and no wait of the host. Skipped without a GPU.

Without a GPU, test_gpu_dry.py runs this file on a simulated one (pretend_gpu.py).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gradients import Chosen, samples, step, watch
from matrix_programs import CLIP, KINDS, MICROS
from rank_programs import LEARNING_RATE, batch_of, build, expected, loss_of
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from wandb_gradwatch import SkipGuard
from wandb_gradwatch.metrics import Activations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 3
PRETENDED = torch.cuda.is_available() and torch.cuda.get_device_name() == "a pretended GPU"
QUICK = "torch" if PRETENDED else "auto"  # Triton's interpreter takes milliseconds for each tensor


def train(model, kind, steps):
    micros, clip = MICROS.get(kind, 1), CLIP.get(kind)
    make = torch.optim.Adam if kind == "amp fused" else torch.optim.SGD
    rate = 0.0 if kind == "amp fused" else LEARNING_RATE
    optimizer = make(model.parameters(), lr=rate, **({"fused": True} if kind == "amp fused" else {}))
    scaler = torch.amp.GradScaler("cuda", init_scale=4096.0, enabled=kind.startswith("amp"))
    batches = [[batch_of(0, number, micro).cuda() for micro in range(micros)] for number in range(steps)]

    def backwards(number):
        optimizer.zero_grad()
        for batch in batches[number]:
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
        return loss

    for number in range(steps):
        if kind == "closure":
            optimizer.step(lambda number=number: backwards(number))
            continue
        backwards(number)
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["plain", "amp", "amp fused"] if PRETENDED else KINDS[: KINDS.index("checkpoint")])
def test_matrix_on_the_gpu(kind, backend):
    model = build().cuda()
    watcher, sink = watch(model, backend=backend)
    train(model, kind, STEPS)
    snapshot = samples(watcher, sink)
    rate = 0.0 if kind == "amp fused" else LEARNING_RATE
    truth = expected(1, STEPS, micros=MICROS.get(kind, 1), clip=CLIP.get(kind), learning_rate=rate)
    np.testing.assert_allclose(snapshot.grad_norm, truth["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(snapshot.grad_norm_clipped, truth["grad_norm_clipped"], rtol=1e-4)


class Mixed(nn.Module):
    """Layers in two dtypes; the middle one gets no gradient, so that the measured slots are no contiguous range."""

    def __init__(self, width, dtype):
        super().__init__()
        self.dtype = dtype
        self.first = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.other = nn.Linear(width, width, dtype=dtype)
        self.last = nn.Linear(width, width)

    def forward(self, x):
        return self.last(self.other(self.first(x).relu().to(self.dtype)).relu().float())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("max_overhead", [0.01] if PRETENDED else [0.01, 0.5])
def test_the_host_never_waits(backend, scaled, clip, max_overhead):
    width = 8 if PRETENDED else 64
    # torch cannot unscale bfloat16 on every device.
    model = Mixed(width, torch.float64 if scaled else torch.bfloat16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    batch = torch.randn(32, width, device="cuda")
    watcher, sink = watch(
        model,
        rules=None,
        backend=backend,
        log_every=3,
        histogram_every=2,
        sample_every=1 if max_overhead == 0.01 else None,
        max_overhead=max_overhead,
    )
    warming, steps = (3, 3) if PRETENDED else (5, 50)

    def training_step():
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(warming):  # kernels are compiled and index tables uploaded
        training_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            training_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watcher.step == warming + steps  # a wait would have raised inside the monitor and stopped it
    snapshot = samples(watcher, sink)
    if max_overhead == 0.01:
        assert snapshot.steps.tolist() == list(range(1, warming + steps + 1))
        assert len(sink.snapshots) == -(-(warming + steps) // 3)
    assert np.isnan(snapshot.num_elements[:, snapshot.names.index("unused.weight")]).all()
    assert np.isfinite(snapshot.total_grad_norm).all()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 4.0]))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_training_with_deterministic_algorithms_only_is_watched(backend):
    model = nn.Sequential(Scale(), Scale()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    activations = Activations(statistics=("norm", "histogram"))
    watcher, sink = watch(model, backend=backend, metrics=[activations], histogram_every=1)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, device="cuda")).sum().backward()
            optimizer.step()
        snapshot = samples(watcher, sink)
    finally:
        torch.use_deterministic_algorithms(False)
    # The outputs are 1, -2, 4 and 1, 4, 16; the gradient of either weight is 1 * -2 * 4 in magnitudes.
    assert snapshot.total_grad_norm.tolist() == pytest.approx([math.sqrt(42)] * 2)
    assert snapshot.metrics["activation/1/norm"].tolist() == pytest.approx([math.sqrt(273)] * 2)


def test_alerts_come_late_but_under_their_own_step():
    model = Chosen(a=2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, rules=None, log_every=100)
    for number in range(1, 21):
        optimizer.zero_grad()
        (model.a * torch.tensor([math.nan if number == 7 else 1.0, 1.0], device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    watcher.remove()
    assert [(alert.title, alert.step) for alert in sink.alerts] == [("NaN gradient", 7)]


def test_gradients_on_two_devices_are_one_model():
    model = Chosen(a=2, b=1)
    model.b = nn.Parameter(model.b.detach().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    watcher, sink = watch(model)
    optimizer.zero_grad()
    (model.a * torch.tensor([3.0, 4.0])).sum().backward()
    (model.b * 12).sum().backward()
    optimizer.step()
    assert samples(watcher, sink).total_grad_norm.tolist() == [13]


def test_training_on_the_gpu_is_bitwise_the_same():
    def final(watched):
        torch.manual_seed(0)
        model = build().cuda()
        watcher = watch(model)[0] if watched else None
        train(model, "clip", 3 if PRETENDED else 10)
        if watcher is not None:
            watcher.remove()
        return model.state_dict()

    plain, watched = final(False), final(True)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


PLACES = [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("one", "two"), PLACES)
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_a_guard_adds_the_norms_of_two_devices(one, two, num_optimizers, fused):
    if two == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = Chosen(a=2, b=1)
    model.a = nn.Parameter(model.a.detach().to(one))
    model.b = nn.Parameter(model.b.detach().to(two))
    owned = [[model.a, model.b]] if num_optimizers == 1 else [[model.a], [model.b]]
    optimizers = [torch.optim.Adam(parameters, lr=0.1, fused=fused, foreach=False) for parameters in owned]
    guard = SkipGuard()
    watcher, sink = watch(model, guard=guard, backend=QUICK)
    steps = 30
    for number in range(1, steps + 1):
        # Each step is unhealthy because of the gradients on the second device alone.
        factor = math.nan if number == steps - 9 else 1.0
        (model.a * torch.tensor([3.0, 4.0], device=one)).sum().backward()
        (model.b * 12 * factor).sum().backward()
        before = model.b.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(before, model.b) == math.isnan(factor)
    assert samples(watcher, sink).total_grad_norm.tolist() == [13] * (steps - 10) + [5] + [13] * 9
    assert guard.num_skipped == 1


def test_step_on_the_gpu_after_a_cpu_copy():
    model = Chosen(a=1)
    watcher, sink = watch(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.0), a=[2])
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    (model.a * 3).sum().backward()
    optimizer.step()
    assert samples(watcher, sink).total_grad_norm.tolist() == [2, 3]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_guard_skips_the_poisoned_step_of_a_fused_optimizer(scaled):
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled, init_scale=1024.0)
    batch = torch.randn(32, 64, device="cuda")
    poison = batch * 1e6
    guard = SkipGuard()
    watcher, _ = watch(model, guard=guard, log_every=10, sample_every=5, backend=QUICK)

    def training_step(batch):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(15):  # compiles the kernels, creates the state, and shows the guard the usual norms
        training_step(batch)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    training_step(poison)
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(model.parameters(), before, strict=True))
    for _ in range(30):
        training_step(batch)
    watcher.remove()
    assert guard.num_skipped == 1
    assert watcher.step == 46


@pytest.mark.parametrize("fused", [False, True])
def test_poison_leaves_no_trace_on_the_gpu(fused):
    steps = 80

    def final(poisoned, guard):
        torch.manual_seed(0)
        model = build().cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        watcher = watch(model, guard=guard, sample_every=10, backend=QUICK)[0] if guard else None
        for number in range(steps):
            if number in (31, 55, 72) and not poisoned:
                continue
            factor = {31: 1e6, 55: math.nan, 72: 1e6}.get(number, 1.0)
            optimizer.zero_grad()
            (factor * loss_of(model, batch_of(0, number).cuda())).backward()
            optimizer.step()
        if watcher is not None:
            watcher.remove()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for guarded, clean in zip(final(True, "skip"), final(False, None), strict=True):
        assert torch.equal(guarded, clean)


def test_optimizers_inside_the_backward():
    model = Chosen(a=2, b=1).cuda()
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}
    watcher, sink = watch(model, backend=QUICK)

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for factor in (1.0, 2.0):
        loss = (model.a * torch.tensor([3.0, 4.0], device="cuda")).sum() + (model.b * 12).sum()
        (factor * loss).backward()
    for handle in handles:
        handle.remove()
    assert samples(watcher, sink).total_grad_norm.tolist() == [13, 26]


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_rank_that_is_alone_on_its_gpu(wrapper, tmp_path):
    """Uses NCCL, which allows one rank per GPU; without a GPU it uses gloo on the CPU."""
    device, library = ("cpu", "gloo") if PRETENDED else ("cuda", "nccl")
    dist.init_process_group(library, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = build().to(device)
        if wrapper == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            model = fully_shard(model, mesh=init_device_mesh(device, (1,)))
        watcher, sink = watch(model, backend=QUICK)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for number in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch_of(0, number).to(device)).backward()
            optimizer.step()
        snapshot = samples(watcher, sink)
    finally:
        dist.destroy_process_group()
    np.testing.assert_allclose(snapshot.grad_norm, expected(1, STEPS)["grad_norm"], rtol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_two_gpus_are_one_model():
    model = Chosen(a=2, b=1)
    model.a = nn.Parameter(model.a.detach().to("cuda:0"))
    model.b = nn.Parameter(model.b.detach().to("cuda:1"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    (model.a * torch.tensor([3.0, 4.0], device="cuda:0")).sum().backward()
    (model.b * 12).sum().backward()
    optimizer.step()
    assert samples(watcher, sink).total_grad_norm.tolist() == [13]
