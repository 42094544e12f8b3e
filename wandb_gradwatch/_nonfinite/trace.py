"""A dispatch mode that follows NaN and Inf from the operation that made them to the tensors that they reach.

A tensor with bad elements has an origin: the operation, parameter, buffer or input that they come from. An operation
that makes bad elements from finite ones is an origin; one that reads bad elements passes their origin on. Infinities
that a program writes on purpose (masks) have an origin too, but count only if they make a NaN.
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from types import FrameType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._analysis.formatting import listing
from .._runtime.autograd import num_nodes_made
from .._runtime.wrappers import is_measurable, named_modules

_NOT_THE_USERS: Final = (  # beginnings of files
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<frozen ",
    "<eval_with_key>",
)
_ALLOCATES: Final = ("aten.empty", "aten.new_empty", "aten.resize")  # return uninitialised memory
_OVERWRITES: Final = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.normal_", "aten.uniform_", "aten.random_")
_NEAR_OVERFLOW: Final = 4.0  # an element within this factor of a half-precision format's maximum is reported
_HALVES: Final = (torch.float16, torch.bfloat16)
_FINITE, _MASK, _INF, _NAN = range(4)  # what a tensor holds at worst; -Inf without +Inf is taken for a mask

_SHOWN: Final = 3  # indices of bad elements

# By `Finding.operation`; None: an operation of the model, or of code that uses its output.
REMEDIES: Final[dict[str | None, str]] = {
    None: "clamp what it reads, or add an epsilon to it, before this operation: a where() after it keeps a NaN out of "
    "the forward only",
    "parameter": "an earlier update has made it so: go back to a checkpoint from before that",
    "buffer": "an earlier forward has made it so: go back to a checkpoint from before that",
    "input": "look at the data of this batch",
    "loss": "look at the targets of this batch, and at logs, roots and divisions in the loss function",
}


@dataclass(frozen=True)
class InputRange:
    """A tensor that the operation read."""

    shape: tuple[int, ...]
    dtype: str  # without "torch."
    minimum: float  # the smallest finite element; NaN if there is none
    maximum: float  # the largest finite element; NaN if there is none
    num_zero: int  # number of elements that are 0
    num_negative: int  # number of elements below 0
    num_nonfinite: int  # number of elements that are NaN or Inf

    @classmethod
    def of(cls, tensor: Tensor) -> "InputRange":
        """Compute the statistics of a tensor. Waits for its device."""
        values = _real(tensor)
        finite = values[torch.isfinite(values)].double()
        low, high = (end.item() + 0.0 for end in torch.aminmax(finite)) if finite.numel() else (math.nan, math.nan)
        counts = int((finite == 0).sum()), int((finite < 0).sum()), values.numel() - finite.numel()
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), low, high, *counts)

    def __str__(self) -> str:
        words = f"{'x'.join(map(str, self.shape)) or 'a number'} of {self.dtype}"
        if not math.isnan(self.minimum):
            words += f", {self.minimum:.3g} to {self.maximum:.3g}"
        zero = "zeros" if self.num_zero > 1 else "zero"
        counts = {zero: self.num_zero, "negative": self.num_negative, "not finite": self.num_nonfinite}
        return words + "".join(f", {count} {name}" for name, count in counts.items() if count)


@dataclass(frozen=True)
class Finding:
    """The first operation that made a NaN or Inf from finite numbers.

    Args:
        operation: its ATen name, such as "aten.log"; in the backward, the forward operation whose derivative it
            computes. "parameter", "buffer" or "input" if one of these was bad before anything ran.
        module: the path of the module that called it; "" is the model itself, None is code outside of the model.
        direction: "forward" or "backward".
        file: the file of the user's code that calls it; None if unknown.
        line: the line in that file.
        inputs: the tensors that it read.
        text: a report, one line each: what was made and where, what it read, what it reached, and the remedy.
    """

    operation: str
    module: str | None
    direction: Literal["forward", "backward"]
    file: str | None
    line: int | None
    inputs: tuple[InputRange, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def made(tensor: Tensor) -> str:
    """Describe the NaN and Inf elements of a tensor; "" if all are finite. Waits for the tensor's device."""
    values = _real(tensor)
    parts = []
    for name, bad in (("NaN", torch.isnan(values)), ("Inf", torch.isinf(values))):
        if count := int(bad.sum()):
            shown = ", ".join(str(tuple(index)) for index in bad.nonzero()[:_SHOWN].tolist())
            parts.append(f"{count} {name} of {bad.numel()} (at {shown}{', ...' if count > _SHOWN else ''})")
    return " and ".join(parts)


