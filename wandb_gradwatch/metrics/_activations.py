"""Activations: the statistics of inputs and outputs of modules."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from .._capture.probes import Found
from .._capture.scaling import SCALERS, scale_tensor
from .._measure.elements import onto
from .._runtime.outputs import is_measurable, leaves_in
from ..snapshot import keys
from ._forward_hooks import ModuleFilter, ModuleIndex, hands_over
from ._module_probe import ForwardProbe
from ._rows import HISTOGRAM, STATISTICS, Dims, RowTally, check_names, slices, tensor_name, tensors_in, widened
from ._rules import NonFiniteActivation

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "min", "max", "dead_ratio", "num_nonfinite", HISTOGRAM)
_OF: Final = ("input", "output", "grad")


class Activations(ForwardProbe):
    """Statistics of module outputs, logged as `activation/<module>/<statistic>` and merged over micro-batches.

    The output of the whole model is `root`. Tensors in a tuple, list or dict are `<module>.output_<index or key>`,
    inputs `<module>.input` or `<module>.input_<index or name>`, gradients of outputs (without the loss scale of a
    gradient scaler) `<module>.grad` or `<module>.grad_<index or key>`, and those of `log_tensor` `<module>.<name>`.

    Each forward of the training is measured once, on the rank that logs; those without gradients and the recomputation
    of activation checkpointing are ignored, and so are modules inside a compiled region, where a hook would break the
    graph. A copied or saved model has no hooks.

    Args:
        match: choose modules by name (a regular expression, searched; several; or a function), or by class, such as
            nn.Linear. None: all.
        of: the tensors to measure: any of "input", "output" and "grad".
        statistics: any of norm, rms, mean, std, min, max, abs_max, dead_ratio, zero_ratio and num_nonfinite (computed
            over finite elements, as for gradients); and "histogram", at steps where gradients have a histogram too
            (`histogram_every` of `watch()`).
        dead_threshold: an element with |a| <= this counts as dead.
        evaluation: measure the forwards of evaluations (the model in eval mode) instead. Those between two samples are
            merged and logged with the later sample as `activation/<module>.eval/<statistic>`.

    Cost: at a sampled step (with `evaluation` at every forward of an evaluation) one batched pass over each matching
        tensor, and 13 numbers per tensor until the sample is complete, 259 more with a histogram. At other steps 1 us
        per matching module, with `evaluation` 2 us.

    Raises:
        ValueError: `statistics` or `of` has an unknown name, or "grad" with `evaluation`; watch() raises it if match
            matches nothing.
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
        self._rows = RowTally(statistics, dead_threshold)
        super().__init__(match, self._rows, in_evaluation=evaluation)
        check_names(f"{self!r}: of={of!r}", of, _OF)
        if evaluation and "grad" in of:
            raise ValueError(f'{self!r}: of={of!r} has "grad", but an evaluation has no backward')
        self._of = frozenset(of)
        check_names(f"{self!r}: statistics={statistics!r}", statistics, (*STATISTICS, HISTOGRAM))
        self.logs = frozenset((keys.ACTIVATION, statistic) for statistic in statistics)
        self.brings = (NonFiniteActivation,) if "num_nonfinite" in statistics else ()
        self._has_histograms = HISTOGRAM in statistics
        self._source: dict[str, str] = {}  # by tensor name: the name under which the hook keeps the tensor's order

    def bind(self, models: ModuleIndex) -> None:
        modules = dict(models.modules())
        # The ids of the models' parameters identify their optimizer, and so the gradient scaler.
        self._parameters = {id(parameter) for module in modules.values() for parameter in module.parameters()}
        self.hook_into(models)
        if not any(map(hands_over, modules.values())):
            self._match.require("module", modules)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._histogram_is_due = histogram_is_due

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
        """Measure the gradient of an output, which the backward continues with unchanged."""
        if self._hooks.is_open:
            self._hooks.boundary.run(self._add_gradient, name, path, gradient)

    def _add_gradient(self, name: str, path: str, gradient: Tensor) -> None:
        scale = scale_tensor(SCALERS.scaler_for(self._parameters))
        for _, tensor in tensors_in(gradient):
            unscaled = tensor if scale is None else widened(tensor) / onto(scale, tensor.device)
            self._add(name, {tensor_name(name, path): unscaled})

    def logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if is_measurable(thing) and (self._match.chooses(module) or self._match.chooses(f"{module}.{name}")):
            within = f"{module}.eval" if self._in_evaluation else module
            parts = {tensor_name(within, name, label): part for label, part in slices(thing.detach(), dims)}
            self._add(f"{module}.{name}", parts)

    def _add(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        self._seen_any = True
        self._source |= dict.fromkeys(tensors, source)
        # The sample of an evaluation is yet to come, and may have histograms.
        histogram = self._has_histograms and (self._histogram_is_due or self._in_evaluation)
        for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
            here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
            self._rows.measure(here, histogram=histogram)

    def take(self) -> Mapping[str, Found]:
        # In the order of the forward: re-entrant checkpointing measures its blocks in the order of the backward.
        order = self._hooks.order
        read = self._rows.read(lambda name: order[self._source[name]], histogram=self._histogram_is_due)
        return {f"{keys.ACTIVATION}/{name}/{statistic}": value for name, statistic, value in read}
