"""A window on the host: frozen arrays, and every number that is derived from them, by name.

The device keeps sums; this room gives them their meaning. Nothing here needs torch or a W&B run.
"""

from __future__ import annotations

from . import keys
from ._arrays import LEAST_SUM_SQ, last_present
from ._overview import Overview
from ._shapes import GroupBy, concatenate, group_function, select_samples
from ._snapshot import Snapshot

__all__ = [
    "LEAST_SUM_SQ",
    "GroupBy",
    "Overview",
    "Snapshot",
    "concatenate",
    "group_function",
    "keys",
    "last_present",
    "select_samples",
]
