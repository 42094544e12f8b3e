"""Activations: the statistics that gradients have, of what modules take in and put out, and of its gradients.

And Router: how the tokens of a mixture of experts spread over its experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._capture.probes import Found
from .._capture.scaling import SCALES, scale_tensor
from .._measure.elements import onto, wide_dtype
from ..snapshot import keys
from ._forward_hooks import ModuleIndex, hands_over
from ._module_probe import ForwardProbe, ModuleFilter
from ._rows import (
    HISTOGRAM,
    QUANTILES,
    STATISTICS,
    Dims,
    RowTally,
    Store,
    add_on_device,
    check_names,
    is_measurable,
    leaves_in,
    slices,
    tensor_name,
    tensors_in,
    widened,
)
from ._rules import DeadExperts, NonFiniteActivation

# T tokens, E experts

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "min", "max", "dead_ratio", "num_nonfinite", HISTOGRAM)
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

    Cost: at a sampled step one batched pass over each matching tensor; 13 numbers of each are kept until the sample is
        complete, with a histogram 259 more, and on the host one histogram until the flush. At other steps 1 us per
        matching module; with `evaluation` 2 us, and the pass at every forward of an evaluation.

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
        check_names(f"{self!r}: of={of!r}", of, _OF)
        if evaluation and "grad" in of:
            raise ValueError(f'{self!r}: of={of!r} has "grad", but an evaluation has no backward')
        self._of = frozenset(of)
        check_names(f"{self!r}: statistics={statistics!r}", statistics, (*STATISTICS, *QUANTILES, HISTOGRAM))
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


POOLED: Final = "all_layers"
MAX_EXPERT_KEYS: Final = 2000  # of all layers; with more, experts are told of all layers together only


class Router(ForwardProbe):
    """Load of the experts, dead experts and the router's entropy, logged as `router/<module>/...`, pooled in
    `router/all_layers/...` where several layers have as many experts.

    A router is a module whose output, or the first floating tensor in it, has one logit of every token for each expert
    in its last dimension: [..., E]. A token goes to its `top_k` largest. Over the tokens of a sample's forwards, all
    micro-batches together:

    - `load_max_ratio`, `load_min_ratio`: the share of the fullest and of the emptiest expert, times E: 1 is the ideal.
    - `dead_experts`: how many got no token.
    - `entropy_ratio`: the mean entropy of softmax(logits), by its largest value log E: 0 where the router is sure, 1
      where it has no opinion.
    - `load_entropy_ratio`: the entropy of the loads by log E: 1 where all are alike (Fedus et al. 2021,
      arXiv 2101.03961, balance this with an auxiliary loss).
    - `expert_<i>/load_ratio`: every expert's share times E; of single layers only while all of them are at most 2,000.

    With several processes the numbers are those of the rank that logs.

    Args:
        match: of the routers: by name as for `Activations`, or their class.
        top_k: experts that a token goes to.

    Memory: E + 2 numbers of each router until the sample is complete. Cost: a softmax and a top-k of the logits at a
    sampled step.

    Raises:
        ValueError: match matches no module (by watch()); top_k is not positive.
    """

    logs, brings = frozenset({(keys.ROUTER, keys.DEAD_EXPERTS)}), (DeadExperts,)

    def __init__(self, match: ModuleFilter, *, top_k: int = 1) -> None:
        super().__init__(match)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"Router(top_k={top_k!r}) must be the number of experts that a token goes to")
        self._top_k = top_k
        # [E + 2] of each router: tokens of the experts, entropies, tokens.
        self._sums = self.collect(Store[str, Tensor](add_on_device))

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        _, logits = next(tensors_in(output), ("", None))
        if logits is None or logits.ndim < 1 or logits.shape[-1] < max(2, self._top_k):
            raise ValueError(
                f"{self!r}: the output of {name!r} is no logits [..., experts] of at least {max(2, self._top_k)} "
                "experts; match the module that returns them"
            )
        self._seen_any = True
        self._sums.add(name, _loads(logits.flatten(0, -2), self._top_k))

    def take(self) -> Mapping[str, Found]:
        layers = self._sums.take()
        num_experts = [len(loads) - 2 for loads in layers.values()]
        taken: dict[str, Found] = {}
        for name, loads in layers.items():
            taken |= self._numbers(name, loads, in_detail=sum(num_experts) <= MAX_EXPERT_KEYS)
        if len(layers) > 1 and len(set(num_experts)) == 1:
            device = next(iter(layers.values())).device
            pooled = torch.stack([onto(loads, device) for loads in layers.values()]).sum(0)
            taken |= self._numbers(POOLED, pooled, in_detail=True)
        return taken

    def _numbers(self, name: str, loads: Tensor, *, in_detail: bool) -> dict[str, Found]:
        tokens_E, entropies, tokens = loads[:-2], loads[-2], loads[-1]
        num_experts = len(tokens_E)
        share_E = tokens_E / (tokens * self._top_k)
        key = f"{keys.ROUTER}/{name}"
        taken: dict[str, Found] = {
            f"{key}/load_max_ratio": share_E.max() * num_experts,
            f"{key}/load_min_ratio": share_E.min() * num_experts,
            f"{key}/{keys.DEAD_EXPERTS}": (tokens_E == 0).sum(),
            f"{key}/entropy_ratio": entropies / tokens / math.log(num_experts),
            f"{key}/load_entropy_ratio": torch.special.entr(share_E).sum() / math.log(num_experts),
        }
        shares = enumerate(share_E if in_detail else ())
        return taken | {f"{key}/expert_{expert}/load_ratio": share * num_experts for expert, share in shares}


def _loads(logits_TE: Tensor, top_k: int) -> Tensor:
    """How many tokens go to each expert, the sum of the tokens' entropies, and their number: [E + 2]."""
    wide = wide_dtype(logits_TE.device)
    chosen_TK = logits_TE.topk(top_k, dim=-1).indices
    # Not by bincount: on a device it makes the host wait for the largest index.
    ones = torch.ones(chosen_TK.numel(), dtype=wide, device=logits_TE.device)
    tokens_E = ones.new_zeros(logits_TE.shape[-1]).scatter_add(0, chosen_TK.flatten(), ones)
    entropies = torch.special.entr(torch.softmax(logits_TE.float(), dim=-1)).sum(dtype=wide)
    return torch.cat([tokens_E, torch.stack([entropies, torch.full_like(entropies, len(logits_TE))])])
