"""A dispatch mode that follows NaN and Inf from the operation that made them to whatever they reach.

A tensor with bad elements has an origin: the operation, parameter, buffer or input that they come from. An operation
that makes bad elements out of finite ones is an origin; one that reads bad elements passes their origin on. Infinities
that a program writes on purpose (masks) have an origin too, but count only once they make a NaN.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._runtime.wrappers import is_transparent
from .finding import REMEDIES, Direction, Finding, InputRange, made

_NOT_THE_USERS: Final = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_ALLOCATES: Final = ("aten.empty", "aten.new_empty", "aten.resize")  # what it returns holds whatever memory held
_OVERWRITES: Final = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.normal_", "aten.uniform_", "aten.random_")
_NEAR_OVERFLOW: Final = 4.0  # within this factor of the largest number of a half precision format
_HALVES: Final = (torch.float16, torch.bfloat16)
_MAX_LISTED: Final = 5


@dataclass(eq=False)
class _Call:
    """An operation of the forward, for the backward that belongs to it."""

    operation: str
    module: str | None
    file: str | None
    line: int | None


@dataclass(eq=False)
class _Origin(_Call):
    """Where bad elements come from."""

    number: int = 0  # in the order in which they were met
    direction: Direction = "forward"
    inputs: tuple[InputRange, ...] = ()
    is_intended: bool = False  # written on purpose, as a mask is
    words: str = ""  # what was made, and where in the tensor
    reached: dict[str, None] = field(default_factory=dict)  # modules, in the order in which they were reached


class _Read(NamedTuple):
    """What an operation reads: a copy where it may write to it."""

    values: Tensor
    storage: int


class NonfiniteTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's annotation
    """Look at every operation while it is active.

    Args:
        model: whose modules are named.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules = list(_named_modules(model, ""))
        self._names = {id(module): name for name, module in reversed(self._modules)}
        self._stack: list[str] = []  # paths of the modules whose forward is under way
        self._origins: dict[int, tuple[Tensor, _Origin]] = {}  # by storage, which the tensor keeps from being reused
        self._calls: dict[int, _Call] = {}  # by the sequence number of the autograd node
        self._numbered: list[_Origin] = []
        self.near_overflow: dict[str, None] = {}

    def tensors(self, kind: Literal["_parameters", "_buffers"]) -> list[tuple[str, Tensor]]:
        """The model's parameters or buffers by name, each once."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, module in self._modules:
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    found.setdefault(id(tensor), (f"{name}.{key}" if name else key, tensor))
        return list(found.values())

    # ---- which module

    @contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Know which module's forward an operation belongs to."""

        def enter(module: nn.Module, _: object) -> None:
            if (name := self._names.get(id(module))) is not None:
                self._stack.append(name)

        def leave(module: nn.Module, *_: object) -> None:
            if id(module) in self._names and self._stack:
                self._stack.pop()

        with ExitStack() as stack:
            for handle in (
                nn.modules.module.register_module_forward_pre_hook(enter),
                nn.modules.module.register_module_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
            yield

    # ---- every operation

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = str(func.overloadpacket)
        reads = [leaf for leaf in tree_leaves((args, kwargs)) if _has_values(leaf)]
        if operation.startswith(_OVERWRITES):
            reads = reads[1:]
        is_mutable = func._schema.is_mutable  # what it reads may not be there afterwards
        reads = [_Read(tensor.clone() if is_mutable else tensor, _storage(tensor)) for tensor in reads]
        result = func(*args, **kwargs)
        # What returns nothing, as the optimizers' operations on lists do, has written to its arguments.
        written = result if func._schema.returns else _written(func._schema, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(written) if _has_values(leaf)]
        if operation.startswith(_ALLOCATES):
            for tensor in outputs:
                tensor.zero_()  # what was left in the memory is nobody's mistake
            return result
        call = self._called_from(operation)
        for tensor in outputs:
            self._follow(tensor, call, reads, (args, kwargs))
        return result

    def _called_from(self, operation: str) -> _Call:
        file, line = _users_line()
        call = _Call(operation, self._stack[-1] if self._stack else None, file, line)
        # The node of an operation is made just before the operation runs; what runs later under the same number is
        # without a node, or of a backward.
        self._calls.setdefault(torch.autograd._get_sequence_nr() - 1, call)  # type: ignore[attr-defined]
        return call

    def _module_of(self, call: _Call) -> str | None:
        """The module of an operation; of one in a backward, that of the forward's operation that it belongs to."""
        node = torch._C._current_autograd_node()
        forward = call if node is None else self._calls.get(node._sequence_nr())
        return None if forward is None else forward.module

    def _follow(self, output: Tensor, call: _Call, reads: list[_Read], given: Any) -> None:
        has_nan, has_inf = _nan_and_inf(output)
        if not has_nan and not has_inf:
            if output._base is None:  # of a view the rest may still be bad
                self._origins.pop(_storage(output), None)
            if output.dtype in _HALVES and _is_near_overflow(output):
                place = "" if call.module is None else f" in {call.module or 'the model itself'}"
                self.near_overflow[f"{call.operation}{place}, {_place(call.file, call.line)}"] = None
            return
        sources: list[_Origin] = []
        reads_nan = reads_mask = reads_unknown = False
        for read in reads:
            nan, inf = _nan_and_inf(read.values)
            if nan or inf:
                known = self._origins.get(read.storage)
                if known is not None:
                    sources.append(known[1])
                    reads_nan = reads_nan or nan
                elif nan or bool((read.values == torch.inf).any()):
                    reads_unknown = True
                else:  # -inf alone, from outside: a mask
                    reads_mask = True
        guilty = [origin for origin in sources if not origin.is_intended]
        if guilty or (sources and (reads_nan or not has_nan)):
            origin = min(guilty or sources, key=lambda one: one.number)
            if (module := self._module_of(call)) is not None:
                origin.reached[module] = None
        else:  # nothing bad was read that is known, or a mask has made a NaN
            writes_inf = reads_mask or any(math.isinf(value) for value in _numbers(given))
            origin = self._origin(call, output, reads, is_intended=writes_inf and not has_nan and not reads_unknown)
        self._origins[_storage(output)] = (output, origin)

    def _origin(self, call: _Call, output: Tensor, reads: list[_Read], *, is_intended: bool) -> _Origin:
        node = torch._C._current_autograd_node()
        words = made(output)
        ranges = tuple(InputRange.of(read.values) for read in reads)
        number = len(self._numbered)
        direction: Direction = "forward"
        if node is not None:
            direction = "backward"
            forward = self._calls.get(node._sequence_nr())
            if forward is None or isinstance(node, torch.autograd.function.BackwardCFunction):
                # The user's own backward has a line of its own.
                call = replace(call, module=None if forward is None else forward.module)
                words += f" in {node.name()}"
            else:
                words += f" in its derivative ({call.operation})"
                call = forward
        origin = _Origin(
            **vars(call), number=number, direction=direction, inputs=ranges, is_intended=is_intended, words=words
        )
        self._numbered.append(origin)
        return origin

    # ---- what is known of a tensor

    def look_at(self, tensor: Tensor, kind: str, name: str) -> Finding | None:
        """Look at a parameter, buffer or input before anything runs; -inf alone is taken for a mask."""
        if not _has_values(tensor):
            return None
        has_nan, has_inf = _nan_and_inf(tensor)
        if (not has_nan and not has_inf) or (
            kind != "parameter" and not has_nan and not bool((tensor == torch.inf).any())
        ):
            return None
        module = "" if kind == "input" else name.rpartition(".")[0]
        text = f"The {kind} {name} holds {made(tensor)}, before anything has run.\nRemedy: {REMEDIES[kind]}."
        return Finding(kind, module, "forward", None, None, (InputRange.of(tensor),), text)

    def finding(self, sinks: Iterable[tuple[str, Tensor]]) -> Finding | None:
        """What the first bad tensor among these goes back to.

        Args:
            sinks: tensors that should be finite, each with what to call it.
        """
        for name, tensor in sinks:
            has_nan, has_inf = _nan_and_inf(tensor)
            known = self._origins.get(_storage(tensor))
            if known is not None and (has_nan or (has_inf and not known[1].is_intended)):
                return self._in_words(known[1], name)
        return None

    def _in_words(self, origin: _Origin, sink: str) -> Finding:
        where = "outside of the model" if origin.module is None else f"in {origin.module or 'the model itself'}"
        lines = [f"{origin.operation} {where}, {_place(origin.file, origin.line)}, made {origin.words}."]
        if origin.inputs:
            lines.append(f"It read {_listed(map(str, origin.inputs), '; ')}.")
        passed = _listed(module or "the model itself" for module in origin.reached)
        lines.append(f"From there it reached {passed}{', then ' if passed else ''}{sink}.")
        if self.near_overflow:
            listed = _listed(self.near_overflow, "; ")
            lines.append(f"Within a factor of {_NEAR_OVERFLOW:g} of the largest number of their format: {listed}.")
        lines.append(f"Remedy: {REMEDIES[None]}.")
        told = (origin.operation, origin.module, origin.direction, origin.file, origin.line, origin.inputs)
        return Finding(*told, "\n".join(lines))


def _named_modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module by its path, without the parts that wrappers add; a wrapper has the path of what it wraps."""
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            inner = name if is_transparent(module, key) else f"{name}.{key}" if name else key
            yield from _named_modules(child, inner)


def _has_values(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel() > 0


def _written(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    writes = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [given[name] for name in writes if name in given]


def _numbers(given: Any) -> Iterator[float]:
    """Every number, and the value of every tensor of one element, among the arguments."""
    for leaf in tree_leaves(given):
        if isinstance(leaf, float):
            yield leaf
        elif isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point():
            yield leaf.item()


def _nan_and_inf(tensor: Tensor) -> tuple[bool, bool]:
    """Whether any element is NaN, and whether any is infinite. Waits for the device."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.detach()
    if bool(torch.isfinite(values).all()):
        return False, False
    return bool(torch.isnan(values).any()), bool(torch.isinf(values).any())


def _is_near_overflow(tensor: Tensor) -> bool:
    return bool(tensor.detach().abs().max() > torch.finfo(tensor.dtype).max / _NEAR_OVERFLOW)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _users_line() -> tuple[str | None, int | None]:
    """The innermost line that is neither torch's nor this package's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_NOT_THE_USERS, "<frozen ", "<eval_with_key>")):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


def _listed(items: Iterable[str], separator: str = ", ") -> str:
    found = list(items)
    rest = [f"and {len(found) - _MAX_LISTED} more"] if len(found) > _MAX_LISTED else []
    return separator.join(found[:_MAX_LISTED] + rest)


def _place(file: str | None, line: int | None) -> str:
    return "at a place that is not known" if file is None else f"{os.path.basename(file)}:{line}"
