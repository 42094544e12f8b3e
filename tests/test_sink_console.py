"""The console sink: one line per snapshot, whole alerts, and no missing values."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from windows import window

from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import Sink
from wandb_gradwatch.sinks._base import ConsoleSink, summary_line


def test_one_line_per_snapshot_and_alerts_in_full() -> None:
    file = io.StringIO()
    sink = ConsoleSink(file)
    assert isinstance(sink, Sink)
    sink.write(window({"a": [3.0, 4.0], "b": [12.0]}, first_step=150))
    sink.alert(Alert("NaN gradient", "layer b\nsince step 7", step=7, level="ERROR"))
    sink.write(window({"a": [1.0]}, first_step=1).sample(0))
    sink.close()
    assert file.getvalue().splitlines() == [
        "step 150 (1 sample)  grad_norm 13  max 13  largest b 12  clip_ratio 0",
        "ERROR at step 7: NaN gradient",
        "    layer b",
        "    since step 7",
        "step 1 (1 sample)  grad_norm 1  max 1  largest a 1  clip_ratio 0",
    ]


def test_what_went_wrong_is_on_the_line() -> None:
    line = summary_line(
        window(
            {"a": [math.nan, 1e-7], "b": [math.inf]},
            {"a": [3e-8], "b": None},
            loss_scale=np.array([65536.0, 32768.0]),
            skipped=np.array([True, False]),
        )
    )
    assert line == (
        "step 2 (2 samples)  grad_norm 3e-8  max 1e-7  largest a 1e-7  NaN 1  Inf 1  clip_ratio 0  "
        "loss_scale 32768  skipped 1"
    )


def test_what_is_missing_is_left_out() -> None:
    assert summary_line(window({"a": None})) == "step 1 (1 sample)"


def test_without_a_file_it_is_the_standard_error_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink().write(window({"a": [1.0]}))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("step 1 (1 sample)  grad_norm 1")


def test_the_name_of_a_file_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"ConsoleSink\(file='log.txt'\) must be an open text file"):
        ConsoleSink("log.txt")  # type: ignore[arg-type]
