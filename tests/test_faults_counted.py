"""A small `python -m benchmarks.faults`: it counts the rows that arrived, and would count a missing row."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults import BrokenSink, TroubledServer, counted, offline, server_in_trouble
from benchmarks.rows import Tally


def test_rows_that_met_trouble_are_counted_once() -> None:
    seen = server_in_trouble("500", 2, 20)
    assert seen.faults == 2
    assert (seen.ours, seen.users) == (Tally(4, 4, 0, 0), Tally(20, 20, 0, 0))
    assert seen.messages == 0


def test_a_sink_in_trouble_costs_one_message_and_no_row() -> None:
    seen = offline("a sink raises", 20, 1, sinks=[BrokenSink()])
    assert (seen.ours, seen.users, seen.messages) == (Tally(4, 4, 0, 0), Tally(20, 20, 0, 0), 1)


def row(number: int, **ours: Any) -> dict[str, Any]:
    return {"_step": number, "loss": float(number)} | {f"gradwatch/{name}": value for name, value in ours.items()}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(4, step=5, grad_norm=5.0), row(9, step=10, grad_norm=5.0)], (2, 2, 0, 0)),
        ([row(4, step=5, grad_norm=5.0)], (2, 1, 1, 0)),
        ([row(4, step=5, grad_norm=5.0), row(9, step=5, grad_norm=5.0)], (2, 2, 1, 1)),
        ([row(4, step=5, grad_norm=5.0), row(9, step=10, grad_norm=4.0)], (2, 1, 1, 0)),  # a wrong number
    ],
)
def test_lost_doubled_and_wrong_rows_are_counted(rows: list[dict[str, Any]], expected: tuple[int, ...]) -> None:
    assert counted(rows, 10)[0] == expected


def test_the_server_makes_as_much_trouble_as_was_asked_for() -> None:
    server = TroubledServer("drop", 2)
    assert [server.trouble_for("file_stream") for _ in range(6)] == ["drop", None, "drop", None, None, None]
    assert server.injected == 2
