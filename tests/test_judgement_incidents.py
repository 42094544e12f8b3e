"""Findings become incidents: what is told, how often and in which words; the tables of symptoms and causes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from grad_samples import measured, of_norms, sample_of, together
from judging import classifier, judged, with_inputs, with_rate

from wandb_gradwatch._judgement import patterns
from wandb_gradwatch._judgement.causes import CAUSES
from wandb_gradwatch._judgement.evidence import Evidence
from wandb_gradwatch._judgement.facts import Facts
from wandb_gradwatch._judgement.finding import Detail, Finding
from wandb_gradwatch._judgement.incident import MAX_FIRST_LINE, MAX_MESSAGE, Incident, Layer, kind_of
from wandb_gradwatch._judgement.incidents import IncidentBook
from wandb_gradwatch._judgement.observer import Observer
from wandb_gradwatch._judgement.patterns import KINDS, PATTERNS, explain
from wandb_gradwatch._judgement.structure import ModelInfo
from wandb_gradwatch._judgement.symptoms import SYMPTOMS
from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import Alert, Judgement, rule
from wandb_gradwatch.snapshot import Snapshot
from wandb_gradwatch.snapshot._shapes import select_samples

NAN = math.nan


def manager(*rules: Any, info: ModelInfo | None = None) -> AlertManager:
    return AlertManager([Judgement(), *rules], info)


def kinds_told(alerts: Sequence[Alert]) -> list[tuple[int, str]]:
    return [(alert.step, alert.incident.kind if alert.incident else alert.title) for alert in alerts]


def above(threshold: float, *, title: str = "Too large", level: Any = "ERROR") -> Any:
    """A rule of the user: norms above a threshold."""
    return rule(title=title, level=level)(
        lambda snapshot: "too large" if snapshot.total_grad_norm[0] > threshold else None
    )


def steps_told(norms: Sequence[float], *rules: Any) -> list[int]:
    return [alert.step for alert in AlertManager(rules or [above(10)]).process(of_norms(norms))]


# One incident, one message


def test_a_rate_1000_times_too_high_is_one_incident_told_when_it_begins_and_when_it_is_worse() -> None:
    found = judged(with_rate(classifier(), lambda step: 0.05 if step < 60 else 50.0), 120)
    told = [alert.incident for alert in found.alerts if alert.level != "INFO"]
    assert [one.level for one in told if one is not None] in (["ERROR"], ["WARN", "ERROR"])
    assert {one.cause for one in told if one is not None} == {"learning_rate_too_high"}
    (incident,) = [one for one in found.incidents if one.level != "INFO"]
    assert len(incident.kinds) >= 2  # further symptoms, which it explains


def test_a_rate_1000_times_too_high_from_the_start_has_no_other_cause() -> None:
    told = [alert.incident for alert in judged(classifier(lr=50.0), 20).alerts if alert.level != "INFO"]
    assert 1 <= len(told) <= 2
    assert all(one is not None and one.cause == "learning_rate_too_high" for one in told)


def test_a_bad_batch_in_a_healthy_training_is_one_message() -> None:
    found = judged(with_inputs(classifier(lr=1e-3), lambda x, step: 3000 * x if step == 60 else x), 120)
    assert len(found.told) == 1
    (incident,) = [one for one in found.incidents if one.level != "INFO"]
    assert (incident.first_step, incident.recovered_step) == (60, 61)


def test_a_finding_joins_the_incident_of_its_kind_before_one_whose_cause_explains_it() -> None:
    nan, equal, book = (
        finding("nan_gradient", "poor_initialisation"),
        finding("equal_units", "constant_initialisation"),
        IncidentBook(),
    )
    assert [incident.kind for incident, _ in book.sample(1, [nan, equal])] == ["nan_gradient", "equal_units"]
    assert book.sample(2, [replace(nan, step=2)]) == []  # the cause of the equal units explains NaN as well
    assert [one.last_step for one in book.incidents] == [2, 1]


def test_a_finding_that_the_cause_of_an_open_incident_explains_is_not_told() -> None:
    book = IncidentBook()
    (told,) = book.sample(1, [finding("exploding_gradient", "learning_rate_too_high", level="ERROR")])
    assert told[0].cause == "learning_rate_too_high"
    assert book.sample(2, [finding("dead_gradient", "dead_units", step=2)]) == []
    assert book.incidents[0].kinds == ("exploding_gradient", "dead_gradient")
    (told,) = book.sample(3, [finding("not_in_optimizer", "not_in_optimizer", step=3)])  # no rate causes that
    assert told[0].kind == "not_in_optimizer"


def test_a_cause_that_becomes_clear_is_told_once_more() -> None:
    book = IncidentBook()
    book.sample(1, [finding("exploding_gradient", "bad_batch", "data_changed")])
    ((told, _),) = book.sample(2, [finding("exploding_gradient", "data_changed", step=2)])
    assert (told.cause, told.rival, told.first_step, told.found_step) == ("data_changed", "", 1, 2)
    assert book.sample(3, [finding("exploding_gradient", "bad_batch", "data_changed", step=3)]) == []
    assert len(book.incidents) == 1


# Episodes


def test_an_incident_is_one_alert_however_long_it_is_and_within_it_only_what_is_worse_is_told() -> None:
    assert steps_told([1, *[20] * 60]) == [2]
    rules = above(10, level="INFO"), above(50, level="WARN"), above(100)
    assert steps_told([20, 20, 60, 60, 20, 200, 60, 200], *rules) == [1, 3, 6]


def test_ten_samples_without_a_finding_end_an_incident_and_twice_as_many_each_further_one() -> None:
    rules = AlertManager([above(10)])
    norms = [20, *[1] * 9, 20, *[1] * 10, 20, *[1] * 19, 20, *[1] * 20, 20, *[1] * 39, 20, *[1] * 40, 20]
    told = [alert.step for alert in rules.process(of_norms(norms))]
    # 9 samples do not end the first one, 10 do; 19 not the second, 20 do; 39 not the third, 40 do
    assert told == [1, 22, 63, 144]
    over = rules.incidents[:3]
    assert [one.recovered_step for one in over] == [12, 43, 104]  # the first of the samples that ended it
    assert [one.last_step for one in over] == [11, 42, 103]
    assert rules.incidents[3].recovered_step is None


def test_kinds_have_episodes_of_their_own_and_two_rules_of_one_title_share_one() -> None:
    rules = AlertManager([above(10), above(30, title="Much too large"), above(10, level="WARN")])
    (first,) = rules.process(of_norms([20]))
    assert (first.title, first.level) == ("Too large", "ERROR")  # the worse of the two
    assert [alert.title for alert in rules.process(of_norms([40], start=2))] == ["Much too large"]


def test_nan_and_a_spike_are_each_told_once_at_their_own_step() -> None:
    norms = [*[1.0] * 49, NAN, *[1.0] * 59, 1000.0, *[1.0] * 20]
    assert kinds_told(manager().process(of_norms(norms))) == [(50, "nan_gradient"), (110, "exploding_gradient")]


def test_samples_in_one_call_or_one_by_one_are_told_the_same() -> None:
    norms = [*[1.0] * 30, 500.0, *[1.0] * 12, NAN, NAN, *[2.0] * 15, 900.0, 1e5, 1e7]
    samples, whole, parts = of_norms(norms), manager(), manager()
    one_by_one = [alert for at in range(len(norms)) for alert in parts.process(select_samples(samples, np.array([at])))]
    assert [(one.step, one.text) for one in whole.process(samples)] == [(one.step, one.text) for one in one_by_one]
    assert len(one_by_one) >= 3


def test_no_more_than_200_incidents_are_kept_and_those_that_last_are() -> None:
    book = IncidentBook()
    lasting = finding("lasting", "")
    for step in range(1, 302):
        assert book.sample(step, [replace(lasting, step=step), replace(finding(f"kind_{step}", ""), step=step)])
    kinds = [one.kind for one in book.incidents]
    assert (len(kinds), kinds[0], kinds[-1]) == (200, "lasting", "kind_301")
    assert book.incidents[0].last_step == 301


# Rules of the user


def test_rules_of_the_user_stand_beside_the_judgement() -> None:
    both = manager(above(10), lambda snapshot: Alert("Odd", "text", 3) if snapshot.steps[0] == 3 else None)
    told = both.process(of_norms([1.0, 20.0, 1.0, NAN]))
    assert [(alert.step, alert.title) for alert in told] == [(2, "Too large"), (3, "Odd"), (4, "NaN gradient")]
    assert told[0].text == "too large"  # the user's own words
    assert [one.kind for one in both.incidents] == ["too_large", "odd", "nan_gradient"]


def test_a_rule_that_raises_is_dropped_and_reported_once_and_the_judgement_goes_on(caplog: Any) -> None:
    def broken(snapshot: Snapshot) -> None:
        raise ZeroDivisionError("in the user's rule")

    told = manager(broken, above(10)).process(of_norms([20.0, NAN]))
    assert [alert.title for alert in told] == ["Too large", "NaN gradient"]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("part", ["_judgement.judge.Judge.findings", "_judgement.finding.explain"])
def test_a_judgement_that_raises_is_dropped_and_reported_once_and_rules_go_on(
    part: str, caplog: Any, monkeypatch: Any
) -> None:
    def raises(*_: object) -> None:
        raise ZeroDivisionError("in the judgement")

    monkeypatch.setattr(f"wandb_gradwatch.{part}", raises)
    assert kinds_told(manager(above(10)).process(of_norms([NAN, 20.0]))) == [(2, "too_large")]
    (record,) = caplog.records
    assert "the judgement raised and is dropped" in record.getMessage()


def test_kinds_that_are_left_out_are_not_reported_and_unknown_ones_are_refused() -> None:
    norms = of_norms([*[1.0] * 20, NAN, 1.0])
    assert AlertManager([Judgement(without=["nan_gradient"])]).process(norms) == []
    assert AlertManager([Judgement(without="nan_gradient")]).process(norms) == []
    assert len(AlertManager([Judgement(without=["dead_gradient"])]).process(norms)) == 1
    assert AlertManager([]).process(norms) == []
    with pytest.raises(ValueError, match="there is no 'nan'; there are"):
        Judgement(without=["nan"])
    with pytest.raises(TypeError, match="must have check"):
        AlertManager(["NaN"])  # type: ignore[list-item]


# Words


def explanation(cause: str, rival: str = "", shows: str = "") -> patterns.Explanation:
    return patterns.Explanation(CAUSES[cause], shows, CAUSES[rival] if rival else None)


def finding(kind: str, cause: str, rival: str = "", *, step: int = 1, level: Any = "WARN") -> Finding:
    """A finding in a sample of which little is known, with this explanation."""
    evidence = Evidence(facts_of(of_norms([1.0], start=step)), kind, [], "")
    explained = explanation(cause, rival) if cause else None
    detail = Detail("a fact", step, evidence=evidence, explanation=explained)
    return Finding(kind, kind.capitalize(), level, step, lambda: detail)


def facts_of(samples: Snapshot, info: ModelInfo | None = None) -> Facts:
    """The facts of the newest sample."""
    observer = Observer(info or ModelInfo())
    *_, newest = (observer.see(samples, sample) for sample in samples.overview)
    assert newest is not None
    return newest


LONG_NAMES = {
    f"model.transformer.encoder.layers.{at}.self_attention.output_projection.weight": np.ones(64) for at in range(9)
}


def of_long_names(num: int = 40) -> Snapshot:
    """Samples of parameters with long names, and numbers that need many digits."""
    samples = [
        sample_of(
            {name: (1 + 0.1 * math.sin(step)) * 1.2345e-7 * np.arange(1, 65) for name in LONG_NAMES},
            step=123_456_000 + step,
            parameters=LONG_NAMES,
        )
        for step in range(num)
    ]
    return measured(together(samples), loss=[1.2345e-7] * num, learning_rate=[1.2345e-7] * num)


@pytest.mark.parametrize("at", range(len(SYMPTOMS)), ids=[f"{at}-{one.kind}" for at, one in enumerate(SYMPTOMS)])
def test_every_message_is_at_most_400_characters_and_its_first_line_120(at: int) -> None:
    symptom, facts = SYMPTOMS[at], facts_of(of_long_names())
    layers = tuple(Layer(name, 1.0, 1.0) for name in [*LONG_NAMES][:5])
    for pattern in PATTERNS[symptom.kind]:
        explained = explanation(pattern.cause, pattern.rival, "evidence " * 9)
        detail = Detail(symptom.says(facts), facts.step - 10**5, layers, explanation=explained)
        found = Finding(
            symptom.kind, symptom.title, symptom.level, facts.step, partial(lambda one: one, detail), facts.step - 10**6
        )
        ((incident, _),) = IncidentBook().sample(facts.step, [found])
        assert len(incident.headline) <= MAX_FIRST_LINE == 120
        assert len(incident.message) <= MAX_MESSAGE == 400
        assert incident.message.partition("\n")[0] == incident.headline
        assert incident.headline.startswith(f"Step {incident.first_step}: ")
        assert CAUSES[pattern.cause].text[:20].lower() in incident.headline.lower()
        assert detail.fact[1:20] in incident.message  # what was seen is always there
        assert incident.remedy.startswith(CAUSES[pattern.cause].remedy)


def test_a_message_says_step_and_cause_then_facts_layers_and_evidence() -> None:
    one = Incident(
        "dead_gradient", "Dead gradient", "WARN", 12, 20, 20, "half of the units are dead", unmeasured_from=5,
        cause="dead_units", cause_text="dead units", rival="unused_layers", rival_text="unused layers", advice="Look",
        evidence="the bias is -50", layers=tuple(Layer(f"{at}.weight") for at in range(5)),
    )  # fmt: skip
    assert one.message == (
        "Step 12: dead units, or unused layers. Look.\nHalf of the units are dead.\nSteps 5 to 11 were not measured.\n"
        "Layers: 0.weight, 1.weight, 2.weight and 2 more.\nFor this cause: The bias is -50."
    )
    assert Incident.from_dict(one.to_dict()) == one


# The tables


def test_every_kind_has_one_title_of_at_most_63_characters_and_a_stable_identifier() -> None:
    titles: dict[str, set[str]] = {}
    for symptom in SYMPTOMS:
        titles.setdefault(symptom.kind, set()).add(symptom.title)
        assert symptom.samples >= 1
        assert symptom.level in ("INFO", "WARN", "ERROR")
        assert len(symptom.title) <= 63
        assert kind_of(symptom.kind) == symptom.kind
    assert all(len(of_kind) == 1 for of_kind in titles.values())
    assert len(set.union(*titles.values())) == len(titles)


def test_every_kind_has_a_pattern_and_every_pattern_and_cause_a_use() -> None:
    assert {symptom.kind for symptom in SYMPTOMS} == set(KINDS) == set(PATTERNS)
    named = set()
    for rows in PATTERNS.values():
        assert rows
        for pattern in rows:
            named |= {pattern.cause, pattern.rival} - {""}
            assert pattern.cause != pattern.rival
            assert set(pattern.kinds) <= set(KINDS.values())
    assert named <= set(CAUSES)


def test_what_follows_from_a_cause_are_known_kinds() -> None:
    assert set().union(*(cause.leads_to for cause in CAUSES.values())) <= set(KINDS)


def test_causes_are_named_and_advised_shortly() -> None:
    for name, cause in CAUSES.items():
        assert name == cause.name
        assert cause.text
        assert cause.remedy
        assert len(f"Step 1: {cause.text}. {cause.advice}.") <= MAX_FIRST_LINE


REFUTABLE = [
    (kind, cause) for kind, rows in PATTERNS.items() for cause in dict.fromkeys(pattern.cause for pattern in rows)
]


@pytest.mark.parametrize(("kind", "name"), REFUTABLE, ids=[f"{kind}-{name}" for kind, name in REFUTABLE])
def test_a_refuted_cause_is_never_named(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All patterns fit; then the facts refute one cause, wherever it stands in the table, as cause or as rival."""
    evidence = Evidence(facts_of(of_long_names()), kind, [0], "parameters")
    fits = [replace(pattern, when=lambda e: True, shows=lambda e: "") for pattern in PATTERNS[kind]]
    monkeypatch.setitem(PATTERNS, kind, tuple(fits))
    for one, cause in CAUSES.items():
        monkeypatch.setitem(CAUSES, one, replace(cause, is_refuted=lambda e, refuted=one == name: refuted))
    explained = explain(evidence)
    if all(pattern.cause == name for pattern in fits):
        assert explained is None
        return
    assert explained is not None
    assert explained.cause.name != name
    assert explained.rival is None or explained.rival.name != name


