"""The flight recorder: bounded, exact, written completely or not at all, and it names where NaN began."""

from __future__ import annotations

import os

import numpy as np
import pytest
from grad_samples import of_norms, sample_of

from wandb_gradwatch._judgement.incident import Incident
from wandb_gradwatch._pipeline.recorder import MAX_NOTE_CHARACTERS, FlightRecorder
from wandb_gradwatch._pipeline.recording import load_recording
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.snapshot import Snapshot

NAN = float("nan")


def same(left: Snapshot, right: Snapshot) -> bool:
    """Compare bit by bit, including NaN."""
    arrays = ("steps", "rows", "loss_scale", "skipped")
    equal = all(np.array_equal(getattr(left, a), getattr(right, a), equal_nan=a != "skipped") for a in arrays)
    histograms = (left.histogram is None) == (right.histogram is None) and (
        left.histogram is None or np.array_equal(left.histogram, right.histogram)
    )
    return equal and histograms and left.names == right.names and left.histogram_steps == right.histogram_steps


def test_the_newest_samples_are_kept_however_they_arrive():
    recorder = FlightRecorder(max_samples=5)
    assert recorder.history() is None
    recorder.add(of_norms(range(1, 4)))
    recorder.add(of_norms(range(4, 13), start=4))  # more than fit at once
    recorder.add(of_norms([13], start=13))
    history = recorder.history()
    assert history.steps.tolist() == [9, 10, 11, 12, 13]
    assert history.total_grad_norm.tolist() == [9, 10, 11, 12, 13]


def test_memory_is_bounded_however_many_samples_arrive_at_once():
    recorder = FlightRecorder(max_samples=8)
    for size in (1, 16, 3, 5, 2, 1, 40, 1, 1):
        recorder.add(of_norms([1.0] * size))
        held = [kept["rows"] if kept["rows"].base is None else kept["rows"].base for kept in recorder._batches]
        assert sum(map(len, held[1:])) < 8
        assert len(held[0]) <= 8
        assert not any("overview" in kept for kept in recorder._batches)  # what the rules have derived


def test_a_parameter_that_appears_later_is_missing_before_and_one_that_left_after():
    recorder = FlightRecorder()
    recorder.add(sample_of({"a": [3.0], "b": [4.0]}, step=1))
    recorder.add(sample_of({"a": [3.0], "c": [5.0]}, step=2, histogram=True))
    history = recorder.history()
    assert history.names == ("a", "b", "c")
    np.testing.assert_array_equal(history.grad_norm, [[3, 4, NAN], [3, NAN, 5]])
    assert history.histogram.sum(axis=1).tolist() == [1, 0, 1]  # the newest sample's one element of a and of c
    assert history.histogram_steps == (2,)


def test_only_the_newest_histogram_is_kept():
    recorder = FlightRecorder()
    for step in (1, 2, 3):
        recorder.add(sample_of({"a": [float(step)] * step}, step=step, histogram=step < 3))
    assert recorder.history().histogram.sum() == 2
    assert recorder.history().histogram_steps == (2,)


def test_a_file_gives_back_every_bit_the_notes_and_the_alerts(tmp_path):
    recorder = FlightRecorder()
    recorder.add(sample_of({"a.w": [1 / 3, NAN], "b": None}, step=7, loss_scale=1024.0, skipped=True))
    recorder.add(sample_of({"a.w": [1e-30, 0.0], "b": [np.inf]}, step=8, histogram=True))
    recorder.note(8, batch=12, file="shard-3", weights=[1, 2])
    recorder.note(8, lr=0.1)
    recorder.alert(Alert("NaN gradient", "text — with a dash", 7, "ERROR"))
    recorder.incidents = (Incident("nan_gradient", "NaN gradient", "ERROR", 7, 7, 8, "a fact", recovered_step=8),)
    path = recorder.write(tmp_path / "run" / "flight")
    assert path == tmp_path / "run" / "flight.npz"
    recording = load_recording(path)
    assert same(recording.snapshot, recorder.history())
    assert recording.notes == {8: {"batch": 12, "file": "shard-3", "weights": "[1, 2]", "lr": 0.1}}
    assert recording.alerts == [Alert("NaN gradient", "text — with a dash", 7, "ERROR")]
    assert recording.incidents == recorder.incidents
    assert os.listdir(path.parent) == ["flight.npz"]  # no temporary file is left


def test_metrics_travel_along(tmp_path):
    sample = sample_of({"a": [1.0]})
    recorder = FlightRecorder()
    recorder.add(Snapshot(sample.steps, sample.names, sample.rows, metrics={"gradwatch/x": np.array([2.5])}))
    assert load_recording(recorder.write(tmp_path / "f")).snapshot.metrics["gradwatch/x"].tolist() == [2.5]


def test_an_empty_recorder_writes_a_file_too(tmp_path):
    recording = load_recording(FlightRecorder().write(tmp_path / "f.npz"))
    assert (recording.snapshot, recording.notes, recording.alerts) == (None, {}, [])


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    recorder = FlightRecorder()
    recorder.add(of_norms([1.0]))
    path = recorder.write(tmp_path / "f.npz")
    recorder.add(of_norms([2.0], start=2))

    def full_disk(file, **arrays):
        file.write(b"half of it")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", full_disk)
        with pytest.raises(OSError, match="No space left"):
            recorder.write(path)
    assert load_recording(path).snapshot.steps.tolist() == [1]
    assert os.listdir(tmp_path) == ["f.npz"]


def test_what_is_no_recording_is_said_to_be_none(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(ValueError, match=r"x\.npz' is not a flight recorder's file"):
        load_recording(tmp_path / "x.npz")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    with pytest.raises(ValueError, match=r"is not a flight recorder's file: it has no 'words'"):
        load_recording(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="there is no such file"):
        load_recording(tmp_path / "absent.npz")


def test_notes_are_small_and_few():
    recorder = FlightRecorder(max_samples=3)
    for step in range(10):
        recorder.note(step, text="x" * 3000, step=step, nothing=None, bad=NAN, flag=True)
    assert list(recorder.notes) == [7, 8, 9]
    note = recorder.notes[9]
    assert len(note["text"]) == MAX_NOTE_CHARACTERS
    assert (note["step"], note["nothing"], note["bad"], note["flag"]) == (9, None, "nan", True)


def test_the_table_is_newest_first_bounded_by_whole_samples_and_has_none_for_missing():
    recorder = FlightRecorder()
    for step in range(1, 11):
        recorder.add(sample_of({"a": [3.0, 4.0], "b": None if step == 10 else [1.0]}, step=step))
    columns, rows = recorder.table(max_rows=4)
    assert columns[:3] == ["step", "name", "grad_norm"]
    assert [row[:3] for row in rows] == [[10, "a", 5.0], [9, "a", 5.0], [9, "b", 1.0]]  # step 8 would make 5 rows
    assert rows[0][columns.index("param_norm")] is None
    assert all(type(value) in (int, float, str, bool, type(None)) for row in rows for value in row)


def test_of_a_sample_too_large_for_the_table_the_worst_layers_stay():
    recorder = FlightRecorder()
    recorder.add(sample_of({"small": [1.0], "nan": [NAN], "large": [9.0], "middle": [5.0]}))
    _, rows = recorder.table(max_rows=2)
    assert [row[1] for row in rows] == ["nan", "large"]
