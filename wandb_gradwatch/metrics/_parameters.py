"""Probes of parameters: histograms, updates, the optimizer's state, and the spectrum of matrices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .._arguments import check, is_number
from .._capture.parameter_registry import NameFilter
from .._capture.probes import WatchedTensor
from .._measure.elements import onto, upload, wide_dtype
from .._measure.measure import measure, sum_sq
from .._measure.probe_values import ArrivedSums, Distance, ProbeSums, root_of_ratio
from .._runtime.sharding import local_part, world_size
from ..snapshot import keys
from ._forward_hooks import ModuleIndex
from ._module_probe import Layout, ParameterProbe, ReadByProbe, SubjectProbe
from ._rows import check_names, histograms_of, reals, square_of, widened, without_scale
from ._rules import OutgrownUpdate

# M rows, N columns of a matrix

_NO_OPTIMIZER: Final = (
    "has measured nothing in %d samples, because no optimizer updated the parameters that it matches. Updates by code "
    "of your own are not measured; leave it out if there is no optimizer."
)
_CHANGE: Final = Distance("norm", "ratio")


class ParameterHistograms(ParameterProbe):
    """Histograms of the parameters after each update, in the same fixed bins as the gradients.

    Each rank counts its shard of a sharded parameter; the counts are added when the window is merged over the ranks.
    Cost: one batched pass over the parameters at the steps that have a histogram.
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._backend = backend

    def __repr__(self) -> str:
        return "the histograms of parameters"

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._is_due = histogram_is_due

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due:
            return
        for device in dict.fromkeys(tensor.parameter.device for tensor in tensors):
            group = [tensor for tensor in tensors if tensor.parameter.device == device]
            measured = measure([one.parameter for one in group], None, histogram=True, backend=self._backend)
            assert measured.histogram is not None
            for one, histogram in zip(group, histograms_of(measured.rows, measured.histogram), strict=True):
                self._found[f"{keys.PARAMETER_HISTOGRAMS}/{one.name}"] = histogram


class Updates(SubjectProbe, ParameterProbe):
    """The norm of each parameter's change in a step, and its ratio to the parameter's norm before the step.

    Logs `update/<parameter>/norm` and `update/<parameter>/ratio`. A healthy ratio is often quoted as 1e-3. The ratio is
    missing for a parameter that was all zero. The change includes learning rate, momentum and weight decay. Both
    numbers of a sharded parameter are those of the whole parameter, merged over the ranks at the flush.

    Args:
        match: choose parameters by name: a regular expression (searched), several, or a function. None: all.
        max_mib: the memory in MiB that the copies may take on one rank.

    Memory: at sampled steps one copy of the matching parameters (of this rank's shards) while the optimizer steps, and
    one parameter's change at a time, in float32 if the parameter is half precision.

    Raises:
        ValueError: max_mib is not above 0; watch() raises it if match matches nothing, or the matching parameters
            exceed max_mib.
    """

    logs, unseen = frozenset({(keys.UPDATE, "norm"), (keys.UPDATE, "ratio")}), _NO_OPTIMIZER

    def __init__(self, match: NameFilter | None = None, *, max_mib: float = 1024) -> None:
        super().__init__(match)
        check(is_number(max_mib) and max_mib > 0, "Updates(): max_mib", max_mib, "a number of MiB above 0")
        self._max_mib = max_mib

    def bind(self, models: ModuleIndex) -> None:
        super().bind(models)
        parts = [local_part(one) for name, one in models.watched_parameters().items() if self._match.chooses(name)]
        size = sum(part.numel() * part.element_size() for part in parts) / 2**20
        if size > self._max_mib:
            raise ValueError(
                f"{self!r} would copy {size:.0f} MiB of parameters at each sampled step, more than "
                f"max_mib={self._max_mib:g}; match fewer parameters, or raise max_mib"
            )

    def wants(self, subject: str, tensor: WatchedTensor) -> bool:
        return subject == keys.UPDATE and self._match.chooses(tensor.name)

    def measure(self, subject: str, tensor: WatchedTensor, values: Tensor, before: Tensor | None = None) -> None:
        assert before is not None
        self._found[f"{keys.UPDATE}/{tensor.name}"] = ProbeSums(sum_sq([values, before]), _CHANGE, tensor.name)


