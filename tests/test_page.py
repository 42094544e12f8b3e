"""The local page: reading a run's file, packing the data into the page, and escaping texts of the run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import wandb
from fake_run import BROKEN, FROZEN, GPT_NAMES, INCIDENTS, fake_snapshots, write_fake_run
from hypothesis import given
from hypothesis import strategies as st
from wandb.proto.wandb_internal_pb2 import Record

from benchmarks.page import write_record
from wandb_gradwatch._analysis.forecast import FORMATS
from wandb_gradwatch._analysis.formatting import visible_text
from wandb_gradwatch._judgement.incident import Incident
from wandb_gradwatch._measure.columns import NUM_BINS, ZERO_BIN, Column, FloatArray, bins_of
from wandb_gradwatch._measure.probe_values import MetricHistogram
from wandb_gradwatch._page import packing, read
from wandb_gradwatch._page.columns import recorded_totals
from wandb_gradwatch._page.history import (
    MAX_KEY,
    HistogramSeries,
    OwnSeries,
    RecordedAlert,
    RecordedTable,
    RunHistory,
    Samples,
    natural_order,
)
from wandb_gradwatch._page.packing import (
    CODE_FIRST,
    CODE_INFINITE,
    CODE_MISSING,
    CODE_ZERO,
    Blob,
    HistogramCollector,
    OwnColumns,
    RowColumns,
    pack_histograms,
    pool,
    pool_extremes,
    pool_steps,
    pool_width,
    quantise,
)
from wandb_gradwatch._page.page import ASSETS, render_page, script_json, write_page
from wandb_gradwatch._page.payload import MAX_SETTING, build_payload, knots, settings_of, wandb_steps
from wandb_gradwatch._page.read import HEADER, RunReader, read_run
from wandb_gradwatch._page.redaction import HIDDEN
from wandb_gradwatch._page.step_axis import steps_between
from wandb_gradwatch.sinks._history_row import counted_histogram
from wandb_gradwatch.snapshot import keys

HOSTILE = "</script><script>window.hacked=1</script>\u202e&amp;"


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def history(run_directory: Path) -> RunHistory:
    return read_run(run_directory)


def small_history(**changes: object) -> RunHistory:
    values = {"gradwatch/grad_norm": np.array([1.0, 2.0]), "grad_norm/a": np.array([3.0, np.nan])}
    content = {"path": Path("run-x.wandb"), "run_id": "x", "steps": np.array([10, 20]), "values": values, "num_rows": 2}
    return RunHistory(**(content | changes))  # type: ignore[arg-type]


def read_rows(*rows: dict[str, object], path: Path = Path("run-x.wandb")) -> RunHistory:
    """Return the history of a run with these rows: dictionaries of keys and values."""
    reading = RunReader(path)
    for row in rows:
        reading.take_row(row)
    return reading.history()


def test_every_key_of_a_real_run_is_read_and_has_its_picture(history: RunHistory) -> None:
    assert set(keys.MODEL_KEYS) - {keys.LOSS} <= set(history.values)  # the run has a loss of its own
    assert all(map(keys.is_ours, history.values))
    assert list(history.own) == ["loss"]
    assert len(history.names) == len(GPT_NAMES)
    assert history.steps.tolist() == list(range(10, 401, 10))
    assert history.finished
    assert history.exit_code == 0
    assert history.notes == ()


def test_details_of_layers_are_series_of_the_layers_and_no_scalars_of_the_user() -> None:
    history = read_rows(*({"gradwatch/step": step, "grad_norm/a": 1.0, "grad_std/a": 0.5} for step in (10, 20)))
    assert not history.own
    [layers] = build_payload(history)[0]["grids"]
    zeros = ["dead_ratio", "num_nonfinite"]  # which the rows left out
    assert [metric["key"] for metric in layers["metrics"]] == ["grad_norm", *zeros, "grad_std"]


def test_a_value_that_was_not_logged_is_missing_and_never_zero(history: RunHistory) -> None:
    frozen = history.first_of("grad_norm/" + FROZEN.replace(".", "/"))
    # The layer is frozen before step 100, so that the windows that end at steps 10 to 90 have no gradient of it.
    assert np.isnan(frozen[:9]).all()
    assert (frozen[9:] > 0).all()


def test_the_page_has_the_verdict_and_the_incidents(history: RunHistory) -> None:
    assert history.incidents == INCIDENTS
    content = build_payload(history)[0]
    assert content["verdict"] == {"status": "error", "sentence": history.verdict.sentence}
    assert [Incident.from_dict(one["told"]) for one in content["incidents"]] == list(INCIDENTS)
    assert [(one["headline"], one["text"]) for one in content["incidents"]] == [
        (one.headline, one.text) for one in INCIDENTS
    ]


def test_an_alert_stands_at_the_last_row_before_it() -> None:
    reading = RunReader(Path("run-x.wandb"))
    reading.take_alert("early", "before any row", "INFO")
    reading.take_row({"gradwatch/step": 70, "gradwatch/grad_norm": 1.0})
    reading.take_alert("mine", "of step 12, says its text", "WARN")
    assert [alert.step for alert in reading.history().alerts] == [None, 70]


def test_rows_of_one_step_become_one_row_and_the_users_rows_are_left_out() -> None:
    of_step = {"gradwatch/step": 10}
    history = read_rows({"loss": 5.0}, {**of_step, "grad_norm/a": 1}, {**of_step, "grad_norm/b": np.inf})
    assert history.steps.tolist() == [10]
    assert [history.first_of(f"grad_norm/{name}").tolist() for name in history.names] == [[1.0], [np.inf]]
    assert history.num_rows == 3


def test_names_are_in_the_model_order_if_the_configuration_has_it_and_in_natural_order_otherwise() -> None:
    values = {f"grad_norm/{name}": np.ones(2) for name in ("layers/10/w", "layers/2/w", "embed", "head")}
    assert small_history(values=values).names == ["embed", "head", "layers/2/w", "layers/10/w"]
    told = {"gradwatch": {"names": ["embed", "layers.2.w", "layers.10.w", "head"]}}
    in_order = ["embed", "layers/2/w", "layers/10/w", "head"]
    assert small_history(values=values, config=told).names == in_order
    assert small_history(values=values, config=told).in_model_order
    assert not small_history(values=values).in_model_order


def test_the_order_of_a_healthy_run_is_in_its_own_file(tmp_path: Path) -> None:
    names = ("embed.weight", "blocks.1.weight", "blocks.0.weight")  # not in alphabetical order
    history = read_run(write_fake_run(tmp_path, names=names, num_flushes=2, alerts=(), with_table=False))
    assert history.in_model_order
    assert history.names == ["embed/weight", "blocks/1/weight", "blocks/0/weight"]
    assert history.config["lr"] == 3e-4


def test_modules_are_sorted_where_their_parameters_are() -> None:
    told = {"gradwatch": {"names": ["embed", "layers.2.w", "layers.10.fc.w", "head"]}}
    names = ("root", "head", "layers/10/act", "layers/10", "layers/2", "embed")
    history = small_history(values={f"activation/{name}/norm": np.ones(2) for name in names}, config=told)
    assert list(history.family("activation")) == ["embed", "layers/2", "layers/10", "layers/10/act", "head", "root"]


def test_keys_of_the_user_that_only_look_like_ours_remain_the_users() -> None:
    row = dict.fromkeys(("update/x", "activation", "parameter//x", "gradient/a/", "loss", "gradwatcher/x"), 1.0)
    media = {"table._type": "table-file", "table.nrows": 3, "_runtime": 1.5}
    assert set(read_rows({"_step": 9, "gradwatch/step": 10, **row, **media}).own) == set(row)


@pytest.mark.parametrize(
    ("placed", "own", "expected"),
    [
        # The user logs a row at every step from 0 on; our values are in the rows of steps 10 and 20.
        ([(9, 10), (19, 20)], [0, 9, 14, 19, 25], [1, 10, 15, 20, 26]),
        # The user logs a row at every fifth step: 10 optimizer steps correspond to 2 W&B steps.
        ([(1, 10), (3, 20)], [0, 1, 2, 3, 4], [5, 10, 15, 20, 25]),
        # Two models that log the same step; then a single row, which gives no rate; then no row.
        ([(4, 5), (5, 5), (9, 10)], [4, 5, 7, 9], [5, 5, 7.5, 10]),
        ([(9, 10)], [0, 20], [1, 21]),
        ([], [0, 20], [0, 20]),
    ],
)
def test_the_users_rows_stand_at_their_own_steps(
    placed: list[tuple[int, int]], own: list[int], expected: list[float]
) -> None:
    rows = {step: {"_step": step} for step in sorted({*dict(placed), *own})}
    for step, ours in placed:
        rows[step] |= {"gradwatch/step": ours, "gradwatch/grad_norm": 1}
    for step in own:
        rows[step] |= {"loss": step}
    loss = read_rows(*rows.values()).own["loss"]
    assert loss.values.tolist() == own
    assert loss.steps.tolist() == expected


def test_the_loss_of_a_row_that_carries_the_flight_recorder_is_kept_and_nan_is_no_gap() -> None:
    history = read_rows(
        {"_step": 0, "gradwatch/step": 1, "gradwatch/grad_norm": 1, "loss": 2.5},
        {"_step": 1, "gradwatch/step": 2, "gradwatch/flight_recorder.path": "t", "loss": np.nan},
    )
    assert history.steps.tolist() == [1]
    assert history.own["loss"].steps.tolist() == [1, 2]
    np.testing.assert_array_equal(history.own["loss"].values, [2.5, np.nan])


def test_a_long_loss_keeps_its_spike_its_dip_and_its_nan() -> None:
    steps = np.arange(1.0, 50_001)
    values = np.full(50_000, 2.0)
    values[30_000], values[10_000], values[40_000] = 197_486.0, 0.01, np.nan
    kept_steps, kept = pool_extremes(steps, values, 4000)
    assert len(kept_steps) == len(kept) <= 4000
    assert (np.diff(kept_steps) > 0).all()
    assert (np.nanmin(kept), np.nanmax(kept)) == (0.01, 197_486.0)
    assert np.abs(kept_steps[np.isnan(kept)] - 40_001).min() <= 25  # each kept point stands for 50000 / 2000 rows


def test_the_loss_and_the_learning_rate_come_first_then_values_that_change() -> None:
    changing, constant = np.array([1.0, 2.0]), np.ones(2)
    own = {
        key: OwnSeries(np.array([1.0, 2.0]), values)
        for key, values in [("a", constant), ("epoch_color", changing), ("lr-SGD", changing), ("train/loss", changing)]
    }
    content, _ = build_payload(small_history(own=own))
    items = content["own"]["items"]
    assert [item["key"] for item in items] == ["train/loss", "lr-SGD", "epoch_color", "a"]
    assert [item["role"] for item in items] == ["loss", "rate", "", ""]
    assert content["own"]["axes"] == [[1.0, 2.0]]  # shared by both keys


def test_a_group_is_sorted_where_its_first_parameter_is() -> None:
    values = {f"grad_norm/{name}": np.ones(2) for name in ("a", "b", "c/0")}
    told = {"gradwatch": {"names": ["c.0.weight", "c.0.bias", "b.weight", "a.weight"]}}
    assert small_history(values=values, config=told).names == ["c/0", "b", "a"]


@given(st.lists(st.integers(0, 10**6)), st.text(), st.text(st.characters(exclude_categories=["Nd", "No"])))
def test_natural_order_compares_numbers_in_any_names(numbers: list[int], before: str, after: str) -> None:
    before = before.rstrip("0123456789")
    names = [f"{before}{number}{after}" for number in numbers]
    assert sorted(names, key=natural_order) == [f"{before}{number}{after}" for number in sorted(numbers)]


def test_of_a_directory_of_runs_the_newest_is_read(run_directory: Path, tmp_path: Path) -> None:
    source = next(run_directory.glob("*.wandb"))
    for name, modified in (("old", 1_000), ("new", 2_000)):
        directory = tmp_path / "wandb" / f"offline-run-{name}"
        directory.mkdir(parents=True)
        shutil.copy(source, directory / f"run-{name}.wandb")
        os.utime(directory / f"run-{name}.wandb", (modified, modified))
    for path in (tmp_path, tmp_path / "wandb", tmp_path / "wandb" / "offline-run-new"):
        assert read_run(path).path.name == "run-new.wandb"


def test_a_run_that_is_still_being_written_is_read_to_its_end(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = next(run_directory.glob("*.wandb")).read_bytes()
    path = _write(tmp_path / "run-late.wandb", whole[: len(whole) // 2])
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: path.write_bytes(whole))
    monkeypatch.setattr(read, "time", clock)  # the rest is written in the first pause
    assert read.read_finished_run(path).finished
    path.write_bytes(whole[: len(whole) // 2])
    assert not read.read_finished_run(path, seconds=0.0).finished  # a run whose end is never written


@pytest.mark.parametrize("pieces", [2, 7, 300])
def test_a_file_that_grows_is_read_on_and_gives_what_reading_it_at_once_does(
    run_directory: Path, tmp_path: Path, pieces: int
) -> None:
    data = next(run_directory.glob("*.wandb")).read_bytes()
    growing = _write(tmp_path / "run-grows.wandb", b"")
    reader = RunReader(growing)
    num_records = []
    for piece in np.array_split(np.frombuffer(data, dtype=np.uint8), pieces):
        with growing.open("ab") as file:
            file.write(piece.tobytes())
        num_records.append(reader.read_on())
    assert reader.read_on() == 0
    assert sum(num_records) == RunReader(next(run_directory.glob("*.wandb"))).read_on()
    assert all(num_records) or pieces == 300  # a piece may end inside a record, and then completes none
    at_once, grown = read_run(run_directory), reader.history()
    assert grown.finished
    assert (grown.alerts, grown.config) == (at_once.alerts, at_once.config)
    np.testing.assert_equal(dict(grown.values) | {"": grown.steps}, dict(at_once.values) | {"": at_once.steps})
    assert (grown.times > 1.7e9).all()


@pytest.mark.parametrize(("names", "num_hidden"), [(("w", "w"), 2), (("w", "model1/w"), 0)])
def test_rows_that_a_later_training_in_the_same_run_hides_are_counted(names: tuple[str, str], num_hidden: int) -> None:
    reading = RunReader(Path("run-folds.wandb"))
    for fold, name in enumerate(names):  # two folds of a cross-validation, or two models that are watched side by side
        for step in (10, 20):
            reading.take_row({"_step": 20 * fold + step, "gradwatch/step": step, f"grad_norm/{name}": 1.0 + fold})
    hidden = [note for note in reading.history().notes if note.startswith("Rows whose steps later rows repeat")]
    assert len(hidden) == (num_hidden > 0)
    assert all(f"are not shown ({num_hidden})" in note for note in hidden)


def test_rows_of_a_run_that_is_too_long_are_merged_as_windows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_KEPT_CELLS", 20)  # 10 rows of 2 keys
    columns = RowColumns()
    for step in range(1, 101):
        columns.add(step, float(step), {"grad_norm_max/a": float(step % 10), "gradwatch/num_nan": 1.0})
    steps, times, values = columns.matrix()
    # At most 11 rows are kept of 100: each holds 16, and the last one the rest.
    assert columns.merged == 16
    assert steps.tolist() == times.tolist() == [16, 32, 48, 64, 80, 96, 100]
    assert values["gradwatch/num_nan"].tolist() == [16.0] * 6 + [4.0]
    assert values["grad_norm_max/a"].tolist() == [9.0] * 5 + [9.0, 9.0]


def test_the_users_scalars_share_their_limit_and_keep_their_spikes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of two keys may have 5,000 values; with the 5,001st it is reduced to 2,500 extremes.
    monkeypatch.setattr(packing, "MAX_OWN_VALUES", 10_000)
    columns = OwnColumns()
    for step in range(20_000):
        columns.add("a", step, 197_486.0 if step == 7_000 else 2.0)
        columns.add("b", step, np.nan if step == 13_000 else 1.0)
    found = dict(columns.arrays())
    for steps, values in found.values():
        assert len(steps) == len(values) <= 5_000
        assert (np.diff(steps) > 0).all()
    assert found["a"][1].max() == 197_486.0
    assert np.isnan(found["b"][1]).any()


@pytest.mark.parametrize(
    ("spoil", "note"),
    [
        (lambda data, middle: data[:middle], "no end record"),
        (lambda data, middle: data[:middle] + bytes(64) + data[middle + 64 :], "corrupt"),
        (lambda data, middle: data[:-16] + bytes(16), "truncated or damaged"),
        (lambda data, middle: b"", "no end record"),
    ],
    ids=["truncated", "damaged", "damaged at the end", "empty"],
)
def test_an_incomplete_file_gives_its_complete_rows_and_a_note(
    run_directory: Path, tmp_path: Path, spoil: Callable[[bytes, int], bytes], note: str
) -> None:
    data = next(run_directory.glob("*.wandb")).read_bytes()
    spoiled = _write(tmp_path / "run-x.wandb", spoil(data, len(data) // 2))
    history = read_run(spoiled)
    assert (0 < len(history.steps) <= 40) == (spoiled.stat().st_size > 0)
    assert len(history.steps) < 40 or note != "no end record"
    assert any(note in said for said in history.notes)
    assert note in render_page(history)


def test_a_run_that_is_still_going_on_can_be_read(tmp_path: Path) -> None:
    directory = write_fake_run(tmp_path, names=("a.weight",), num_flushes=3, finish=False)
    try:
        history = read_run(directory)
        assert not history.finished
        # wandb decides how much it has written; the file holds the beginning of the run.
        assert history.steps.tolist() == [10, 20, 30][: len(history.steps)]
        assert "no end record" in render_page(history)
    finally:
        wandb.finish()


def test_a_row_whose_record_is_cut_within_its_first_bytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    with path.open("wb") as file:
        file.write(HEADER)
        # Up to 8 bytes before the end of the first block: 7 for the header of a part, 1 for the first byte of the row.
        write_record(file, Record(output_raw={"line": "x" * 32738}).SerializeToString())
        assert file.tell() == 32768 - 8
        write_record(file, Record(num=300, history={"item": [{"key": "a", "value_json": "1"}]}).SerializeToString())
    assert read_run(path).num_rows == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nowhere", "there is no file or directory"),
        (lambda path: path, "holds no run.*JSONLSink's.*give the directory that wandb.init"),
        (lambda path: _write(path / "train.log", b"epoch 1"), "is not a run: give a W&B run's .wandb file"),
        (lambda path: _write(path / "run-x.wandb", b"this is some other file"), "cannot be read as a W&B run.*header"),
    ],
)
def test_a_path_that_is_no_run_is_explained_in_one_sentence(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_run(make(tmp_path))  # type: ignore[operator]


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_table_outside_the_runs_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    _write(tmp_path / "secret.json", b'{"columns": ["a"], "data": [[1]]}')
    history = read_rows({"gradwatch/flight_recorder.path": "../../secret.json"}, path=tmp_path / "run" / "run-x.wandb")
    assert history.flight_recorder is None
    assert "is not in the run's directory" in history.notes[-1]


def test_progress_counts_rows(run_directory: Path) -> None:
    assert read_rows(*({"gradwatch/step": step} for step in range(3))).num_rows == 3
    seen: list[int] = []
    read_run(run_directory, progress=seen.append)
    assert seen == []  # progress is called every 100 rows, and the run has 41


@pytest.mark.parametrize(
    ("steps", "values", "expected"),
    [
        ([1, 2, 3], [5.0, 6, 7], ([1, 2, 3], [5, 6, 7])),
        ([1, 2, 3, 4], [0.0, 0, 1, 1], ([1, 3], [0, 1])),  # the first step of every value
        ([1, 2, 3], [5.0, 4, 7], ([1, 3], [5, 7])),  # a clock that was set back
        ([2, 1, 2], [0.0, np.nan, 1], None),  # a single step makes no axis
        ([1, 2], [np.nan, np.nan], None),
        ([], [], None),
    ],
)
def test_an_axis_rises_with_the_steps(steps: list[int], values: list[float], expected: object) -> None:
    found = knots(np.array(steps, dtype=float), np.array(values))
    assert (found and tuple(part.tolist() for part in found)) == expected


def test_wandbs_own_step_is_told_where_it_counts_something_else() -> None:
    steps = np.array([10.0, 20])
    for placed, expected in (
        ([9.0, 19], None),  # W&B counts the same steps from 0
        ([3.0, 30], {"steps": [10.0, 20.0], "values": [3.0, 30.0]}),
    ):
        assert wandb_steps(small_history(wandb_steps=OwnSeries(steps, np.array(placed)))) == expected


def test_settings_and_commit_are_on_the_page_and_secrets_are_not() -> None:
    config = {"lr": 0.1, "optimizer": {"name": "adam"}, "wandb_api_key": "abcXYZ", "long": "x" * 1000}
    history = small_history(config=config | {"gradwatch": {"names": ["a"]}}, commit="0123abcd")
    assert settings_of(history) == [
        *(("long", "x" * (MAX_SETTING - 1) + "…"), ("lr", "0.1"), ("optimizer.name", "adam")),
        ("wandb_api_key", HIDDEN),
    ]
    page = render_page(history)
    assert "0123abcd" in page
    assert "abcXYZ" not in page


@pytest.mark.parametrize(("told", "expected"), [("18cbf5c1a69b", "18cbf5c1a69b"), ("<b>", ""), ("", "")])
def test_a_commit_is_read_if_it_can_be_one(told: str, expected: str, tmp_path: Path) -> None:
    record = Record()
    record.run.run_id, record.run.git.commit = "x", told
    with (tmp_path / "run-x.wandb").open("wb") as file:
        file.write(HEADER)
        write_record(file, record.SerializeToString())
    assert read_run(tmp_path).commit == expected


def test_the_norm_that_was_received_is_that_of_all_parameters_at_the_recorders_steps() -> None:
    # Of step 10 both parameters are recorded: sqrt(3² + 4²) before and sqrt(0.6² + 0.8²) after clipping. Of step 20 one
    # is: its norm is not the sample's.
    table = RecordedTable(
        ["step", "name", "grad_norm", "grad_norm_clipped"],
        [[20, "a", 3.0, 0.6], [10, "a", 3.0, 0.6], [10, "b", 4.0, 0.8]],
    )
    history = small_history(flight_recorder=table, listed=Samples(np.array([10, 20]), np.full(2, 5.0), np.zeros(2)))
    assert recorded_totals(history) == {10: pytest.approx(1.0)}


def test_histograms_of_our_rows_are_read_as_they_are(history: RunHistory) -> None:
    for name in (BROKEN, FROZEN):
        series, place = history.histograms[name.replace(".", "/")], GPT_NAMES.index(name)
        logged = [one for one in fake_snapshots() if one.histogram[place].any()]
        assert series.steps.tolist() == [one.steps[-1] for one in logged]
        np.testing.assert_array_equal(series.counts, [one.histogram[place] for one in logged])
        extremes = [one.rows[-1, place, [Column.GRAD_MIN, Column.GRAD_MAX]] for one in logged]
        np.testing.assert_allclose(np.stack([series.low, series.high], axis=1), extremes, rtol=1e-5)


_count = st.integers(0, 2**24)


@given(st.lists(_count | st.just(0), min_size=NUM_BINS, max_size=NUM_BINS), st.sampled_from([-1e-300, -3.5, -math.inf]))
def test_a_listed_histogram_is_the_one_that_was_logged(counts: list[int], low: float) -> None:
    counts[200] = 1  # an empty histogram is not logged
    entry = counted_histogram("gradients/a/b", MetricHistogram(np.array(counts), low, 2.0))
    collector = HistogramCollector()
    assert collector.add(7, json.loads(json.dumps([entry]), parse_int=float)) == 0
    (series,) = collector.series()[""].values()
    assert series.counts.tolist() == [counts]
    assert series.low.tolist() == [low] or (math.isnan(series.low[0]) and low == -math.inf)
    assert (series.steps.tolist(), series.high.tolist()) == ([7], [2.0])


@pytest.mark.parametrize(
    "entry",
    [
        *(None, 7, "gradients/a", {}, [], ["gradients/a"], ["gradients/a", 0.0, 1.0], [7, 0.0, 1.0, 5.0]),
        *(["loss", 0.0, 1.0, 5.0], ["gradients/" + "a" * MAX_KEY, 0.0, 1.0, 5.0]),
        *(["gradients/a", 0.0, 1.0, *odd] for odd in ([0.5], [None], ["x"], [[1.0]], [math.nan], [2.0**60])),
        *(["gradients/a", 0.0, 1.0, *far] for far in ([-257.0, 1.0], [-258.0], [1.0] * 258, [-1e300] * 9)),
    ],
)
def test_a_histogram_that_is_not_of_our_rows_is_left_out(entry: object) -> None:
    collector = HistogramCollector()
    assert collector.add(1, [entry, ["gradients/b", None, "x", 3.0]]) == 1
    assert collector.series()[""].keys() == {"b"}


def test_the_collector_stays_bounded_and_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_STORED", 10)
    collector = HistogramCollector()
    for step in range(100):
        collector.add(step, [["gradients/a", -1.0, 1.0, 5.0]])
    steps = collector.series()[""]["a"].steps
    assert len(steps) <= 10
    assert set(np.diff(steps)) == {16}  # halved until 100 fit into 10: every 16th is kept, beginning with the first


def test_histograms_are_packed_with_the_bins_that_are_filled() -> None:
    # Elements of 1.5 lie in the bin from 1.5 to 2, those of -1 in the one from 1 to 1.5; one bin is left below.
    counts = np.zeros((1, NUM_BINS))
    counts[0, bins_of(np.array([-1.0, 0.0, 1.5]))] = [25, 50, 25]
    series = HistogramSeries(np.array([20]), np.array([-1.0]), np.array([1.5]), counts)
    blob = Blob()
    packed = pack_histograms({"a": series}, ["a"], 1_000_000, blob)
    assert packed["edges"] == [0, 1, 1.5, 2]
    (item,) = packed["items"]
    shares = np.frombuffer(gzip.decompress(base64.b64decode(blob.encoded())), np.uint8)[item["shares"] :]
    assert shares.tolist() == [0, 128, 0, 180, 0, 0, 128]  # 255 times the root of a quarter, of a half
    counts[0, [-1, ZERO_BIN + 1]] = 1  # the open bin, and that of the smallest sizes
    edges = pack_histograms({"a": series}, ["a"], 1_000_000, blob)["edges"]
    assert (edges[:3], edges[-2:]) == ([0, 2**-126, 2**-47], [3 * 2**14, 3 * 2**15])
    nothing = pack_histograms({"a": replace(series, counts=0 * counts)}, ["a"], 1_000_000, blob)
    assert nothing["edges"] == [0, 2**-126]


@given(st.lists(st.floats(1e-13, 1e13), min_size=1))
def test_a_stored_value_is_right_to_a_twentieth_of_a_percent(values: list[float]) -> None:
    codes, start, step = quantise(np.array(values), signed=False)
    stored = 10 ** (start + step * (codes.astype(float) - CODE_FIRST))
    # Half a step of 0.0004 decades: 10 ** 0.0002 = 1.00046; rounding of the logarithm itself is far below.
    np.testing.assert_allclose(stored, values, rtol=4.7e-4)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1))
def test_a_value_of_either_sign_is_right_to_a_hundred_thousandth_of_the_range(values: list[float]) -> None:
    codes, start, step = quantise(np.array(values), signed=True)
    stored = start + step * (codes.astype(float) - CODE_FIRST)
    assert codes.min() >= CODE_FIRST
    # Half of a 65532nd part is 7.6e-6.
    np.testing.assert_allclose(stored, values, rtol=0, atol=1e-5 * (max(values) / 2 - min(values) / 2) * 2 + 1e-307)


def test_values_of_metrics_are_packed_by_family() -> None:
    values = {
        "activation/a/mean": np.array([-1.0, 1.0]),
        "activation/a/norm": np.array([2.0, 3.0]),
        "activation/b/norm": np.array([np.nan, 3.0]),
        "activation/c/norm": np.array([np.nan, np.nan]),
    }
    series = HistogramSeries(np.array([20]), np.array([-1.0]), np.array([1.0]), np.ones((1, NUM_BINS)))
    content, _ = build_payload(small_history(values=values, family_histograms={"activation": {"d": series}}))
    _, family = content["grids"]
    assert (family["key"], family["names"], family["histogramNames"]) == ("activation", ["a", "b"], ["d"])
    assert [(metric["key"], metric["signed"]) for metric in family["metrics"]] == [("norm", False), ("mean", True)]
    assert family["columns"] == [[10, 20], [10, 20], [True, True]]
    assert len(family["histograms"]["items"]) == 1


def test_missing_zero_and_infinite_have_their_own_codes() -> None:
    codes, _, _ = quantise(np.array([np.nan, -1.0, 0.0, 1.0, np.inf]), signed=False)
    assert codes.tolist() == [CODE_MISSING, CODE_MISSING, CODE_ZERO, CODE_FIRST, CODE_INFINITE]


def test_pooling_shows_the_largest_and_never_loses_an_infinity_or_a_count() -> None:
    values = np.array([[1.0, np.nan], [3.0, np.nan], [np.inf, np.nan], [2.0, 5.0], [4.0, np.nan]])
    expected = [[3.0, np.nan], [np.inf, 5.0], [4.0, np.nan]]
    np.testing.assert_array_equal(pool(values, 2, "grad_norm"), expected)
    counts = np.array([[1.0], [0.0], [np.nan], [np.nan], [2.0]])
    np.testing.assert_array_equal(pool(counts, 2, "gradwatch/num_nan"), [[1.0], [np.nan], [2.0]])
    first, last = pool_steps(np.array([10, 20, 30, 40, 50]), 2)
    assert (first.tolist(), last.tolist()) == ([10, 30, 50], [20, 40, 50])


@given(st.integers(0, 5000), st.integers(1, 500))
def test_pooled_columns_never_exceed_their_limit(num_rows: int, most: int) -> None:
    width = pool_width(num_rows, most)
    assert len(pool_steps(np.arange(num_rows), width)[1]) <= most
    assert len(pool_steps(np.arange(num_rows), width)[0]) == len(pool(np.ones((num_rows, 1)), width, "x"))


@pytest.mark.parametrize("num_rows", [1, 10_000])
def test_the_head_of_the_page_has_the_first_and_the_last_step_of_the_run(num_rows: int) -> None:
    steps = np.arange(1, num_rows + 1)
    history = small_history(steps=steps, values={"gradwatch/grad_norm": np.ones(num_rows)}, num_rows=num_rows)
    assert build_payload(history)[0]["run"]["span"] == [1, num_rows]


def test_a_thousand_layers_by_a_thousand_rows_stay_below_fifteen_megabytes() -> None:
    rng = np.random.default_rng(0)
    rows = np.arange(1, 1001)
    values: dict[str, FloatArray] = {}
    histograms = {}
    for layer in range(1000):
        # Noise of a quarter of a decade around a layer's own size, as in real norms; it cannot be compressed well.
        norm = 10 ** (rng.normal() + 0.25 * rng.normal(size=1000))
        name = f"transformer/h/{layer}/mlp/weight"
        values |= {f"grad_norm/{name}": norm, f"grad_norm_max/{name}": norm * (1 + rng.random(1000))}
        values |= {f"grad_param_ratio/{name}": norm / 100 * (1 + rng.random(1000))}
        values |= {f"dead_ratio/{name}": 0.01 * rng.random(1000), f"num_nonfinite/{name}": np.zeros(1000)}
        counts = np.zeros((100, NUM_BINS))
        counts[:, 60:200] = rng.poisson(100.0, (100, 140))
        histograms[name] = HistogramSeries(rows[::10], -norm[::10], norm[::10], counts)
    page = render_page(small_history(steps=rows, values=values, histograms=histograms))
    assert len(page) < 15_000_000


def test_a_hostile_text_cannot_leave_its_script_element() -> None:
    text = script_json({HOSTILE: [HOSTILE]})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {HOSTILE: [visible_text(HOSTILE)]}


def test_hostile_names_alerts_and_tables_leave_the_markup_as_it_is() -> None:
    harmless = render_page(small_history())
    texts = {"name": HOSTILE, "project": HOSTILE, "notes": (HOSTILE,)}
    texts |= {"values": {f"grad_norm/{HOSTILE}": np.ones(2)}, "own": {HOSTILE: OwnSeries(np.ones(2), np.ones(2))}}
    hostile = render_page(small_history(**texts, alerts=(RecordedAlert(HOSTILE, HOSTILE, HOSTILE, 10),)))
    for tag in ("<script", "</script"):
        assert hostile.count(tag) == harmless.count(tag)
    assert "\u202e" not in hostile


def test_characters_that_cannot_be_seen_are_shown() -> None:
    assert visible_text("a\u202eb\u200bc\x07d\ne") == "a‹U+202E›b‹U+200B›c‹U+0007›d\ne"
    assert visible_text("слой/层/שכבה") == "слой/层/שכבה"
    assert json.loads(script_json({"a": [("b\u2066", 1)]})) == {"a": [["b‹U+2066›", 1]]}  # a finding's parts are pairs


def test_nothing_runs_in_the_page_but_the_scripts_whose_hashes_the_policy_names() -> None:
    page = render_page(small_history())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(scripts) == 1
    for text in scripts + styles:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_an_output_that_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """/dev/stdout, for example, is a link to a pipe."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text, encoding="utf-8")
        write_page(small_history(), link)
    assert read.result().startswith("<!doctype html>")
    assert link.is_symlink()
    assert pipe.is_fifo()


