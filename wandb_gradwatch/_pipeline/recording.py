"""Reads a flight recorder's file, which may come from a stranger: sizes are checked before anything is decompressed."""

import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from .._judgement.incident import Incident
from .._measure.columns import NUM_BINS, arranged
from ..rules import Alert
from ..snapshot import Snapshot, keys
from .recorder import ARRAYS, FORMAT, OF_PARAMETERS, Note

# S samples, P watched parameters, C columns, B histogram bins

MAX_BYTES: Final = 2**31  # of all arrays, decompressed; 256 samples of 45,000 parameters have fewer
MAX_CHARACTERS: Final = 2**24  # of all notes and alerts
_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """The contents of a flight recorder's file.

    Args:
        snapshot: the samples; None if there are none.
        notes: by step.
        alerts: the newest ones, oldest first.
        incidents: all of the run, as they were known when the file was written.
    """

    snapshot: Snapshot | None
    notes: dict[int, Note]
    alerts: list[Alert]
    incidents: tuple[Incident, ...]


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a flight recorder's file: the one in the run's folder, or a path that `watcher.record()` returned.

    Reading runs no code, and takes no more than 2 GiB of memory whatever the file claims. Statistics that the version
    that wrote the file did not have are missing.

    Raises:
        ValueError: the file cannot be read, is not a flight recorder's file, or has another format version.
    """
    try:
        if not os.path.isfile(path):  # opening a FIFO would wait for its writer
            raise ValueError("there is no such file")
        with zipfile.ZipFile(path) as file:
            return _recording(file)
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds of exceptions for damaged files
        raise ValueError(f"{os.fspath(path)!r} is not a flight recorder's file: {error}") from error


def _recording(file: zipfile.ZipFile) -> Recording:
    members = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
    _check_headers({key: _header(file, info) for key, info in members.items()})
    words = json.loads(str(_array(file, members["words"])))
    if not isinstance(words, dict) or words.get("format") != FORMAT:
        found = words.get("format") if isinstance(words, dict) else None
        raise ValueError(f"its format is {found!r:.20}; this version reads format {FORMAT}")
    arrays = {key: _array(file, info) for key, info in members.items() if key != "words"}
    snapshot = None
    if "steps" in arrays:
        arrays["rows"] = arranged(arrays["rows"], arrays.pop("columns").tolist())
        snapshot = Snapshot(
            names=tuple(arrays["names"].tolist()),
            histogram=arrays.get("histogram"),
            histogram_steps=tuple(arrays["histogram_steps"].tolist()) if "histogram" in arrays else (),
            **{name: arrays[name] for name in ARRAYS},  # type: ignore[arg-type]  # other arguments are not among these
            metrics={key.removeprefix("metric/"): arrays[key] for key in arrays if key.startswith("metric/")},
            per_parameter={
                name: arrays[OF_PARAMETERS + name] for name in keys.PARAMETER_FACTS if OF_PARAMETERS + name in arrays
            },
        )
    notes = {_is(int, step, "notes"): _note(note) for step, note in _pairs(words, "notes")}
    alerts, incidents = (_is(list, words.get(key), key) for key in ("alerts", "incidents"))
    return Recording(snapshot, notes, list(map(_alert, alerts)), tuple(map(Incident.from_dict, incidents)))


def _header(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[_Shape, np.dtype[Any]]:
    """Read an array's shape and type without the array; they must agree with the size that the file names."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename!r:.50} is compressed in another way")
    with file.open(info) as member:
        if npy.read_magic(member) != (1, 0):  # headers of other versions may have any length
            raise ValueError(f"{info.filename!r:.50} is not an array as this package writes it")
        shape, _, dtype = npy.read_array_header_1_0(member)
        size = member.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or size != info.file_size:
        raise ValueError(f"{info.filename!r:.50} is not an array of numbers or texts of the size that it claims")
    return shape, dtype


def _check_headers(headers: Mapping[str, tuple[_Shape, np.dtype[Any]]]) -> None:
    """Check the type and shape of every array by its name, and the size of all."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in headers.values())
    if size > MAX_BYTES:
        raise ValueError(f"its arrays would take {size / 2**30:.1f} GiB, and at most {MAX_BYTES / 2**30:.0f} are read")
    shapes = {key: shape for key, (shape, _) in headers.items()}
    num_samples, num_names, num_columns, num_histograms = (
        math.prod(shapes.get(key, ())) for key in ("steps", "names", "columns", "histogram_steps")
    )
    expected: dict[str, tuple[str, _Shape]] = {
        "words": ("U", ()),
        "columns": ("U", (num_columns,)),
        "steps": ("i", (num_samples,)),
        "names": ("U", (num_names,)),
        "rows": ("f", (num_samples, num_names, num_columns)),
        "loss_scale": ("f", (num_samples,)),
        "skipped": ("b", (num_samples,)),
        "trainable": ("b", (num_names,)),
        "histogram": ("i", (num_names, NUM_BINS)),
        "histogram_steps": ("i", (num_histograms,)),
    }
    expected |= {OF_PARAMETERS + name: ("f", (num_samples, num_names)) for name in keys.PARAMETER_FACTS}
    needed = {"words"} | ({*ARRAYS, "names", "columns"} if "steps" in headers else set())
    needed |= {"histogram_steps"} if "histogram" in headers else set()
    if missing := sorted(needed - headers.keys()):
        raise ValueError(f"it has no {missing[0]!r}")
    for key, (shape, dtype) in headers.items():
        kind, wanted = ("f", (num_samples,)) if key.startswith("metric/") else expected.get(key, ("", ()))
        if dtype.kind != kind or shape != wanted:
            raise ValueError(f"{key!r:.50} must be {wanted} of kind {kind!r}, but is {shape} of {dtype}")
    if headers["words"][1].itemsize > 4 * MAX_CHARACTERS:
        raise ValueError(f"'words' has more than {MAX_CHARACTERS} characters")


def _array(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with file.open(info) as member:
        return np.asarray(npy.read_array(member, allow_pickle=False))


def _pairs(words: Mapping[str, Any], key: str) -> Sequence[Sequence[Any]]:
    found: list[Any] = _is(list, words.get(key), key)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in found):
        raise ValueError(f"{key!r} must be pairs")
    return found


def _note(note: Any) -> Note:
    for key, value in _is(dict, note, "notes").items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise ValueError(f"the note {key!r:.50} must be a text or a number")
    return dict(note)


def _alert(alert: Any) -> Alert:
    told = _is(dict, alert, "alerts")
    title, text, level = (_is(str, told.get(key), f"alerts: {key}") for key in ("title", "text", "level"))
    incident = None if told.get("incident") is None else Incident.from_dict(told["incident"])
    return Alert(title, text, _is(int, told.get("step"), "alerts: step"), level, incident)


def _is(kind: type, value: Any, key: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key!r} must be of type {kind.__name__}, but is {value!r:.50}")
    return value
