"""Facts about the inputs and outputs of the watched models, noted by a hook at the end of a measured forward."""

import logging
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._interruptions import raise_interruption
from .._measure.columns import FloatArray
from .._measure.elements import elements_of, onto, upload, wide_dtype
from .._measure.probe_values import ProbeSums
from .._runtime.autograd import current_graph_task, replay
from .._runtime.error_boundary import ErrorBoundary, graph_is_made
from .._runtime.root_hooks import RootHooks
from .._runtime.wrappers import leaves_in
from .._transfer.transfers import Found
from ..snapshot import keys
from .hooks import GradientHooks

logger: Final = logging.getLogger("wandb_gradwatch")

# E elements of a tensor

MAX_ELEMENTS: Final = 2**20  # that are read of one tensor
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # an odd number, by which checksums of several tensors are told apart
_PLAIN: Final = frozenset([Tensor, Parameter])

# Of the inputs the numbers of elements, of non-finite ones and of zeros, and the sum of the squares of the finite ones;
# the same of the outputs; the sum of the variances of the first output's features; and the number of forwards whose
# checksum was that of the forward before
_NUM_SUMS: Final = 10
_Row = tuple[float, float, float, float]
_NO_ROW: Final[_Row] = (0.0, 0.0, 0.0, 0.0)
_WITHOUT_TENSORS: Final = frozenset([bool, int, float, str, type(None)])
_KEYS: Final = {name: keys.FACT + name for name in keys.SAMPLE_FACTS}
_OF_NUMPY: Final = frozenset([torch.float32, torch.float64, torch.int64])  # the usual ones of the dtypes that it has
_SMALL: Final = 1 << 13  # elements; for more, the product of two vectors would start threads of numpy's own


class _Read(NamedTuple):
    """The tensors of one forward, thinned."""

    given: Sequence[Tensor]  # the inputs of any dtype
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    batch: Tensor | None  # the output with features: the first with several rows


@dataclass(frozen=True)
class ForwardMeaning:
    """Converts the sums of a sample's forwards to facts: of inputs and outputs, variances, equal checksums."""

    on_host: tuple[float, ...]  # what the host knows of the sums: the numbers of elements, and forwards on the CPU
    num_features: int  # whose variances are summed
    num_compared: int  # number of forwards whose checksums were compared with the ones before
    num_sums = _NUM_SUMS
    of_every_rank = False

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        return self.facts(tuple(map(sum, zip(self.on_host, sums, strict=True))))

    def facts(self, sums: tuple[float, ...]) -> dict[str, float]:
        """Return the facts by name, from the sums of all forwards."""
        num_in, bad_in, zero_in, sum_sq_in, num_out, bad_out, zero_out, sum_sq_out, variance, num_equal = sums
        output_rms = math.sqrt(_ratio(sum_sq_out, num_out - bad_out))
        return {
            "input_rms": math.sqrt(_ratio(sum_sq_in, num_in - bad_in)),
            "input_num_nonfinite": bad_in if num_in else math.nan,
            "input_zero_ratio": _ratio(zero_in, num_in),
            "input_repeated": _ratio(num_equal, self.num_compared),
            "output_rms": output_rms,
            "output_num_nonfinite": bad_out if num_out else math.nan,
            "output_zero_ratio": _ratio(zero_out, num_out),
            "output_spread": _ratio(math.sqrt(_ratio(variance, self.num_features)), output_rms),
        }


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


@dataclass
class _Forwards:
    """What the forwards of a sample have shown so far."""

    on_host: tuple[float, ...] = ()  # sums as in ForwardMeaning; none: no forward had tensors
    on_device: Tensor | None = None  # the rest of the sums
    num_features: int = 0
    num_compared: int = 0
    known: dict[str, float] = field(default_factory=dict)  # facts that follow from shapes and dtypes

    def add(self, other: "_Forwards") -> None:
        """Add later forwards."""
        both = self.on_host, other.on_host
        self.on_host = tuple(map(sum, zip(*both, strict=True))) if all(both) else self.on_host or other.on_host
        if self.on_device is None or other.on_device is None:
            self.on_device = self.on_device if other.on_device is None else other.on_device
        else:
            self.on_device = self.on_device + onto(other.on_device, self.on_device.device)
        self.num_features += other.num_features
        self.num_compared += other.num_compared
        for name, value in other.known.items():
            self.known[name] = _merged(name, self.known[name], value) if name in self.known else value


def _merged(name: str, one: float, later: float) -> float:
    """Merge a fact that follows from shapes or dtypes: numbers add up, the narrowest dtype counts, the first width."""
    if name == "output_width":
        return one
    return one + later if name in ("num_forwards", "batch_size") else min(one, later)