@dataclass(frozen=True)
class StateSums:
    """The meaning of a parameter's number of elements, and the sums of squares of the gradient, of gradient /
    sqrt(second moment), of both bias-corrected moments (the second: its sum), of the update, and of each state tensor.
    """

    states: tuple[str, ...]  # names of the tensors in the optimizer's state
    eps: float  # of the optimizer; 0 if it has none
    of_every_rank = side_by_side = False

    @property
    def num_sums(self) -> int:
        return 6 + len(self.states)

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        num, gradient, stale, first, second, update, *of_states = sums
        return {f"{name}_norm": math.sqrt(square) for name, square in zip(self.states, of_states, strict=True)} | {
            "update_rms": root_of_ratio(update, num),
            keys.STALE: root_of_ratio(stale, num),
            "coherence": first / second if second > 0 else math.nan,
            "grad_eps_ratio": root_of_ratio(gradient, num * self.eps**2),
        }


class OptimizerState(ParameterProbe):
    """Norms of the optimizer's state and of its update, logged as `optimizer_state/<parameter>/...`.

    Let g be the gradient that the optimizer received, and m and v the bias-corrected moments of Adam (divided by
    1 - beta^t). For each parameter of n elements:

    - `<state>_norm`: the L2 norm of each tensor in the optimizer's state, as stored: `exp_avg_norm`,
      `exp_avg_sq_norm`, `momentum_buffer_norm`. Available for every optimizer.
    - `update_rms`: the root mean square of the update divided by the learning rate, without weight decay:
      m / (sqrt(v) + eps) for Adam and AdamW, the buffer for SGD with momentum. White noise gives
      sqrt((1 - beta1) / (1 + beta1)), which is 0.229 for 0.9; gradients that agree give 1.
    - `coherence`: |m|^2 / sum(v), the same squared and without eps: the share of the gradients that has a direction.
    - `stale_ratio`: sqrt(mean(g^2 / max(v, eps^2))) with v from before the step; 1 in a steady state. An element whose
      v is 0 counts as 0. Above 2.3 the second moment is out of date, and the loss may spike 1 to 8 steps later
      (Wortsman et al. 2023, arXiv 2304.13013; v from before the step, because the step itself bounds a later v).
    - `grad_eps_ratio`: the root mean square of g, divided by eps. Near or below 1 the update is scaled by eps, not v.

    A number is missing if the optimizer has no such state; `stale_ratio` is missing at the first step. Numbers of a
    sharded parameter are those of the whole parameter, merged over the ranks at the flush.

    Args:
        match: choose parameters by name: a regular expression (searched), several, or a function. None: all.

    Cost: at a sampled step about 15 passes over each matching parameter, with three temporaries of its size.

    Raises:
        ValueError: by watch(): match matches nothing.
    """

    logs, brings = frozenset({(keys.OPTIMIZER_STATE, keys.STALE)}), (OutgrownUpdate,)
    unseen = _NO_OPTIMIZER

    def __init__(self, match: NameFilter | None = None) -> None:
        super().__init__(match)
        self._gradients: dict[str, Tensor] = {}  # [3] by name: sums that are taken before the step

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for tensor, state, group in _with_states(tensors):
            if tensor.gradient is None or not self._match.chooses(tensor.name):
                continue
            squares = reals(without_scale(tensor.gradient, tensor.inverse_scale)).square()
            wide, second = wide_dtype(squares.device), _moment(state, group, "exp_avg_sq", 1)
            num = torch.full((), squares.numel(), dtype=wide, device=squares.device)
            stale = torch.full_like(num, torch.nan)
            if second is not None:
                least = max(float(group["eps"]) ** 2, torch.finfo(second.dtype).tiny)
                # An element that never had a gradient, such as a rare token's embedding, has no outdated moment.
                stale = (squares / second.clamp_min(least)).masked_fill(second == 0, 0.0).sum(dtype=wide)
            self._gradients[tensor.name] = torch.stack([num, squares.sum(dtype=wide), stale])

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for tensor, state, group in _with_states(tensors):
            if (before := self._gradients.pop(tensor.name, None)) is None:
                continue
            parts = {
                name: reals(local_part(value))
                for name, value in sorted(state.items())
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.ndim
            }
            first, second, update = _made_of(tensor, state, group)
            squares = [None if one is None else one.square() for one in (first, update, *parts.values())]
            squares.insert(1, second)  # the second moment consists of squares already
            missing = torch.full((), torch.nan, dtype=before.dtype, device=before.device)
            sums = [missing if s is None else onto(s.sum(dtype=before.dtype), before.device) for s in squares]
            eps = group.get("eps", 0.0)
            meaning = StateSums(tuple(parts), eps if isinstance(eps, float) else 0.0)
            key = f"{keys.OPTIMIZER_STATE}/{tensor.name}"
            self._found[key] = ProbeSums(torch.cat([before, torch.stack(sums)]), meaning, tensor.name)


