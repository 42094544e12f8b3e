"""Facts about the inputs and outputs of the watched models, noted by a hook at the end of a measured forward."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._interruptions import raise_interruption
from .._measure.columns import NUM_COLUMNS, Column
from .._measure.elements import onto, upload, wide_dtype
from .._measure.measure import measure
from .._measure.probe_values import ProbeSums
from .._runtime.autograd import current_graph_task, replay
from .._runtime.error_boundary import ErrorBoundary, graph_is_made
from .._runtime.root_hooks import RootHooks
from .._runtime.wrappers import leaves_in
from .._transfer.transfers import Found
from ..snapshot import keys
from .clock import SampleClock

logger: Final = logging.getLogger("wandb_gradwatch")

# N tensors of one forward, C columns, E elements

MAX_ELEMENTS: Final = 2**20  # that are read of one tensor
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # an odd number, by which checksums of several tensors are told apart
_PLAIN: Final = frozenset([Tensor, Parameter])
_NUM_SUMS: Final = 2 * NUM_COLUMNS + 2


@dataclass(frozen=True)
class ForwardMeaning:
    """Converts the sums of a sample's forwards to facts: rows of inputs and outputs, variances, equal checksums."""

    num_features: int  # whose variances are summed
    num_compared: int  # number of forwards whose checksums were compared with the ones before
    num_sums = _NUM_SUMS
    of_every_rank = False

    def __call__(self, sums: Sequence[float]) -> Mapping[str, float]:
        of_inputs, of_outputs = sums[:NUM_COLUMNS], sums[NUM_COLUMNS : 2 * NUM_COLUMNS]
        variance, num_equal = sums[2 * NUM_COLUMNS :]
        facts = _facts_of_row("input", of_inputs) | _facts_of_row("output", of_outputs)
        facts["input_repeated"] = _ratio(num_equal, self.num_compared)
        facts["output_spread"] = _ratio(math.sqrt(_ratio(variance, self.num_features)), facts["output_rms"])
        return facts


def _facts_of_row(what: str, row: Sequence[float]) -> dict[str, float]:
    num, num_nonfinite = row[Column.NUM_ELEMENTS], row[Column.NUM_NAN] + row[Column.NUM_INF]
    return {
        f"{what}_rms": math.sqrt(_ratio(row[Column.GRAD_SUM_SQ], num - num_nonfinite)),
        f"{what}_num_nonfinite": num_nonfinite if num else math.nan,
        f"{what}_zero_ratio": _ratio(row[Column.NUM_ZERO], num),
    }


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


