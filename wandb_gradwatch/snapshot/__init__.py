"""Snapshot: the samples of one window on the host, as frozen arrays, and all statistics derived from them.

The device computes sums; this package derives norms, means and ratios from them. It needs neither torch nor a W&B run.
"""

from . import keys
from ._snapshot import Snapshot

__all__ = ["Snapshot", "keys"]
