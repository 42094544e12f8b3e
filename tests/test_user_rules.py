"""Rules that users write: functions, decorated functions, and what is refused; and the numbers in their texts."""

from __future__ import annotations

import math

import pytest
from grad_samples import of_norms

from wandb_gradwatch._analysis.formatting import listing, number
from wandb_gradwatch.rules import Alert, Judgement, Rule, default_rules, rule
from wandb_gradwatch.rules._base import as_rule
from wandb_gradwatch.snapshot import Snapshot


def test_a_decorated_function_is_a_rule_of_its_own_title_asked_sample_by_sample() -> None:
    @rule(title="Head too large", level="ERROR")
    def head_too_large(snapshot: Snapshot) -> str | None:
        norm = snapshot.grad_norm[0, snapshot.names.index("w")]
        return f"{norm:.0f} at step {snapshot.steps[0]}" if norm > 10 else None

    assert isinstance(head_too_large, Rule)
    (alert,) = head_too_large.check(of_norms([1.0, 20.0, 1.0]))
    assert alert == Alert("Head too large", "20 at step 2", 2, "ERROR")


def test_a_plain_function_is_titled_by_its_name_and_may_return_an_alert() -> None:
    def loss_is_weird(snapshot: Snapshot) -> str | Alert:
        return "hm" if snapshot.steps[0] == 1 else Alert("Other", "text", int(snapshot.steps[0]), "INFO")

    assert list(as_rule(loss_is_weird).check(of_norms([1.0, 1.0]))) == [
        Alert("Loss is weird", "hm", 1, "WARN"),
        Alert("Other", "text", 2, "INFO"),
    ]


def test_bad_rules_say_what_to_do() -> None:
    with pytest.raises(TypeError, match="must have check"):
        as_rule(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 to 63 characters"):
        rule(title="x" * 64)(lambda snapshot: None)
    with pytest.raises(TypeError, match="must return a str, an Alert or None, but returned 3"):
        list(as_rule(lambda snapshot: 3).check(of_norms([1.0])))  # type: ignore[arg-type, return-value]


def test_the_default_is_the_judgement_in_a_list_of_ones_own() -> None:
    assert default_rules() == [Judgement()]
    default_rules().append(as_rule(lambda snapshot: None))
    assert default_rules() == [Judgement()]


def test_numbers_are_written_as_people_write_them() -> None:
    values = (0.0, 1.0, 999.6, 1234.5, 65536.0, -113_250.4, 999_499.4, 1e6, 1.911e11, 0.0123, 5.51e-7, math.inf)
    written = ["0", "1", "1000", "1230", "65536", "-113000", "999000", "1e6", "1.91e11", "0.0123", "5.51e-7", "inf"]
    assert [number(value) for value in values] == written


def test_a_listing_has_five_items_and_counts_the_rest() -> None:
    assert listing(["a"] * 5) == "a, a, a, a, a"
    assert listing(["a"] * 7) == "a, a, a, a, a, and 2 more"
