"""Spectrum: the largest singular value and the stable rank of matrices, by a power iteration that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, WatchedTensor
from .._measure.elements import onto, wide_dtype
from ..snapshot import keys
from ._module_index import ModuleIndex, matcher, nothing_matches
from ._module_probe import ModuleProbe
from ._reduction import widened
from ._shards import ProbeShards
from ._updates import Befores

# M rows, N columns

SUBJECTS: Final = (keys.PARAMETER, keys.GRADIENT, keys.UPDATE)
_FIRST: Final = 20  # iterations from a random vector; later ones begin where the last sample's ended
_SEED: Final = 1234


class Spectrum(ModuleProbe):
    """Largest singular value and stable rank of matrices, logged as `<of>/<parameter>/largest_singular_value` and
    `.../stable_rank`.

    The stable rank |A|_F^2 / sigma^2 lies between 1, a matrix of rank one, and the smaller dimension, where all
    singular values are alike. Parameters of more than two dimensions are taken as [first, all others]; of less, left
    out. The largest singular value sigma is |A v| after a power iteration on A^T A (Miyato et al. 2018,
    arXiv 1802.05957) whose vector v goes on from sample to sample, and so from below: where a matrix changes quickly,
    as gradients do, sigma lags behind by a few samples, and the stable rank is that much too large.

    Of parameters before the update, of gradients without the loss scale and before clipping, of updates as the
    parameter has changed. Sharded parameters are left out, which is said: a singular value of parts is none of the
    whole, and each product of the iteration would have to be summed over the ranks first, a collective of the
    training's own time at every sample. Rows merge only once, at the flush.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        of: out of "parameter", "gradient" and "update".

    Memory: a vector of each matrix's columns for each of `of`; with "update" a copy of the matching parameters while
    an optimizer steps. Cost: 2 matrix-vector products and a norm of each at a sampled step, 40 at the first one.

    Raises:
        ValueError: an unknown `of`; match matches no matrix (by watch()).
    """

    def __init__(self, match: NameFilter | None = None, *, of: Sequence[str] = (keys.PARAMETER,)) -> None:
        self._match = match
        self._matches = matcher(match, repr(self))
        if isinstance(of, str) or not of or not set(of) <= set(SUBJECTS):
            raise ValueError(f"Spectrum(of={of!r}) must be a sequence of names out of {SUBJECTS}")
        self._of = tuple(of)
        self._vectors: dict[str, Tensor] = {}  # by key: [N]
        self._found: dict[str, Tensor] = {}  # [2] by key
        self._befores = Befores()
        self._shards = ProbeShards()
        self._is_due = False

    def claims(self) -> set[tuple[str, str]]:
        return {(subject, name) for subject in self._of for name in ("largest_singular_value", "stable_rank")}

    def bind(self, models: ModuleIndex) -> None:
        matrices = [name for name, parameter in models.watched_parameters().items() if parameter.ndim > 1]
        if not any(map(self._matches, matrices)):
            raise nothing_matches("Spectrum()", self._match, "matrix", matrices)
        self._shards.bind(models)

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        self._is_due = next_step_is_due
        self._befores.forget()

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due or keys.GRADIENT not in self._of:
            return
        self._shards.look()
        for tensor in tensors:
            gradient = tensor.gradient
            if gradient is not None and gradient.layout is torch.strided and self._is_measured(tensor):
                sigma_and_rank = self._of_matrix(f"{keys.GRADIENT}/{tensor.name}", gradient)
                if tensor.inverse_scale is not None:
                    scale = torch.stack([onto(tensor.inverse_scale, gradient.device).to(sigma_and_rank.dtype)])
                    sigma_and_rank = torch.cat([sigma_and_rank[:1] * scale, sigma_and_rank[1:]])
                self._found[f"{keys.GRADIENT}/{tensor.name}"] = sigma_and_rank  # the last backward's counts

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        self._shards.look()
        measured = [tensor for tensor in tensors if self._is_measured(tensor)]
        if keys.PARAMETER in self._of:
            for tensor in measured:
                key = f"{keys.PARAMETER}/{tensor.name}"
                self._found[key] = self._of_matrix(key, tensor.parameter)
        if keys.UPDATE in self._of:
            self._befores.keep(measured)

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        for name, change, _ in self._befores.changes(tensors):
            self._found[f"{keys.UPDATE}/{name}"] = self._of_matrix(f"{keys.UPDATE}/{name}", change)

    def take(self) -> Mapping[str, Found]:
        found, self._found = self._found, {}
        names = ("largest_singular_value", "stable_rank")
        return {f"{key}/{name}": value for key, of in found.items() for name, value in zip(names, of, strict=True)}

    def close(self) -> None:
        self._befores.forget()

    def _is_measured(self, tensor: WatchedTensor) -> bool:
        if tensor.parameter.ndim < 2 or not tensor.parameter.is_floating_point() or not self._matches(tensor.name):
            return False
        return self._shards.is_whole(tensor.name, needed_by="spectra")

    def _of_matrix(self, key: str, tensor: Tensor) -> Tensor:
        """The largest singular value and the stable rank: [2]; of a matrix of zeros 0, and no rank."""
        matrix_MN = widened(tensor).flatten(1)
        vector_N = self._vectors.get(key)
        is_new = vector_N is None or len(vector_N) != matrix_MN.shape[1] or vector_N.device != tensor.device
        if is_new:  # with numbers of its own: those of the training stay as they are
            generator = torch.Generator("cpu").manual_seed(_SEED)
            vector_N = onto(torch.randn(matrix_MN.shape[1], generator=generator, dtype=matrix_MN.dtype), tensor.device)
        assert vector_N is not None
        start_N = torch.nn.functional.normalize(vector_N, dim=0)
        vector_N = start_N
        for _ in range(_FIRST if is_new else 1):
            image_N = matrix_MN.T @ (matrix_MN @ vector_N)
            # What is all zero, or not finite, for one sample does not end the iteration.
            is_good = torch.isfinite(image_N).all() & (image_N != 0).any()
            vector_N = torch.where(is_good, torch.nn.functional.normalize(image_N, dim=0), start_N)
        self._vectors[key] = vector_N
        wide = wide_dtype(tensor.device)
        sigma_sq = (matrix_MN @ vector_N).square().sum(dtype=wide)
        rank = matrix_MN.square().sum(dtype=wide) / torch.where(sigma_sq > 0, sigma_sq, torch.nan)
        return torch.stack([sigma_sq.sqrt(), rank])
