"""The zoo's scoring is correct, and a small part of the zoo: no alerts for healthy trainings, faults are found."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.zoo import cases, detectors, pictures, table
from benchmarks.zoo.cases import CASES, Case, build, chosen
from benchmarks.zoo.causes import KNOWN_CAUSES, named
from benchmarks.zoo.mutations import MUTATIONS, Mutation, mutate
from benchmarks.zoo.record import Recording, Told, record, replay
from benchmarks.zoo.score import add_up, failures, judge_cause, names_layer, score, seen_by_others
from benchmarks.zoo.specification import formula
from benchmarks.zoo.transforms import transform
from wandb_gradwatch import Alert
from wandb_gradwatch._judgement.incident import Incident, Layer, Level
from wandb_gradwatch._judgement.structure import ModelInfo

CASE = CASES["biases of -20 in a hidden layer | MLP, SGD with momentum"]  # layer 2, dead units, from step 1
LATER = CASES["biases pushed to -50 at step 120 | MLP, squared error"]
STEPS = 200


def told(step: int, cause: str = "", rival: str = "", *, level: Level = "ERROR", layers: tuple[str, ...] = ()) -> Told:
    incident = Incident(
        "kind", "Title", level, step, step, step, "fact", cause=cause, rival=rival, layers=tuple(map(Layer, layers))
    )
    return Told(Alert("Title", "text", step, level, incident), step)


def recording(case: Case, *alerts: Told, losses: tuple[float, ...] = (1.0,) * STEPS) -> Recording:
    """A training that was not run: these alerts were told."""
    return Recording(case.name, 0, None, tuple(enumerate(losses, 1)), case.first_bad, ModelInfo(), alerts)


def always(case: Case) -> Recording:
    return recording(case, *(told(step, "bad_batch") for step in range(1, STEPS + 1)))


def test_a_detector_that_always_alarms_sees_everything_and_is_never_trusted() -> None:
    figures = add_up(score(case, always(case)) for case in CASES.values())
    assert figures["seen"] == 1.0
    assert figures["delay, median"] == 0
    assert figures["healthy runs with a WARN or ERROR"] == 1.0
    assert figures["healthy runs with an ERROR, which stops them"] == 1.0
    assert figures["false alarms per healthy run"] == figures["messages per faulty run"] == STEPS


def test_a_detector_that_never_alarms_is_silent_and_sees_nothing() -> None:
    figures = add_up(score(case, recording(case)) for case in CASES.values())
    assert figures["seen"] == figures["cause right"] == figures["no cause right"] == 0.0
    assert figures["healthy runs with a WARN or ERROR"] == figures["false alarms per healthy run"] == 0.0
    assert figures["their steps saved by stopping at the first ERROR"] == 0.0


def test_what_is_told_before_the_fault_is_a_false_alarm_and_its_step_is_not_the_delay() -> None:
    found = score(LATER, recording(LATER, told(30, "bad_batch"), told(123, "dead_units")))
    assert found.false == ("Title at step 30",)
    assert (found.delay, found.cause, found.errors) == (3, "right", 1)


def test_an_info_is_no_alarm() -> None:
    found = score(CASE, recording(CASE, told(2, "dead_units", level="INFO"), told(9, "bad_batch", level="WARN")))
    assert (found.delay, found.cause, len(found.lengths)) == (8, "none right", 1)


@pytest.mark.parametrize(
    ("alerts", "saved"),
    [
        ((told(130, level="WARN"), told(150)), 50),  # of the 80 steps from step 120 to step 200
        ((told(30), told(150)), 0),  # a training that was sound was stopped
        ((told(130, level="WARN"),), 0),
    ],
)
def test_the_first_error_saves_the_steps_after_it_unless_too_early(alerts: tuple[Told, ...], saved: int) -> None:
    found = score(LATER, recording(LATER, *alerts))
    assert (found.doomed, found.saved) == (80, saved)


@pytest.mark.parametrize(
    ("later", "is_doomed"),
    [(0.5, False), (0.96, True), (3.0, True), (math.nan, True)],  # 1.0 before the fault; 5 % is the least gain
)
def test_a_fault_is_worth_an_error_if_nothing_is_learned_after_it(later: float, is_doomed: bool) -> None:
    found = score(LATER, recording(LATER, losses=(1.0,) * 119 + (later,) * 81))
    assert (found.doomed > 0) == is_doomed


def test_a_fault_from_the_start_is_compared_with_the_first_loss_and_an_ascent_is_always_worth_an_error() -> None:
    assert score(CASE, recording(CASE, losses=(1.0, *[50.0] * 199))).doomed == STEPS - 1
    assert score(CASE, recording(CASE, losses=(50.0, *[1.0] * 199))).doomed == STEPS - 1  # the first ten but one are 1
    falling = tuple(100.0 - step for step in range(STEPS))
    assert score(CASE, recording(CASE, losses=falling)).doomed == 0
    ascent = next(case for case in CASES.values() if case.fault is not None and case.fault.causes[0] == "wrong_sign")
    assert score(ascent, recording(ascent, losses=falling)).doomed == STEPS - 1


@pytest.mark.parametrize(
    ("cause", "rival", "judged"),
    [
        ("dead_units", "", "right"),
        ("dead_units", "bad_batch", "either"),
        ("bad_batch", "dead_units", "either"),
        ("bad_batch", "depth", "none right"),
        ("bad_batch", "", "none right"),
        ("", "", "open"),
    ],
)
def test_causes_are_read_from_the_incident(cause: str, rival: str, judged: str) -> None:
    assert judge_cause(named(told(1, cause, rival).alert), {"dead_units"}) == judged


def test_an_alert_without_an_incident_leaves_the_cause_open_and_its_text_is_the_message() -> None:
    alert = Alert("Title", "eight...", 2, "WARN")
    found = score(CASE, recording(CASE, Told(alert, 2)))
    assert (found.seen, found.cause, found.layer, found.lengths) == (True, "open", False, (8,))


def test_every_fault_has_known_causes_and_sits_in_trainings_that_exist() -> None:
    rows = [row for one in cases.SETS for row in one["trainings"]]
    names = {row["name"] for row in rows}
    assert len(names) == len(rows)  # no name is used twice
    for case in CASES.values():
        if case.fault is not None:
            assert case.fault.causes, case.name
            assert set(case.fault.causes) <= KNOWN_CAUSES, case.name
            assert case.base in names


def test_a_set_says_what_it_is_for_when_it_was_written_and_what_nobody_tunes_on() -> None:
    for one in cases.SETS:
        assert date.fromisoformat(one["written"]), one["set"]  # raises if it is none
        assert len(one["purpose"]) > 50, one["set"]
        assert one["not_tuned_on"], one["set"]


def test_a_layer_is_named_as_a_whole() -> None:
    assert names_layer(told(1, layers=("head.bias", "blocks.1.mlp.0.weight")).alert, "blocks.1.mlp.0")
    assert names_layer(told(1, layers=("2",)).alert, "2")
    assert not names_layer(told(1, layers=("blocks.1.mlp.0.weight",)).alert, "mlp.0")
    assert not names_layer(told(1, layers=("12.weight", "22")).alert, "2")
    assert not names_layer(told(1).alert, "2")


def test_the_halves_share_no_training_and_a_third_of_the_families_is_kept_out() -> None:
    tune, scored = (({(case.name, seed) for case, seed in chosen(half)}) for half in ("tune", "score"))
    assert not tune & scored
    for is_healthy in (True, False):
        some = [case for case in CASES.values() if (case.fault is None) == is_healthy]
        families, kept_out = {case.family for case in some}, {case.family for case in some if case.kept_out}
        assert 3 * len(kept_out) >= len(families)
        assert families & cases.LOCKED <= kept_out
        assert families & cases.SEALED_FAMILIES <= cases.LOCKED
    assert not any(case.kept_out for case, _ in chosen("tune"))
    assert not any(case.family in cases.SEALED_FAMILIES for case, _ in chosen("score"))
    assert {case.family for case, _ in chosen("all")} == {case.family for case in CASES.values()}


def _kinds(mutations: list[Mutation]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, options in mutations:
        yield kind, options
        yield from _kinds(options.get("do", []))


def test_the_sets_use_what_the_catalogues_have_and_nothing_else() -> None:
    used = [one for case in CASES.values() if case.fault is not None for one in _kinds(case.fault.mutations)]
    assert {kind for kind, _ in used} == set(MUTATIONS)
    for kind, options in used:
        known = inspect.signature(MUTATIONS[kind]).parameters
        is_open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        assert is_open or set(options) <= set(known), (kind, options)


def test_a_transform_is_a_name_or_a_call_or_several_of_them() -> None:
    x = torch.tensor([1.0, 2.0])
    assert transform("zeros")(x).tolist() == [0.0, 0.0]
    assert transform(["times", 3])(x).tolist() == [3.0, 6.0]
    assert transform([["times", 3], ["plus", 1]])(x).tolist() == [4.0, 7.0]
    assert transform(["added", 10, [["times", 3], ["plus", 1]]])(x).tolist() == [41.0, 72.0]  # x + 10 * (3 x + 1)
    with pytest.raises(KeyError, match="gremlins"):
        transform("gremlins")


def test_a_formula_is_a_number_or_a_function_of_the_step() -> None:
    assert formula(3)(7) == 3
    assert formula("max(0.0, 1 - step / 10)")(5) == 0.5
    with pytest.raises(NameError, match="open"):
        formula("open('file')")(1)


def test_a_mutation_begins_and_ends_at_its_steps() -> None:
    loop = build(CASES["MLP, squared error"])
    loop.batch = lambda step: (torch.ones(2, 3), torch.ones(2, 1))
    mutate(loop, "", [("batch", {"by": ["times", 5], "part": 1, "at": 3, "until": 6, "every": 2})])
    # Of steps 3 to 5 every second one, and only the targets.
    assert [float(loop.batch(step)[1].mean()) for step in range(1, 8)] == [1, 1, 5, 1, 5, 1, 1]
    assert float(loop.batch(3)[0].mean()) == 1


def test_a_family_is_locked_as_a_whole_or_not_at_all() -> None:
    found: dict[tuple[str, bool], set[tuple[bool, ...]]] = {}
    for case in CASES.values():
        found.setdefault((case.family, case.fault is None), set()).add((case.locked, case.sealed, case.kept_out))
    assert all(len(access) == 1 for access in found.values())


def test_sealed_faults_sit_in_a_layer_of_a_sealed_training() -> None:
    models = {name: build(case).model for name, case in CASES.items() if case.family == "sealed trainings"}
    for case in CASES.values():
        if case.family == "sealed faults":
            models[case.base].get_submodule(case.layer)


HALF_LOCKED = ("matched pairs", "research recipes", "everyday tasks", "textbook models", "coin toss")


@pytest.mark.parametrize("name", HALF_LOCKED)
def test_open_and_locked_faults_share_no_training(name: str) -> None:
    faulty = [case for case in CASES.values() if case.fault is not None and case.family.startswith(name)]
    assert {case.locked for case in faulty} == {True, False}
    for case in faulty:
        assert CASES[case.base].locked == case.locked, case.name


def test_what_goes_wrong_is_listed_except_in_the_locked_families() -> None:
    wrong = [score(case, recording(case, told(1 if case.fault is None else 400))) for case in CASES.values()]
    listed = "\n".join(failures(wrong))
    assert all(f" {family}: " in listed for family in {one.family for one in wrong} - cases.LOCKED)
    assert not any(f" {family}: " in listed for family in cases.LOCKED)


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
    readme = table.README.read_text(encoding="utf-8")
    assert readme == table.with_worst(readme, results)
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
    assert [(one.alert.title, one.alert.step) for one in again.told] == [
        (one.alert.title, one.alert.step) for one in live.told
    ]
    assert seen_by_others(CASES[live.case], live)["detect_anomaly"] == (0, 0)
