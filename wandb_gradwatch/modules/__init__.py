"""Any metric of any tensor: what `watch(..., metrics=[...])` takes, and the coordinate check."""

from __future__ import annotations

from .activations import Activations
from .alerts import EntropyCollapse, NonFiniteActivation
from .attention import Attention, log_attention
from .base import ModuleProbe
from .binding import MetricLike, probes_of, rules_of
from .coordinate_check import CoordinateCheck, coordinate_check
from .custom import CustomMetrics
from .metric import Metric
from .mixin import MonitorMixin
from .reference import Reference
from .tap import log_tensor
from .updates import Updates

__all__ = [
    "Activations",
    "Attention",
    "CoordinateCheck",
    "CustomMetrics",
    "EntropyCollapse",
    "Metric",
    "MetricLike",
    "ModuleProbe",
    "MonitorMixin",
    "NonFiniteActivation",
    "Reference",
    "Updates",
    "coordinate_check",
    "log_attention",
    "log_tensor",
    "probes_of",
    "rules_of",
]