_Held = Mapping[str, Any]  # a parameter's state in its optimizer, or its parameter group


def _with_states(tensors: Sequence[WatchedTensor]) -> Iterator[tuple[WatchedTensor, _Held, _Held]]:
    """Yield each parameter that an optimizer holds, with its state and its parameter group."""
    optimizers = {id(tensor.optimizer): tensor.optimizer for tensor in tensors if tensor.optimizer is not None}
    groups = (group for optimizer in optimizers.values() for group in optimizer.param_groups)
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    for tensor in tensors:
        if tensor.optimizer is not None and tensor.held is not None:
            yield tensor, tensor.optimizer.state.get(tensor.held, {}), group_of.get(id(tensor.held), {})


def _moment(state: _Held, group: _Held, name: str, place: int) -> Tensor | None:
    """Return a bias-corrected moment of an Adam-like optimizer; None for other optimizers and before the first step.

    The step number stays where the optimizer keeps it: on the host, or on the device if capturable or fused.
    """
    moment, step, betas = state.get(name), state.get("step", group.get("step")), group.get("betas")
    if not isinstance(moment, Tensor) or step is None or betas is None or "eps" not in group:
        return None
    step = step.to(wide_dtype(step.device)) if isinstance(step, Tensor) else float(step)
    corrected: Tensor = reals(local_part(moment)) / (1 - betas[place] ** step)
    return corrected


def _made_of(tensor: WatchedTensor, state: _Held, group: _Held) -> list[Tensor | None]:
    """Return the bias-corrected first and second moment, and the update divided by the learning rate."""
    first, second, update = _moment(state, group, "exp_avg", 0), _moment(state, group, "exp_avg_sq", 1), None
    buffer = state.get("momentum_buffer")
    if isinstance(tensor.optimizer, torch.optim.Adam | torch.optim.AdamW) and first is not None and second is not None:
        divisor = _moment(state, group, "max_exp_avg_sq", 1) if group.get("amsgrad") else second
        assert divisor is not None
        update = first / (divisor.sqrt() + group["eps"])
    elif isinstance(tensor.optimizer, torch.optim.SGD) and buffer is not None and tensor.gradient is not None:
        buffer = reals(local_part(buffer))
        update = reals(tensor.gradient) + group["momentum"] * buffer if group.get("nesterov") else buffer
    return [first, second, update]


_SUBJECTS: Final = (keys.PARAMETER, keys.GRADIENT, keys.UPDATE)
_NAMES: Final = ("largest_singular_value", "stable_rank")
_FIRST_ITERATIONS: Final = 20  # from a random vector; later samples continue from the previous sample's vector
_FIRST_MERGED: Final = 8  # the same for sharded matrices, where each iteration takes a merge over ranks
_PRODUCT_EVERY: Final = 50  # samples; the largest distance between two products


