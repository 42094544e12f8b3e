"""Tests of the simulated GPU, and of the package on it. Run by test_gpu_dry.py with `-p pretend_gpu`."""

from __future__ import annotations

import functools
import gc
import json
import sys
import threading

import numpy as np
import pretend_gpu
import pytest
import torch

from wandb_gradwatch import MemorySink, watch
from wandb_gradwatch._measure.columns import NUM_BINS, NUM_COLUMNS, RECEIVED_COLUMNS, Column
from wandb_gradwatch._measure.cuda_plan import AddressTable
from wandb_gradwatch._measure.elements import Measurement, onto, upload
from wandb_gradwatch._measure.measure import measure
from wandb_gradwatch._transfer.sample_buffer import SampleBuffer
from wandb_gradwatch._transfer.transfers import PinnedPool, Sample
from wandb_gradwatch.snapshot import Snapshot, keys

WAITS = {
    "item": lambda x: x.item() if x.numel() == 1 else x.sum().item(),
    "a condition": lambda x: bool((x > 0).any()),
    "a list as an index": lambda x: x[[0, 2]],
    "an index of the host": lambda x: x[torch.tensor([0, 2])],
    "a list as a place": lambda x: x.__setitem__([0, 2], 1.0),
    "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "where of one argument": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x),
    "torch.tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "a pageable copy": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "a blocking copy": lambda x: x.copy_(torch.ones(3).pin_memory()),
    "a copy back": lambda x: x.cpu(),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_is_noticed(what):
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            WAITS[what](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_tensor_of_the_host_among_those_of_the_device_is_an_error():
    with pytest.raises(AssertionError, match="on the host"):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_memory_that_the_device_is_still_to_read_must_not_change():
    pinned = torch.ones(3).pin_memory()
    torch.ones(3, device="cuda").copy_(pinned, non_blocking=True)
    pinned.fill_(2)
    with pytest.raises(AssertionError, match="still to read"):
        torch.cuda.synchronize()


def test_what_has_not_arrived_is_nonsense():
    pinned = torch.ones(3, pin_memory=True)
    pinned.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    assert pinned.isnan().all()
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    assert event.query()
    assert pinned.tolist() == [1, 1, 1]


def test_what_a_copy_to_the_host_brings_must_not_be_read_before_it_is_there():
    early = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    assert early.isnan().all()
    torch.cuda.synchronize()
    assert early.tolist() == [1, 1, 1]


def test_memory_that_another_stream_is_still_to_write_is_a_race():
    x, side = torch.zeros(3, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    with pytest.raises(AssertionError, match="races with stream"):
        x + 1
    torch.cuda.current_stream().wait_stream(side)
    assert (x + 1).tolist() == [2, 2, 2]


def test_what_is_on_two_gpus_does_not_meet_in_one_operation():
    with pytest.raises(AssertionError, match="tensors are on"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")


def test_an_event_belongs_to_the_device_it_was_first_recorded_on():
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream("cuda:1"))
    with pytest.raises(AssertionError, match="recorded on cuda:0"):
        event.record(torch.cuda.current_stream("cuda:0"))


def facts_on(device):
    """The facts of a training whose parameters have two dtypes, and whose second sample lacks the gradient of one."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2).to(torch.float64)}).to(device)
    first, optimizer = model["a"], torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 3).to(device) for _ in range(2)]
    batches[1][0, 0], batches[1][0, 1] = 0.0, torch.inf
    with watch([first, model["b"]], sinks=[sink := MemorySink()], sample_every=1, log_every=1, rules=[]) as watcher:
        for number in (0, 0, 1):
            optimizer.zero_grad()
            first(batches[number]).sum().backward()
            if number < 1:
                model["b"](torch.ones(2, 2, dtype=torch.float64).to(device)).sum().backward()
            optimizer.step()
        watcher.flush()
    whole = functools.reduce(Snapshot.merge, sink.snapshots)
    facts = {key: value for key, value in whole.metrics.items() if key.startswith(keys.FACT)}
    return facts | dict(whole.per_parameter)


def test_facts_on_a_device_are_those_on_the_host():
    on_host, on_device = facts_on("cpu"), facts_on("cuda")
    assert on_host.keys() == on_device.keys()
    for key, values in on_host.items():
        np.testing.assert_allclose(on_device[key], values, rtol=1e-5, err_msg=key)
    assert np.isfinite(on_host[keys.FACT + "input_repeated"]).any()
    assert np.isfinite(on_host["grad_cosine"]).any()


def rows_of(value):
    return torch.full((3, NUM_COLUMNS), float(value), device="cuda", dtype=torch.float64)


def test_a_window_that_goes_on_on_another_stream_waits_for_the_one_before():
    window, side = SampleBuffer(keep_newest_histogram=False), torch.cuda.Stream()
    window.resize(3)
    counts = torch.ones((3, NUM_BINS), device="cuda", dtype=torch.int64)
    rows = [rows_of(value) for value in range(4)]
    for step, stream in ((1, torch.cuda.current_stream()), (2, side), (3, torch.cuda.current_stream())):
        stream.wait_stream(torch.cuda.current_stream())  # orders the rows; the window must order its own memory
        with torch.cuda.stream(stream):
            window.write([0, 1, 2], Measurement(rows[step], counts))
            window.commit(Sample(step, False, ()))
    window.flush()
    torch.cuda.synchronize()
    arrived = [*window.poll(), *window.poll(), *window.poll(), *window.poll(), *window.poll()]
    assert [sample.rows[0, 0] for sample in arrived[:3]] == [1, 2, 3]
    assert (arrived[3].histogram == 3).all()


def test_samples_land_in_memory_that_is_there_already():
    window = SampleBuffer(keep_newest_histogram=False)
    window.resize(3)
    kept = []
    for step in range(1, 21):
        window.write([0, 1, 2], Measurement(rows_of(step), None))
        if step == 1:
            pinned = pretend_gpu.GPU.num_pinned
        window.commit(Sample(step, False, ()))
        kept += window.poll()
    kept += window.poll(wait=True)
    assert pretend_gpu.GPU.num_pinned == pinned  # no allocation after the first sample
    # Samples that have arrived do not change when later samples reuse the pinned memory.
    assert [sample.rows[2, 5] for sample in kept] == list(range(1, 21))


def test_a_device_that_is_behind_gets_as_much_memory_as_it_needs_and_no_more_later():
    pinned_pool = PinnedPool()
    first = [pinned_pool.send(rows_of(value)) for value in range(7)]
    torch.cuda.synchronize()
    assert [transfer.take()[0, 0] for transfer in first if transfer.arrived(wait=True)] == list(range(7))
    pinned = pretend_gpu.GPU.num_pinned
    second = [pinned_pool.send(rows_of(value)) for value in range(7)]
    assert all(transfer.arrived(wait=True) for transfer in second)
    assert [transfer.take()[0, 0] for transfer in second] == list(range(7))
    assert pretend_gpu.GPU.num_pinned == pinned


def test_kinds_that_come_and_go_keep_a_bounded_number_of_buffers():
    pinned_pool = PinnedPool()
    for size in range(1, 40):
        transfer = pinned_pool.send(torch.full((size,), float(size), device="cuda"))
        assert transfer.arrived(wait=True)
        assert transfer.take().tolist() == [size] * size
    assert len(pinned_pool._free) <= 16


def test_kinds_that_are_used_all_the_time_are_kept_whatever_else_comes_on_any_device():
    pinned_pool = PinnedPool()
    devices = ("cuda:0", "cuda:1")
    rows = [torch.ones((3, 3), device=device) for device in devices]
    for round_number in range(40):
        for device, tensor in zip(devices, rows, strict=True):
            pinned_pool.send(torch.ones(round_number + 1, device=device))
            before = pretend_gpu.GPU.num_pinned
            transfer = pinned_pool.send(tensor)
            assert transfer.arrived(wait=True)
            transfer.take()
            assert pretend_gpu.GPU.num_pinned == before + (2 if round_number == 0 else 0)


def test_gradients_on_two_gpus_are_each_measured_where_they_are():
    for backend in ("cuda", "torch"):
        for device in ("cuda:0", "cuda:1"):
            gradient = torch.tensor([3.0, -4.0], device=device)
            measured = measure([gradient], [gradient], histogram=True, backend=backend)
            assert measured.rows.device == gradient.device
            assert measured.rows[0, Column.GRAD_SUM_SQ].item() == 25


def test_index_tables_are_uploaded_on_each_stream_that_reads_them():
    gradient, side = torch.ones(3001, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for backend in ("cuda", "torch"):
        measure([gradient], None, histogram=True, backend=backend)  # queued after the side stream has waited
        with torch.cuda.stream(side):
            assert measure([gradient], None, histogram=True, backend=backend).rows[0, Column.GRAD_SUM].item() == 3001


def test_a_model_that_the_collector_finds_during_a_capture_is_not_flushed_into_it(monkeypatch):
    sink = MemorySink()
    model = torch.nn.Linear(2, 2).cuda()
    watcher = watch(model, sinks=[sink], rules=[], backend="torch", sample_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    del model, optimizer
    gc.collect()
    assert sink.merged() is None
    monkeypatch.undo()
    watcher.remove()
    assert sink.merged().steps.tolist() == [1]


def test_a_window_is_written_and_sent_without_a_wait():
    window = SampleBuffer(keep_newest_histogram=False)
    window.resize(5)
    rows = torch.arange(3.0 * NUM_COLUMNS, device="cuda").double().view(3, NUM_COLUMNS)
    torch.cuda.synchronize()
    with pretend_gpu.no_waits():
        for step, slots in ((1, [0, 2, 4]), (2, [1, 2, 3])):
            window.write(slots, Measurement(rows.clone(), None))
            window.write_received(slots, rows[:, RECEIVED_COLUMNS])
            window.rescale(slots, torch.ones(NUM_COLUMNS, device="cuda", dtype=torch.float64))
            window.drop_zero_rows(slots)
            window.set_loss_scale(torch.ones((), device="cuda"))
            window.clear(slots[:1])
            window.commit(Sample(step, False, ()))
        assert window.poll() == []
        arrived = [*window.poll(), *window.poll()]
    assert [sample.sample.step for sample in arrived] == [1, 2]
    for sample, present in zip(arrived, ([2, 4], [2, 3]), strict=True):
        assert np.flatnonzero(~np.isnan(sample.rows[:, 0])).tolist() == present


def test_addresses_are_uploaded_without_a_wait_while_earlier_uploads_are_under_way():
    table = AddressTable(2, torch.device("cuda", 0))
    with pretend_gpu.no_waits():
        for address in range(5):
            assert table.write([address, 1])
            assert not table.write([address, 1])
        upload(np.arange(3), torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert table.device_table.cpu().tolist() == [4, 1]


def test_what_the_host_is_to_use_at_once_is_waited_for():
    before = len(pretend_gpu.GPU.waits)
    assert onto(torch.ones(2, device="cuda"), torch.device("cpu")).tolist() == [1, 1]
    assert len(pretend_gpu.GPU.waits) > before


def test_the_benchmark_of_the_kernels_runs_and_prints_its_table(tmp_path, capsys):
    from benchmarks import kernel

    results = tmp_path / "results.json"
    arguments = ["--tiny", "--rounds", "1", "--dtypes", "bfloat16", "--json", str(results)]
    assert kernel.main(arguments) == 0
    report = json.loads(results.read_text())
    assert [(result["model"], result["dtype"]) for result in report["results"]] == [("tiny", "bfloat16")]
    for result in report["results"]:
        assert result["candidates"]["copy"]["of_copy"] == 1
        assert all(candidate["gpu_ms"] > 0 for candidate in result["candidates"].values())
    assert report["added_time"]["gpu"] > 0
    assert report["added_time"]["said"] > 0
    assert report["added_time"]["default_every"] >= 1
    assert report["added_time"]["num_waits"] == 0
    text = capsys.readouterr().out
    assert "a pretended GPU" in text
    assert "| tiny, bfloat16 |" in text
    assert "ailed" not in text


def test_a_part_of_the_benchmark_that_fails_is_named_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    from benchmarks import kernel

    def fails(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    def is_wrong_in_float32(gradients, parameters):
        assert gradients[0].dtype is not torch.float32, "a number is wrong"

    right = kernel.measure  # this test does not need the kernels
    monkeypatch.setattr(kernel, "measure", lambda *args, **kwargs: right(*args, **{**kwargs, "backend": "torch"}))
    monkeypatch.setattr(kernel, "measure_received", fails)
    monkeypatch.setattr(kernel, "check", is_wrong_in_float32)
    monkeypatch.setattr(kernel, "measure_added_time", fails)
    results = tmp_path / "results.json"
    dtypes = ["--dtypes", "float32", "bfloat16"]
    arguments = ["--tiny", "--rounds", "1", *dtypes, "--json", str(results)]
    assert kernel.main(arguments) == 1
    in_float32, in_bfloat16 = json.loads(results.read_text())["results"]
    assert in_float32["candidates"] == {}
    assert in_float32["failures"] == {"the list": "AssertionError: a number is wrong"}
    assert in_bfloat16["failures"] == {"sum_sq": "OutOfMemoryError: CUDA out of memory."}
    assert in_bfloat16["candidates"]["columns"]["gpu_ms"] > 0
    text, messages = capsys.readouterr()
    assert "Failed: a step: OutOfMemoryError: CUDA out of memory." in text
    assert "| failed |" in text
    assert "is_wrong_in_float32" in messages  # from the traceback


def test_the_targets_are_those_that_were_asked_and_a_missed_one_is_called_so():
    from benchmarks import kernel

    def figures(gpu_ms, of_copy):
        return {
            name: {"gpu_ms": gpu_ms, "host_ms": 0.2, "of_copy": of_copy} for name in ("columns", "+ histogram", "all")
        }

    report = {
        "results": [
            {"model": "GPT 1.2B", "dtype": "bfloat16", "candidates": figures(1.0, 0.5)},
            {"model": "GPT-2 small", "dtype": "bfloat16", "candidates": figures(0.6, 0.8)},
        ],
        "added_time": None,
    }
    # 0.5 of a copy is less than 0.7 and more than 0.35; 0.6 ms is more than 0.5, 0.2 ms less than 0.3. Half of a copy's
    # bandwidth is twice the limit, more than 1.4 times; 0.8 is 1.25 times.
    expected = ["MISSED", "met", "MISSED", "met", "MISSED", "met"]
    assert [line.split()[0] for line in kernel.targets(report)] == expected


@pytest.mark.parametrize("world", [1, 2])
def test_kernels_are_compiled_in_the_background_and_can_be_waited_for(world, monkeypatch):
    from wandb_gradwatch._measure import cuda_launch

    door = sys.modules["wandb_gradwatch._watch"]
    asked, may_go_on = [], threading.Event()

    def warm_up(device, dtypes, *, goes_on, **options):
        assert may_go_on.wait(30)
        asked.append((device, dtypes, goes_on(), options["in_buckets"]))

    monkeypatch.setattr(cuda_launch, "warm_up", warm_up)
    monkeypatch.setattr(door, "world_size", lambda: world)
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16).cuda()
    watcher = door.watch(model, sinks=[MemorySink()], sample_every=1, rules=[])
    assert asked == []  # watch() did not wait
    may_go_on.set()
    door.wait_for_kernels()
    assert asked == [(pretend_gpu.CUDA, [torch.bfloat16], True, world > 1)]
    watcher.remove()


def test_the_benchmark_notices_a_wrong_number(monkeypatch):
    from benchmarks import kernel

    right = kernel.measure

    def wrong(*args, backend, **kwargs):
        measurement = right(*args, backend=backend, **kwargs)
        if backend == "cuda":
            measurement.rows[0, 3] += 1
        return measurement

    monkeypatch.setattr(kernel, "measure", wrong)
    gradients = [torch.ones(5, device="cuda")] * 2
    with pytest.raises(AssertionError, match="not equal"):
        kernel.check(gradients, gradients)
