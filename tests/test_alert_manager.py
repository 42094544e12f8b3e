"""The alert manager: one alert per episode, a limited number per hour, and no harm from a rule that raises."""

from __future__ import annotations

import json
import logging

import pytest
from grad_samples import of_norms

from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import Alert, ExplodingGradient, NaNGradient, default_rules, rule
from wandb_gradwatch.rules._base import finding


class Clock:
    """A simulated clock, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def alarms_above(threshold: float, *, title: str = "Too large", level: str = "ERROR"):
    """Return a rule that alerts for every sample with a norm above a threshold."""
    return rule(title=title, level=level)(
        lambda snapshot: f"{snapshot.steps[0]}" if snapshot.total_grad_norm[0] > threshold else None
    )


def sent_steps(alert_manager: AlertManager, norms: list[float], *, start: int = 1) -> list[int]:
    return [alert.step for alert in alert_manager.process(of_norms(norms, start=start))]


def test_an_episode_is_one_alert_however_long_it_is():
    alert_manager = AlertManager([alarms_above(10)])
    assert sent_steps(alert_manager, [1, 20, 20, 20, 20] + [20] * 50) == [2]


def test_an_episode_ends_only_after_enough_healthy_samples_in_a_row():
    alert_manager = AlertManager([alarms_above(10)], rearm_samples=3)
    # two healthy samples (steps 3, 4) do not end the episode, three (6, 7, 8) do
    assert sent_steps(alert_manager, [1, 20, 1, 1, 20, 1, 1, 1, 20]) == [2, 9]
    alert_manager = AlertManager([alarms_above(10)], rearm_samples=3)
    assert sent_steps(alert_manager, [1, 20, 1, 1, 20, 1, 20]) == [2]  # three healthy samples, but not in a row


def test_what_comes_again_and_again_is_told_ever_more_rarely():
    alert_manager = AlertManager([alarms_above(10)], rearm_samples=2)
    # 2 healthy samples end the first episode, 4 the second, 8 the third: alerts at 1 and 4, and the next from 9 on
    assert sent_steps(alert_manager, [20, 1, 1] * 3 + [20]) == [1, 4]
    assert sent_steps(alert_manager, [1] * 4 + [20] + [1] * 7 + [20] + [1] * 8 + [20], start=11) == [15, 32]


def test_within_an_episode_only_what_is_worse_is_told():
    alert_manager = AlertManager([alarms_above(10, level="INFO"), alarms_above(50, level="WARN"), alarms_above(100)])
    assert sent_steps(alert_manager, [20, 20, 60, 60, 20, 200, 60, 200]) == [1, 3, 6]


def test_no_title_crowds_out_another_one_within_the_hour():
    alert_manager = AlertManager([alarms_above(10), NaNGradient()], max_per_hour=1, clock=lambda: 0.0)
    assert [alert.title for alert in alert_manager.process(of_norms([20.0, float("nan")]))] == [
        "Too large",
        "NaN gradient",
    ]


def test_samples_in_one_call_or_one_by_one_send_the_same():
    norms = [1, 20, 1, 1, 20, 1, 1, 1, 1, 1, 20, 20, 1, 1, 1, 1, 1, 1, 1, 1, 20]
    whole, parts = (AlertManager([alarms_above(10)], rearm_samples=5) for _ in range(2))
    one_by_one = [step for index, norm in enumerate(norms) for step in sent_steps(parts, [norm], start=index + 1)]
    assert sent_steps(whole, norms) == one_by_one
    assert one_by_one == [2, 11]  # five healthy samples before 11; fewer than ten before 21


def test_titles_have_episodes_of_their_own_and_two_rules_of_one_title_share_one():
    alert_manager = AlertManager(
        [alarms_above(10), alarms_above(30, title="Much too large"), alarms_above(10, level="WARN")]
    )
    (first,) = alert_manager.process(of_norms([20]))
    assert first.level == "ERROR"  # the worse of the two
    assert [alert.title for alert in alert_manager.process(of_norms([40], start=2))] == ["Much too large"]


def test_that_more_are_withheld_is_still_said_when_the_cause_is_known():
    alert_manager = AlertManager([], max_per_hour=1, clock=lambda: 0.0)
    alert = alert_manager.open(finding("Too large", "It is 20.", "a", "not clear", "look", 3))
    assert "withheld" in alert.text
    assert "withheld" in alert.but(cause="a rate that is too large").text


def test_at_most_so_many_an_hour_and_the_last_says_that_more_are_withheld():
    clock = Clock()
    alert_manager = AlertManager([alarms_above(10)], rearm_samples=1, max_per_hour=3, clock=clock)
    alerts = alert_manager.process(of_norms([20, 1, 20, 1, 1, 20, *[1] * 4, 20, *[1] * 9]))
    assert [alert.step for alert in alerts] == [1, 3, 6]  # episodes end after 1, 2 and 4 healthy samples
    assert "further ones are withheld until the hour is over" in alerts[2].text
    assert "withheld" not in alerts[1].text
    clock.now += 3599
    assert sent_steps(alert_manager, [20, 1], start=21) == []
    clock.now += 1
    assert sent_steps(alert_manager, [20, 1], start=23) == [23]


def test_recovery_is_noted_once_by_the_logger(caplog):
    alert_manager = AlertManager([alarms_above(10)], rearm_samples=2)
    with caplog.at_level(logging.INFO, logger="wandb_gradwatch"):
        alert_manager.process(of_norms([20, 1, 1, 1, 1]))
    (record,) = caplog.records
    assert record.getMessage() == "recovered: no 'Too large' for 2 samples, up to step 3 (it began at step 1)"


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


def test_healthy_is_about_the_newest_sample_and_only_errors_count():
    alert_manager = AlertManager([alarms_above(10), alarms_above(5, title="Large", level="WARN")])
    assert alert_manager.healthy
    alert_manager.process(of_norms([20, 7]))
    assert alert_manager.healthy
    assert [finding.title for finding in alert_manager.last_findings] == ["Large"]
    alert_manager.process(of_norms([20], start=3))  # no alert is sent within the episode, but the run is not healthy
    assert not alert_manager.healthy
    alert_manager.process(of_norms([1], start=4))
    assert alert_manager.healthy


def test_a_finding_under_a_step_that_is_not_there_is_told_with_the_newest_sample():
    alert_manager = AlertManager([lambda snapshot: Alert("Odd", "text", 99)])
    assert alert_manager.process(of_norms([1, 1])) == [Alert("Odd", "text", 99)]


def test_the_default_rules_see_nan_and_a_spike_and_send_each_once():
    norms = [1.0] * 49 + [float("nan")] + [1.0] * 59 + [1000.0] + [1.0] * 20
    found = AlertManager(default_rules()).process(of_norms(norms))
    assert [(alert.step, alert.title) for alert in found] == [(50, "NaN gradient"), (110, "Exploding gradient")]


def test_a_resumed_desk_goes_on_where_it_stopped():
    norms = [1.0] * 30 + [500.0] * 3 + [1.0] * 40 + [900.0] + [1.0] * 5
    clock = Clock()
    whole = AlertManager(default_rules(), clock=clock)
    expected = sent_steps(whole, norms)
    for cut in (10, 31, 32, 50, 74):
        first, second = AlertManager(default_rules(), clock=clock), AlertManager(default_rules(), clock=Clock())
        found = sent_steps(first, norms[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert found + sent_steps(second, norms[cut:], start=cut + 1) == expected
    assert expected == [31, 74]


def test_a_state_loads_into_a_changed_list_of_rules():
    first = AlertManager([NaNGradient(), ExplodingGradient()])
    first.process(of_norms([1.0] * 30))
    second = AlertManager([ExplodingGradient(), alarms_above(10), ExplodingGradient(min_factor=2.0)])
    second.load_state_dict(first.state_dict())
    # the first ExplodingGradient restores the usual norms: it needs no second warm-up
    assert sorted(alert.title for alert in second.process(of_norms([500.0], start=31))) == [
        "Exploding gradient",
        "Too large",
    ]


def test_a_state_that_does_not_fit_costs_a_rule_its_memory_only(caplog):
    alert_manager = AlertManager([ExplodingGradient(), alarms_above(10)])
    state = alert_manager.state_dict()
    state["rules"]["ExplodingGradient: Exploding gradient"] = {"from": "another version"}
    alert_manager.load_state_dict(state)
    assert "could not load its state" in caplog.text
    assert sent_steps(alert_manager, [20]) == [1]


def test_the_hours_limit_survives_a_resume():
    clock = Clock()
    alert_manager = AlertManager([alarms_above(10)], rearm_samples=1, max_per_hour=1, clock=clock)
    alert_manager.process(of_norms([20]))
    clock.now += 3000
    other = Clock()
    other.now = 5.0  # the clock of another process has another zero
    resumed = AlertManager([alarms_above(10)], rearm_samples=1, max_per_hour=1, clock=other)
    resumed.load_state_dict(alert_manager.state_dict())
    assert sent_steps(resumed, [1, 20], start=2) == []
    other.now += 600
    assert sent_steps(resumed, [20], start=4) == [4]


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match="must have check"):
        AlertManager(["NaN"])
