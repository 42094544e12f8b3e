"""Names of modules and parameters, and a view into forwards: by hooks that a model can be copied and saved with, and by
tensors that modules hand over themselves.

What is seen is the training's own forward, once: not an evaluation, unless it is asked for, not a forward without
gradients, not what checkpointing computes again, and nothing at a step that is not sampled.

Inside a compiled region nothing is seen: a hook there would break the graph, or the fusion that the compiler found. The
outputs of modules outside of it are, that of the compiled model among them; what stays unseen is said once.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._capture.parameter_registry import NameFilter, name_predicate
from .._runtime.autograd import current_graph_task, replay
from .._runtime.error_boundary import ErrorBoundary
from .._runtime.wrappers import TransientHook, named_modules, named_tensors
from ._rows import Dims

logger: Final = logging.getLogger("wandb_gradwatch")

SeenOutput = Callable[[str, nn.Module, tuple[Any, ...], Mapping[str, Any], Any], None]
At = Literal["beginning", "end", "any end"]
When = Literal["training", "evaluation", "always"]
SeenThing = Callable[[str, str, Any, Dims], None]

# The whole model's output has a name too: that of the model, or this where the model has none.
ROOT: Final = "root"

# torch.utils.checkpoint's re-entrant Function, and that of the libraries which took it over.
_REENTRANT: Final = "CheckpointFunctionBackward"


class ModuleIndex:
    """The watched models, held weakly: what each one's names begin with ("" or ending in a dot), and the model.

    Of their parameters those `watched` are told to probes; None: all.
    """

    def __init__(self, models: Iterable[tuple[str, nn.Module]] = (), *, watched: Collection[str] | None = None) -> None:
        self._watched = None if watched is None else frozenset(watched)
        self._models = [(prefix, weakref.ref(model)) for prefix, model in models]

    def alive(self) -> list[tuple[str, nn.Module]]:
        return [(prefix, model) for prefix, reference in self._models if (model := reference()) is not None]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once; a wrapper comes before what it wraps, under the same name."""
        return ((prefix.removesuffix(".") or ROOT, module) for prefix, module in self._walk())

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter once, under the name that the snapshot gives it."""
        return named_tensors(self._walk())

    def watched_parameters(self) -> dict[str, Tensor]:
        """Those that probes are told of."""
        return {name: p for name, p in self.parameters().items() if self._watched is None or name in self._watched}

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[int] = set()
        return itertools.chain.from_iterable(named_modules(model, prefix, seen) for prefix, model in self.alive())


def matcher(match: NameFilter | None, owner: str) -> Callable[[str], bool]:
    """A `match=` as a function from a name: a regular expression (searched), several, a function; None: everything."""
    predicate = name_predicate(match, f"{owner}: match")
    return (lambda _: True) if predicate is None else functools.cache(predicate)


def chosen_by(
    matches: Callable[[str], bool], names: Iterable[str], *, owner: str, match: object, what: str
) -> list[str]:
    """The names that a `match=` chooses; a ValueError where it chooses none."""
    known = list(names)
    if not (chosen := list(filter(matches, known))):
        first = ", ".join(map(repr, known[:3])) or "none at all"
        raise ValueError(f"{owner} with match={match!r} matches no {what}; the first names are {first}")
    return chosen


class ForwardHook:
    """Hooks on modules, open during the forwards of sampled steps: of the "training", an "evaluation", or "always".

    `on_logged` gets what modules hand over: the module's name, the thing's name, the thing, its named dimensions.
    """

    def __init__(
        self, owner: object, models: ModuleIndex, *, on_logged: SeenThing | None = None, when: When = "training"
    ) -> None:
        self.is_open = False
        self.order: dict[str, int] = {}  # of everything's first end in a forward, counted or not
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.models = models
        self.boundary = ErrorBoundary(self._failed)
        self._owner, self._on_logged, self._when = owner, on_logged, when
        self._hooked: dict[At, _Hooked] = {}

    def hook(self, chosen: Callable[[str, nn.Module], bool], seen: SeenOutput, *, at: At = "end") -> None:
        """Hook every chosen module that is not hooked there yet, where several share a name the outermost.

        At "any end": after a forward that raised, too, then as at the "beginning" with None for the output.
        """
        taken: set[str] = set()
        self.names.clear()
        before, now = self._hooked.pop(at, _Hooked()), _Hooked()
        for name, module in self.models.modules():
            self.names[module] = name
            if name in taken or not chosen(name, module):
                continue
            taken.add(name)
            if module in before:
                handle, hook = before.pop(module)
                hook.name = name  # a module can move: out of a list, into a wrapper
            else:
                hook = _Hook(self, name, seen, is_end=at == "end")
                register: Any = module.register_forward_hook if at != "beginning" else module.register_forward_pre_hook
                handle = register(hook, with_kwargs=True, **({"always_call": True} if at == "any end" else {}))
            now[module] = handle, hook
        for handle, _ in before.values():  # not there any more, or not chosen under its new name
            handle.remove()
        self._hooked[at] = now

    def open(self) -> None:
        self.is_open = not self.boundary.stopped
        if self.is_open and self._on_logged is not None:
            _open_taps[self] = self._on_logged

    def shut(self) -> None:
        self.is_open = False
        _open_taps.pop(self, None)

    def remove(self) -> None:
        self.shut()
        for handle, _ in (pair for hooked in self._hooked.values() for pair in hooked.values()):
            handle.remove()
        self._hooked = {}

    def see(self, function: Callable[[], None]) -> None:
        """Run this if the forward under way counts; an exception in it is reported once and ends this tap only."""
        if self._counts():
            self.boundary.run(function)

    def _counts(self) -> bool:
        if replay.is_running or self._when == "always":
            return not replay.is_running
        is_training = any(model.training for _, model in self.models.alive())
        if self._when == "evaluation":
            return current_graph_task() == -1 and not is_training
        if not torch.is_grad_enabled():
            return False
        if current_graph_task() == -1:
            return is_training
        # In a backward, checkpointing repeats forwards. The re-entrant kind had run the first one without gradients, so
        # that only the repetition is seen; the other kind's repetition is the second of two.
        return type(torch._C._current_autograd_node()).__name__ == _REENTRANT

    def _failed(self, error: Exception) -> None:
        self.remove()
        logger.error("wandb_gradwatch: %s failed and is dropped; training goes on.", self._owner, exc_info=error)


class _Hook(TransientHook):
    def __init__(self, tap: ForwardHook, name: str, seen: SeenOutput, *, is_end: bool) -> None:
        self._tap, self.name, self._seen, self._is_end = tap, name, seen, is_end

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any = None) -> None:
        # First of all, so that a compiler which traces this sees a constant, and guards nothing.
        if torch.compiler.is_compiling() or not self._tap.is_open:
            return
        if self._is_end:
            self._tap.order.setdefault(self.name, len(self._tap.order))
        self._tap.see(lambda: self._seen(self.name, module, args, kwargs, output))


_Hooked = weakref.WeakKeyDictionary[nn.Module, tuple[RemovableHandle, _Hook]]

_open_taps: Final[dict[ForwardHook, SeenThing]] = {}


def log_tensor(module: nn.Module, name: str, tensor: Tensor, *, dims: Dims = None) -> None:
    """Hand over any tensor from inside a module's forward: it is treated like an output called `<module>.<name>`.

    Does nothing unless the model is watched with a probe that wants it, and the step is sampled.

    Args:
        module: the module whose forward this is.
        name: what the tensor is called.
        tensor: of any shape; it is not kept.
        dims: dimensions to keep apart by index, with their names: {1: "head"} makes `<module>.<name>/head_0/...`.
    """
    _hand_over(module, name, tensor, dims)


def _hand_over(module: nn.Module, name: str, thing: Any, dims: Dims = None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"MonitorMixin is for torch.nn.Module, but {type(module).__name__} is not one")
    if torch.compiler.is_compiling() or not _open_taps:
        return
    for tap, on_logged in tuple(_open_taps.items()):
        if (of := tap.names.get(module)) is not None:
            tap.order.setdefault(f"{of}.{name}", len(tap.order))
            tap.see(partial(on_logged, of, name, thing, dims))


@dataclass(frozen=True)
class AttentionCall:
    """One attention inside a forward: query [..., H, L, D], key and value [..., H, S, D], as torch's own function."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    is_causal: bool
    scale: float | None

    def parts(self) -> dict[str, Tensor]:
        parts = {"query": self.query, "key": self.key, "value": self.value}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}


