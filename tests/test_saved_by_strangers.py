"""A recording or a saved state from a stranger: a ValueError that names the place, and nothing is changed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grad_samples import sample_of
from numpy.lib import format as npy

from wandb_gradwatch import MemorySink, SkipGuard, Watcher, load_recording, watch
from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch._pipeline import recording
from wandb_gradwatch._pipeline.recorder import FlightRecorder
from wandb_gradwatch.metrics import NoiseScale
from wandb_gradwatch.rules import Alert, Judgement


def arrays() -> dict[str, Any]:
    """What a recorder writes, ready to be spoiled."""
    recorder = FlightRecorder()
    recorder.add(sample_of({"a": [1.0], "b": [2.0]}, step=1, histogram=True))
    recorder.note(1, batch=7)
    recorder.alert(Alert("A title", "text", 1))
    return recorder._arrays()


def words(**changed: Any) -> np.ndarray:
    return np.array(json.dumps(json.loads(str(arrays()["words"])) | changed))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("created",)


SPOILED: dict[str, tuple[str, Any]] = {
    "pickle": ("words", np.array([Evil()], dtype=object)),
    "no json": ("words", np.array("{")),
    "list": ("words", np.array("[1]")),
    "deep": ("words", np.array('{"format":' + "[" * 100_000)),
    "format": ("words", words(format=1)),
    "incidents": ("words", words(incidents=None)),
    "odd incident": ("words", words(incidents=[{"kind": "a"}])),
    "no notes": ("words", words(notes=None)),
    "odd notes": ("words", words(notes=[["x", {}]])),
    "odd note": ("words", words(notes=[[1, {"a": []}]])),
    "pairs": ("words", words(notes=[[1]])),
    "odd alert": ("words", words(alerts=[{"evil": 1}])),
    "no alert": ("words", words(alerts=[1])),
    "title": ("words", words(alerts=[{"title": "", "text": "", "step": 1, "level": "WARN"}])),
    "level": ("words", words(alerts=[{"title": "a", "text": "", "step": 1, "level": "x"}])),
    "step": ("words", words(alerts=[{"title": "a", "text": "", "step": "1", "level": "WARN"}])),
    "rows": ("rows", np.zeros((1, 2, 3))),
    "kind": ("rows", np.zeros((1, 2, 15), dtype=np.int64)),
    "names": ("names", np.arange(2)),
    "steps": ("steps", np.array([0.5])),
    "skipped": ("skipped", np.zeros(1)),
    "trainable": ("trainable", np.ones((1, 2), dtype=bool)),
    "metric": ("metric/x", np.zeros(2)),
    "fact": ("fact/grad_cosine", np.zeros(2)),
    "unknown fact": ("fact/other", np.zeros((1, 2))),
    "histogram": ("histogram", np.zeros((2, 3), dtype=np.int64)),
    "unknown": ("other", np.zeros(1)),
    "missing": ("loss_scale", None),
    "no words": ("words", None),
}


@pytest.mark.parametrize(("key", "value"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_recording_is_a_value_error(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spoiled = {name: array for name, array in (arrays() | {key: value}).items() if array is not None}
    np.savez("spoiled.npz", **spoiled)
    with pytest.raises(ValueError, match=r"'spoiled\.npz' is not a flight recorder's file: "):
        load_recording("spoiled.npz")
    assert os.listdir() == ["spoiled.npz"]


def test_truncated_and_flipped_recordings_are_value_errors_or_whole(tmp_path: Path) -> None:
    path, chance = tmp_path / "f.npz", random.Random(0)
    np.savez_compressed(path, **arrays())
    whole, num_refused = path.read_bytes(), 0
    for number in range(200):
        data = bytearray(whole[: chance.randrange(len(whole))] if number % 2 else whole)
        for _ in range(chance.randrange(1, 4)):
            if data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            load_recording(path)
        except ValueError:
            num_refused += 1
    assert num_refused > 150


def zipped(path: Path, key: str, shape: tuple[int, ...], descr: str, size: int) -> None:
    """Write an array that claims this shape and has this many bytes of zeros, next to sound ones."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, array in arrays().items():
            if name != key:
                with file.open(f"{name}.npy", "w") as member:
                    npy.write_array(member, np.asanyarray(array))
        with file.open(f"{key}.npy", "w", force_zip64=True) as member:
            npy.write_array_header_1_0(member, {"descr": descr, "fortran_order": False, "shape": shape})
            for _ in range(size // 2**20):
                member.write(bytes(2**20))


BOMBS: dict[str, tuple[str, tuple[int, ...], str, int]] = {
    "bytes as words": ("words", (2**26,), "|u1", 2**26),
    "a long text": ("words", (), f"<U{2**25}", 2**27),
    "a size that is not there": ("rows", (1, 2, 15), "<f8", 2**20),
    "a claim of 8 TB": ("words", (10**12,), "<f8", 0),
    "a metric": ("metric/x", (2**23,), "<f8", 2**26),
}


@pytest.mark.parametrize(("key", "shape", "descr", "size"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_it_is_decompressed(
    key: str, shape: tuple[int, ...], descr: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped(tmp_path / "bomb.npz", key, shape, descr, size)
    monkeypatch.setattr(npy, "read_array", lambda *_, **__: pytest.fail("it was decompressed"))
    with pytest.raises(ValueError, match="is not a flight recorder's file"):
        load_recording(tmp_path / "bomb.npz")


def test_consistent_arrays_that_are_too_large_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "f.npz", **arrays())
    monkeypatch.setattr(recording, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="its arrays would take"):
        load_recording(tmp_path / "f.npz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_path_that_is_no_file_is_a_value_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "raw").write_bytes(pickle.dumps(Evil()))
    for path in (tmp_path, tmp_path / "absent", tmp_path / "fifo", tmp_path / "raw"):
        with pytest.raises(ValueError, match="is not a flight recorder's file"):
            load_recording(path)


def test_a_note_whose_repr_raises_is_kept_by_its_type() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("of the user")

    recorder = FlightRecorder()
    recorder.note(1, batch=Bad())
    assert recorder.notes == {1: {"batch": "Bad without repr(): RuntimeError"}}


def trained(num_steps: int) -> Watcher:
    model = torch.nn.Linear(2, 1)
    options: dict[str, Any] = {"guard": SkipGuard(), "metrics": [NoiseScale(batch_size=4)]}
    options["rules"] = [Judgement()]
    watcher = watch(model, sinks=[MemorySink()], sample_every=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return watcher


def plain(state: Any) -> Any:
    """A state whose parts can be compared: tensors as lists, NaN as text, and no ages of alerts, which grow."""
    if isinstance(state, torch.Tensor):
        return plain(state.tolist())
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items() if key != "sent_at"}
    if isinstance(state, list | tuple):
        return list(map(plain, state))
    return str(state)


def spoil_everywhere(state: Any, apply: Callable[[Any], None]) -> int:
    """Call `apply` with copies of the state in each of which one value, at any depth, is of another kind."""
    odd = (None, "x", [[1]], {"a": 1}, -1)
    num = 0

    def visit(part: Any, put: Callable[[Any], Any]) -> None:
        nonlocal num
        for value in odd:
            apply(put(value))
            num += 1
        keys = part.keys() if isinstance(part, dict) else range(min(len(part), 1)) if isinstance(part, list) else ()
        for key in keys if part is not state["alert_manager"]["rules"] else ():  # rules check theirs themselves
            visit(part[key], lambda value, key=key: put(_with(part, key, value)))

    for key in state:
        visit(state[key], lambda value, key=key: _with(state, key, value))
    return num


def _with(part: Any, key: Any, value: Any) -> Any:
    changed = copy.copy(part)
    changed[key] = value
    return changed


def test_a_state_with_any_odd_value_is_loaded_whole_or_refused_whole(caplog: pytest.LogCaptureFixture) -> None:
    saved, watcher = trained(12).state_dict(), trained(3)
    watcher.flush()
    untouched, num_refused = watcher.state_dict(), 0

    def load(state: Any) -> None:
        nonlocal num_refused
        try:
            watcher.load_state_dict(state)
        except ValueError:
            num_refused += 1
            assert plain(watcher.state_dict()) == plain(untouched)
        else:
            watcher.load_state_dict(untouched)

    num = spoil_everywhere(saved, load)
    assert num > 100
    assert num_refused > num / 4  # a rule that cannot load its state begins without it, and some values are only odd
    watcher.load_state_dict(saved)
    assert plain(watcher.state_dict()) == plain(saved)


def test_the_message_names_the_key() -> None:
    watcher = trained(1)
    state = watcher.state_dict()
    state["sampler"]["num_samples"] = "many"
    with pytest.raises(ValueError, match=r"'sampler': 'num_samples' does not fit: 'many'"):
        watcher.load_state_dict(state)


def of_another_version(rows: Any, columns: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns as a version would have saved them that lacked one column and had another."""
    kept = [place for place, name in enumerate(columns) if name != "GRAD_MAX"]
    theirs = np.concatenate([np.asarray(rows)[..., kept], np.asarray(rows)[..., :1]], axis=-1)
    return theirs, np.array([*np.asarray(columns)[kept], "GRAD_SUM_OF_ANOTHER_KIND"])


def test_a_recording_of_other_statistics_is_read_and_those_that_it_lacks_are_missing(tmp_path: Path) -> None:
    saved = arrays()
    rows, columns = of_another_version(saved["rows"], saved["columns"])
    np.savez(tmp_path / "f.npz", **(saved | {"rows": rows, "columns": columns}))
    snapshot = load_recording(tmp_path / "f.npz").snapshot
    assert snapshot is not None
    assert snapshot.grad_norm.tolist() == [[1.0, 2.0]]
    assert snapshot.grad_min.tolist() == [[1.0, 2.0]]
    assert np.isnan(snapshot.grad_max).all()


def with_open_window() -> tuple[torch.nn.Module, Watcher]:
    """A model and its watcher, which has measured three steps that are not flushed."""
    model = torch.nn.Linear(2, 1)
    watcher = watch(model, sinks=[MemorySink()], sample_every=1, log_every=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, watcher


def test_a_state_of_other_statistics_is_continued_and_those_that_it_lacks_are_missing() -> None:
    _model, watcher = with_open_window()
    state = watcher.state_dict()
    assert len(state["samples"]) == 3
    before = state["columns"]
    for sample in state["samples"]:
        rows, columns = of_another_version(sample["rows"], before)
        sample["rows"], state["columns"] = torch.from_numpy(rows), columns.tolist()
    watcher.load_state_dict(state)
    snapshot = watcher.flush()
    assert snapshot is not None
    # Gradients of the weights are 1 and 1, that of the bias is 1: the norm is sqrt(3).
    np.testing.assert_allclose(snapshot.total_grad_norm, [3**0.5] * 3)
    assert np.isnan(snapshot.grad_max).all()


def test_a_state_of_another_form_is_refused_with_its_version() -> None:
    watcher = trained(1)
    with pytest.raises(ValueError, match="but its version is 2, and this one reads version 1"):
        watcher.load_state_dict(watcher.state_dict() | {"version": 2})


def test_rows_that_do_not_fit_the_names_of_their_columns_are_refused() -> None:
    _model, watcher = with_open_window()
    with pytest.raises(ValueError, match=f"its rows have {NUM_COLUMNS} columns, and 'columns' names 1"):
        watcher.load_state_dict(watcher.state_dict() | {"columns": ["NUM_ELEMENTS"]})
