"""Attention: the heads of an attention, their weights and logits. Router: how the experts of a mixture are used.

The entropy of one query's weights lies between 0 (one key only) and the logarithm of the number of keys that the mask
allows. `entropy` is its mean over the queries, in nats; `entropy_ratio` is the mean of entropy / largest possible
entropy over the queries with at least two keys. Both describe the softmax, before any dropout.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._arguments import check, check_flags, is_whole
from .._capture.probes import Found
from .._measure.elements import onto, wide_dtype
from .._runtime.wrappers import is_measurable
from ..snapshot import keys
from ._forward_hooks import AttentionCall, ModuleFilter
from ._module_probe import ForwardProbe
from ._rows import STATISTICS, Dims, RowTally, Store, add_on_device, check_names, slices, tensors_in
from ._rules import POOLED, DeadExperts, EntropyCollapse, GrowingLogits

# N batch, H heads, L queries, S keys, D features of a head; T tokens, E experts

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "abs_max")

# The largest number of attention weights computed at once: 64 MiB in float32.
_WEIGHTS_AT_ONCE: Final = 2**24

_ARGUMENTS: Final = inspect.signature(nn.MultiheadAttention.forward)

# A bias below this excludes a key: masks use -inf, or the dtype's smallest number.
_FORBIDDEN: Final = -1e4


class Attention(ForwardProbe):
    """Per-head statistics of query, key and value, the entropy of the attention weights, and the size of the logits.

    Logs `attention/<module>/head_<i>/query_norm` and so on, `.../entropy`, `.../entropy_ratio`, `.../logit_max` (the
    largest logit, scaled and masked), and `.../logsumexp_sq`, the mean of log(sum(exp(logits)))^2, which a z-loss keeps
    small. Logits that grow without bound precede divergence (Dehghani et al. 2023, arXiv 2302.05442; Wortsman et al.
    2023, arXiv 2309.14322): the rule GrowingLogits extrapolates them. `nn.MultiheadAttention` is measured
    automatically. Any other module must call `log_attention` in its forward, or `log_tensor` with a dimension named
    "head" for the statistics alone.

    Args:
        match: choose modules by name (a regular expression, searched; several; or a function), or by class. None: all.
        statistics: the statistics of query, key and value, named as for `Activations`, without "histogram".
        weights: recompute the attention weights, for their entropy and the logits.

    Cost: at a sampled step the projections of each nn.MultiheadAttention and the weights of each attention are computed
        again, in blocks of queries: at most 64 MiB of weights at a time, for any sequence length.

    Raises:
        ValueError: `statistics` has an unknown name; watch() raises it if match matches no module.
        TypeError: weights is not a bool.
    """

    unseen = (
        "has seen no attention in %d updates: nn.MultiheadAttention is measured by itself, any other module has to "
        "call wandb_gradwatch.metrics.log_attention() in its forward. Modules inside a compiled model are not measured."
    )

    def __init__(
        self, match: ModuleFilter | None = None, *, statistics: Sequence[str] = DEFAULT_STATISTICS, weights: bool = True
    ) -> None:
        check_names(f"Attention(): statistics={statistics!r}", statistics, STATISTICS)
        check_flags("Attention()", weights=weights)
        self._rows = RowTally(statistics)
        self._of_weights = Store[str, tuple[Tensor, Tensor]](_merged)  # by module: weight_sums()
        super().__init__(match, self._rows, self._of_weights)
        self._weights = weights
        self.brings = (EntropyCollapse, GrowingLogits) if weights else ()

    def sees(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and self._match.chooses(name)

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        if any(type(parameter).__name__ == "DTensor" for parameter in module.parameters()):
            self.say_once("leaves out %s, which is sharded; call log_attention() in it.", name)
            return
        with torch.autocast(module.out_proj.weight.device.type, enabled=False):
            self._measure(name, _call_of(module, args, kwargs))

    def logged(self, module: str, name: str, thing: Any, dims: Dims) -> None:
        if not self._match.chooses(module):
            return
        if isinstance(thing, AttentionCall):
            with torch.autocast(thing.query.device.type, enabled=False):
                self._measure(module, thing)
        elif is_measurable(thing) and dims and "head" in dims.values():
            self._seen_any = True
            self._rows.measure({f"{module}/{label}/{name}": part for label, part in slices(thing.detach(), dims)})

    def _measure(self, module: str, call: AttentionCall) -> None:
        if not all(map(is_measurable, call.parts().values())):  # an empty batch or sequence, or a call under vmap
            return
        self._seen_any = True
        parts = ((part, slices(tensor.detach(), {-3: "head"})) for part, tensor in call.parts().items())
        self._rows.measure({f"{module}/{label}/{part}": one for part, heads in parts for label, one in heads})
        if self._weights:
            self._of_weights.add(module, weight_sums(call))

    def take(self) -> Mapping[str, Found]:
        read = self._rows.read()
        taken: dict[str, Found] = {f"{keys.ATTENTION}/{name}_{statistic}": value for name, statistic, value in read}
        for module, (sums, largest) in self._of_weights.take().items():
            entropy, num, ratio, num_ratios, log_sum_sq = sums.unbind(1)
            numbers = {"entropy": entropy / num, "entropy_ratio": ratio / num_ratios, "logsumexp_sq": log_sum_sq / num}
            for name, of_heads in (numbers | {keys.LOGIT_MAX: largest}).items():
                for head, value in enumerate(of_heads):
                    taken[f"{keys.ATTENTION}/{module}/head_{head}/{name}"] = value
        return taken


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return add_on_device(one[0], other[0]), torch.maximum(one[1], onto(other[1], one[1].device))


def weight_sums(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Recompute the attention weights in blocks of queries; return [H, 5] sums and the [H] largest logits.

    The sums over the queries: entropy, number of entropies, entropy / largest possible entropy, number of these ratios,
    and log(sum(exp(logits)))^2. A query without an allowed key is left out; one with a single key has entropy 0 and no
    ratio.
    """
    query, key = (t.flatten(0, -4) if t.ndim > 3 else t[None] for t in (call.query.detach(), call.key.detach()))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
    num_items, num_heads, num_queries, num_keys = shape = (*query.shape[:3], key.shape[2])
    bias = None if call.mask is None else _bias(call, call.mask).expand(shape)
    rows = min(num_queries, max(1, _WEIGHTS_AT_ONCE // max(num_heads * num_keys, 1)))
    items = max(1, _WEIGHTS_AT_ONCE // max(num_heads * num_keys * rows, 1))
    sums = query.new_zeros((num_heads, 5), dtype=wide_dtype(query.device))
    largest = query.new_full((num_heads,), -math.inf, dtype=torch.float32)
    places = torch.arange(max(num_queries, num_keys), device=query.device)
    for item in range(0, num_items, items):
        keys_of_items = key[item : item + items].float().transpose(-2, -1)
        for row in range(0, num_queries, rows):
            logits = (query[item : item + items, :, row : row + rows].float() @ keys_of_items) * scale
            if bias is not None:
                logits = logits + bias[item : item + items, :, row : row + rows]
            if call.is_causal:
                is_later = places[:num_keys] > places[row : row + logits.shape[2], None]
                logits = logits.masked_fill(is_later, -math.inf)
            sums += _sums_of_logits(logits, bias is not None or call.is_causal)
            largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return sums, largest


def _sums_of_logits(logits_NHLS: Tensor, is_masked: bool) -> Tensor:
    entropy = torch.special.entr(torch.softmax(logits_NHLS, dim=-1)).sum(-1)
    num_keys = logits_NHLS.shape[-1]
    places = (logits_NHLS > _FORBIDDEN).sum(-1) if is_masked else torch.full_like(entropy, num_keys)
    has_any, has_choice = places > 0, places > 1
    entropy = torch.where(has_any, entropy, 0.0)
    ratio = torch.where(has_choice, entropy / places.clamp_min(2).log(), 0.0)
    log_sum_sq = torch.where(has_any, torch.logsumexp(logits_NHLS, dim=-1).square(), 0.0)
    wide = wide_dtype(entropy.device)
    return torch.stack([t.sum((0, 2), dtype=wide) for t in (entropy, has_any, ratio, has_choice, log_sum_sq)], dim=1)


def _bias(call: AttentionCall, mask: Tensor) -> Tensor:
    """Return the mask as an additive bias that broadcasts to [N, H, L, S]."""
    bias = _forbidding(~mask) if mask.dtype == torch.bool else mask.detach()
    return bias if bias.ndim <= 4 else bias.expand(*call.query.shape[:-3], *bias.shape[-3:]).flatten(0, -4)


def _call_of(module: nn.MultiheadAttention, args: Any, kwargs: Mapping[str, Any]) -> AttentionCall:
    """Recompute the projections and masks of an nn.MultiheadAttention from the arguments of its forward."""
    given = _ARGUMENTS.bind(module, *args, **kwargs).arguments
    attn_mask, padding = given.get("attn_mask"), given.get("key_padding_mask")  # is_causal only describes attn_mask
    tensors: list[Tensor] = [given[name].detach() for name in ("query", "key", "value")]
    if tensors[0].ndim == 2:
        tensors = [tensor[None] for tensor in tensors]
    elif not module.batch_first:
        tensors = [tensor.transpose(0, 1) for tensor in tensors]
    weights: Sequence[Tensor] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.float().chunk(3)
    triples = zip(tensors, weights, biases, strict=True)
    projected = [functional.linear(tensor.float(), weight.float(), bias) for tensor, weight, bias in triples]
    for index, extra in ((1, module.bias_k), (2, module.bias_v)):
        if extra is not None:
            projected[index] = torch.cat([projected[index], extra.float().expand(len(projected[index]), 1, -1)], dim=1)
    if module.add_zero_attn:
        projected[1:] = [functional.pad(tensor, (0, 0, 0, 1)) for tensor in projected[1:]]
    num_heads = module.num_heads
    heads = [one.view(*one.shape[:2], num_heads, one.shape[2] // num_heads).transpose(1, 2) for one in projected]
    if attn_mask is not None and attn_mask.ndim == 3:  # [batch * heads, L, S]
        attn_mask = attn_mask.view(len(heads[0]), num_heads, *attn_mask.shape[1:])
    if padding is not None:  # [S] or [batch, S]
        padding = padding.view(len(heads[0]), 1, 1, -1)
    # Both masks become additive biases, with zeros for the keys that the module appends itself.
    mask: Tensor | None = None
    for one in (one for one in (attn_mask, padding) if one is not None):
        bias = _forbidding(one) if one.dtype == torch.bool else one.float()  # True excludes, in this module
        bias = functional.pad(bias, (0, heads[1].shape[2] - bias.shape[-1]))
        mask = bias if mask is None else mask + bias
    return AttentionCall(heads[0], heads[1], heads[2], mask, False, None)


def _forbidding(places: Tensor) -> Tensor:
    return torch.zeros(places.shape, device=places.device).masked_fill_(places, -math.inf)


MAX_EXPERT_KEYS: Final = 2000  # over all layers; with more, single experts are logged only pooled over the layers


class Router(ForwardProbe):
    """Load of the experts, dead experts and the router's entropy, logged as `router/<module>/...` and, if several
    layers have the same number of experts, pooled as `router/all_layers/...`; a second Router of the same `watch()`
    pools its layers as `router/all_layers_2/...`, and so on.

    A router is a module whose output, or the first floating-point tensor in it, has one logit per token and expert:
    [..., E]. A token goes to the experts with its `top_k` largest logits. The numbers cover all tokens of a sample,
    over all micro-batches, on the rank that logs:

    - `load_max_ratio`, `load_min_ratio`: the share of the fullest and of the emptiest expert, times E; 1 is ideal.
    - `dead_experts`: the number of experts that got no token.
    - `entropy_ratio`: the mean entropy of softmax(logits), divided by its maximum log E: 0 if the router is certain of
      each choice, 1 if all experts are equally likely.
    - `load_entropy_ratio`: the entropy of the loads, divided by log E: 1 if all loads are equal (Fedus et al. 2021,
      arXiv 2101.03961, balance the loads with an auxiliary loss).
    - `expert_<i>/load_ratio`: each expert's share times E; for single layers only up to 2,000 experts over all layers.

    Args:
        match: choose the routers by name, as for `Activations`, or by class.
        top_k: the number of experts that a token goes to.

    Memory: E + 2 numbers per router until the sample is complete. Cost: a softmax and a top-k of the logits at a
    sampled step.

    Raises:
        ValueError: top_k is not positive; watch() raises it if match matches no module.
    """

    logs, brings = frozenset({(keys.ROUTER, keys.LOAD_RATIO)}), (DeadExperts,)
    pooled = POOLED  # in place of a module's name; watch() gives each further Router another one

    def __init__(self, match: ModuleFilter, *, top_k: int = 1) -> None:
        # [E + 2] per router: the number of tokens of each expert, the sum of the entropies, the number of tokens.
        self._sums = Store[str, Tensor]()
        super().__init__(match, self._sums)
        is_count = is_whole(top_k) and top_k >= 1
        check(is_count, "Router(): top_k", top_k, "the number of experts that a token goes to, at least 1")
        self._top_k = top_k

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
                numbers |= {f"expert_{expert}/{keys.LOAD_RATIO}": share * num for expert, share in enumerate(share_E)}
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
