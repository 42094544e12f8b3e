"""Values that a sample collects on the device and merges over micro-batches, and helpers for tensors in outputs."""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from .._capture.probes import Found
from .._measure.columns import MAX_COLUMNS, MIN_COLUMNS, NUM_COLUMNS, Column
from .._measure.elements import onto, wide_dtype
from .._measure.measure import measure
from .._measure.probe_values import ProbeHistogram
from .._runtime.sharding import local_part
from .._runtime.wrappers import leaves_in

# M tensors, C columns, B histogram bins

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Dims = Mapping[int, str] | None


class Store(Generic[Key, Value]):
    """Values by key that merge: those of the open sample, and pending ones, which may belong to the next sample.

    Values are never changed in place, so copies of the dictionaries may share them.
    """

    def __init__(self, merge: Callable[[Value, Value], Value]) -> None:
        self.sample: dict[Key, Value] = {}
        self.pending: dict[Key, Value] = {}
        self._merge = merge

    def add(self, key: Key, value: Value, *, pending: bool = True) -> None:
        values = self.pending if pending else self.sample
        values[key] = self._merge(values[key], value) if key in values else value

    def settle(self) -> None:
        """Merge the pending values into the open sample."""
        for key, value in self.pending.items():
            self.add(key, value, pending=False)
        self.pending = {}

    def take(self) -> dict[Key, Value]:
        taken, self.sample = self.sample, {}
        return taken


def add_on_device(one: Tensor, other: Tensor) -> Tensor:
    return one + onto(other, one.device)


def square_of(tensor: Tensor) -> Tensor:
    """Return the squared norm, without overflow of the squares."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device))
    return norm.square()


def widened(tensor: Tensor) -> Tensor:
    """Convert half precision and narrower to float32; return other tensors unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def reals(tensor: Tensor) -> Tensor:
    """Widen a tensor; view a complex one as real and imaginary parts, as optimizers do."""
    return widened(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)


def dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def without_scale(gradient: Tensor, inverse_scale: Tensor | None) -> Tensor:
    """Remove the loss scale from a gradient; a scaled half-precision gradient becomes float32."""
    return gradient if inverse_scale is None else widened(gradient) * onto(inverse_scale, gradient.device)


def tensors_in(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `leaves_in`, detached; of a DTensor this rank's local part."""
    for where, tensor in leaves_in(output, path):
        yield where, local_part(tensor.values() if tensor.is_nested else tensor).detach()


def slices(tensor: Tensor, dims: Dims) -> list[tuple[str, Tensor]]:
    """Return a tensor's slices along its named dimensions, with their labels; without dims, the tensor under ""."""
    return list(zip(*labelled(tensor, dims), strict=True)) if dims else [("", tensor)]


def labelled(tensor: Tensor, dims: Dims) -> tuple[list[str], Tensor]:
    """Return the K labels of the slices, and the slices as one tensor: [K, ...]."""
    if not dims:
        return [""], tensor.reshape(1, -1)
    wrong = [dim for dim in dims if not -tensor.ndim <= dim < tensor.ndim]
    if wrong:
        raise ValueError(f"dims={dict(dims)!r} names dimension {wrong[0]}, but the tensor has shape {[*tensor.shape]}")
    front = tensor.movedim([dim % tensor.ndim for dim in dims], list(range(len(dims))))
    sizes = zip(dims.values(), front.shape, strict=False)
    parts = ([f"{name}_{index}" for index in range(size)] for name, size in sizes)
    return list(map("/".join, itertools.product(*parts))), front.flatten(0, len(dims) - 1)


def tensor_name(module: str, path: str, label: str = "") -> str:
    """Return the full name of a tensor: its module, its path in the output, and the label of a slice."""
    return (f"{module}.{path}" if path else module) + (f"/{label}" if label else "")


def _num_finite(c: Tensor) -> Tensor:
    return c[Column.NUM_ELEMENTS] - c[Column.NUM_NAN] - c[Column.NUM_INF]


def _mean(c: Tensor, total: Column = Column.GRAD_SUM) -> Tensor:
    return c[total] / _num_finite(c)  # 0 / 0 gives NaN: missing


def _known(c: Tensor, value: Tensor) -> Tensor:
    """Return a value that is 0 if no element is finite, which is missing instead; an empty tensor has the value."""
    return torch.where((_num_finite(c) == 0) & (c[Column.NUM_ELEMENTS] > 0), torch.nan, value)


def _std(c: Tensor) -> Tensor:
    variance = _mean(c, Column.GRAD_SUM_SQ) - _mean(c) ** 2
    return variance.clamp_min(0.0).sqrt()  # rounding can make the variance of a constant slightly negative


def _present(extreme: Tensor) -> Tensor:
    return torch.where(extreme.isinf(), torch.nan, extreme)  # still at its start value: no finite element


# Statistics from the columns [C, M]; of finite elements only, as for gradients.
STATISTICS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "norm": lambda c: _known(c, c[Column.GRAD_SUM_SQ].sqrt()),
    "rms": lambda c: _mean(c, Column.GRAD_SUM_SQ).sqrt(),
    "mean": _mean,
    "std": _std,
    "min": lambda c: _present(c[Column.GRAD_MIN]),
    "max": lambda c: _present(c[Column.GRAD_MAX]),
    "abs_max": lambda c: _present(torch.maximum(c[Column.GRAD_MIN].abs(), c[Column.GRAD_MAX].abs())),
    "dead_ratio": lambda c: _known(c, c[Column.NUM_DEAD] / c[Column.NUM_ELEMENTS]),
    "zero_ratio": lambda c: _known(c, c[Column.NUM_ZERO] / c[Column.NUM_ELEMENTS]),
    "num_nonfinite": lambda c: c[Column.NUM_NAN] + c[Column.NUM_INF],
}

