"""What a sample collects on the device, merged over micro-batches: tensors of an output, values by key, and rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor

from .._capture.probes import Found
from .._measure.columns import MAX_COLUMNS, MIN_COLUMNS, NUM_COLUMNS, ZERO_BIN, Column, magnitude_edges
from .._measure.elements import onto, wide_dtype
from .._measure.measure import measure
from .._measure.probe_values import ProbeHistogram
from .._runtime.sharding import local_part

# M tensors, C columns, B histogram bins

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Dims = Mapping[int, str] | None


class Store(Generic[Key, Value]):
    """Values by key that merge: those of the open sample, and apart what may belong to the next one.

    No value is ever changed in place, so that copies may share them.
    """

    def __init__(self, merge: Callable[[Value, Value], Value]) -> None:
        self.sample: dict[Key, Value] = {}
        self.pending: dict[Key, Value] = {}
        self._marked: dict[Key, Value] = {}
        self._merge = merge

    def add(self, key: Key, value: Value, *, pending: bool = True) -> None:
        values = self.pending if pending else self.sample
        values[key] = self._merge(values[key], value) if key in values else value

    def settle(self) -> None:
        """What is pending belongs to the open sample."""
        for key, value in self.pending.items():
            self.add(key, value, pending=False)
        self.forget_pending()

    def forget_pending(self) -> None:
        self.pending, self._marked = {}, {}

    def take(self) -> dict[Key, Value]:
        taken, self.sample = self.sample, {}
        return taken

    def mark(self) -> None:
        """A forward begins: remember what is pending."""
        self._marked = dict(self.pending)

    def go_back(self) -> None:
        """The forward has failed: what was pending at `mark` is pending again."""
        self.pending, self._marked = self._marked, {}


def add_on_device(one: Tensor, other: Tensor) -> Tensor:
    return one + onto(other, one.device)


def square_of(tensor: Tensor) -> Tensor:
    """The squared norm, without an overflow of the squares."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device))
    return norm.square()


def widened(tensor: Tensor) -> Tensor:
    """Half precision and less as float32, everything else as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def reals(tensor: Tensor) -> Tensor:
    """The same for a tensor of real numbers; a complex one, as optimizers see it, as real and imaginary parts."""
    return widened(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)


def dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def without_scale(gradient: Tensor, inverse_scale: Tensor | None) -> Tensor:
    """A gradient without the loss scale; half precision that has one as float32."""
    return gradient if inverse_scale is None else widened(gradient) * onto(inverse_scale, gradient.device)


def tensors_in(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every real or complex floating tensor in an output, with where it lies.

    A lone tensor lies at "", those of tuples, lists, dicts and dataclasses at "output_0", "output_hidden_1", by index
    and key. Of a tensor that several ranks hold together (a DTensor) it is this rank's part.
    """
    for where, tensor in leaves_in(output, path):
        yield where, local_part(tensor.values() if tensor.is_nested else tensor).detach()


def leaves_in(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The same tensors themselves, as they are in the graph."""
    if is_measurable(output):
        yield path, output
    items: Any = ()
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, tuple | list):
        items = zip(getattr(output, "_fields", range(len(output))), output, strict=True)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    for key, value in items:
        yield from leaves_in(value, f"{path or 'output'}_{key}")


def is_measurable(thing: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with real or complex floating elements to look at.

    One under vmap or grad stands for many tensors and has none; what is empty has no statistics.
    """
    if not isinstance(thing, Tensor) or not (thing.is_floating_point() or thing.is_complex()):
        return False
    return thing.numel() > 0 and not torch._C._functorch.is_functorch_wrapped_tensor(thing)


def slices(tensor: Tensor, dims: Dims) -> list[tuple[str, Tensor]]:
    """A tensor's slices along its named dimensions, each with its label; without any, the tensor itself under ""."""
    return list(zip(*labelled(tensor, dims), strict=True)) if dims else [("", tensor)]


def labelled(tensor: Tensor, dims: Dims) -> tuple[list[str], Tensor]:
    """The K labels of these slices, and the slices as one tensor: [K, ...]."""
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
    """The name of a tensor: the module's, where it lies in the output, and which slice of it."""
    return (f"{module}.{path}" if path else module) + (f"/{label}" if label else "")


def _mean(c: Tensor, total: Column = Column.GRAD_SUM) -> Tensor:
    return c[total] / (c[Column.NUM_ELEMENTS] - c[Column.NUM_NAN] - c[Column.NUM_INF])  # 0 / 0 is NaN: missing


def _std(c: Tensor) -> Tensor:
    variance = _mean(c, Column.GRAD_SUM_SQ) - _mean(c) ** 2
    return variance.clamp_min(0.0).sqrt()  # rounding leaves a constant a hair below zero


def _present(extreme: Tensor) -> Tensor:
    return torch.where(extreme.isinf(), torch.nan, extreme)  # nothing entered it


# Of the finite elements, as for gradients, from the columns [C, M].
STATISTICS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "norm": lambda c: c[Column.GRAD_SUM_SQ].sqrt(),
    "rms": lambda c: _mean(c, Column.GRAD_SUM_SQ).sqrt(),
    "mean": _mean,
    "std": _std,
    "min": lambda c: _present(c[Column.GRAD_MIN]),
    "max": lambda c: _present(c[Column.GRAD_MAX]),
    "abs_max": lambda c: _present(torch.maximum(c[Column.GRAD_MIN].abs(), c[Column.GRAD_MAX].abs())),
    "dead_ratio": lambda c: c[Column.NUM_DEAD] / c[Column.NUM_ELEMENTS],
    "zero_ratio": lambda c: c[Column.NUM_ZERO] / c[Column.NUM_ELEMENTS],
    "num_nonfinite": lambda c: c[Column.NUM_NAN] + c[Column.NUM_INF],
}

