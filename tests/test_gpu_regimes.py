"""CUDA graphs, compiled steps, several streams and float8 on a GPU, each a part of `make gpu`. Skipped without a GPU.

Without a GPU, test_gpu_dry.py runs this file on a simulated one (pretend_gpu.py), except tests marked `real`.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from gradients import samples, watch
from rank_programs import build
from test_gpu import PRETENDED, QUICK, train
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
real = pytest.mark.skipif(PRETENDED, reason="needs more of a GPU than can be pretended")


def on_a_side_stream(step):
    """Make a step where torch requires the steps before a capture to be made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)


def true_norms(model):
    """Return the norm of each gradient in float64: [P]."""
    return [parameter.grad.double().norm().item() for parameter in model.parameters()]


@real
def test_a_cuda_graph_may_hold_the_launches():
    from wandb_gradwatch._measure import cuda_launch

    gradient = torch.ones(100_000, device="cuda")
    kwargs = {"dead": False, "inverse_scale": None, "histogram": True}
    plan = cuda_launch.prepare([gradient])
    cuda_launch.launch(plan, **kwargs)  # compiled before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, histogram = cuda_launch.launch(plan, **kwargs)
    for value in (2.0, -3.0):
        gradient.fill_(value)
        graph.replay()
        assert rows[0, 5].item() == value * 100_000  # GRAD_SUM
        assert histogram.sum().item() == 100_000


@real
def test_a_graph_is_captured_while_another_thread_polls_for_arrived_samples():
    from wandb_gradwatch._measure.events import Event

    event, done, asked = Event(), threading.Event(), []
    event.record(torch.cuda.current_stream())

    def ask():
        while not done.is_set():
            asked.append(event.query())

    thread, static, graph = threading.Thread(target=ask), torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    thread.start()
    with torch.cuda.graph(graph):
        before = len(asked)
        for _ in range(1000):
            static.add_(1)
    during = len(asked) - before
    done.set()
    thread.join()
    graph.replay()
    assert static.sum().item() == 8000
    assert during > 0


@real
def test_a_graph_is_captured_while_the_kernels_are_still_being_compiled():
    model = build().cuda()
    watcher, sink = watch(model)  # begins to compile in the background
    static = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
    graph.replay()
    assert static.sum().item() == 8
    train(model, "plain", 1)
    assert samples(watcher, sink).steps.tolist() == [1]


@real
@pytest.mark.parametrize("guard", [None, "skip"])
def test_a_step_that_a_graph_replays_is_trained_as_usual_and_counted(guard):
    def train(watched):
        torch.manual_seed(0)
        model, loss_fn = nn.Linear(8, 8).cuda(), nn.MSELoss()
        batch = torch.randn(4, 8, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
        watcher, sink = watch(model, guard=guard) if watched else (None, None)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss_fn(model(batch), batch).backward()
            optimizer.step()

        for _ in range(3):
            on_a_side_stream(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(5):
            graph.replay()
        step()
        torch.cuda.synchronize()
        seen = None if watcher is None else samples(watcher, sink).steps.tolist()
        return [parameter.detach().cpu() for parameter in model.parameters()], seen

    (plain, _), (watched, seen) = train(False), train(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert seen == [1, 2, 3, 9]  # the replays are the steps 4 to 8


@pytest.mark.parametrize("sample_every", [1, 2])
@pytest.mark.parametrize("num_graphed_steps", [1, 3])
def test_steps_that_a_graph_replays_are_counted_and_said_to_be_unmeasured(num_graphed_steps, sample_every, said):
    model = nn.Linear(8, 8).cuda()
    batch = torch.randn(4, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watcher, sink = watch(model, sample_every=sample_every, backend=QUICK)

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        on_a_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_graphed_steps):
            step()
    assert watcher.step == 2  # a capture makes no step
    assert not [text for text in said() if "CUDA graph" in text]
    for _ in range(4):
        graph.replay()
    assert watcher.step == 2 + 4 * num_graphed_steps
    for _ in range(2):
        step()
    snapshot = samples(watcher, sink)
    eager = [1, 2, 3 + 4 * num_graphed_steps, 4 + 4 * num_graphed_steps]
    assert snapshot.steps.tolist() == [number for number in eager if number % sample_every == 0]
    assert np.isfinite(snapshot.total_grad_norm).all()
    assert len([text for text in said() if "CUDA graph" in text]) == 1


def test_a_watcher_that_goes_during_a_capture_hides_no_later_step():
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watcher, _ = watch(model, backend=QUICK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        watcher.remove()
    watcher, sink = watch(model, backend=QUICK)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    assert samples(watcher, sink).steps.tolist() == [1, 2, 3]


def test_gradients_that_a_captured_optimizer_step_uses_are_measured():
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, backend=QUICK)

    def backward(number):
        optimizer.zero_grad(set_to_none=False)  # the graph reads the same memory in every replay
        model(torch.full((4, 8), float(number), device="cuda")).sum().backward()

    def first_step():
        backward(1)
        optimizer.step()

    on_a_side_stream(first_step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for number in (2, 3):
        backward(number)
        graph.replay()
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3]
    # Each of the 64 weights has the gradient 4 * number, each of the 8 biases 4.
    np.testing.assert_allclose(snapshot.total_grad_norm, [(64 * (4 * n) ** 2 + 8 * 16) ** 0.5 for n in (1, 2, 3)])


@real
def test_graphed_callables_have_the_norms_of_their_gradients():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(16, 64, device="cuda"),))
    watcher, sink = watch(model)
    truth = train(model, 6, graphed)
    np.testing.assert_allclose(samples(watcher, sink).grad_norm, truth, rtol=1e-5)


def test_a_training_on_a_stream_of_its_own_and_a_flush_outside_of_it():
    def seen(stream):
        torch.manual_seed(0)
        model = build().cuda()
        watcher, sink = watch(model, backend=QUICK)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            train(model, "clip", 3 if PRETENDED else 10)
        snapshot = samples(watcher, sink)  # this stream was not told to wait for the other
        return snapshot.grad_norm, snapshot.histogram.sum()

    (norms, count), (expected_norms, expected_count) = seen(torch.cuda.Stream()), seen(torch.cuda.current_stream())
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)  # matrix products may differ in their last digits
    assert count == expected_count


