"""The alert manager: findings become incidents, one message each; no harm from a rule that raises."""

from __future__ import annotations

import copy
import logging
import math

import pytest
from grad_samples import of_norms
from gradients import only

from wandb_gradwatch._judgement.incidents import QUIET
from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import Alert, Judgement, default_rules, rule

CALM = [1.0] * QUIET


def alarms_above(threshold: float, *, title: str = "Too large", level: str = "ERROR"):
    """Return a rule that alerts for every sample with a norm above a threshold."""
    return rule(title=title, level=level)(
        lambda snapshot: f"{snapshot.steps[0]}" if snapshot.total_grad_norm[0] > threshold else None
    )


def sent_steps(alert_manager: AlertManager, norms: list[float], *, start: int = 1) -> list[int]:
    return [alert.step for alert in alert_manager.process(of_norms(norms, start=start))]


def test_an_incident_is_one_message_however_long_it_is():
    alert_manager = AlertManager([alarms_above(10)])
    assert sent_steps(alert_manager, [1, 20, 20, 20, 20] + [20] * 50) == [2]
    (incident,) = alert_manager.incidents
    assert (incident.first_step, incident.last_step, incident.recovered_step) == (2, 55, None)


def test_an_incident_ends_only_after_enough_calm_samples_in_a_row():
    alert_manager = AlertManager([alarms_above(10)])
    assert sent_steps(alert_manager, [20, *CALM[1:], 20, *CALM[1:], 20]) == [1]  # one too few, twice
    alert_manager = AlertManager([alarms_above(10)])
    assert sent_steps(alert_manager, [20, *CALM, 20]) == [1, QUIET + 2]
    assert [incident.recovered_step for incident in alert_manager.incidents] == [2, None]


def test_what_comes_again_and_again_is_told_ever_more_rarely():
    alert_manager = AlertManager([alarms_above(10)])
    # The first incident ends after 10 calm samples, the second after 20, the third after 40.
    assert sent_steps(alert_manager, [20, *CALM, 20, *CALM, 20, *CALM * 2, 20, *CALM * 3, 20, *CALM * 4, 20]) == [
        1, 12, 44, 116,
    ]  # fmt: skip


def test_within_an_incident_only_what_is_worse_is_told():
    alert_manager = AlertManager([alarms_above(10, level="INFO"), alarms_above(50, level="WARN"), alarms_above(100)])
    assert sent_steps(alert_manager, [20, 20, 60, 60, 20, 200, 60, 200]) == [1, 3, 6]
    assert [incident.level for incident in alert_manager.incidents] == ["ERROR"]


def test_no_title_crowds_out_another_one():
    """A NaN after many incidents of another kind is told."""
    alert_manager = AlertManager([alarms_above(10), only("nan_gradient")])
    before = [20.0] + [1.0] * 10 + [20.0] + [1.0] * 20 + [20.0] + [1.0] * 40
    alerts = alert_manager.process(of_norms([*before, 20.0, math.nan]))
    assert [alert.incident.kind for alert in alerts] == ["too_large"] * 4 + ["nan_gradient"]
    assert alerts[-1].step == len(before) + 2


@pytest.mark.parametrize("rules", [[alarms_above(10)], [Judgement()]], ids=["a rule", "the judgement"])
def test_samples_in_one_call_or_one_by_one_send_the_same(rules):
    norms = [*([1.0] * 30), 2000.0, 2000.0, *CALM, math.nan, *CALM * 2, 2000.0]
    whole, parts = AlertManager(rules), AlertManager(rules)
    one_by_one = [step for index, norm in enumerate(norms) for step in sent_steps(parts, [norm], start=index + 1)]
    assert sent_steps(whole, norms) == one_by_one
    assert one_by_one[0] == 31
    assert whole.incidents == parts.incidents


def test_titles_have_incidents_of_their_own_and_two_rules_of_one_title_share_one():
    alert_manager = AlertManager(
        [alarms_above(10), alarms_above(30, title="Much too large"), alarms_above(10, level="WARN")]
    )
    (first,) = alert_manager.process(of_norms([20]))
    assert first.level == "ERROR"  # the worse of the two
    assert [alert.title for alert in alert_manager.process(of_norms([40], start=2))] == ["Much too large"]