class _SharedVector:
    """The power iteration's vector of a sharded matrix. All ranks start with the same one and advance at a merge.

    A merge reaches some ranks a little earlier than others. Each rank sends the version of the vector that it used, and
    sums from different versions are discarded.
    """

    def __init__(self, part_MN: Tensor, layout: Layout) -> None:
        self._vector_N, self._layout = _random(part_MN), layout
        self._version = 0

    def sums(self, part_MN: Tensor, *, with_product: bool) -> Tensor:
        """Return what this rank's rows add: 1, version, version^2, |A v|^2 and |A|_F^2; on request also A^T A v."""
        wide = wide_dtype(part_MN.device)
        image_M = part_MN @ self._vector_N
        known = [torch.full((), self._version**power, dtype=wide, device=part_MN.device) for power in range(3)]
        sums = torch.stack([*known, square_of(image_M), square_of(part_MN)])
        return torch.cat([sums, (part_MN.T @ image_M).to(wide)]) if with_product else sums

    def advance(self, sums: Sequence[float]) -> tuple[float, float] | None:
        """Return largest singular value and stable rank, or None if unknown; continue from a new product."""
        num, version, version_sq, image_sq, norm_sq = sums[:5]
        if num != self._layout.num_ranks or num * version_sq != version**2:
            return None
        product_N = np.array(sums[5:])
        length = float(np.linalg.norm(product_N))
        if version == num * self._version and 0 < length < math.inf:
            self._vector_N = upload(product_N / length, self._vector_N.device).to(self._vector_N.dtype)
            self._version += 1
        if version < num * _FIRST_MERGED:
            return None
        return math.sqrt(image_sq / self._layout.num_replicas), norm_sq / image_sq if image_sq > 0 else math.nan