# Not a number but the counts in the fixed bins, at steps where gradients have histograms too.
HISTOGRAM: Final = "histogram"


def check_names(said: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise a ValueError that begins with `said`, unless `given` is a non-empty sequence of known names."""
    if isinstance(given, str) or not given or not set(given) <= set(known):
        raise ValueError(f"{said} must be a sequence of names out of {known}")


class RowTally(Store[str, Tensor]):
    """One row per name for these statistics: the columns [C], followed by the histogram [B] if there is one."""

    def __init__(self, statistics: Sequence[str], dead_threshold: float = 0.0) -> None:
        super().__init__(_merged)
        self._numbers = [name for name in statistics if name != HISTOGRAM]
        self._dead_threshold = dead_threshold

    def measure(self, tensors: Mapping[str, Tensor], *, histogram: bool = False) -> None:
        """Measure tensors, all on one device and at least one, in one batched pass. No tensor is kept."""
        measured = measure(list(tensors.values()), None, dead_threshold=self._dead_threshold, histogram=histogram)
        rows = measured.rows
        if measured.histogram is not None:
            rows = torch.cat([rows, measured.histogram.to(rows.dtype)], dim=1)
        for name, row in zip(tensors, rows, strict=True):
            self.add(name, row)

    def read(
        self, order: Callable[[str], Any] | None = None, *, histogram: bool = False
    ) -> Iterable[tuple[str, str, Found]]:
        """Take the sample: yield name, statistic and value, sorted by `order`, or in the order of arrival."""
        rows = self.take()
        alike: dict[tuple[torch.device, int], list[str]] = {}
        for name in rows if order is None else sorted(rows, key=order):
            alike.setdefault((rows[name].device, len(rows[name])), []).append(name)
        for (_, size), group in alike.items():
            rows_MC = torch.stack([rows[name] for name in group])
            values: dict[str, Sequence[Found]] = {name: STATISTICS[name](rows_MC.T).unbind() for name in self._numbers}
            if histogram and size > NUM_COLUMNS:
                values[HISTOGRAM] = histograms_of(rows_MC, rows_MC[:, NUM_COLUMNS:])
            for index, name in enumerate(group):
                for statistic, of_names in values.items():
                    yield name, statistic, of_names[index]


def _merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge two rows. Columns are indexed one by one: the host would wait for the upload of a list of indices."""
    # A forward that began before the previous sample closed may lack the histogram; half a histogram would be wrong,
    # so the merged row has none.
    size = min(len(one), len(other))
    one, other = one[:size], onto(other[:size], one.device)
    merged = one + other
    for columns, extreme in ((MIN_COLUMNS, torch.minimum), (MAX_COLUMNS, torch.maximum)):
        for column in columns:
            merged[column] = extreme(one[column], other[column])
    return merged


def histograms_of(rows_MC: Tensor, histogram_MB: Tensor) -> list[ProbeHistogram]:
    """Combine each histogram with the extremes of its row."""
    extremes = [rows_MC[:, column, None] for column in (Column.GRAD_MIN, Column.GRAD_MAX)]
    return list(map(ProbeHistogram, torch.cat([histogram_MB.to(rows_MC.dtype), *extremes], dim=1)))
