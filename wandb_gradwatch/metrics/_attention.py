"""Attention: statistics of query, key and value per head, the entropy of the attention weights, and the logits.

The entropy of one query's weights lies between 0 (one key only) and the logarithm of the number of keys that the mask
allows. `entropy` is its mean over the queries, in nats; `entropy_ratio` is the mean of entropy / largest possible
entropy over the queries with at least two keys. Both describe the softmax, before any dropout.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._capture.probes import Found
from .._measure.elements import onto, wide_dtype
from .._runtime.wrappers import is_measurable
from ..snapshot import keys
from ._forward_hooks import AttentionCall, ModuleFilter
from ._module_probe import ForwardProbe
from ._rows import STATISTICS, Dims, RowTally, Store, add_on_device, check_names, slices
from ._rules import EntropyCollapse, GrowingLogits

# N batch, H heads, L queries, S keys, D features of a head

DEFAULT_STATISTICS: Final = ("norm", "mean", "std", "abs_max")

# The largest number of attention weights computed at once: 64 MiB in float32.
_WEIGHTS_AT_ONCE: Final = 2**24

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
    """

    unseen = (
        "has seen no attention in %d updates: nn.MultiheadAttention is measured by itself, any other module has to "
        "call wandb_gradwatch.metrics.log_attention() in its forward. Modules inside a compiled model are not measured."
    )

    def __init__(
        self, match: ModuleFilter | None = None, *, statistics: Sequence[str] = DEFAULT_STATISTICS, weights: bool = True
    ) -> None:
        super().__init__(match)
        self._weights = weights
        self.brings = (EntropyCollapse, GrowingLogits) if weights else ()
        check_names(f"{self!r}: statistics={statistics!r}", statistics, STATISTICS)
        self._rows = self.collect(RowTally(statistics))
        self._of_weights = self.collect(Store[str, tuple[Tensor, Tensor]](_merged))  # by module: weight_sums()

    def sees(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and self._match.chooses(name)

    def forward_done(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        if any(type(parameter).__name__ == "DTensor" for parameter in module.parameters()):
            self.say_once("leaves out %s, which is sharded; call log_attention() in it.", name)
            return
        with torch.autocast(module.out_proj.weight.device.type, enabled=False):
            self._measure(name, _call_of(module, *args, **kwargs))

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


def _call_of(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> AttentionCall:
    """Recompute the projections and masks of an nn.MultiheadAttention from the arguments of its forward."""
    del need_weights, average_attn_weights, is_causal  # is_causal is only a hint about attn_mask, which is always given
    tensors = [tensor.detach() for tensor in (query, key, value)]
    if query.ndim == 2:
        tensors = [tensor[None] for tensor in tensors]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        tensors = [tensor.transpose(0, 1) for tensor in tensors]
    weights: Sequence[Tensor] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    biases: Sequence[Tensor | None] = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projected = [
        functional.linear(tensor.float(), weight.float(), None if bias is None else bias.float())
        for tensor, weight, bias in zip(tensors, weights, biases, strict=True)
    ]
    for index, extra in ((1, module.bias_k), (2, module.bias_v)):
        if extra is not None:
            projected[index] = torch.cat([projected[index], extra.float().expand(len(projected[index]), 1, -1)], dim=1)
    if module.add_zero_attn:
        projected[1:] = [functional.pad(tensor, (0, 0, 0, 1)) for tensor in projected[1:]]
    num_heads = module.num_heads
    heads = [one.view(*one.shape[:2], num_heads, one.shape[2] // num_heads).transpose(1, 2) for one in projected]
    if attn_mask is not None and attn_mask.ndim == 3:  # [batch * heads, L, S]
        attn_mask = attn_mask.view(len(heads[0]), num_heads, *attn_mask.shape[1:])
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
    # Both masks become additive biases, with zeros for the keys that the module appends itself.
    mask: Tensor | None = None
    for given in (one for one in (attn_mask, padding) if one is not None):
        bias = _forbidding(given) if given.dtype == torch.bool else given.float()  # True excludes, in this module
        bias = functional.pad(bias, (0, heads[1].shape[2] - bias.shape[-1]))
        mask = bias if mask is None else mask + bias
    return AttentionCall(heads[0], heads[1], heads[2], mask, False, None)


def _forbidding(places: Tensor) -> Tensor:
    return torch.zeros(places.shape, device=places.device).masked_fill_(places, -math.inf)