@dataclass
class _Forwards:
    """What the forwards of a sample have shown so far."""

    sums: Tensor | None = None  # as in ForwardMeaning
    num_features: int = 0
    num_compared: int = 0
    known: dict[str, float] = field(default_factory=dict)  # facts that follow from shapes and dtypes

    def add(self, other: "_Forwards") -> None:
        """Add later forwards."""
        if self.sums is None or other.sums is None:
            self.sums = self.sums if other.sums is None else other.sums
        else:
            self.sums = self.sums + onto(other.sums, self.sums.device)
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

    Cost of a measured forward: one batched measurement of its tensors, a variance, and a checksum of each input. At
    other steps the hook only finds that it is not `is_open`.
    """

    def __init__(self, clock: SampleClock, backend: str) -> None:
        self._clock, self._backend = clock, backend
        self._boundary = ErrorBoundary(self._failed)
        self._is_sampled = False
        self._sample, self._pending = _Forwards(), _Forwards()
        self._checksums: dict[int, Tensor] = {}  # by the number of the model: of its last measured forward
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
        return self._is_sampled and not self._clock.muted

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
            self._sample.add(self._pending)
            self._pending = _Forwards()

    def see_loss(self, loss: Tensor) -> None:
        """Note the dtype of the tensor that a backward of the open sample was called on."""
        if self.is_open:
            self._sample.add(_Forwards(known={"loss_largest": torch.finfo(loss.dtype).max}))

    def take(self) -> dict[str, Found]:
        """Return the facts of the closed sample by key, and forget them."""
        sample, self._sample = self._sample, _Forwards()
        found: dict[str, Found] = {keys.FACT + name: value for name, value in sample.known.items()}
        if sample.sums is not None:
            meaning = ForwardMeaning(sample.num_features, sample.num_compared)
            found[keys.FACT.removesuffix("/")] = ProbeSums(sample.sums, meaning)
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
            self._boundary.run(self._note, number, (args, kwargs), output)

    def _note(self, number: int, inputs: Any, output: Any) -> None:
        given, returned = _tensors_in(inputs), _tensors_in(output)
        floats = [list(filter(_is_floating, some)) for some in (given, returned)]
        forward = _Forwards(known=_known_facts(given, *floats))
        if returned or given:
            forward.sums = self._sums(forward, number, given, *floats)
        self._pending.add(forward)

    def _sums(
        self,
        forward: _Forwards,
        number: int,
        given: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Tensor:
        """Return the sums of one forward, on the device of the first output."""
        tensors = (*outputs, *given)
        device = next((one.device for one in tensors if not one.is_cpu), tensors[0].device)  # so that nobody waits
        read = {id(one): _thinned(one) for one in (*given, *outputs)}
        rows = self._row_pair([read[id(one)] for one in inputs], [read[id(one)] for one in outputs], device)
        variance = is_equal = None
        batch = next((read[id(one)] for one in outputs if one.ndim), None)
        if batch is not None and len(batch) > 1:
            variances = torch.var(batch.float() if batch.dtype.itemsize < 4 else batch, dim=0, correction=0)
            variance, forward.num_features = variances.sum(dtype=rows.dtype), variances.numel()
        if given:
            checksum = self._checksum([read[id(one)] for one in given], device)
            if (before := self._checksums.get(number)) is not None and before.device == device:
                is_equal, forward.num_compared = checksum == before, 1
            self._checksums[number] = checksum
        others = [rows.new_zeros(1) if one is None else one.reshape(1).to(rows.dtype) for one in (variance, is_equal)]
        return torch.cat([rows, *others])

    def _row_pair(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the sums of the rows of all inputs and of all outputs, one after the other: [2 * C]."""
        tensors = [*inputs, *outputs]
        if len(inputs) == len(outputs) == 1 and tensors[0].device == device:  # the usual case
            return self._rows(tensors).reshape(-1)
        # Extremes do not add up, but nothing reads them.
        total = torch.zeros(2, NUM_COLUMNS, dtype=wide_dtype(device), device=device)
        for place, some in enumerate((inputs, outputs)):
            for home in dict.fromkeys(one.device for one in some):
                rows = self._rows([one for one in some if one.device == home])
                total[place] += onto(rows.sum(dim=0).to(total.dtype), device)
        return total.reshape(-1)

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor:
        return measure(tensors, None, backend=self._backend).rows

    def _checksum(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return a checksum of the tensors' bits and their places: 0-dim int64."""
        total = None
        for tensor in tensors:
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
            flat = real.reshape(-1)
            bits = flat.view(torch.uint8 if flat.dtype is torch.bool else _INTEGERS[flat.element_size()])
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


def _is_transformed(module: nn.Module) -> bool:
    """Whether the model is called through torch.func: under a transform, or with tensors in place of its parameters."""
    first = next(module.parameters(), None)
    return torch._C._functorch.maybe_current_level() is not None or type(first) is Tensor


def _known_facts(given: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, float]:
    """Return the facts that follow from shapes and dtypes."""
    known = {"num_forwards": 1.0}
    if (batch := next((one.shape for one in given if one.ndim), None)) is not None:
        known["batch_size"] = float(batch[0])
    if (shape := next((one.shape for one in outputs if one.ndim), None)) is not None:
        known["output_width"] = float(shape[-1] if len(shape) > 1 else 1)  # [batch]: one feature
    for what, some in (("input", inputs), ("output", outputs)):
        if some:
            known[f"{what}_largest"] = min(torch.finfo(one.dtype).max for one in some)
    return known


def _tensors_in(thing: Any) -> list[Tensor]:
    """Return the tensors in a model's inputs or output, detached."""
    found = (tensor for _, tensor in leaves_in(thing, is_leaf=_is_readable))
    return [one.detach() if type(one) in _PLAIN else _plain(one) for one in found]


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
