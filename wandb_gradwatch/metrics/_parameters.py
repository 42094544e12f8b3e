"""Of each parameter: its histogram, what its optimizer remembers and makes of it, and the spectrum of a matrix."""

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
from .._measure.measure import measure
from .._measure.probe_values import ArrivedSums, ProbeSums, root_of_ratio
from .._runtime.sharding import local_part, world_size
from ..snapshot import keys
from ._forward_hooks import ModuleIndex
from ._module_probe import ParameterProbe, ProbeShards, ReadByProbe
from ._rows import check_names, dense, histograms_of, reals, square_of, widened, without_scale
from ._rules import OutgrownUpdate

# M rows, N columns of a matrix


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
    - `stale_ratio`: sqrt(mean(g^2 / max(v, eps^2))) with v as it was before the step, 1 in a steady state; an element
      whose v is 0 counts as 0. Above 2.3 the second moment is out of date, and the loss may spike 1 to 8 steps later
      (Wortsman et al. 2023, arXiv 2304.13013, with v before the step, where it is not bounded by the step itself).
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
            squares = without_scale(reals(dense(tensor.gradient)), tensor.inverse_scale).square()
            wide, second = wide_dtype(squares.device), _moment(state, group, "exp_avg_sq", 1)
            num = torch.full((), squares.numel(), dtype=wide, device=squares.device)
            stale = torch.full_like(num, torch.nan)
            if second is not None:
                least = max(float(group["eps"]) ** 2, torch.finfo(second.dtype).tiny)
                # An element without any gradient so far, such as a rare token's, has nothing that could be out of date.
                stale = (squares / second.clamp_min(least)).masked_fill(second == 0, 0.0).sum(dtype=wide)
            self._gradients[tensor.name] = torch.stack([num, squares.sum(dtype=wide), stale])

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for tensor, state, group in _with_states(tensors):
            if (before := self._gradients.pop(tensor.name, None)) is None:
                continue
            parts = {
                name: reals(local_part(value).detach())
                for name, value in sorted(state.items())
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.ndim
            }
            first, second, update = _made_of(tensor, state, group)
            squares = (None if one is None else one.square() for one in (first, update, *parts.values()))
            of_first, *of_others = squares
            missing = torch.full((), torch.nan, dtype=before.dtype, device=before.device)
            sums = [
                missing if one is None else onto(one.sum(dtype=before.dtype), before.device)
                for one in (of_first, second, *of_others)
            ]
            eps = group.get("eps", 0.0)
            meaning = StateSums(tuple(parts), eps if isinstance(eps, float) else 0.0)
            key = f"{keys.OPTIMIZER_STATE}/{tensor.name}"
            self._found[key] = ProbeSums(torch.cat([before, torch.stack(sums)]), meaning, tensor.name)


_Held = Mapping[str, Any]  # what an optimizer has of a parameter: its state, and its group


def _with_states(tensors: Sequence[WatchedTensor]) -> Iterator[tuple[WatchedTensor, _Held, _Held]]:
    """Each with its optimizer's state of it, and its parameter group."""
    optimizers = {id(tensor.optimizer): tensor.optimizer for tensor in tensors if tensor.optimizer is not None}
    groups = (group for optimizer in optimizers.values() for group in optimizer.param_groups)
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    for tensor in tensors:
        if tensor.optimizer is not None and tensor.held is not None:
            yield tensor, tensor.optimizer.state.get(tensor.held, {}), group_of.get(id(tensor.held), {})


def _moment(state: _Held, group: _Held, name: str, place: int) -> Tensor | None:
    """A moment of an optimizer like Adam as it uses it; None for another optimizer, and before its first step.

    The number of the step stays where it is: on the host, or, of capturable and fused ones, on the device.
    """
    moment, step, betas = state.get(name), state.get("step", group.get("step")), group.get("betas")
    if not isinstance(moment, Tensor) or step is None or betas is None or "eps" not in group:
        return None
    step = step.to(wide_dtype(step.device)) if isinstance(step, Tensor) else float(step)
    corrected: Tensor = reals(local_part(moment).detach()) / (1 - betas[place] ** step)
    return corrected


def _made_of(tensor: WatchedTensor, state: _Held, group: _Held) -> list[Tensor | None]:
    """Both moments as they are used, and the update in units of the learning rate."""
    first, second, update = _moment(state, group, "exp_avg", 0), _moment(state, group, "exp_avg_sq", 1), None
    buffer = state.get("momentum_buffer")
    if isinstance(tensor.optimizer, torch.optim.Adam | torch.optim.AdamW) and first is not None and second is not None:
        divisor = _moment(state, group, "max_exp_avg_sq", 1) if group.get("amsgrad") else second
        assert divisor is not None
        update = first / (divisor.sqrt() + group["eps"])
    elif isinstance(tensor.optimizer, torch.optim.SGD) and buffer is not None and tensor.gradient is not None:
        buffer = reals(local_part(buffer).detach())
        update = reals(tensor.gradient) + group["momentum"] * buffer if group.get("nesterov") else buffer
    return [first, second, update]


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

    Of a sharded parameter (FSDP2, tensor parallel) both are those of the whole. Each rank multiplies its shard with the
    same vector, and the products are added when the window is merged over the ranks: the training waits for nothing,
    and the iteration takes one step with each flush that has histograms, of which the first 8 have no numbers.
    Parameters of FSDP1, those that are cut along both dimensions, and those of which some ranks have nothing
    (pipelines) are left out, which is said.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        of: out of "parameter" (before the update), "gradient" (without the loss scale, before clipping) and "update".

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
                # Again after each backward: the last one's counts.
                self._measure(keys.GRADIENT, tensor.name, without_scale(gradient, tensor.inverse_scale))

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
        cut_sides = {dim > 0 for dim, _, _ in layout.cuts} if layout is not None else set()
        is_merged = layout is not None and layout.num_ranks == world_size() and len(cut_sides) < 2
        return (is_merged or self._shards.is_whole(tensor.name, needed_by="spectra")) and tensor.parameter.ndim > 1

    def _measure(self, subject: str, name: str, tensor: Tensor) -> None:
        key, matrix_MN = f"{subject}/{name}", widened(tensor).flatten(1)
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
        vector_N, num_iterations = self._vectors.get(key), 1
        if vector_N is None or len(vector_N) != matrix_MN.shape[1] or vector_N.device != matrix_MN.device:
            vector_N, num_iterations = _random(matrix_MN.shape[1], matrix_MN), _FIRST_ITERATIONS
        start_N = vector_N
        for _ in range(num_iterations):
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
    return vector / torch.linalg.vector_norm(vector)  # type: ignore[no-any-return]