@dataclass(eq=False)
class _Origin:
    """Where bad elements come from."""

    found: Finding  # its text only says what was made, and where in the tensor
    is_intended: bool  # written on purpose, such as a mask
    number: int = field(default_factory=count().__next__)  # in the order of discovery
    reached: dict[str, None] = field(default_factory=dict)  # the modules that it reached, in order


_Read = tuple[Tensor, int]  # a tensor that an operation reads (a copy if it may write to it), and its storage's id


class NonfiniteTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's annotation
    """Observes every operation while it is active, and records which module runs it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): prefix.removesuffix(".") for prefix, module in named_modules(model)}
        self._stack: list[str] = []  # paths of the modules whose forward is running
        self._origins: dict[int, tuple[Tensor, _Origin]] = {}  # by storage; holding the tensor keeps its id unique
        # By the sequence number of the autograd node: operations of the forward, to be named when a derivative is bad.
        self._calls: dict[int, Finding] = {}
        self.near_overflow: dict[str, None] = {}

    @contextmanager
    def follow_modules(self) -> Iterator[None]:
        def enter(module: nn.Module, _: object) -> None:
            if (name := self._names.get(id(module))) is not None:
                self._stack.append(name)

        def leave(module: nn.Module, *_: object) -> None:
            if id(module) in self._names and self._stack:
                self._stack.pop()

        of_all = nn.modules.module
        with (
            of_all.register_module_forward_pre_hook(enter),
            of_all.register_module_forward_hook(leave, always_call=True),
        ):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = str(func.overloadpacket)
        given = _tensors_in((args, kwargs))
        if operation.startswith(_OVERWRITES):
            given = given[1:]
        is_mutable = func._schema.is_mutable  # it may overwrite what it reads
        reads = [(tensor.clone() if is_mutable else tensor, _storage(tensor)) for tensor in given]
        result = func(*args, **kwargs)
        # An operation without a result, such as the optimizers' operations on lists, writes to its arguments.
        written = result if func._schema.returns else _written(func._schema, args, kwargs)
        outputs = _tensors_in(written)
        if operation.startswith(_ALLOCATES):
            for tensor in outputs:
                tensor.zero_()  # so that leftovers in uninitialised memory are not reported
            return result
        call = Finding(operation, self._stack[-1] if self._stack else None, "forward", *_users_line(), (), "")
        # Autograd creates an operation's node just before the operation runs. Later operations with the same sequence
        # number have no node, or belong to a backward.
        self._calls.setdefault(num_nodes_made() - 1, call)
        for tensor in outputs:
            self._follow(tensor, call, reads, (args, kwargs))
        return result

    def _follow(self, output: Tensor, call: Finding, reads: list[_Read], given: Any) -> None:
        worst = _worst(output)
        if worst == _FINITE:
            if output.dtype in _HALVES and output.detach().abs().max() > torch.finfo(output.dtype).max / _NEAR_OVERFLOW:
                place = "" if call.module is None else f" in {call.module or 'the model itself'}"
                self.near_overflow[f"{call.operation}{place}, {_place(call.file, call.line)}"] = None
            return
        bad = [(storage, read) for values, storage in reads if (read := _worst(values)) != _FINITE]
        sources = [self._origins[storage][1] for storage, _ in bad if storage in self._origins]
        are_masks = [read == _MASK for storage, read in bad if storage not in self._origins]
        node = torch._C._current_autograd_node()
        # In a backward: the forward operation whose derivative is being computed.
        forward = call if node is None else self._calls.get(node._sequence_nr())
        guilty = [origin for origin in sources if not origin.is_intended]
        if guilty or (sources and worst != _NAN):
            origin = min(guilty or sources, key=lambda one: one.number)
            if forward is not None and forward.module is not None:
                origin.reached[forward.module] = None
        else:  # the operation read nothing bad with a known origin, or made a NaN from a mask
            writes_inf = any(are_masks) or any(map(_is_infinite, tree_leaves(given)))
            words = made(output)
            if node is not None:
                if forward is None or isinstance(node, torch.autograd.function.BackwardCFunction):
                    # A user-defined backward has its own line.
                    call = replace(call, module=None if forward is None else forward.module)
                    words += f" in {node.name()}"
                else:
                    words += f" in its derivative ({call.operation})"
                    call = forward
            inputs = tuple(InputRange.of(values) for values, _ in reads)
            found = replace(call, direction="forward" if node is None else "backward", inputs=inputs, text=words)
            origin = _Origin(found, writes_inf and worst != _NAN and all(are_masks))
        self._origins[_storage(output)] = (output, origin)

    def look_at(self, tensor: Tensor, kind: str, name: str) -> Finding | None:
        """Check a parameter, buffer or input before anything runs."""
        if not is_measurable(tensor) or _worst(tensor) <= (_FINITE if kind == "parameter" else _MASK):
            return None
        module = "" if kind == "input" else name.rpartition(".")[0]
        text = f"The {kind} {name} holds {made(tensor)}, before anything has run.\nRemedy: {REMEDIES[kind]}."
        return Finding(kind, module, "forward", None, None, (InputRange.of(tensor),), text)

    def finding(self, sinks: Iterable[tuple[str, Tensor]]) -> Finding | None:
        """Return the origin of the first bad tensor among these, which should be finite; each has a description."""
        for name, tensor in ((name, stored) for name, sink in sinks for stored in _tensors_in(sink)):
            worst, known = _worst(tensor), self._origins.get(_storage(tensor))
            if known is not None and worst > (_INF if known[1].is_intended else _FINITE):
                return self._in_words(known[1], name)
        return None

    def _in_words(self, origin: _Origin, sink: str) -> Finding:
        found = origin.found
        where = "outside of the model" if found.module is None else f"in {found.module or 'the model itself'}"
        lines = [f"{found.operation} {where}, {_place(found.file, found.line)}, made {found.text}."]
        if found.inputs:
            lines.append(f"It read {listing(found.inputs, separator='; ')}.")
        passed = listing(origin.reached, lambda module: module or "the model itself")
        lines.append(f"From there it reached {passed}{', then ' if passed else ''}{sink}.")
        if self.near_overflow:
            listed = listing(self.near_overflow, separator="; ")
            lines.append(f"Within a factor of {_NEAR_OVERFLOW:g} of the largest number of their format: {listed}.")
        lines.append(f"Remedy: {REMEDIES[None]}.")
        return replace(found, text="\n".join(lines))


def _tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors with elements; of a sparse one, the elements that it stores."""
    leaves = filter(is_measurable, tree_leaves(tree))
    stored = (leaf._values() if leaf.layout is torch.sparse_coo else leaf for leaf in leaves)
    return [one for one in stored if one.layout is torch.strided and one.numel()]


def _written(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    writes = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [given[name] for name in writes if name in given]


def _is_infinite(given: Any) -> bool:
    """Whether an argument is an infinite number or floating-point scalar tensor."""
    if isinstance(given, Tensor) and given.ndim == 0 and given.is_floating_point():
        given = given.item()
    return isinstance(given, float) and math.isinf(given)


def _worst(tensor: Tensor) -> int:
    """Return _FINITE, _MASK, _INF or _NAN. Waits for the device."""
    values = _real(tensor).detach()
    if bool(torch.isfinite(values).all()):
        return _FINITE
    if bool(torch.isnan(values).any()):
        return _NAN
    return _INF if bool((values == torch.inf).any()) else _MASK


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _users_line() -> tuple[str | None, int | None]:
    """Return the innermost line of the stack that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return (None, None) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _place(file: str | None, line: int | None) -> str:
    return "at a place that is not known" if file is None else f"{os.path.basename(file)}:{line}"