def test_an_existing_page_is_replaced_in_one_piece(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    output.write_text("old")
    assert write_page(small_history(), output) == output.resolve()
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(("name", "problem"), [("", "is a directory"), ("no/page.html", "there is no directory")])
def test_an_output_that_cannot_be_written_is_rejected_and_leaves_no_file(
    name: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match=f"{problem}.*; give the name of an HTML file"):
        write_page(small_history(), tmp_path / name)
    assert list(tmp_path.parent.glob("*.partial")) + list(tmp_path.iterdir()) == []


def test_the_page_is_smaller_than_it_was() -> None:
    """JavaScript and style sheet, which a reader must know."""
    files = [*ASSETS.glob("*.js"), *ASSETS.glob("*.css")]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 2_700


def test_no_script_can_end_its_element() -> None:
    for script in ASSETS.glob("*.js"):
        assert "</script" not in script.read_text(encoding="utf-8").lower()
        assert "<!--" not in script.read_text(encoding="utf-8")


def test_the_page_draws_the_formats_of_the_forecast() -> None:
    program = (ASSETS / "main.js").read_text(encoding="utf-8")
    (line,) = [line for line in program.splitlines() if line.startswith("const FORMATS")]
    assert re.findall(r'\["(\w+)", "', line) == list(FORMATS)
    assert program.count("FORMATS") == 3  # its definition, and its uses


def test_the_page_spells_layers_as_alerts_do_and_keys_with_slashes() -> None:
    values = {f"grad_norm/{name}": np.ones(2) for name in ("blocks/0/fc/weight", "a/b/weight")}
    history = small_history(values=values, config={"gradwatch": {"names": ["blocks.0.fc.weight", "a/b.weight"]}})
    assert history.names == ["blocks/0/fc/weight", "a/b/weight"]
    assert build_payload(history)[0]["grids"][0]["names"] == ["blocks.0.fc.weight", "a/b.weight"]
    assert history.spelled(["untold/0/bias"]) == ["untold.0.bias"]


@pytest.mark.parametrize("every", [1, 10])
def test_the_users_rows_have_the_right_steps_if_samples_are_much_older_than_their_rows(every: int) -> None:
    """The default cadence: a row is flushed at every 50th step, and its last sample may be 40 steps old."""
    placed, sampled = np.array([49.0, 149, 249, 449, 699]), np.array([10.0, 120, 250, 410, 660])
    own = np.arange(0.0, 700 / every)
    placed = (placed + 1) / every - 1
    assert steps_between(own, placed, sampled).tolist() == [every * (number + 1) for number in range(700 // every)]
