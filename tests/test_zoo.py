"""The zoo's scoring is correct, and a small part of the zoo: no alerts for healthy trainings, faults are found."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.zoo import cases, detectors, pictures, table
from benchmarks.zoo.cases import CASES, Case, chosen
from benchmarks.zoo.causes import VOCABULARY, read_causes
from benchmarks.zoo.record import Recording, Told, record, replay
from benchmarks.zoo.score import add_up, failures, judge_cause, names_layer, score, seen_by_others
from wandb_gradwatch import Alert

CASE = CASES["biases of -20 in a hidden layer | MLP, SGD with momentum"]  # layer 2, dead units, from step 1
LATER = CASES["biases pushed to -50 at step 120 | MLP, squared error"]
STEPS = 200


def recording(case: Case, *told: tuple[int, str], level: str = "ERROR", losses: object = None) -> Recording:
    """A training that was not run: these (step, text) were told."""
    alerts = tuple(Told(Alert("Title", text, step, level), step) for step, text in told)  # type: ignore[arg-type]
    shown = tuple((step, 1.0) for step in range(1, STEPS + 1)) if losses is None else losses
    return Recording(case.name, 0, None, shown, case.first_bad, {}, (), alerts, ())  # type: ignore[arg-type]


def always(case: Case) -> Recording:
    return recording(case, *((step, "Probable cause: one bad batch. Remedy: none.") for step in range(1, STEPS + 1)))


def test_a_detector_that_always_alarms_sees_everything_and_is_never_trusted() -> None:
    figures = add_up(score(case, always(case)) for case in CASES.values())
    assert figures["seen"] == 1.0
    assert figures["seen within 2 steps"] == 1.0
    assert figures["healthy runs without an alarm"] == 0.0
    assert figures["healthy runs without an ERROR"] == 0.0
    assert figures["false alarms per healthy run"] == STEPS
    assert figures["false alarms per 1,000 healthy steps"] == 1000.0


def test_a_detector_that_never_alarms_is_silent_and_sees_nothing() -> None:
    figures = add_up(score(case, recording(case)) for case in CASES.values())
    assert figures["seen"] == figures["cause right"] == figures["confidently wrong"] == 0.0
    assert figures["false alarms per healthy run"] == 0.0
    assert figures["healthy runs without an alarm"] == 1.0


def test_what_is_told_before_the_fault_is_a_false_alarm_and_its_step_is_not_the_delay() -> None:
    found = score(LATER, recording(LATER, (30, "early"), (123, "Probable cause: dead ReLUs (2). Remedy: use GELU.")))
    assert found.false == ("Title at step 30",)
    assert (found.delay, found.cause, found.remedy, found.steps) == (3, "right", True, 119)


def test_an_info_is_no_alarm() -> None:
    assert not score(CASE, recording(CASE, (2, "Probable cause: dead ReLUs."), level="INFO")).seen


def test_the_lead_is_counted_to_the_first_loss_that_is_not_finite() -> None:
    losses = tuple((step, math.nan if step >= 140 else 1.0) for step in range(1, STEPS + 1))
    assert score(LATER, recording(LATER, (125, ""), losses=losses)).lead == 15


@pytest.mark.parametrize(
    ("text", "judged"),
    [
        ("Probable cause: dead ReLUs (the learning rate is too high). Remedy: x.", "right"),  # brackets are evidence
        ("Probable cause: learning rate too high. Remedy: x.", "wrong"),
        ("Cause not clear: either one bad batch or dead ReLUs; the next batch tells them apart. Remedy: x.", "either"),
        ("Cause not clear: either one bad batch or a high learning rate that is too high. Remedy: x.", "wrong"),
        ("Probable cause: too high a learning rate, a bad batch, or growth through depth. Remedy: x.", "open"),
        ("Probable cause: unknown. Remedy: dead ReLUs.", "open"),
        ("no cause at all", "open"),
    ],
)
def test_causes_are_read_from_the_text(text: str, judged: str) -> None:
    assert judge_cause(read_causes(text).causes, ("dead units",)) == judged


def test_every_fault_uses_the_vocabulary_and_sits_in_trainings_that_exist() -> None:
    names = {case.name for case in CASES.values() if case.fault is None}
    assert len(names) == sum(map(len, cases.HEALTHY.values()))  # no name is used twice
    for case in CASES.values():
        if case.fault is not None:
            assert {case.fault.cause, *case.fault.also} <= set(VOCABULARY), case.name
            assert case.base in names


def test_a_layer_is_named_as_a_whole() -> None:
    assert names_layer("Worst layers: blocks.1.mlp.0.weight 3", "blocks.1.mlp.0")
    assert not names_layer("Worst layers: blocks.1.mlp.0.weight 3", "mlp.0")
    assert names_layer("Worst layers: 2 100 %.", "2")
    assert not names_layer("the norm is 2.5 times the usual", "2")
    assert not names_layer("12.weight", "2")


def test_the_halves_share_no_training_and_a_third_of_the_families_is_kept_out() -> None:
    tune, scored = (({(case.name, seed) for case, seed in chosen(half)}) for half in ("tune", "score"))
    assert not tune & scored
    healthy = {case.family for case in CASES.values() if case.fault is None}
    faults = {case.family for case in CASES.values() if case.fault is not None}
    assert healthy >= cases.KEPT_OUT_HEALTHY
    assert faults >= cases.KEPT_OUT_FAULTS
    assert 3 * len(cases.KEPT_OUT_HEALTHY) >= len(healthy)
    assert 3 * len(cases.KEPT_OUT_FAULTS) >= len(faults)
    assert not any(case.kept_out for case, _ in chosen("tune"))
    assert not any("locked" in case.family for case, _ in chosen("tune"))
    assert {family for family in healthy | faults if "locked" in family} == cases.LOCKED


@pytest.mark.parametrize("number", ["third", "fourth", "fifth"])
def test_open_and_locked_faults_share_no_training(number: str) -> None:
    halves = {True: f"{number} locked trainings", False: f"{number} trainings"}
    faulty = [case for case in CASES.values() if case.fault is not None and case.family.startswith(number)]
    assert faulty
    for case in faulty:
        assert CASES[case.base].family == halves[case.family in cases.LOCKED], case.name


def test_what_goes_wrong_is_listed_except_in_the_locked_families() -> None:
    wrong = [score(case, recording(case, (1, "early") if case.fault is None else (400, ""))) for case in CASES.values()]
    listed = "\n".join(failures(wrong))
    assert all(f" {family}: " in listed for family in {one.family for one in wrong} - cases.LOCKED)
    assert "locked" not in listed


@pytest.mark.parametrize("detector", detectors.DETECTORS.values())
def test_other_detectors_see_a_spike_of_a_millionfold_and_nothing_in_a_calm_run(detector: detectors.Detector) -> None:
    rng = np.random.default_rng(0)
    calm = [(step, 1.0 + 0.01 * rng.random(), 1.0 + 0.01 * rng.random()) for step in range(1, 301)]
    # A bounded uniform is never 2.5 of its deviations above its mean: they are 0.29 of its width, and 0.5 / 0.29 = 1.7.
    assert list(detector(calm)) == []
    bad = [(step, loss * 1e6, norm * 1e6) if 200 <= step < 204 else (step, loss, norm) for step, loss, norm in calm]
    assert min(detector(bad)) in range(200, 204)  # llm-foundry waits for four of them


def test_the_pages_show_the_results_that_are_kept() -> None:
    results = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    assert table.PAGE.read_text(encoding="utf-8") == table.page_of(results)
    alerts = table.ALERTS.read_text(encoding="utf-8")
    assert alerts == table.with_titles(alerts, table.newest(results))
    files = {path.name: path.stat().st_size for path in pictures.FOLDER.iterdir()}
    assert set(files) == {pictures.file_name(title) for title in pictures.PICTURES}
    assert max(files.values()) < 4000


SILENT = (
    "MLP, SGD with momentum",
    "logistic regression, separable",
    "a class of 3 %",
    "MLP, squared error",
    "loss summed, norms of a million",
    "sine activations",
    "Adagrad",
    "warm-up of 100 steps from 0",
    "LoRA",
    "biases only",
)
SEEN = (
    "1000x from the first step | MLP, SGD with momentum",
    "one layer 100x | MLP, SGD with momentum",
    "biases of -20 in a hidden layer | MLP, SGD with momentum",
    "one batch of noise, 1000x, at step 150 | MLP, squared error",
    "one input NaN at step 150 | MLP, SGD with momentum",
    "one input Inf at step 90 | MLP, squared error",
    "division by a deviation of 0 at step 80 | MLP, squared error",
    "a parameter turns NaN at step 90 | MLP, SGD with momentum",
    "Adam with eps = 0 and a gradient of 0 | MLP, Adam, fits to zero loss",
    "gradients zeroed before the step | MLP, SGD with momentum",
)


@pytest.mark.parametrize("name", SILENT)
def test_healthy_trainings_are_silent(name: str) -> None:
    found = record(CASES[name], 0)
    assert found.error is None
    assert score(CASES[name], found).false == ()


@pytest.mark.parametrize("name", SEEN)
def test_faults_are_seen_with_their_cause_and_not_before_they_begin(name: str) -> None:
    found = score(CASES[name], record(CASES[name], 0))
    assert found.seen
    assert found.false == ()
    assert found.cause in ("right", "either")


def test_a_run_is_told_to_nobody_but_the_scoring(capsys: pytest.CaptureFixture[str]) -> None:
    assert record(CASES[SEEN[4]], 0).told
    assert capsys.readouterr() == ("", "")  # otherwise whoever runs a locked family reads its alerts


def test_a_replay_tells_what_the_rules_told_live() -> None:
    live = record(CASES[SEEN[4]], 0)
    again = replay(replace(live, told=()))
    assert [(told.alert.title, told.alert.step) for told in again.told] == [
        (told.alert.title, told.alert.step) for told in live.told
    ]
    assert seen_by_others(CASES[live.case], live)["detect_anomaly"] == (0, 0)