class ForwardFacts:
    """Facts about the open sample's forwards, which are pending until a backward has ended or an optimizer steps.

    Only training forwards count: those with gradients enabled, of a model in training mode, outside of a backward. A
    compiled function that calls the model does not call the hook, and TorchScript refuses hooks: then there are no
    facts.

    Of one tensor at most about a million elements are read, at fixed strides, for all facts but those of shapes and
    dtypes. Tensors that are sparse, nested, sharded or of a class that wraps others are left out. The hook runs after
    the forward: if the model changes its input in place, the facts are those of the changed input.

    Cost of a measured forward on the CPU: one read of its tensors, by numpy, because a call of torch costs more than
    the arithmetic of a small tensor. On other devices: some ten launches for the inputs and as many for the outputs,
    for which nobody waits. At other steps the hook only finds that it is not `is_open`.
    """

    def __init__(self, gradient_hooks: GradientHooks) -> None:
        self._gradient_hooks = gradient_hooks
        self._boundary = ErrorBoundary(self._failed)
        self._is_sampled = False
        self._sample, self._pending = _Forwards(), _Forwards()
        self._checksums: dict[int, int | Tensor] = {}  # by the number of the model: of its last measured forward
        self._random: dict[torch.device, Tensor] = {}  # the factor of each place in a checksum
        self._hooks = RootHooks(self, self._boundary)

    def start(self, models: Iterable[nn.Module]) -> None:
        """Register the hooks."""
        for number, model in enumerate(models):
            try:
                self._hooks.register(model, partial(self._forward_done, number))
            except Exception as error:  # TorchScript's modules refuse it
                raise_interruption(error)

    @property
    def is_open(self) -> bool:
        """Whether forwards are looked at: not those of a step that evaluates its closure again."""
        return self._is_sampled and not self._gradient_hooks.muted

    @property
    def seconds_spent(self) -> float:
        """Seconds that the hooks have taken."""
        return self._boundary.seconds_spent

    def begin(self, *, is_sampled: bool) -> None:
        """Begin a sample; unless it `is_sampled`, forwards are not looked at."""
        self._is_sampled = is_sampled and not self._boundary.stopped
        self._hooks.follow_compiler()
        self._sample = _Forwards()
        if not is_sampled:
            self._pending = _Forwards()

    def settle(self) -> None:
        """Add the pending forwards to the open sample."""
        if self._pending.known:
            if self._sample.known:
                self._pending, before = _Forwards(), self._pending
                self._sample.add(before)
            else:
                self._sample, self._pending = self._pending, _Forwards()

    def see_loss(self, loss: Tensor) -> None:
        """Note the dtype of the tensor that a backward of the open sample was called on."""
        if self.is_open:
            known, largest = self._sample.known, _largest(loss.dtype)
            known["loss_largest"] = min(known.get("loss_largest", largest), largest)

    def take(self) -> dict[str, Found]:
        """Return the facts of the closed sample by key, and forget them."""
        sample, self._sample = self._sample, _Forwards()
        known, found = sample.known, dict[str, Found]()
        if sample.on_host:
            meaning = ForwardMeaning(sample.on_host, sample.num_features, sample.num_compared)
            if sample.on_device is None:
                known |= meaning.facts(sample.on_host)
            else:
                found[keys.FACT.removesuffix("/")] = ProbeSums(sample.on_device, meaning)
        for name, value in known.items():
            found[_KEYS[name]] = value
        return found

    def remove(self) -> None:
        """Remove every hook. Idempotent."""
        self._is_sampled = False
        self._hooks.remove()
        self._checksums, self._random = {}, {}
        self._sample, self._pending = _Forwards(), _Forwards()

    def caught(self, error: Exception) -> None:
        """Get an exception of a hook."""
        self._boundary.caught(error)

    def _failed(self, error: Exception) -> None:
        self.remove()
        logger.error(
            "wandb_gradwatch: facts about the model's inputs and outputs failed and are dropped; training and gradient "
            "logging go on.",
            exc_info=error,
        )

    def _forward_done(self, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        is_training = torch.is_grad_enabled() and module.training and current_graph_task() == -1
        is_traced = graph_is_made() or torch._C._get_tracing_state() is not None
        if is_training and not (replay.is_running or is_traced or _is_transformed(module)):
            self._boundary.run(self._note, number, (*args, *kwargs.values()), output)

    def _note(self, number: int, inputs: Sequence[Any], output: Any) -> None:
        given, returned = _tensors_in(inputs), _tensors_in([output])
        floats, outputs = list(filter(_is_floating, given)), list(filter(_is_floating, returned))
        forward = _Forwards(known=_known_facts(given, floats, outputs))
        if given or returned:
            if any([one.numel() > MAX_ELEMENTS for one in (*given, *outputs)]):
                thinned = {id(one): _thinned(one) for one in (*given, *outputs)}
                given, floats, outputs = ([thinned[id(one)] for one in some] for some in (given, floats, outputs))
            batch = next((one for one in outputs if one.ndim), None)
            if batch is not None and (num_rows := batch.shape[0]) > 1:
                forward.num_features = batch.numel() // num_rows
            else:
                batch = None
            read = _Read(given, floats, outputs, batch)
            if all([one.is_cpu for one in (*given, *outputs)]):
                self._read_on_host(forward, number, read)
            else:
                self._read_on_device(forward, number, read)
        self._pending.add(forward)

    def _read_on_host(self, forward: _Forwards, number: int, read: _Read) -> None:
        """Fill in the sums of one forward, all of whose tensors are on the CPU."""
        num_equal = 0
        if read.given:
            checksum = 0
            for tensor in read.given:
                checksum = zlib.crc32(np.ascontiguousarray(_array_of(tensor)).data, checksum)
            if (before := self._checksums.get(number)) is not None:
                num_equal, forward.num_compared = int(checksum == before), 1
            self._checksums[number] = checksum
        with np.errstate(all="ignore"):  # of the sums of numbers near the largest one
            row, _ = _row_on_host(read.inputs, None)
            row_of_outputs, variance = _row_on_host(read.outputs, read.batch)
        forward.on_host = (*row, *row_of_outputs, variance, num_equal)

    def _read_on_device(self, forward: _Forwards, number: int, read: _Read) -> None:
        """Fill in the sums of one forward, on the device of the first output that is not on the CPU: nobody waits."""
        device = next(one.device for one in (*read.outputs, *read.given) if not one.is_cpu)
        rows = [_row_on_device(some, device) for some in (read.inputs, read.outputs)]
        variance = is_equal = rows[0].new_zeros(1)
        if read.batch is not None:
            wide = read.batch if read.batch.is_complex() else read.batch.to(wide_dtype(read.batch.device))
            variance = onto(torch.var(wide, dim=0, correction=0).sum().reshape(1), device)
        if read.given:
            checksum, before = self._checksum(read.given, device), self._checksums.get(number)
            if isinstance(before, Tensor) and before.device == device:
                is_equal, forward.num_compared = (checksum == before).reshape(1), 1
            self._checksums[number] = checksum
        forward.on_device = torch.cat([*rows, variance.to(rows[0].dtype), is_equal.to(rows[0].dtype)])
        # A device counts what is not 0, and of the rest the host knows the number.
        num_in, num_out = (float(sum(map(Tensor.numel, some))) for some in (read.inputs, read.outputs))
        forward.on_host = (num_in, 0.0, num_in, 0.0, num_out, 0.0, num_out, 0.0, 0.0, 0.0)

    def _checksum(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return a checksum of the tensors' bits and their places: 0-dim int64."""
        total = None
        for tensor in tensors:
            bits = _bits_of(tensor)
            one = onto((bits * self._random_like(bits)).sum(), device)
            total = one if total is None else total * _FACTOR + one
        assert total is not None
        return total

    def _random_like(self, bits: Tensor) -> Tensor:
        """Return a random number for each place: [E]. They are the same whenever this is called."""
        random = self._random.get(bits.device)
        if random is None or len(random) < len(bits):
            size = 1 << (len(bits) - 1).bit_length()
            numbers = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size)
            random = self._random[bits.device] = upload(numbers, bits.device)
        return random[: len(bits)]


def _bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor's elements as integers: [E], or [2 * E] of complex elements."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = (real.resolve_neg() if real.is_neg() else real).reshape(-1)
    return flat.view(torch.uint8 if flat.dtype is torch.bool else _INTEGERS[flat.element_size()])


def _array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the elements of a tensor on the CPU, or the integers that `_bits_of` returns."""
    is_plain = tensor.dtype in _OF_NUMPY and not tensor.is_neg()
    array: npt.NDArray[Any] = (tensor if is_plain else _bits_of(tensor)).numpy()
    return array


def _row_on_host(tensors: Sequence[Tensor], batch: Tensor | None) -> tuple[_Row, float]:
    """Return the row of tensors on the CPU, and the sum of the variances of the batch's features if it is given."""
    row, variance = _NO_ROW, 0.0
    for tensor in tensors:
        is_plain = tensor.dtype in _OF_NUMPY and not tensor.is_neg()
        wide_E: FloatArray = (tensor if is_plain else _wide(tensor)).numpy().reshape(-1).astype(np.float64, copy=False)
        sum_sq, num_nonfinite = _sum_sq(wide_E), 0
        if not math.isfinite(sum_sq):  # rarely: something is not finite, or its square in float64 is not
            finite_E = wide_E[np.isfinite(wide_E)]
            sum_sq, num_nonfinite = _sum_sq(finite_E), wide_E.size - finite_E.size
        if tensor is batch:
            variance = math.nan if num_nonfinite else _sum_of_variances(wide_E, tensor)
        one = float(wide_E.size), float(num_nonfinite), float(np.count_nonzero(wide_E == 0)), sum_sq
        row = one if row is _NO_ROW else (row[0] + one[0], row[1] + one[1], row[2] + one[2], row[3] + one[3])
    return row, variance


def _sum_sq(values: FloatArray) -> float:
    return float(values @ values if values.size <= _SMALL else np.einsum("e,e->", values, values))


def _sum_of_variances(wide_E: FloatArray, batch: Tensor) -> float:
    """Return the sum of the variances over dimension 0, given the elements in float64 (magnitudes of complex ones)."""
    num = batch.shape[0]
    if batch.is_complex():
        wide_E = torch.view_as_real(batch.resolve_conj()).double().reshape(-1).numpy()
    rows = wide_E.reshape(num, -1)
    difference = rows - rows[0]  # so that equal rows have a variance of exactly 0
    total = np.add.reduce(difference, axis=0)
    return max(_sum_sq(difference.reshape(-1)) / num - _sum_sq(total) / num**2, 0.0)


def _row_on_device(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return what a device knows of the row of tensors, with the negative number of elements that are not zero: [4]."""
    row = torch.zeros(4, dtype=wide_dtype(device), device=device)
    for tensor in tensors:
        wide = _wide(tensor)
        finite = wide.nan_to_num(0.0, 0.0, 0.0)
        num, num_finite = torch.count_nonzero(wide), torch.count_nonzero(finite)
        zero = torch.zeros_like(num)
        one = torch.stack([zero, num - num_finite, -num, finite.square().sum()])
        row = row + onto(one.to(row.dtype), device)
    return row


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in the dtype of sums; the magnitudes, flat, of complex ones."""
    if tensor.is_complex():
        return elements_of(tensor)[0]
    wide = tensor.to(wide_dtype(tensor.device))
    return wide.resolve_neg() if wide.is_neg() else wide


def _is_transformed(module: nn.Module) -> bool:
    """Whether the model is called through torch.func: under a transform, or with tensors in place of its parameters."""
    return torch._C._functorch.maybe_current_level() is not None or type(_first_parameter(module)) is Tensor


def _first_parameter(module: nn.Module) -> Tensor | None:
    """Return the first of the module's parameters, a tenth of the time that `parameters()` takes to begin."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (found := _first_parameter(child)) is not None:
            return found
    return None


@cache
def _largest(dtype: torch.dtype) -> float:
    """The largest finite number of a dtype."""
    return float(torch.finfo(dtype).max)


def _known_facts(given: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, float]:
    """Return the facts that follow from shapes and dtypes."""
    known = {"num_forwards": 1.0}
    if (batch := next((one.shape for one in given if one.ndim), None)) is not None:
        known["batch_size"] = float(batch[0])
    if (shape := next((one.shape for one in outputs if one.ndim), None)) is not None:
        known["output_width"] = float(shape[-1] if len(shape) > 1 else 1)  # [batch]: one feature
    for what, some in (("input", inputs), ("output", outputs)):
        if some:
            known[f"{what}_largest"] = min([_largest(one.dtype) for one in some])
    return known


def _tensors_in(things: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in a model's arguments or output, detached."""
    found: list[Tensor] = []
    for thing in things:
        if type(thing) is Tensor:  # the usual case
            if _is_readable(thing):
                found.append(thing.detach())
        elif type(thing) not in _WITHOUT_TENSORS:
            leaves = (tensor for _, tensor in leaves_in(thing, is_leaf=_is_readable))
            found += [one.detach() if type(one) in _PLAIN else _plain(one) for one in leaves]
    return found


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor of a subclass that only adds methods as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def _is_readable(thing: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with elements in memory of its own."""
    if not issubclass(type(thing), Tensor):  # not isinstance, which runs the code of a class that defines `__class__`
        return False
    tensor = cast("Tensor", thing)
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        return False
    is_there = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
    return is_there and tensor.numel() > 0


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _thinned(tensor: Tensor) -> Tensor:
    """Return a view of about MAX_ELEMENTS elements at fixed strides, fewest along the last dimensions."""
    for dim in reversed(range(tensor.ndim)):
        if tensor.numel() <= MAX_ELEMENTS:
            break
        step = min(-(-tensor.numel() // MAX_ELEMENTS), tensor.shape[dim])
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    return tensor
