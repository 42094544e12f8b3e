"""Router: how the tokens of a mixture of experts spread over its experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._capture.probes import Found
from .._measure.elements import onto, wide_dtype
from ..snapshot import keys
from ._module_probe import ForwardProbe, ModuleFilter, tensors_in
from ._rows import Store, add_on_device
from ._rules import DeadExperts

# T tokens, E experts

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