# Of the magnitudes, zeros included: the upper edge of the histogram bin that holds them, so right to half an octave.
QUANTILES: Final[Mapping[str, float]] = {"abs_p01": 0.01, "abs_p50": 0.5, "abs_p99": 0.99}

# Not a number: the counts in the fixed bins, at the steps that have histograms of gradients too.
HISTOGRAM: Final = "histogram"


def check_names(said: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise a ValueError, which begins with what is said, unless this is a sequence of some of the known names."""
    if isinstance(given, str) or not given or not set(given) <= set(known):
        raise ValueError(f"{said} must be a sequence of names out of {known}")


class RowTally(Store[str, Tensor]):
    """One row per name, [C] each, and the histogram's [B] behind it where there is one, for these statistics."""

    def __init__(self, statistics: Sequence[str], dead_threshold: float = 0.0) -> None:
        super().__init__(_merged)
        self._numbers = [name for name in statistics if name != HISTOGRAM]
        self._has_histograms = HISTOGRAM in statistics
        self._dead_threshold = dead_threshold
        self._needs_bins = not QUANTILES.keys().isdisjoint(statistics)
        self.measures_histograms = False  # of what is pending
        self.reads_histograms = False  # of the sample

    def measure(self, tensors: Mapping[str, Tensor]) -> None:
        """Measure tensors, all on one device, in one batched pass. None of them is kept."""
        if not tensors:
            return
        histogram = self._needs_bins or (self._has_histograms and self.measures_histograms)
        measured = measure(list(tensors.values()), None, dead_threshold=self._dead_threshold, histogram=histogram)
        rows = measured.rows
        if measured.histogram is not None:
            rows = torch.cat([rows, measured.histogram.to(rows.dtype)], dim=1)
        for name, row in zip(tensors, rows, strict=True):
            self.add(name, row)

    def read(self, order: Callable[[str], Any] | None = None) -> Iterable[tuple[str, str, Found]]:
        """Take the sample: name, statistic and value, by name in the order given, otherwise in that of arrival."""
        rows = self.take()
        alike: dict[tuple[torch.device, int], list[str]] = {}
        for name in rows if order is None else sorted(rows, key=order):
            alike.setdefault((rows[name].device, len(rows[name])), []).append(name)
        for (_, size), group in alike.items():
            rows_MC = torch.stack([rows[name] for name in group])
            values: dict[str, Sequence[Found]] = {}
            for name in self._numbers:
                q = QUANTILES.get(name)
                found = STATISTICS[name](rows_MC.T) if q is None else _abs_quantile(rows_MC[:, NUM_COLUMNS:], q)
                values[name] = found.unbind()
            if self._has_histograms and self.reads_histograms and size > NUM_COLUMNS:
                values[HISTOGRAM] = histograms_of(rows_MC, rows_MC[:, NUM_COLUMNS:])
            for index, name in enumerate(group):
                for statistic, of_names in values.items():
                    yield name, statistic, of_names[index]


def _merged(one: Tensor, other: Tensor) -> Tensor:
    """Two rows as one. Columns are selected one by one: a list of them would have to be uploaded, and waited for."""
    # A forward that began before the sample before was closed may have been measured without a histogram: half of one
    # would be wrong, so there is none.
    size = min(len(one), len(other))
    one, other = one[:size], onto(other[:size], one.device)
    merged = one + other
    for columns, extreme in ((MIN_COLUMNS, torch.minimum), (MAX_COLUMNS, torch.maximum)):
        for column in columns:
            merged[column] = extreme(one[column], other[column])
    return merged


def histograms_of(rows_MC: Tensor, histogram_MB: Tensor) -> list[ProbeHistogram]:
    """Histograms with the extremes of their rows."""
    extremes = [rows_MC[:, column, None] for column in (Column.GRAD_MIN, Column.GRAD_MAX)]
    return list(map(ProbeHistogram, torch.cat([histogram_MB.to(rows_MC.dtype), *extremes], dim=1)))


def _abs_quantile(histogram_MB: Tensor, q: float) -> Tensor:
    """The upper edge of the bin of magnitudes that holds the q-quantile: [M]; 0 for the zeros, NaN without elements."""
    zeros, positive = histogram_MB[:, ZERO_BIN : ZERO_BIN + 1], histogram_MB[:, ZERO_BIN + 1 :]
    # In integers: CUDA has no deterministic sum of that kind in floats, and may have been told to use no other.
    counts = torch.cat([zeros, positive + histogram_MB[:, :ZERO_BIN].flip(1)], dim=1).to(torch.int64)
    cumulative = counts.cumsum(1).to(histogram_MB.dtype)
    total = cumulative[:, -1]
    bins = (cumulative < (q * total).ceil().clamp_min(1.0)[:, None]).sum(1)
    edges = _upper_edges(histogram_MB.device, histogram_MB.dtype)
    return torch.where(total > 0, edges[bins.clamp_max(len(edges) - 1)], torch.nan)


@functools.cache
def _upper_edges(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Uploaded once per device: 0 for the zeros, then the upper edge of every magnitude bin, the last one open."""
    edges = torch.cat([torch.zeros(1, device="cpu"), torch.tensor(magnitude_edges()[1:], device="cpu")]).to(dtype)
    return (edges.pin_memory() if device.type == "cuda" else edges).to(device, non_blocking=True)
