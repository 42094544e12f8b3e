"""Updates: by how much each parameter changed, and how that compares with the parameter itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ..capture.probes import WatchedTensor
from ..capture.roster import NameFilter
from ..statistics.measure import sum_sq
from .base import ModuleProbe
from .naming import Models, matcher, nothing_matches
from .shards import Whole

_MIB: Final = 2**20


class Befores:
    """Copies of parameters from before an update until after it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def keep(self, tensors: Iterable[WatchedTensor]) -> None:
        """Copy these."""
        self._kept |= {tensor.name: tensor.parameter.clone() for tensor in tensors}

    def changes(self, tensors: Iterable[WatchedTensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, change (half precision in float32) and former value of each that was kept; each copy is dropped."""
        for tensor in tensors:
            before = self._kept.pop(tensor.name, None)
            if before is not None and before.shape == tensor.parameter.shape:
                yield tensor.name, _wide(tensor.parameter) - _wide(before), before

    def forget(self) -> None:
        """Drop what is left, of updates that never ended."""
        self._kept.clear()


class Updates(ModuleProbe):
    """The norm of each parameter's change in a step, and its ratio to the parameter's norm before.

    Logs `update/<parameter>/norm` and `update/<parameter>/ratio`. A healthy ratio is often quoted as 1e-3. It is
    missing for a parameter that was all zero. The change is what the optimizer did: learning rate, momentum, weight
    decay and all.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        max_mib: the memory that the copies may take.

    Memory: one copy of the matching parameters, from before to after the optimizer's step, in sampled steps only; and
    one parameter's change at a time.

    Raises:
        ValueError: match matches nothing, or its parameters exceed max_mib; both by watch().
    """

    def __init__(self, match: NameFilter | None = None, *, max_mib: float = 1024) -> None:
        self._match, self._max_mib = match, max_mib
        self._matches = matcher(match, repr(self))
        self._befores, self._whole = Befores(), Whole()
        self._due = False
        self._taken: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return "Updates()" if self._match is None else f"Updates({self._match!r})"

    def bind(self, models: Models) -> None:
        self._whole.bind(models)
        parameters = models.watched_parameters()
        chosen = {name: parameter for name, parameter in parameters.items() if self._matches(name)}
        if not chosen:
            raise nothing_matches("Updates()", self._match, "parameter", list(parameters))
        size = sum(parameter.numel() * parameter.element_size() for parameter in chosen.values()) / _MIB
        if size > self._max_mib:
            raise ValueError(
                f"{self!r} would copy {size:.0f} MiB of parameters at each sampled step, more than "
                f"max_mib={self._max_mib:g}; match fewer parameters, or raise max_mib"
            )

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._due = next_step_is_due
        self._befores.forget()
        if next_step_is_due:
            self._whole.look()

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if self._due:
            self._befores.keep(t for t in tensors if self._matches(t.name) and self._whole.is_whole(t.name))

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for name, change, before in self._befores.changes(tensors):
            change_norm, norm_before = sum_sq([change, before]).sqrt()
            self._taken[f"update/{name}/norm"] = change_norm
            self._taken[f"update/{name}/ratio"] = torch.where(norm_before > 0, change_norm / norm_before, torch.nan)

    def take(self) -> Mapping[str, Tensor]:
        taken, self._taken = self._taken, {}
        return taken

    def close(self) -> None:
        self._befores.forget()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