REFUTED: list[tuple[str, str, dict[str, Any]]] = [
    ("nonfinite_inputs", "nan_gradient", {"input_num_nonfinite": 0.0}),
    ("inputs_zero", "zero_inputs", {"input_zero_ratio": 0.5}),
]


@pytest.mark.parametrize(("cause", "kind", "known"), REFUTED)
def test_what_is_known_of_the_inputs_refutes(cause: str, kind: str, known: dict[str, float]) -> None:
    of_sample = {f"gradwatch/fact/{name}": np.array([value]) for name, value in known.items()}
    facts = facts_of(replace(of_norms([NAN]), metrics=of_sample))
    assert CAUSES[cause].is_refuted(Evidence(facts, kind, [], ""))
    unknown = Evidence(facts_of(of_norms([NAN])), kind, [], "")
    assert not CAUSES[cause].is_refuted(unknown)  # what is not known refutes nothing


def test_architectures_refute_what_they_lack() -> None:
    def evidence(name: str, kind: str) -> Evidence:
        samples = sample_of({f"{name}.weight": np.ones(64)}, parameters={f"{name}.weight": np.ones(64)})
        return Evidence(facts_of(samples, ModelInfo({name: kind})), "exploding_gradient", [], "")

    plain, recurrent = evidence("body", "Linear"), evidence("rnn", "LSTM")
    norm, attention = evidence("bn", "BatchNorm1d"), evidence("attn", "MultiheadAttention")
    for cause, fitting in (("recurrence", recurrent), ("small_batch_norm", norm), ("attention_logits", attention)):
        assert CAUSES[cause].is_refuted(plain)
        assert not CAUSES[cause].is_refuted(fitting)


