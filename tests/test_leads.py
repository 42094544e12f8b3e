"""Signals that precede a change of the loss: every fault has one, the control has none, and docs/ has the table."""

from __future__ import annotations

import pytest

from benchmarks.leads import BEGIN, CASES, END, PAGE, _moved, run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_the_signal_comes_before_the_loss_moves_and_the_control_has_none(case) -> None:
    found, control = run(case, 0, is_faulty=True), run(case, 0, is_faulty=False)
    assert found.signal is not None
    assert found.loss is not None
    assert case.faulty_from < found.signal < found.loss
    assert control.signal is None


def test_the_loss_has_moved_where_its_mean_is_twice_the_usual_one() -> None:
    # Ten of 1, then of 2.9: the mean of the last 10 is 1 + 0.19 n after n of them, above 2 at the sixth.
    assert _moved([1.0] * 100 + [2.9] * 20, 80) == 106
    assert _moved([1.0] * 120, 80) is None
    assert _moved([1.0] * 100 + [float("nan")] * 5, 80) == 101


def test_the_docs_have_a_row_of_every_training() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(BEGIN) : text.index(END)]
    for case in CASES:
        assert f"| {case.name} |" in table
