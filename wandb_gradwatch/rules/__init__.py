"""Alerts, and the rules of the user that raise them: snapshot in, alerts out. The shipped judgement is one entry."""

from ._base import Alert, FunctionRule, Rule, rule
from ._judgement import Judgement

__all__ = ["Alert", "FunctionRule", "Judgement", "Rule", "default_rules", "rule"]


def default_rules() -> list[Rule | Judgement]:
    """Return what `watch()` uses by default: the shipped judgement. Add your own rules to it."""
    return [Judgement()]
