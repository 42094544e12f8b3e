"""Spectrum: the largest singular value and the stable rank of matrices, by a power iteration that goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .._capture.parameter_registry import NameFilter
from .._capture.probes import WatchedTensor
from .._measure.elements import onto, wide_dtype
from .._measure.probe_values import ArrivedSums, ProbeSums
from .._runtime.sharding import world_size
from ..snapshot import keys
from ._module_index import ModuleIndex, ProbeShards
from ._module_probe import ParameterProbe, ReadByProbe, without_scale
from ._rows import square_of, widened

# M rows, N columns

SUBJECTS: Final = (keys.PARAMETER, keys.GRADIENT, keys.UPDATE)
_NAMES: Final = ("largest_singular_value", "stable_rank")
_FIRST: Final = 20  # iterations from a random vector; later ones begin where the last sample's ended
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
        if isinstance(of, str) or not of or not set(of) <= set(SUBJECTS):
            raise ValueError(f"Spectrum(of={of!r}) must be a sequence of names out of {SUBJECTS}")
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
        for _ in range(_FIRST if is_new else 1):
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
