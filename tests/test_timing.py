"""Device time is measured with events that are queried and never waited for."""

from __future__ import annotations

import pytest
import torch

from wandb_gradwatch._capture.measurer import _MAX_UNREAD, DeviceTimer, device_lag
from wandb_gradwatch._runtime.error_boundary import ErrorBoundary

CUDA, OTHER, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


class Device:
    """A device whose clock is set by the test, and which has got as far as the test says."""

    def __init__(self) -> None:
        self.queued_at = 0.0  # milliseconds: when what is queued now will run
        self.now = 0.0
        self.num_events = 0

    def event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: object = None) -> None:
        assert getattr(stream, "device", stream) in (CUDA, OTHER), "recorded on another stream than the current one"
        self.at = self.device.queued_at

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "torch raises here: the device has not got there"
        return end.at - self.at

    def synchronize(self) -> None:
        raise AssertionError("the host waited")


def timer_of(device: Device) -> DeviceTimer:
    return DeviceTimer(device.event, lambda where: where)


class Stream:
    device = CUDA


def test_the_hosts_time_counts_only_if_the_device_has_waited_for_it() -> None:
    device, boundary = Device(), ErrorBoundary(lambda error: None)
    boundary.lag = device_lag(device.event, Stream)
    device.queued_at, device.now = 5, 4  # the device still works on what was queued before
    boundary.run(lambda: boundary.run(lambda: None))
    assert boundary.seconds_spent == 0

    def finish() -> None:
        assert boundary.is_hidden()
        device.now = 5
        assert not boundary.is_hidden()

    boundary.run(finish)
    assert boundary.seconds_spent > 0
    assert device.num_events == 1  # events are used again


def test_an_error_of_the_device_does_not_leave_the_monitor() -> None:
    def is_busy() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    reported: list[Exception] = []
    boundary = ErrorBoundary(reported.append)
    boundary.lag = lambda: is_busy
    assert boundary.run(lambda: 1) is None
    assert [str(error) for error in reported] == ["CUDA error: device-side assert triggered"]
    assert boundary.stopped


def work(timer: DeviceTimer, device: Device, milliseconds: float, where: torch.device = CUDA) -> None:
    with timer.on(where):
        device.queued_at += milliseconds


def test_what_the_device_has_done_is_added_up_and_the_rest_later() -> None:
    device = Device()
    timer = timer_of(device)
    work(timer, device, 3)
    work(timer, device, 5)
    assert timer.seconds() == 0
    device.now = 3
    assert timer.seconds() == pytest.approx(0.003)
    device.now = 8
    assert timer.seconds() == pytest.approx(0.008)
    assert timer.seconds() == pytest.approx(0.008)


def test_events_are_used_again() -> None:
    device = Device()
    timer = timer_of(device)
    for _ in range(10):
        work(timer, device, 1)
        device.now = device.queued_at
        timer.seconds()
    assert device.num_events == 2


def test_a_device_that_never_gets_there_costs_a_bounded_number_of_events() -> None:
    device = Device()
    timer = timer_of(device)
    for _ in range(_MAX_UNREAD + 100):
        work(timer, device, 1)
    assert timer.seconds() == 0
    assert device.num_events == 2 * _MAX_UNREAD


def test_devices_work_side_by_side_and_the_cpu_has_no_events() -> None:
    device = Device()
    timer = timer_of(device)
    for where, milliseconds in ((CUDA, 3), (OTHER, 4), (CPU, 100)):
        work(timer, device, milliseconds, where)
    device.now = device.queued_at
    assert timer.seconds() == pytest.approx(0.004)
