"""The open window in a checkpoint, and back: parameters are matched by name, and those that are gone are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._measure.columns import NUM_BINS, NUM_COLUMNS
from .._measure.probe_values import MetricHistogram
from .._transfer.transfers import ArrivedSample, Sample
from .assembly import padded

# P watched parameters, N of them known when the state was saved, C columns, B histogram bins


@dataclass(frozen=True)
class NameMatch:
    """Which of the saved names are watched now.

    Args:
        num_saved: N.
        num_names: P.
        slots: the places among the names of now of those that are in both.
        saved: their places among the saved names.
    """

    num_saved: int
    num_names: int
    slots: list[int]
    saved: list[int]

    @classmethod
    def of(cls, saved_names: Sequence[str], slot_of_name: Mapping[str, int], num_names: int) -> NameMatch:
        """Match saved names with the slots of now."""
        both = [(slot_of_name[name], index) for index, name in enumerate(saved_names) if name in slot_of_name]
        return cls(len(saved_names), num_names, [slot for slot, _ in both], [index for _, index in both])


def save_samples(samples: Sequence[ArrivedSample]) -> list[dict[str, Any]]:
    """The samples as numbers, dicts and tensors."""
    return [
        {
            "step": sample.sample.step,
            "rows": torch.from_numpy(sample.rows.copy()),
            "loss_scale": sample.loss_scale,
            "skipped": sample.skipped,
            "metrics": dict(sample.metrics),
            "histograms": {key: torch.from_numpy(h.packed()) for key, h in sample.histograms.items()},
        }
        for sample in samples
    ]


def load_samples(states: Sequence[Mapping[str, Any]], match: NameMatch) -> list[ArrivedSample]:
    """The samples under the names of now; what was not watched then is missing."""
    return [_load_sample(state, match) for state in states]


def _load_sample(state: Mapping[str, Any], match: NameMatch) -> ArrivedSample:
    rows = np.full((match.num_names, NUM_COLUMNS), np.nan)
    rows[match.slots] = padded(state["rows"].numpy(), match.num_saved)[match.saved]
    skipped = bool(state["skipped"])
    return ArrivedSample(
        Sample(int(state["step"]), skipped, ()),
        rows,
        float(state["loss_scale"]),
        skipped,
        dict(state["metrics"]),
        {key: MetricHistogram.of(packed.numpy()) for key, packed in state.get("histograms", {}).items()},
    )


def load_histogram(counts: torch.Tensor | None, match: NameMatch) -> torch.Tensor | None:
    """The saved histogram [at most N, B] under the names of now: [P, B]; None for none."""
    if counts is None:
        return None
    histogram = np.zeros((match.num_names, NUM_BINS), dtype=np.int64)
    histogram[match.slots] = padded(counts.numpy(), match.num_saved, fill=0)[match.saved]
    return torch.from_numpy(histogram)
