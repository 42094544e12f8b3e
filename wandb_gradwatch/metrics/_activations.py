"""Activations: the statistics that gradients have, of what modules take in and put out, and of its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from .._capture.probes import Found
from .._capture.scaling import SCALES, scale_tensor
from .._measure.elements import onto
from ..snapshot import keys
from ._forward_hooks import Dims, hands_over
from ._module_index import ModuleIndex
from ._module_probe import ForwardProbe, ModuleFilter, is_measurable, leaves_in, slices, tensor_name, tensors_in
from ._rows import DEFAULT_STATISTICS, RowTally, check_statistics, widened
from ._rules import NonFiniteActivation

_OF: Final = ("input", "output", "grad")


class Activations(ForwardProbe):
    """Statistics of module outputs, logged as `activation/<module>/<statistic>`, merged over micro-batches.

    A tensor inside a tuple, list or dict is called `<module>.output_<index or key>`, an input of the module
    `<module>.input` or `<module>.input_<index or name>`, the gradient of an output `<module>.grad` or
    `<module>.grad_<index or key>`, without the scale of a gradient scaler. One that a module hands over itself
    (`log_tensor`) is called `<module>.<name>`, the output of the whole model `root`. With several processes the
    statistics are those of the rank that logs.

    Only forwards of the training are seen, once each: not those without gradients, not what activation checkpointing
    repeats, and evaluations only in a probe of their own, with `evaluation=True`. Nothing inside a compiled region is
    seen: a hook there would break the graph. A copied or saved model is not monitored.

    Args:
        match: of which modules: a regular expression (searched in the name), several, or a function; a class of
            modules, such as nn.Linear; None: all.
        of: what of them, out of "input", "output" and "grad".
        statistics: names out of norm, rms, mean, std, min, max, abs_max, dead_ratio, zero_ratio, num_nonfinite (of the
            finite elements, like those of gradients), abs_p01, abs_p50, abs_p99 (right to half an octave), and
            "histogram", at the steps that have histograms of gradients too: `histogram_every` of `watch()`.
        dead_threshold: |a| <= this counts as dead.
        evaluation: of the forwards of evaluations instead (the model in eval mode), all between two samples together,
            logged with the later one as `activation/<module>.eval/<statistic>`.

    Cost: at a sampled step one batched pass over each matching tensor, when it is there. 13 numbers of each are kept,
        and with a histogram 259 more, until the sample is complete; on the host one histogram of each until the flush.
        At other steps 1 us per matching module; with `evaluation` 2 us, and the pass at every forward of an evaluation.

    Raises:
        ValueError: an unknown statistic or `of`, such as "grad" of an evaluation; match matches nothing (by watch()).
    """

    def __init__(
        self,
        match: ModuleFilter | None = None,
        *,
        of: Sequence[str] = ("output",),
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        dead_threshold: float = 0.0,
        evaluation: bool = False,
    ) -> None:
        super().__init__(match, in_evaluation=evaluation)
        if isinstance(of, str) or not of or not set(of) <= set(_OF):
            raise ValueError(f"{self!r}: of={of!r} must be a sequence of names out of {_OF}")
        if evaluation and "grad" in of:
            raise ValueError(f'{self!r}: of={of!r} has "grad", but an evaluation has no backward')
        self._of = frozenset(of)
        statistics = check_statistics(repr(self), statistics, histogram=True)
        self.logs = frozenset((keys.ACTIVATION, statistic) for statistic in statistics)
        self.brings = (NonFiniteActivation,) if "num_nonfinite" in statistics else ()
        self._rows = self.collect(RowTally(statistics, dead_threshold))
        self._source: dict[str, str] = {}  # of each tensor's name: what the tap's order knows

    def bind(self, models: ModuleIndex) -> None:
        modules = dict(models.modules())
        # Ids of the models' own: whose optimizer they have, whose scaler.
        self._parameters = {id(parameter) for module in modules.values() for parameter in module.parameters()}
        self.tap_into(models)
        if not any(map(hands_over, modules.values())):
            self.check_match("module", modules)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._rows.measures_histograms = histogram_is_due or self._in_evaluation  # it belongs to a sample to come
        self._rows.reads_histograms = histogram_is_due

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, hooked = (f"{name}.eval" if self._in_evaluation else name), name
        seen: list[tuple[str, Tensor]] = []
        if "input" in self._of:
            seen += [*tensors_in(args[0] if len(args) == 1 else args, "input"), *tensors_in(kwargs, "input")]
        if "output" in self._of:
            seen += tensors_in(output)
        self._add(hooked, {tensor_name(name, path): tensor for path, tensor in seen})
        if "grad" in self._of:
            for path, tensor in leaves_in(output, "grad"):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._backward_reached, name, path))  # type: ignore[no-untyped-call]

    def _backward_reached(self, name: str, path: str, gradient: Tensor) -> None:
        """The gradient of an output is there; it goes on as it is."""
        if self._tap.is_open:
            self._tap.boundary.run(self._add_gradient, name, path, gradient)

    def _add_gradient(self, name: str, path: str, gradient: Tensor) -> None:
        scaler = SCALES.scaler_for(self._parameters)
        scale = None if scaler is None else scale_tensor(scaler)
        for _, tensor in tensors_in(gradient):
            unscaled = tensor if scale is None else widened(tensor) / onto(scale, tensor.device)
            self._add(name, {tensor_name(name, path): unscaled})

    def logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if is_measurable(thing) and (self._matches(module) or self._matches(f"{module}.{name}")):
            within = f"{module}.eval" if self._in_evaluation else module
            parts = {tensor_name(within, name, label): part for label, part in slices(thing.detach(), dims)}
            self._add(f"{module}.{name}", parts)

    def _add(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        self._seen_any = True
        self._source |= dict.fromkeys(tensors, source)
        for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
            self._rows.measure({name: tensor for name, tensor in tensors.items() if tensor.device == device})

    def take(self) -> Mapping[str, Found]:
        # By the place in the forward: re-entrant checkpointing measures its blocks in the backward's order.
        read = self._rows.read(lambda name: self._tap.order[self._source[name]])
        return {f"{keys.ACTIVATION}/{name}/{statistic}": value for name, statistic, value in read}
