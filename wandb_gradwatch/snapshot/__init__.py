"""A window on the host: frozen arrays, and every number that is derived from them, by name.

The device keeps sums; this room gives them their meaning. Nothing here needs torch or a W&B run.
"""

from __future__ import annotations

from . import keys
from ._snapshot import Snapshot

__all__ = [
    "Snapshot",
    "keys",
]
