"""Activations: the statistics that gradients have, of what modules put out in the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found
from ..rules import Rule
from ..snapshot import keys
from ._forward_hooks import Dims, ForwardHook
from ._mixin import hands_over
from ._module_index import ModuleIndex, matcher, nothing_matches
from ._module_probe import ForwardProbe, is_measurable, slices, tensor_name, tensors_in
from ._rows import DEFAULT_STATISTICS, RowTally, check_statistics
from ._rules import NonFiniteActivation


class Activations(ForwardProbe):
    """Statistics of module outputs, logged as `activation/<module>/<statistic>`, merged over micro-batches.

    A tensor inside a tuple, list or dict is called `<module>.output_<index or key>`, one that a module hands over
    itself (`log_tensor`) `<module>.<name>`, the output of the whole model `root`. With several processes they are those
    of the rank that logs.

    Only forwards of the training are seen, once each: not evaluations, not those without gradients, not what activation
    checkpointing repeats. Nothing inside a compiled region is: see `tap`. A copied or saved model is not monitored.

    Args:
        match: of which modules: a regular expression (searched in the name), several, or a function; None: all.
        statistics: names out of norm, rms, mean, std, min, max, abs_max, dead_ratio, zero_ratio, num_nonfinite (of the
            finite elements, like those of gradients), abs_p01, abs_p50, abs_p99 (right to half an octave), and
            "histogram", at the steps that have histograms of gradients too: `histogram_every` of `watch()`.
        dead_threshold: |a| <= this counts as dead.

    Cost: at a sampled step one batched pass over each matching output, when it is there. 13 numbers of each are kept,
        and with a histogram 259 more, until the sample is complete; on the host one histogram of each until the flush.
        At other steps 1 us per matching module.

    Raises:
        ValueError: an unknown statistic; match matches nothing (by watch()).
    """

    def __init__(
        self,
        match: NameFilter | None = None,
        *,
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        dead_threshold: float = 0.0,
    ) -> None:
        super().__init__()
        self._match = match
        self._matches = matcher(match, repr(self))
        self._statistics = check_statistics(repr(self), statistics, histogram=True)
        self._pending, self._sample = self.stores(lambda: RowTally(self._statistics, dead_threshold))
        self._source: dict[str, str] = {}  # of each tensor's name: what the tap's order knows

    def __repr__(self) -> str:
        return "Activations()" if self._match is None else f"Activations({self._match!r})"

    def claims(self) -> set[tuple[str, str]]:
        return {(keys.ACTIVATION, statistic) for statistic in self._statistics}

    def rules(self) -> list[Rule]:
        return [NonFiniteActivation()] if "num_nonfinite" in self._statistics else []

    def bind(self, models: ModuleIndex) -> None:
        modules = dict(models.modules())
        if not any(map(self._matches, modules)) and not any(map(hands_over, modules.values())):
            raise nothing_matches("Activations()", self._match, "module", list(modules))
        self.tap_into(models, self._logged)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._pending.histogram_is_due = self._sample.histogram_is_due = histogram_is_due

    def install(self, tap: ForwardHook) -> None:
        tap.hook(lambda name, _: self._matches(name), self._forward_done)

    def _forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._add(name, {tensor_name(name, path): tensor for path, tensor in tensors_in(output)})

    def _logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if is_measurable(thing) and (self._matches(module) or self._matches(f"{module}.{name}")):
            parts = {tensor_name(module, name, label): part for label, part in slices(thing.detach(), dims)}
            self._add(f"{module}.{name}", parts)

    def _add(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        self._seen_any = True
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            self._source[name] = source
            by_device.setdefault(tensor.device, {})[name] = tensor
        for group in by_device.values():
            self._pending.add(group)

    def take(self) -> Mapping[str, Found]:
        taken = {
            f"{keys.ACTIVATION}/{name}/{statistic}": value for name, statistic, value in self._sample.read(self._order)
        }
        self._sample.clear()
        return taken

    def _order(self, name: str) -> int:
        """The place in the forward; re-entrant checkpointing measures its blocks in the backward's order."""
        return self._tap.order[self._source[name]] if self._tap is not None else 0