def test_parameters_that_hardly_moved_refute_a_rate_that_is_too_high() -> None:
    """A gradient of a thousand times the usual one, after updates that changed the parameters by nothing."""
    (alert,) = manager().process(of_norms([*[1.0] * 30, 1000.0, 1.0]))
    assert alert.incident is not None
    assert "learning_rate_too_high" not in (alert.incident.cause, alert.incident.rival)


def test_a_symptom_that_lasts_is_told_with_the_step_at_which_it_began_and_the_unmeasured_ones_before() -> None:
    samples = together([of_norms([1.0], start=step) for step in range(10, 110, 10)] + [of_norms([NAN], start=110)])
    (alert,) = manager().process(samples)
    assert alert.incident is not None
    assert (alert.incident.first_step, alert.incident.unmeasured_from) == (110, 101)
    assert "Steps 101 to 109 were not measured." in alert.text


def test_the_operation_that_made_nan_is_told_if_the_step_was_run_again() -> None:
    found = manager()
    found.notes = {21: {"first_bad_operation": "sqrt in 'below'"}}
    (alert,) = found.process(of_norms([*[1.0] * 20, NAN]))
    assert alert.incident is not None
    assert alert.incident.evidence == "found by running the step again: sqrt in 'below'"
    assert found.incidents == (alert.incident,)
    assert "sqrt in 'below'" in alert.text


def test_slow_symptoms_are_looked_for_at_both_distances() -> None:
    """A norm that grows by half a percent per step, with parameters that grow as well: too slow from step to step."""

    def growing(every: int) -> set[str]:
        samples = [
            sample_of(
                {"0.weight": np.full(300, 1e-2 * 1.01**step)},
                step=step,
                parameters={"0.weight": np.full(300, 1.006**step)},
            )
            for step in range(every, 1201, every)
        ]
        history = measured(together(samples), loss=[1.01 ** sample.steps[0] for sample in samples])
        found = manager()
        assert found.process(history)
        return {kind for incident in found.incidents for kind in incident.kinds}

    assert "exploding_gradient" in growing(20)
    assert growing(20) <= growing(1)
