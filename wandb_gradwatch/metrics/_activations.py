"""Activations: the statistics of inputs and outputs of modules. Router: how the experts of a mixture are used."""

import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._capture.probes import Found
from .._capture.scaling import SCALERS, scale_tensor
from .._measure.elements import onto, wide_dtype
from .._runtime.wrappers import is_measurable, leaves_in
from ..snapshot import keys
from ._forward_hooks import ModuleFilter, ModuleIndex, hands_over
from ._module_probe import ForwardProbe
from ._rows import (
    HISTOGRAM,
    STATISTICS,
    Dims,
    RowTally,
    Store,
    add_on_device,
    check_names,
    slices,
    tensor_name,
    tensors_in,
    widened,
)
from ._rules import POOLED, DeadExperts, NonFiniteActivation

# T tokens, E experts

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "min", "max", "dead_ratio", "num_nonfinite", HISTOGRAM)
_OF: Final = ("input", "output", "grad")


class Activations(ForwardProbe):
    """Statistics of module outputs, logged as `activation/<module>/<statistic>` and merged over micro-batches.

    Tensors in a tuple, list or dict are named `<module>.output_<index or key>`, inputs `<module>.input` or
    `<module>.input_<index or name>`, and gradients of outputs `<module>.grad` or `<module>.grad_<index or key>`
    (without the loss scale of a gradient scaler). A tensor passed to `log_tensor` is named `<module>.<name>`; the
    output of the whole model is `root`. With several processes the statistics are those of the rank that logs.

    Each forward of the training is measured once. Forwards without gradients and the recomputation of activation
    checkpointing are ignored; evaluations are measured only by a separate probe with `evaluation=True`. Modules inside
    a compiled region are not measured, because a hook would break the graph. A copied or saved model has no hooks.

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

    Cost: at a sampled step one batched pass over each matching tensor, and 13 numbers per tensor kept until the sample
        is complete; a histogram adds 259 numbers, and one histogram on the host until the flush. At other steps 1 us
        per matching module. With `evaluation` 2 us, and the pass at every forward of an evaluation.

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
        super().__init__(match, in_evaluation=evaluation)
        check_names(f"{self!r}: of={of!r}", of, _OF)
        if evaluation and "grad" in of:
            raise ValueError(f'{self!r}: of={of!r} has "grad", but an evaluation has no backward')
        self._of = frozenset(of)
        check_names(f"{self!r}: statistics={statistics!r}", statistics, (*STATISTICS, HISTOGRAM))
        self.logs = frozenset((keys.ACTIVATION, statistic) for statistic in statistics)
        self.brings = (NonFiniteActivation,) if "num_nonfinite" in statistics else ()
        self._rows = self.collect(RowTally(statistics, dead_threshold))
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


MAX_EXPERT_KEYS: Final = 2000  # over all layers; with more, single experts are logged only pooled over the layers


class Router(ForwardProbe):
    """Load of the experts, dead experts and the router's entropy, logged as `router/<module>/...` and, if several
    layers have the same number of experts, pooled as `router/all_layers/...`; a second Router of the same `watch()`
    pools its layers as `router/all_layers_2/...`, and so on.

    A router is a module whose output, or the first floating-point tensor in it, has one logit per token and expert:
    [..., E]. A token goes to the experts with its `top_k` largest logits. The numbers cover all tokens of a sample,
    over all micro-batches:

    - `load_max_ratio`, `load_min_ratio`: the share of the fullest and of the emptiest expert, times E; 1 is ideal.
    - `dead_experts`: the number of experts that got no token.
    - `entropy_ratio`: the mean entropy of softmax(logits), divided by its maximum log E: 0 if the router always picks
      one expert with certainty, 1 if all experts are equally likely.
    - `load_entropy_ratio`: the entropy of the loads, divided by log E: 1 if all loads are equal (Fedus et al. 2021,
      arXiv 2101.03961, balance the loads with an auxiliary loss).
    - `expert_<i>/load_ratio`: each expert's share times E; for single layers only up to 2,000 experts over all layers.

    With several processes the numbers are those of the rank that logs.

    Args:
        match: choose the routers by name, as for `Activations`, or by class.
        top_k: the number of experts that a token goes to.

    Memory: E + 2 numbers per router until the sample is complete. Cost: a softmax and a top-k of the logits at a
    sampled step.

    Raises:
        ValueError: top_k is not positive; watch() raises it if match matches no module.
    """

    logs, brings = frozenset({(keys.ROUTER, keys.DEAD_EXPERTS)}), (DeadExperts,)
    pooled = POOLED  # in place of a module's name; watch() gives each further Router another one

    def __init__(self, match: ModuleFilter, *, top_k: int = 1) -> None:
        super().__init__(match)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"Router(top_k={top_k!r}) must be the number of experts that a token goes to")
        self._top_k = top_k
        # [E + 2] per router: the number of tokens of each expert, the sum of the entropies, the number of tokens.
        self._sums = self.collect(Store[str, Tensor](add_on_device))

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        _, logits = next(tensors_in(output), ("", None))
        if logits is None:  # no tokens, or a call under vmap
            return
        if logits.ndim < 1 or logits.shape[-1] < max(2, self._top_k):
            raise ValueError(
                f"{self!r}: the output of {name!r} is not logits [..., experts] of at least {max(2, self._top_k)} "
                "experts; match the module that returns them"
            )
        self._seen_any = True
        self._sums.add(name, _loads(logits.flatten(0, -2), self._top_k))

    def take(self) -> Mapping[str, Found]:
        layers = self._sums.take()
        num_experts = [len(loads) - 2 for loads in layers.values()]
        if len(layers) > 1 and len(set(num_experts)) == 1:
            layers[self.pooled] = functools.reduce(add_on_device, layers.values())
        taken: dict[str, Found] = {}
        for name, loads in layers.items():
            tokens_E, entropies, tokens = loads[:-2], loads[-2], loads[-1]
            num = len(tokens_E)
            share_E = tokens_E / (tokens * self._top_k)
            numbers = {
                "load_max_ratio": share_E.max() * num,
                "load_min_ratio": share_E.min() * num,
                keys.DEAD_EXPERTS: (tokens_E == 0).sum(),
                "entropy_ratio": entropies / tokens / math.log(num),
                "load_entropy_ratio": torch.special.entr(share_E).sum() / math.log(num),
            }
            if name == self.pooled or sum(num_experts) <= MAX_EXPERT_KEYS:
                numbers |= {f"expert_{expert}/load_ratio": share * num for expert, share in enumerate(share_E)}
            taken |= {f"{keys.ROUTER}/{name}/{what}": number for what, number in numbers.items()}
        return taken


def _loads(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return the tokens of each expert, the sum of the tokens' entropies, and the number of tokens: [E + 2]."""
    wide = wide_dtype(logits_TE.device)
    chosen_TK = logits_TE.topk(top_k, dim=-1).indices
    # bincount would make the host wait for the largest index on a device.
    ones = torch.ones(chosen_TK.numel(), dtype=wide, device=logits_TE.device)
    tokens_E = ones.new_zeros(logits_TE.shape[-1]).scatter_add(0, chosen_TK.flatten(), ones)
    entropies = torch.special.entr(torch.softmax(logits_TE.float(), dim=-1)).sum(dtype=wide)
    return torch.cat([tokens_E, torch.stack([entropies, torch.full_like(entropies, len(logits_TE))])])
