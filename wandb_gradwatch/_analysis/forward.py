"""What the forward of a sample had to say, where `modules.Activations` has measured it."""

from __future__ import annotations

from typing import Final

from ..snapshot import Snapshot

# Of the metric that counts the non-finite elements of a module's output: [S].
_PREFIX: Final = "activation/"
_SUFFIX: Final = "/num_nonfinite"


def nonfinite_activations(snapshot: Snapshot, sample: int) -> dict[str, int]:
    """Modules whose output was not finite in a sample, in the order of the forward, and how many elements each had.

    Empty where all were finite, and where nothing is measured in the forward.
    """
    found = {}
    for key, counts in snapshot.metrics.items():
        if key.startswith(_PREFIX) and key.endswith(_SUFFIX) and counts[sample] > 0:
            found[key[len(_PREFIX) : -len(_SUFFIX)]] = int(counts[sample])
    return found
