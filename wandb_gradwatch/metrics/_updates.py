"""Of each parameter: its update, what the optimizer makes that of, its histogram, and the spectrum of a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .._capture.parameter_registry import NameFilter
from .._capture.probes import WatchedTensor
from .._measure.elements import onto, wide_dtype
from .._measure.measure import measure, sum_sq
from .._measure.probe_values import ArrivedSums, Distance, ProbeSums, root_of_ratio
from .._runtime.sharding import local_part, world_size
from ..snapshot import keys
from ._forward_hooks import ModuleIndex
from ._module_probe import ParameterProbe, ProbeShards, ReadByProbe
from ._rows import check_names, dense, histograms_of, square_of, widened, without_scale
from ._rules import OutgrownUpdate

# M rows, N columns of a matrix

_MIB: Final = 2**20
_CHANGE: Final = Distance("norm", "ratio")


class Updates(ParameterProbe):
    """The norm of each parameter's change in a step, and its ratio to the parameter's norm before.

    Logs `update/<parameter>/norm` and `update/<parameter>/ratio`. A healthy ratio is often quoted as 1e-3. It is
    missing for a parameter that was all zero. The change is what the optimizer did: learning rate, momentum, weight
    decay and all. Of a sharded parameter each rank measures its shard, and both numbers are those of the whole: they
    are merged over the ranks when the window is flushed.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        max_mib: the memory that the copies may take on one rank.

    Memory: one copy of the matching parameters (of this rank's shards of them), from before to after the optimizer's
    step, in sampled steps only; and one parameter's change at a time, in float32 where it is half precision.

    Raises:
        ValueError: match matches nothing, or its parameters exceed max_mib; both by watch().
    """

    logs = frozenset({(keys.UPDATE, "norm"), (keys.UPDATE, "ratio")})

    def __init__(self, match: NameFilter | None = None, *, max_mib: float = 1024) -> None:
        super().__init__(match)
        self._max_mib = max_mib

    def bind(self, models: ModuleIndex) -> None:
        super().bind(models)
        parts = [local_part(one) for name, one in models.watched_parameters().items() if self._matches(name)]
        size = sum(part.numel() * part.element_size() for part in parts) / _MIB
        if size > self._max_mib:
            raise ValueError(
                f"{self!r} would copy {size:.0f} MiB of parameters at each sampled step, more than "
                f"max_mib={self._max_mib:g}; match fewer parameters, or raise max_mib"
            )

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if self._is_due:
            self._befores.keep(tensor for tensor in tensors if self._matches(tensor.name))

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for name, change, before in self._befores.changes(tensors):
            self._found[f"{keys.UPDATE}/{name}"] = ProbeSums(sum_sq([change, before]), _CHANGE, name)


class ParameterHistograms(ParameterProbe):
    """Count each parameter that an optimizer has just updated in the fixed bins of gradients.

    Of a sharded parameter each rank counts its shard; the counts add up when the window is merged over the ranks.
    Cost: at the steps that have a histogram one batched pass over the parameters.
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._backend = backend

    def __repr__(self) -> str:
        return "the histograms of parameters"

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(histogram_is_due, histogram_is_due)

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due:
            return
        for device in dict.fromkeys(tensor.parameter.device for tensor in tensors):
            group = [tensor for tensor in tensors if tensor.parameter.device == device]
            measured = measure([one.parameter for one in group], None, histogram=True, backend=self._backend)
            assert measured.histogram is not None
            for one, histogram in zip(group, histograms_of(measured.rows, measured.histogram), strict=True):
                self._found[f"{keys.PARAMETER_HISTOGRAMS}/{one.name}"] = histogram


# The sums of every parameter: its elements, and the squares of the gradient, of the gradient over the second moment, of
# the two moments, and of the update. Those of each state's squares follow.
_NUM, _GRADIENT, _STALE, _FIRST, _SECOND, _UPDATE = range(6)
_NUM_SUMS: Final = 6


@dataclass(frozen=True)
class StateSums:
    states: tuple[str, ...]  # names of the optimizer's tensors, as they are in its state
    eps: float  # of the optimizer; 0 for none
    of_every_rank = False

    @property
    def num_sums(self) -> int:
        return _NUM_SUMS + len(self.states)

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        num = sums[_NUM]
        found = {f"{name}_norm": math.sqrt(sums[_NUM_SUMS + index]) for index, name in enumerate(self.states)}
        found["update_rms"] = root_of_ratio(sums[_UPDATE], num)
        found[keys.STALE] = root_of_ratio(sums[_STALE], num)
        found["coherence"] = sums[_FIRST] / sums[_SECOND] if sums[_SECOND] > 0 else math.nan
        found["grad_eps_ratio"] = root_of_ratio(sums[_GRADIENT], num * self.eps**2)
        return found


class OptimizerState(ParameterProbe):
    """What the optimizer remembers, and the update that it makes of it, logged as `optimizer_state/<parameter>/...`.

    With g the gradient that the optimizer received, and m and v the moments of Adam as it uses them, divided by
    1 - beta^t, over the n elements of a parameter:

    - `<state>_norm`: the L2 norm of each of the optimizer's tensors, as they lie in its state: `exp_avg_norm`,
      `exp_avg_sq_norm`, `momentum_buffer_norm`. Any optimizer has these.
    - `update_rms`: the root mean square of the update in units of the learning rate, without weight decay:
      m / (sqrt(v) + eps) of Adam and AdamW, the buffer of SGD with momentum. White noise gives
      sqrt((1 - beta1) / (1 + beta1)), which is 0.229 for 0.9; gradients that agree give 1.
    - `coherence`: |m|^2 / sum(v), the square of the same without eps: the share of the gradients that has a direction.
    - `stale_ratio`: sqrt(mean(g^2 / max(v, eps^2))) with v as it was before the step, 1 in a steady state. Above 2.3
      the second moment is out of date, and the loss may spike 1 to 8 steps later (Wortsman et al. 2023,
      arXiv 2304.13013, with v before the step, where it is not bounded by the step itself).
    - `grad_eps_ratio`: the root mean square of g over eps: near 1 and below, eps and not v scales the update.

    Each is missing where the optimizer has no such state, and `stale_ratio` is missing at the first step. Of a sharded
    parameter they are those of the whole, merged over the ranks when the window is flushed.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.

    Cost: at a sampled step about 15 passes over each matching parameter, with three temporaries of its size.

    Raises:
        ValueError: match matches nothing (by watch()).
    """

    logs, brings = frozenset({(keys.OPTIMIZER_STATE, keys.STALE)}), (OutgrownUpdate,)

    def __init__(self, match: NameFilter | None = None) -> None:
        super().__init__(match)
        self._gradients: dict[str, Tensor] = {}  # [3] by name: sums from before the step

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._gradients = {}

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for tensor, state, group in _with_states(tensors):
            if tensor.gradient is None or not self._matches(tensor.name):
                continue
            squares = without_scale(widened(dense(tensor.gradient)), tensor.inverse_scale).square()
            wide = wide_dtype(squares.device)
            num = torch.full((), squares.numel(), dtype=wide, device=squares.device)
            moment = _moment(state, group, "exp_avg_sq", 1)
            stale = torch.full_like(num, torch.nan)
            if moment is not None:
                least = max(float(group["eps"]) ** 2, torch.finfo(moment.dtype).tiny)
                stale = (squares / moment.clamp_min(least)).sum(dtype=wide)
            self._gradients[tensor.name] = torch.stack([num, squares.sum(dtype=wide), stale])

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for tensor, state, group in _with_states(tensors):
            if (before := self._gradients.pop(tensor.name, None)) is None:
                continue
            parts = {
                name: local_part(value).detach()
                for name, value in sorted(state.items())
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim
            }
            missing = torch.full((), torch.nan, dtype=before.dtype, device=before.device)
            sums = [
                missing if one is None else onto(widened(one).square().sum(dtype=before.dtype), before.device)
                for one in (*_made_of(tensor, state, group), *parts.values())
            ]
            second = _moment(state, group, "exp_avg_sq", 1)
            sums.insert(1, missing if second is None else second.sum(dtype=before.dtype))
            eps = group.get("eps", 0.0)
            meaning = StateSums(tuple(parts), float(eps) if isinstance(eps, float) else 0.0)
            key = f"{keys.OPTIMIZER_STATE}/{tensor.name}"
            self._found[key] = ProbeSums(torch.cat([before, torch.stack(sums)]), meaning, tensor.name)


def _with_states(
    tensors: Sequence[WatchedTensor],
) -> Iterator[tuple[WatchedTensor, Mapping[str, Any], Mapping[str, Any]]]:
    """Each with its optimizer's state of it, and its parameter group."""
    optimizers = {id(tensor.optimizer): tensor.optimizer for tensor in tensors if tensor.optimizer is not None}
    groups = (group for optimizer in optimizers.values() for group in optimizer.param_groups)
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    for tensor in tensors:
        if tensor.optimizer is not None and tensor.held is not None:
            yield tensor, tensor.optimizer.state.get(tensor.held, {}), group_of.get(id(tensor.held), {})


def _moment(state: Mapping[str, Any], group: Mapping[str, Any], name: str, place: int) -> Tensor | None:
    """A moment of an optimizer like Adam as it uses it; None for another optimizer, and before its first step.

    The number of the step stays where it is: on the host, or, of capturable and fused ones, on the device.
    """
    moment, step, betas = state.get(name), state.get("step", group.get("step")), group.get("betas")
    if not isinstance(moment, Tensor) or step is None or betas is None or "eps" not in group:
        return None
    step = step.to(wide_dtype(step.device)) if isinstance(step, Tensor) else float(step)
    corrected: Tensor = widened(local_part(moment).detach()) / (1 - betas[place] ** step)
    return corrected


def _made_of(tensor: WatchedTensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> list[Tensor | None]:
    """The first moment as it is used, and the update in units of the learning rate."""
    first, second = _moment(state, group, "exp_avg", 0), _moment(state, group, "exp_avg_sq", 1)
    if isinstance(tensor.optimizer, torch.optim.Adam | torch.optim.AdamW) and first is not None and second is not None:
        if group.get("amsgrad"):
            second = _moment(state, group, "max_exp_avg_sq", 1)
            assert second is not None
        return [first, first / (second.sqrt() + group["eps"])]
    buffer = state.get("momentum_buffer")
    if not isinstance(tensor.optimizer, torch.optim.SGD) or buffer is None or tensor.gradient is None:
        return [first, None]
    buffer = widened(local_part(buffer).detach())
    return [first, widened(tensor.gradient) + group["momentum"] * buffer if group.get("nesterov") else buffer]


_SUBJECTS: Final = (keys.PARAMETER, keys.GRADIENT, keys.UPDATE)
_NAMES: Final = ("largest_singular_value", "stable_rank")
_FIRST_ITERATIONS: Final = 20  # iterations from a random vector; later ones begin where the last sample's ended
_FIRST_MERGED: Final = 8  # the same where each takes a merge over ranks
_PRODUCT_EVERY: Final = 50  # samples at the latest
_SEED: Final = 1234


class _SharedVector:
    """The vector of a sharded matrix's iteration. All ranks begin with the same, and go on when a product is merged.

    A merge reaches one rank a little earlier than another. Each sends the version of the vector that it has used, and
    what ranks have measured with different ones is left out.
    """

    def __init__(self, size: int, like: Tensor, num_ranks: int, num_replicas: int) -> None:
        self._vector_N = _random(size, like)
        self._version = 0
        self._num_ranks, self._num_replicas = num_ranks, num_replicas

    def sums(self, part_MN: Tensor, *, with_product: bool) -> Tensor:
        """What the rank's rows add: a 1, the version and its square, |A v|^2 and |A|_F^2, and if asked for A^T A v."""
        wide = wide_dtype(part_MN.device)
        image_M = part_MN @ self._vector_N
        known = [torch.full((), self._version**power, dtype=wide, device=part_MN.device) for power in range(3)]
        sums = torch.stack([*known, square_of(image_M), square_of(part_MN)])
        return torch.cat([sums, (part_MN.T @ image_M).to(wide)]) if with_product else sums

    def advance(self, sums: Sequence[float]) -> tuple[float, float] | None:
        """The largest singular value and the stable rank; None where they are not known. Go on from a new product."""
        num, version, version_sq, image_sq, norm_sq = sums[:5]
        if num != self._num_ranks or num * version_sq != version**2:
            return None
        product_N = np.array(sums[5:])
        length = float(np.linalg.norm(product_N))
        if version == num * self._version and 0 < length < math.inf:
            vector_N = torch.from_numpy(product_N / length).to(self._vector_N.dtype)
            device = self._vector_N.device
            self._vector_N = onto(vector_N.pin_memory() if device.type == "cuda" else vector_N, device)
            self._version += 1
        if version < num * _FIRST_MERGED:
            return None
        return math.sqrt(image_sq / self._num_replicas), norm_sq / image_sq if image_sq > 0 else math.nan


class Spectrum(ParameterProbe):
    """Largest singular value and stable rank of matrices, logged as `<of>/<parameter>/largest_singular_value` and
    `.../stable_rank`.

    The stable rank |A|_F^2 / sigma^2 lies between 1, a matrix of rank one, and the smaller dimension, where all
    singular values are alike. Parameters of more than two dimensions are taken as [first, all others]; of less, left
    out. The largest singular value sigma is |A v| after a power iteration on A^T A (Miyato et al. 2018,
    arXiv 1802.05957) whose vector v goes on from sample to sample, and so from below: where a matrix changes quickly,
    as gradients do, sigma lags behind by a few samples, and the stable rank is that much too large.

    Of parameters before the update, of gradients without the loss scale and before clipping, of updates as the
    parameter has changed.

    Of a sharded parameter (FSDP2, tensor parallel) both are those of the whole. Each rank multiplies its shard with the
    same vector, and the products are added when the window is merged over the ranks: the training waits for nothing,
    and the iteration takes one step with each flush that has histograms. Both numbers are missing during its first 8
    steps, and where ranks have just begun with a new vector. Parameters of FSDP1, those that are cut along
    both dimensions, and those of which some ranks have nothing (pipelines) are left out, which is said.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        of: out of "parameter", "gradient" and "update".

    Memory: a vector of each matrix's columns for each of `of`; with "update" a copy of the matching parameters while
    an optimizer steps. Cost: 2 matrix-vector products and a norm of each at a sampled step, 40 at the first one. Of a
    sharded matrix its columns (or rows, where the columns are cut) are sent to the other ranks once a flush.

    Raises:
        ValueError: an unknown `of`; match matches no matrix (by watch()).
    """

    def __init__(self, match: NameFilter | None = None, *, of: Sequence[str] = (keys.PARAMETER,)) -> None:
        super().__init__(match)
        check_names(f"Spectrum(of={of!r})", of, _SUBJECTS)
        self._of = tuple(of)
        self.logs = frozenset((subject, name) for subject in of for name in _NAMES)
        self._vectors: dict[str, Tensor] = {}  # by key: [N]
        self._shared: dict[str, _SharedVector] = {}  # of sharded matrices
        self._has_product = False
        self._since_product = 0  # samples

    def bind(self, models: ModuleIndex) -> None:
        self._shards = ProbeShards(models)
        are_flat = self._shards.uses_fsdp1  # whose matrices are told from the rest nowhere, and left out
        matrices = [name for name, one in models.watched_parameters().items() if one.ndim > 1 or are_flat]
        self.check_match("matrix", matrices)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._since_product += next_step_is_due
        self._has_product = histogram_is_due or self._since_product >= _PRODUCT_EVERY
        if self._has_product:
            self._since_product = 0

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due or keys.GRADIENT not in self._of:
            return
        self._shards.look()
        for tensor in tensors:
            gradient = tensor.gradient
            if gradient is not None and gradient.layout is torch.strided and self._is_measured(tensor):
                self._measure(keys.GRADIENT, tensor.name, gradient, tensor.inverse_scale)  # the last backward's counts

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        self._shards.look()
        measured = [tensor for tensor in tensors if self._is_measured(tensor)]
        if keys.PARAMETER in self._of:
            for tensor in measured:
                self._measure(keys.PARAMETER, tensor.name, tensor.parameter)
        if keys.UPDATE in self._of:
            self._befores.keep(measured)

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for name, change, _ in self._befores.changes(tensors):
            self._measure(keys.UPDATE, name, change)

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for key, shared in self._shared.items():
            one = sums.get(f"{key}/spectrum")
            if one is not None and (numbers := shared.advance(one.sums)) is not None:
                found |= {f"{key}/{name}": number for name, number in zip(_NAMES, numbers, strict=True)}
        return found

    def _is_measured(self, tensor: WatchedTensor) -> bool:
        if not tensor.parameter.is_floating_point() or not self._matches(tensor.name):
            return False
        layout = self._shards.layouts.get(tensor.name)
        is_merged = (
            layout is not None and layout.num_ranks == world_size() and len({dim > 0 for dim, _, _ in layout.cuts}) < 2
        )
        return (is_merged or self._shards.is_whole(tensor.name, needed_by="spectra")) and tensor.parameter.ndim > 1

    def _measure(self, subject: str, name: str, tensor: Tensor, inverse_scale: Tensor | None = None) -> None:
        key, matrix_MN = f"{subject}/{name}", without_scale(widened(tensor).flatten(1), inverse_scale)
        layout = self._shards.layouts.get(name)
        if layout is None:
            numbers = self._of_matrix(key, matrix_MN)
            self._found |= {f"{key}/{what}": number for what, number in zip(_NAMES, numbers, strict=True)}
            return
        if any(dim > 0 for dim, _, _ in layout.cuts):  # what the ranks have are columns: rows of the transposed matrix
            matrix_MN = matrix_MN.T
        if key not in self._shared:
            self._shared[key] = _SharedVector(matrix_MN.shape[1], matrix_MN, layout.num_ranks, layout.num_replicas)
        sums = self._shared[key].sums(matrix_MN, with_product=self._has_product)
        self._found[f"{key}/spectrum"] = ProbeSums(sums, ReadByProbe(len(sums)))

    def _of_matrix(self, key: str, matrix_MN: Tensor) -> Tensor:
        """The largest singular value and the stable rank: [2]; of a matrix of zeros 0, and no rank."""
        vector_N, device = self._vectors.get(key), matrix_MN.device
        is_new = vector_N is None or len(vector_N) != matrix_MN.shape[1] or vector_N.device != device
        start_N = vector_N = _random(matrix_MN.shape[1], matrix_MN) if is_new or vector_N is None else vector_N
        for _ in range(_FIRST_ITERATIONS if is_new else 1):
            image_N = _unit(matrix_MN.T @ _unit(matrix_MN @ vector_N))
            # What is all zero, or not finite, for one sample does not end the iteration.
            vector_N = torch.where(torch.isfinite(image_N).all(), image_N, start_N)
        self._vectors[key] = vector_N
        sigma_sq = square_of(matrix_MN @ vector_N)
        rank = square_of(matrix_MN) / torch.where(sigma_sq > 0, sigma_sq, torch.nan)
        return torch.stack([sigma_sq.sqrt(), rank])


def _random(size: int, like: Tensor) -> Tensor:
    """A vector of length 1, the same on every rank; the random numbers of the training stay as they are."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    return onto(_unit(torch.randn(size, generator=generator, dtype=like.dtype)), like.device)


def _unit(vector: Tensor) -> Tensor:
    """The vector with length 1, however short it was; NaN of zeros."""
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit
