"""What the forward of a sample had to say, where `modules.Activations` has measured it."""

from __future__ import annotations

from ..snapshot import Snapshot, keys


def nonfinite_activations(snapshot: Snapshot, sample: int) -> dict[str, int]:
    """Modules whose output was not finite in a sample, in the order of the forward, and how many elements each had.

    Empty where all were finite, and where nothing is measured in the forward.
    """
    found = {}
    for key, counts in snapshot.metrics.items():
        family, name, metric = keys.split_metric(key) or ("", "", "")
        if (family, metric) == (keys.ACTIVATION, keys.NONFINITE_METRIC) and counts[sample] > 0:
            found[name] = int(counts[sample])
    return found