def test_a_rule_that_raises_is_dropped_and_reported_once_and_the_others_go_on(caplog):
    calls = []

    def broken(snapshot):
        calls.append(int(snapshot.steps[0]))
        raise ZeroDivisionError("in the user's rule")

    alert_manager = AlertManager([broken, alarms_above(10)])
    assert sent_steps(alert_manager, [1]) == []
    assert sent_steps(alert_manager, [20], start=2) == [2]
    assert calls == [1]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_finding_under_a_step_that_is_not_there_is_told_with_the_newest_sample():
    alert_manager = AlertManager([lambda snapshot: Alert("Odd", "text", 99)])
    (alert,) = alert_manager.process(of_norms([1, 1]))
    assert (alert.title, alert.text, alert.step, alert.incident.found_step) == ("Odd", "text", 2, 2)


def test_the_judgement_sees_nan_and_a_spike_and_sends_each_once():
    norms = [1.0] * 49 + [math.nan] + [1.0] * 59 + [1000.0] + [1.0] * 20
    found = AlertManager(default_rules()).process(of_norms(norms))
    assert [(alert.step, alert.incident.kind) for alert in found] == [(50, "nan_gradient"), (110, "exploding_gradient")]
    assert [alert.incident.first_step for alert in found] == [50, 110]


def test_kinds_that_are_left_out_are_not_told_and_the_others_are():
    norms = [1.0] * 49 + [math.nan] + [1.0] * 59 + [1000.0] + [1.0] * 20
    found = AlertManager([Judgement(without=["nan_gradient"])]).process(of_norms(norms))
    assert [alert.incident.kind for alert in found] == ["exploding_gradient"]
    assert AlertManager([]).process(of_norms(norms)) == []


def test_after_a_restart_the_judgement_goes_on_where_it_stopped():
    norms = [1.0] * 30 + [500.0] * 3 + [1.0] * 40 + [900.0] + [1.0] * 5
    whole = AlertManager(default_rules())
    expected = sent_steps(whole, norms)
    assert expected[0] == 31
    for cut in (10, 31, 32, 50, 74):
        first, second = AlertManager(default_rules()), AlertManager(default_rules())
        found = sent_steps(first, norms[:cut])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert found + sent_steps(second, norms[cut:], start=cut + 1) == expected
        assert [one.to_dict() for one in second.incidents] == [one.to_dict() for one in whole.incidents]


def counting(title: str):
    """Return a rule that alerts at its third sample, and counts in its state."""

    class Counts:
        def __init__(self) -> None:
            self.title, self.num = title, 0

        def check(self, snapshot):
            self.num += len(snapshot)
            return [Alert(self.title, "text", int(snapshot.steps[-1]))] if self.num == 3 else []

        def state_dict(self):
            return {"num": self.num}

        def load_state_dict(self, state):
            self.num = state["num"]

    return Counts()


def test_a_state_loads_into_a_changed_list_of_rules():
    first = AlertManager([counting("One"), counting("Two")])
    first.process(of_norms([1.0, 1.0]))
    second = AlertManager([counting("Two"), alarms_above(10), counting("Three"), Judgement()])
    second.load_state_dict(first.state_dict())
    assert [alert.title for alert in second.process(of_norms([20.0], start=3))] == ["Too large", "Two"]


def test_a_state_that_does_not_fit_costs_a_rule_its_memory_only(caplog):
    alert_manager = AlertManager([counting("One"), alarms_above(10), Judgement()])
    state = alert_manager.state_dict()
    state["rules"]["Counts: One"] = state["judge"] = {"from": "another version"}
    alert_manager.load_state_dict(state)
    assert caplog.text.count("could not load its state") == 2
    assert sent_steps(alert_manager, [20]) == [1]


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match="must have check"):
        AlertManager(["NaN"])