class Spectrum(SubjectProbe, ParameterProbe):
    """Largest singular value and stable rank of matrices, logged as `<of>/<parameter>/largest_singular_value` and
    `.../stable_rank`.

    The stable rank |A|_F^2 / sigma^2 lies between 1 (a matrix of rank one) and the smaller dimension (all singular
    values equal). Parameters of more than two dimensions are reshaped to [first, all others]; those of fewer are left
    out. The largest singular value sigma is |A v| after a power iteration on A^T A (Miyato et al. 2018,
    arXiv 1802.05957). Its vector v continues from sample to sample, so sigma is approximated from below: if a matrix
    changes quickly, as gradients do, sigma lags by a few samples, and the stable rank is too large by as much.

    Both numbers of a sharded parameter (FSDP2, tensor parallel) are those of the whole. Each rank multiplies its shard
    with the same vector, and the products are added when the window is merged over the ranks: the training does not
    wait. The iteration advances once per flush that has histograms; the first 8 such flushes give no numbers. A message
    says once that other parameters are left out: those of FSDP1, those sharded along both dimensions, and those of
    which some ranks hold nothing (pipelines).

    Args:
        match: choose parameters by name: a regular expression (searched), several, or a function. None: all.
        of: any of "parameter" (before the update), "gradient" (without the loss scale, before clipping) and "update".

    Memory: a vector with one element per column for each matrix and each of `of`; with "update" a copy of the matching
    parameters while an optimizer steps. Cost: 3 matrix-vector products and a norm per matrix at a sampled step, 41 at
    the first. Each flush sends one number per column of a sharded matrix (per row, if the columns are sharded).

    Raises:
        ValueError: `of` has an unknown name; watch() raises it if match matches no matrix.
    """

    def __init__(self, match: NameFilter | None = None, *, of: Sequence[str] = (keys.PARAMETER,)) -> None:
        super().__init__(match)
        check_names(f"Spectrum(): of={of!r}", of, _SUBJECTS)
        self._of = tuple(of)
        self.logs = frozenset((subject, name) for subject in of for name in _NAMES)
        self._vectors: dict[str, Tensor] = {}  # by key: [N]
        self._shared: dict[str, _SharedVector] = {}  # by key, for sharded matrices
        self._has_product = False
        self._since_product = 0  # number of samples

    def bind(self, models: ModuleIndex) -> None:
        are_flat = models.uses_fsdp1  # FSDP1's parameters do not show which are matrices; they are skipped later
        matrices = [name for name, one in models.watched_parameters().items() if one.ndim > 1 or are_flat]
        self._match.require("matrix", matrices)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._since_product += next_step_is_due
        self._has_product = histogram_is_due or self._since_product >= _PRODUCT_EVERY
        if self._has_product:
            self._since_product = 0

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for key, shared in self._shared.items():
            one = sums.get(f"{key}/spectrum")
            if one is not None and (numbers := shared.advance(one.sums)) is not None:
                found |= {f"{key}/{name}": number for name, number in zip(_NAMES, numbers, strict=True)}
        return found

    def wants(self, subject: str, tensor: WatchedTensor) -> bool:
        if subject not in self._of or not tensor.parameter.is_floating_point() or not self._match.chooses(tensor.name):
            return False
        if subject == keys.GRADIENT and tensor.gradient is not None and tensor.gradient.layout is not torch.strided:
            return False
        layout = Layout.of(tensor)
        cut_sides = {dim > 0 for dim, _, _ in layout.cuts} if layout is not None else set()
        is_merged = layout is not None and layout.num_ranks == world_size() and len(cut_sides) < 2
        return (is_merged or self.gets_whole(tensor, needed_by="spectra")) and tensor.parameter.ndim > 1

    def measure(self, subject: str, tensor: WatchedTensor, values: Tensor, before: Tensor | None = None) -> None:
        key, matrix_MN = f"{subject}/{tensor.name}", widened(values).flatten(1)
        layout = Layout.of(tensor)
        if layout is None:
            numbers = self._of_matrix(key, matrix_MN)
            self._found |= {f"{key}/{what}": number for what, number in zip(_NAMES, numbers, strict=True)}
            return
        if any(dim > 0 for dim, _, _ in layout.cuts):  # ranks hold columns: transpose, so that they hold rows
            matrix_MN = matrix_MN.T
        if key not in self._shared:
            self._shared[key] = _SharedVector(matrix_MN, layout)
        sums = self._shared[key].sums(matrix_MN, with_product=self._has_product)
        self._found[f"{key}/spectrum"] = ProbeSums(sums, ReadByProbe(len(sums)))

    def _of_matrix(self, key: str, matrix_MN: Tensor) -> Tensor:
        """Return the largest singular value and the stable rank: [2]; for a matrix of zeros 0 and NaN."""
        vector_N, num_iterations = self._vectors.get(key), 1
        kind = (matrix_MN.shape[1:], matrix_MN.device, matrix_MN.dtype)
        if vector_N is None or (vector_N.shape, vector_N.device, vector_N.dtype) != kind:
            vector_N, num_iterations = _random(matrix_MN), _FIRST_ITERATIONS
        start_N = vector_N
        for _ in range(num_iterations):
            image_N = _unit(matrix_MN.T @ _unit(matrix_MN @ vector_N))
            # A sample that is all zero or not finite does not end the iteration: it keeps the vector.
            vector_N = torch.where(torch.isfinite(image_N).all(), image_N, start_N)
        self._vectors[key] = vector_N
        sigma_sq = square_of(matrix_MN @ vector_N)
        rank = square_of(matrix_MN) / torch.where(sigma_sq > 0, sigma_sq, torch.nan)
        return torch.stack([sigma_sq.sqrt(), rank])


def _random(matrix_MN: Tensor) -> Tensor:
    """Return the same vector [N] of length 1 on every rank, without touching the training's random generators."""
    generator = torch.Generator("cpu").manual_seed(1234)
    return onto(_unit(torch.randn(matrix_MN.shape[1], generator=generator, dtype=matrix_MN.dtype)), matrix_MN.device)


def _unit(vector: Tensor) -> Tensor:
    """Return the vector scaled to length 1, however short it was; NaN for zeros."""
    return vector / torch.linalg.vector_norm(vector)  # type: ignore[no-any-return]
