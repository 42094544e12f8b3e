"""Metrics for `watch(..., metrics=[...])`, which measure any function of any tensor, and the coordinate check."""

from ._coordinate_check import CoordinateCheck, coordinate_check
from ._forward_hooks import MonitorMixin, log_attention, log_tensor
from ._metric import Metric
from ._module_probe import ModuleProbe
from ._outputs import Activations, Reference
from ._parameters import OptimizerState, Spectrum, Updates
from ._ranks import NoiseScale, Ranks
from ._rules import DeadExperts, EntropyCollapse, GrowingLogits, NonFiniteActivation, OutgrownUpdate, SlowRank
from ._transformer_layers import Attention, Router

__all__ = [
    "Activations", "Attention", "CoordinateCheck", "DeadExperts", "EntropyCollapse", "GrowingLogits", "Metric",
    "ModuleProbe", "MonitorMixin", "NoiseScale", "NonFiniteActivation", "OptimizerState", "OutgrownUpdate", "Ranks",
    "Reference", "Router", "SlowRank", "Spectrum", "Updates", "coordinate_check", "log_attention",
    "log_tensor",
]  # fmt: skip
