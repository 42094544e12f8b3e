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


def add_on_device(one: Tensor, other: Tensor) -> Tensor:
    return one + onto(other, one.device)


class Store(Generic[Key, Value]):
    """Values by key that merge: those of the open sample, and pending ones, which may belong to the next sample.

    Values are never changed in place, so copies of the dictionaries may share them.
    """

    def __init__(self, merge: Callable[[Any, Any], Any] = add_on_device) -> None:
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


def without_scale(gradient: Tensor, inverse_scale: Tensor | None) -> Tensor:
    """Return a gradient, dense, without the loss scale; a scaled half-precision gradient becomes float32."""
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    return dense if inverse_scale is None else widened(dense) * onto(inverse_scale, dense.device)


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


STATISTICS: Final = ("norm", "rms", "mean", "std", "min", "max", "abs_max", "dead_ratio", "zero_ratio", "num_nonfinite")

# Not a number but the counts in the fixed bins, at steps where gradients have histograms too.
HISTOGRAM: Final = "histogram"


def check_names(said: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise a ValueError that begins with `said`, unless `given` is a non-empty sequence of known names."""
    is_several = isinstance(given, Collection) and not isinstance(given, str | Mapping)
    if not is_several or not given or any(name not in known for name in given):
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
            numbers = _statistics(rows_MC.T)
            values: dict[str, Sequence[Found]] = {name: numbers[name].unbind() for name in self._numbers}
            if histogram and size > NUM_COLUMNS:
                values[HISTOGRAM] = histograms_of(rows_MC, rows_MC[:, NUM_COLUMNS:])
            for index, name in enumerate(group):
                for statistic, of_names in values.items():
                    yield name, statistic, of_names[index]


def _statistics(c: Tensor) -> Mapping[str, Tensor]:
    """Return STATISTICS, [M] each, from columns [C, M]: of finite elements only, as for gradients."""
    num, sum_sq, num_nonfinite = c[Column.NUM_ELEMENTS], c[Column.GRAD_SUM_SQ], c[Column.NUM_NAN] + c[Column.NUM_INF]
    num_finite = num - num_nonfinite
    mean, mean_sq = c[Column.GRAD_SUM] / num_finite, sum_sq / num_finite  # 0 / 0 gives NaN: missing
    # An extreme that is still at its start value has seen no finite element.
    low, high = (torch.where(c[i].isinf(), torch.nan, c[i]) for i in (Column.GRAD_MIN, Column.GRAD_MAX))
    # Added to values that are 0 if no element is finite, which are missing instead; an empty tensor has the values.
    missing = torch.where((num_finite == 0) & (num > 0), torch.nan, 0.0)
    return {
        "norm": sum_sq.sqrt() + missing,
        "rms": mean_sq.sqrt(),
        "mean": mean,
        "std": (mean_sq - mean**2).clamp_min(0.0).sqrt(),  # rounding can make the variance slightly negative
        "min": low,
        "max": high,
        "abs_max": torch.maximum(low.abs(), high.abs()),
        "dead_ratio": c[Column.NUM_DEAD] / num + missing,
        "zero_ratio": c[Column.NUM_ZERO] / num + missing,
        "num_nonfinite": num_nonfinite,
    }


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
