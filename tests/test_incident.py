"""Incidents and verdicts as data: what is sent, and what comes back from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from wandb_gradwatch._judgement.incident import Incident, Layer
from wandb_gradwatch._judgement.verdict import verdict_of

SPIKE = Incident(
    kind="exploding_gradient",
    title="Exploding gradient",
    level="ERROR",
    first_step=152,
    found_step=153,
    last_step=160,
    fact="the gradient norm is 41.2, 45 times the usual 0.91",
    cause="learning_rate",
    cause_text="learning rate too high",
    evidence="it rose 100 times at step 151",
    advice="divide it by 10, or warm up for longer",
    remedy="divide the learning rate by 10 or lengthen its warm-up, and clip the gradients",
    layers=(Layer("head.weight", 40.0, 0.5), Layer("blocks.0.fc.weight")),
    values={"grad_norm": 41.2, "usual": math.nan},
    kinds=("exploding_gradient",),
)


def test_the_message_says_the_cause_first() -> None:
    lines = SPIKE.message.split("\n")
    assert lines[0] == "Step 152: learning rate too high. Divide it by 10, or warm up for longer."
    assert lines[1] == "The gradient norm is 41.2, 45 times the usual 0.91."


@pytest.mark.parametrize("length", [1, 119, 400, 5000])
def test_no_message_is_longer_than_a_phone_shows(length: int) -> None:
    long = "x" * length
    incident = replace(SPIKE, fact=long, cause_text=long, evidence=long, layers=(Layer(long),), advice=long)
    first, *_ = incident.message.split("\n")
    assert len(first) <= 120
    assert len(incident.message) <= 400


def test_what_was_not_measured_is_said() -> None:
    assert "Steps 71 to 151 were not measured." in replace(SPIKE, unmeasured_from=71).message


def test_an_incident_survives_json() -> None:
    again = Incident.from_dict(json.loads(json.dumps(SPIKE.to_dict(), allow_nan=False)))
    assert again.to_dict() == SPIKE.to_dict()
    assert math.isnan(again.values["usual"])
    assert again.layers[0] == SPIKE.layers[0]


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"level": "FATAL"},
        {"first_step": "1"},
        {"layers": 3},
        {"values": [1]},
        {"title": None},
        {"kinds": [1]},
        {"rank": True},
    ],
)
def test_another_object_is_no_incident(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Incident.from_dict(SPIKE.to_dict() | change)


def test_the_verdict_counts_what_was_measured() -> None:
    assert verdict_of([], num_steps=400, num_measured=212).sentence == "no alert in 212 of 400 steps measured"
    assert verdict_of([], num_steps=0, num_measured=0).status == "unknown"
    broken = verdict_of([replace(SPIKE, recovered_step=170)], num_steps=400, num_measured=40)
    assert broken.status == "error"
    assert broken.exit_status == 2
    assert broken.sentence == (
        "broke at step 152: learning rate too high; usual again at the measured step 170; 40 of 400 steps measured"
    )


def test_the_worst_incident_is_the_verdict() -> None:
    remark = replace(SPIKE, level="INFO")
    assert verdict_of([remark], num_steps=9, num_measured=9).status == "ok"
    warning = replace(SPIKE, level="WARN", first_step=3)
    both = verdict_of([remark, warning, SPIKE], num_steps=9, num_measured=9)
    assert both.status == "error"
    assert "1 more incident" in both.sentence
    assert "152" in both.sentence


def test_a_sentence_that_begins_with_a_name_keeps_it() -> None:
    assert "head.weight has" in replace(SPIKE, fact="head.weight has a norm of 9").message
    assert "The norm has" in replace(SPIKE, fact="the norm has doubled").message
