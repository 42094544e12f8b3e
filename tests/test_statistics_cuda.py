"""The CUDA backend: its kernels (kernel_suite.py, in a separate process), its address table, and its selection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from mutate_kernel import FAULTS

from wandb_gradwatch._measure import events
from wandb_gradwatch._measure import measure as door
from wandb_gradwatch._measure.columns import Column
from wandb_gradwatch._measure.cuda_plan import AddressTable


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_equal_the_reference() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    suite = Path(__file__).with_name("kernel_suite.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(suite)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


def test_every_fault_that_can_be_planted_has_its_place() -> None:
    """mutate_kernel.py runs by hand only: without this test its faults could silently stop matching the code."""
    folder = Path(door.__file__).parent
    places = {fault: (folder / fault.file).read_text().count(fault.right) for fault in FAULTS}
    assert [fault.name for fault, number in places.items() if number != fault.occurrences] == []


def test_a_table_is_uploaded_only_when_an_address_changed() -> None:
    table = AddressTable(2, torch.device("cpu"))
    assert table.write([1, 2])
    assert not table.write([1, 2])
    assert table.write([1, 3])
    assert table.device_table.tolist() == [1, 3]


def test_pinned_memory_in_flight_is_never_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeEvent:
        made: ClassVar[list[FakeEvent]] = []

        def __init__(self) -> None:
            self.in_flight = False
            self.made.append(self)

        def query(self) -> bool:
            return not self.in_flight

        def record(self, stream: object) -> None:
            assert not self.in_flight, "the device has not read this yet"
            self.in_flight = True

    empty = torch.empty
    monkeypatch.setattr("wandb_gradwatch._measure.cuda_plan.Event", FakeEvent)
    monkeypatch.setattr(torch, "empty", lambda size, *, pin_memory, **kwargs: empty(size, **kwargs))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    table = AddressTable(1, torch.device("cpu"))
    for address in range(3):  # the host runs ahead of the device
        table._upload(torch.tensor([address]))
    assert len(FakeEvent.made) == 3
    FakeEvent.made[0].in_flight = False
    table._upload(torch.tensor([3]))
    assert len(FakeEvent.made) == 3
    table._upload(torch.tensor([4]))
    assert len(FakeEvent.made) == 4
    assert table.device_table.tolist() == [4]


def test_an_event_is_asked_while_captures_of_other_threads_forbid_this_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes, asked_in = [0], []  # the thread's capture mode in the driver: 0 is global

    def exchange(reference: Any) -> int:
        mode = reference._obj
        mode.value, modes[0] = modes[0], mode.value
        return 0

    class FakeEvent:
        def __init__(self, **_: object) -> None:
            pass

        def query(self) -> bool:
            asked_in.append(modes[0])
            raise RuntimeError("device is lost")

        synchronize = query

    monkeypatch.setattr(events, "exchange_capture_mode", lambda: exchange)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    event = events.Event()
    for ask in (event.query, event.synchronize):
        with pytest.raises(RuntimeError, match="device is lost"):
            ask()
        assert modes == [0]
    assert asked_in == [2, 2]  # 2 is relaxed


def test_the_cuda_backend_refuses_other_devices_by_name() -> None:
    message = "backend='cuda' needs CUDA gradients, but 'head.weight' is on cpu; use backend='auto'"
    with pytest.raises(RuntimeError, match=message):
        door.resolve_backend("cuda", torch.device("cpu"), "head.weight")


def test_auto_uses_triton_where_it_is_installed_and_the_cuda_backend_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(door, "_triton_is_installed", lambda: True)
    assert door.resolve_backend("auto", cuda, "w") == "cuda"
    monkeypatch.setattr(door, "_triton_is_installed", lambda: False)
    assert door.resolve_backend("auto", cuda, "w") == "torch"
    with pytest.raises(RuntimeError, match="backend='cuda' needs Triton, which is not installed; pip install triton"):
        door.resolve_backend("cuda", cuda, "w")


def test_auto_goes_on_without_triton_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    cuda_launch = pytest.importorskip("wandb_gradwatch._measure.cuda_launch", reason="Triton is not installed")

    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("no such architecture")

    monkeypatch.setattr(cuda_launch, "measure", broken)
    monkeypatch.setattr(door, "_triton_failed", [])
    monkeypatch.setattr(door, "_best_backend", lambda device: "torch" if door._triton_failed else "cuda")
    for _ in range(2):
        assert door.measure([torch.ones(3)], None).rows[0, Column.GRAD_SUM] == 3
    messages = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert len(messages) == 1
    assert "no such architecture" in messages[0]
    assert "backend='torch' from now on" in messages[0]


def test_memory_that_is_full_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_launch = pytest.importorskip("wandb_gradwatch._measure.cuda_launch", reason="Triton is not installed")

    def full(*args: object, **kwargs: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_launch, "measure", full)
    monkeypatch.setattr(door, "_triton_failed", [])
    monkeypatch.setattr(door, "_best_backend", lambda device: "cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        door.measure([torch.ones(3)], None)
    assert door._triton_failed == []


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), "install gcc"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "Python's headers, as in python3-dev"),
        (ValueError("no such architecture"), "ValueError('no such architecture')"),
    ],
)
def test_what_the_compiler_of_kernels_lacks_is_named(failure: Exception, why: str) -> None:
    assert why in door.why_not(failure)
