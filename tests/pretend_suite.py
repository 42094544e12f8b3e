"""What the pretended GPU notices, and the window on it. Run by test_gpu_dry.py with `-p pretend_gpu`."""

from __future__ import annotations

import json

import numpy as np
import pretend_gpu
import pytest
import torch

from wandb_gradwatch.shipments import Sample
from wandb_gradwatch.statistics.columns import NUM_COLUMNS
from wandb_gradwatch.statistics.elements import onto
from wandb_gradwatch.statistics.measure import Measurement
from wandb_gradwatch.statistics.pages import upload
from wandb_gradwatch.statistics.table import AddressTable
from wandb_gradwatch.window import Window

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


def test_a_window_is_written_and_sent_without_a_wait():
    window = Window(keep_newest_histogram=False)
    window.resize(5)
    rows = torch.arange(3.0 * NUM_COLUMNS, device="cuda").double().view(3, NUM_COLUMNS)
    torch.cuda.synchronize()
    with pretend_gpu.no_waits():
        for step, slots in ((1, [0, 2, 4]), (2, [1, 2, 3])):
            window.write(slots, Measurement(rows.clone(), None))
            window.write_received(slots, rows[:, 6])
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


def test_the_benchmark_of_the_kernels_runs_and_writes_its_table(tmp_path):
    from benchmarks import kernel

    readme, results = tmp_path / "README.md", tmp_path / "results.json"
    readme.write_text(f"before\n{kernel.BEGIN}\n{kernel.END}\nafter\n")
    kernel.main(["--tiny", "--rounds", "1", "--dtypes", "bfloat16", "--json", str(results), "--readme", str(readme)])
    report = json.loads(results.read_text())
    assert [(result["model"], result["dtype"]) for result in report["results"]] == [("tiny", "bfloat16")]
    for result in report["results"]:
        assert result["candidates"]["copy"]["of_copy"] == 1
        assert all(candidate["gpu_ms"] > 0 for candidate in result["candidates"].values())
    assert report["added_time"]["gpu"] > 0
    assert report["added_time"]["host"] > 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "a pretended GPU" in text
    assert "| tiny, bfloat16 |" in text


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
