"""Alerts and the rules that raise them: snapshot in, alerts out. Pure; nothing here needs torch or a W&B run."""

from ._base import Alert, FunctionRule, Rule, rule
from ._dead import DeadGradient
from ._exploding import ExplodingGradient
from ._initial import LargeInputs, PoorInitialisation
from ._loss import LossSpike
from ._missing import NoGradient
from ._nonfinite import InfGradient, LossScaleCollapse, NaNGradient, NonFiniteLoss
from ._parameters import FastParameters
from ._vanishing import VanishingGradient
from ._wiring import GradientsNotReset, NegativeLearningRate, NotInOptimizer, TightClipping, UnchangedParameters

__all__ = [
    "Alert",
    "DeadGradient",
    "ExplodingGradient",
    "FastParameters",
    "FunctionRule",
    "GradientsNotReset",
    "InfGradient",
    "LargeInputs",
    "LossScaleCollapse",
    "LossSpike",
    "NaNGradient",
    "NegativeLearningRate",
    "NoGradient",
    "NonFiniteLoss",
    "NotInOptimizer",
    "PoorInitialisation",
    "Rule",
    "TightClipping",
    "UnchangedParameters",
    "VanishingGradient",
    "default_rules",
    "rule",
]


def default_rules() -> list[Rule]:
    """Return the rules that `watch()` uses by default. They are meant to stay silent on a healthy training."""
    return [
        NaNGradient(),
        InfGradient(),
        NonFiniteLoss(),
        LossSpike(),
        ExplodingGradient(),
        LossScaleCollapse(),
        VanishingGradient(),
        DeadGradient(),
        NoGradient(),
        NotInOptimizer(),
        GradientsNotReset(),
        UnchangedParameters(),
        NegativeLearningRate(),
        PoorInitialisation(),
        LargeInputs(),
        FastParameters(),
        TightClipping(),
    ]