def log_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> None:
    """Hand over the tensors of an attention from inside a module's forward, for `Attention` to measure.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`. Does nothing unless the model is
    watched with `Attention` and the step is sampled.

    Args:
        module: the module whose forward this is.
        query: [..., H, L, D].
        key: [..., H, S, D], with fewer heads where several queries share one.
        value: [..., H, S, D]; may be left out.
        attn_mask: broadcasts to [..., H, L, S]: True where a place may be looked at, or a number added to the logits.
        is_causal: each query looks at the keys up to its own.
        scale: of the logits; None: 1 / sqrt(D).
    """
    _hand_over(module, "attention", AttentionCall(query, key, value, attn_mask, is_causal, scale))


class MonitorMixin:
    """For modules that hand over tensors from inside their forward.

    The functions `log_tensor` and `log_attention` do the same for any module. All of it does nothing unless the model
    is watched with a probe that wants it, and the step is sampled.

    Example:
        class SelfAttention(MonitorMixin, nn.Module):
            def forward(self, x):
                q, k, v = self.heads(self.qkv(x))               # [batch, head, position, feature] each
                self.log_attention(q, k, v, is_causal=True)
                self.log_tensor("gate", self.gate(x))
                ...
    """

    log_tensor = log_tensor
    log_attention = log_attention


def hands_over(module: nn.Module) -> bool:
    """Whether a module's own code hands over tensors, by the mixin or the functions: their names are not known yet."""
    if isinstance(module, MonitorMixin):
        return True
    methods = (method for cls in type(module).__mro__ if cls is not nn.Module for method in vars(cls).values())
    codes = (code for method in methods if (code := getattr(method, "__code__", None)) is not None)
    return any({"log_tensor", "log_attention"} & {*code.co_names} for code in codes)