def test_gradients_that_come_from_two_streams_are_measured_after_both():
    torch.manual_seed(0)
    halves = [nn.Linear(64, 64).cuda() for _ in range(2)]
    model = nn.ModuleList(halves)
    watcher, sink = watch(model, backend=QUICK, sample_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    main, streams = torch.cuda.current_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    truth = []
    for number in range(3 if PRETENDED else 20):
        optimizer.zero_grad()
        losses = []
        for half, stream in zip(halves, streams, strict=True):
            batch = torch.full((16, 64), float(number + 1), device="cuda")
            stream.wait_stream(main)
            with torch.cuda.stream(stream):  # torch runs the backward of these operations on this stream, too
                losses.append(half(batch).square().mean())
        for stream in streams:
            main.wait_stream(stream)
        torch.stack(losses).sum().backward()
        truth.append(true_norms(model))
        optimizer.step()
    np.testing.assert_allclose(samples(watcher, sink).grad_norm, truth, rtol=1e-5)


@real
def test_a_step_compiled_as_a_whole_is_trained_as_usual_and_its_gradients_are_measured():
    def train(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
        watcher, sink = watch(model, sample_every=1) if watched else (None, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        @torch.compile
        def step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        truth = []
        for number in range(6):
            step(torch.full((16, 64), 0.1 * (number + 1), device="cuda"))
            truth.append(true_norms(model))
        snapshot = None if watcher is None else samples(watcher, sink)
        return [parameter.detach().cpu() for parameter in model.parameters()], truth, snapshot

    (plain, _, _), (watched, truth, snapshot) = train(False), train(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(snapshot.grad_norm, truth, rtol=1e-5)


class Float8Linear(nn.Module):
    """A linear layer whose product is made in float8, and its gradients in bfloat16."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16) * 0.1)

    def forward(self, x):
        return _Float8Product.apply(x, self.weight)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        one = torch.ones((), device=x.device)
        x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        return torch._scaled_mm(x8, weight8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@real
def test_float8_layers_have_the_norms_of_their_gradients():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card has no float8: it needs compute capability 8.9")
    torch.manual_seed(0)
    model = nn.Sequential(Float8Linear(64), nn.GELU(), Float8Linear(64)).cuda()
    watcher, sink = watch(model, sample_every=1)
    optimizer, truth = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        truth.append(true_norms(model))
        optimizer.step()
    np.testing.assert_allclose(samples(watcher, sink).grad_norm, truth, rtol=1e-5)
