"""Module and parameter names, and access to activations: by forward hooks, with which a model can still be copied and
saved, and by tensors that modules log themselves.

Modules inside a compiled region are not seen: a hook would break the graph, or a fusion of the compiler.
"""

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

from .._analysis.formatting import listing
from .._boundary import Boundary, CallbackError, entry_point
from .._capture.parameter_registry import NameFilter, name_predicate
from .._interruptions import raise_interruption
from .._runtime.autograd import current_graph_task, replay
from .._runtime.error_boundary import ErrorBoundary, dynamo_disabled
from .._runtime.sharding import has_fsdp1
from .._runtime.wrappers import TransientHook, named_modules, named_tensors
from ._code_references import refer_to
from ._rows import Dims

logger: Final = logging.getLogger("wandb_gradwatch")

SeenOutput = Callable[[str, nn.Module, tuple[Any, ...], Mapping[str, Any], Any], None]
At = Literal["beginning", "end", "any end"]
When = Literal["training", "evaluation", "always"]
SeenThing = Callable[[str, str, Any, Dims], None]
ModuleFilter = NameFilter | type[nn.Module]

# The name of a whole model that has no name of its own.
ROOT: Final = "root"

# The autograd node of torch.utils.checkpoint's re-entrant Function, and of libraries that copied it.
_REENTRANT: Final = "CheckpointFunctionBackward"


class ModuleIndex:
    """Weak references to the watched models, each with the prefix of its names: "" or a string that ends in a dot.

    `watched` holds the names of the parameters that probes measure; None: all.
    """

    def __init__(self, models: Iterable[tuple[str, nn.Module]] = (), *, watched: Collection[str] | None = None) -> None:
        self._watched = None if watched is None else frozenset(watched)
        self._models = [(prefix, weakref.ref(model)) for prefix, model in models]

    def alive(self) -> list[tuple[str, nn.Module]]:
        return [(prefix, model) for prefix, reference in self._models if (model := reference()) is not None]

    @property
    def uses_fsdp1(self) -> bool:
        """Whether parameters are views of FSDP1's flat parameters, whose layout only FSDP1 has."""
        return has_fsdp1([model for _, model in self.alive()])

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return every module once, with its name; a wrapper precedes the module that it wraps, under the same name."""
        return ((prefix.removesuffix(".") or ROOT, module) for prefix, module in self._walk())

    def parameters(self) -> dict[str, Tensor]:
        """Return every parameter once, by its name in the snapshot."""
        return named_tensors(self._walk())

    def watched_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that probes measure, by name."""
        return {name: p for name, p in self.parameters().items() if self._watched is None or name in self._watched}

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[int] = set()
        return itertools.chain.from_iterable(named_modules(model, prefix, seen) for prefix, model in self.alive())


class Match:
    """The user's `match=`, which chooses parameters or modules by name, or modules by class; None chooses all.

    Raises:
        ValueError: `match` is invalid, for instance not a regular expression; the message begins with `owner`.
    """

    def __init__(self, match: ModuleFilter | None, owner: str) -> None:
        self._match, self._owner = match, owner
        predicate = (lambda _: False) if isinstance(match, type) else name_predicate(match, f"{owner}: match")
        self.chooses: Callable[[str], bool] = (lambda _: True) if predicate is None else functools.cache(predicate)

    def __repr__(self) -> str:
        """Return the argument as the user wrote it; an empty text for None."""
        if self._match is None:
            return ""
        return self._match.__name__ if isinstance(self._match, type) else repr(self._match)

    def look_at(self, models: ModuleIndex) -> None:
        """Find the current instances of a class."""
        if isinstance(self._match, type):
            names = frozenset(name for name, module in models.modules() if isinstance(module, self._match))
            self.chooses = names.__contains__

    def require(self, what: str, names: Iterable[str]) -> list[str]:
        """Return the chosen names; raise a ValueError if there is none, in which `what` says what they name."""
        known = list(names)
        if not (chosen := list(filter(self.chooses, known))):
            first = ", ".join(map(repr, known[:3])) or "none at all"
            raise ValueError(f"{self._owner} with match={self._match!r} matches no {what}; the first names are {first}")
        return chosen

    def require_module(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise a ValueError if no module is chosen and no tensor that a module logs can be chosen.

        The names of these tensors are not known before the forward; they have no class.
        """
        is_class = isinstance(self._match, type)
        if not any(map(self.chooses, modules)) and (is_class or not refer_to(_LOGGING, modules.values())):
            self.require("module", modules)


class ForwardHooks:
    """Hooks on modules that are open only during the forwards of sampled steps: "training", "evaluation" or "always".

    `on_logged` is called with what modules log: the module's name, the object's name, the object, and its named dims.
    """

    def __init__(
        self, owner: object, models: ModuleIndex, *, on_logged: SeenThing | None = None, when: When = "training"
    ) -> None:
        self.is_open = False
        self.order: dict[str, int] = {}  # by name: position in the forward, in the order in which forwards first ended
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.models = models
        self._boundary = ErrorBoundary(self._failed)
        self._owner, self._on_logged, self._when = owner, on_logged, when
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that cannot be hooked
        self._hooked: dict[At, dict[str, tuple[weakref.ref[nn.Module], RemovableHandle]]] = {}  # by name

    def hook(self, chosen: Callable[[str, nn.Module], bool], seen: SeenOutput) -> None:
        """Hook the ends of the chosen modules' forwards, and no others; of modules with one name, the outermost."""
        self.names.clear()
        wanted: dict[str, nn.Module] = {}
        for name, module in self.models.modules():
            self.names[module] = name
            if name not in wanted and chosen(name, module):
                wanted[name] = module
        self.attach(wanted, seen, at="end")

    def attach(self, wanted: Mapping[str, nn.Module], seen: SeenOutput, *, at: At) -> None:
        """Hook these modules at this place, and no others.

        "any end" also runs after a forward that raised; its hook gets None as the output, like one at the "beginning".
        Modules that refuse hooks, as those of TorchScript do, are left out, which is said once.
        """
        hooked = self._hooked.setdefault(at, {})
        for name in [name for name, (module, _) in hooked.items() if module() is not wanted.get(name)]:
            hooked.pop(name)[1].remove()  # the module was removed or moved, for instance into a wrapper
        refused: dict[str, Exception] = {}
        for name in [name for name in wanted if name not in hooked and wanted[name] not in self._refused]:
            module, hook = wanted[name], TransientHook(self, partial(self._ran, name, seen, at == "end"))
            register: Any = module.register_forward_hook if at != "beginning" else module.register_forward_pre_hook
            try:
                handle = register(hook, with_kwargs=True, **({"always_call": True} if at == "any end" else {}))
            except Exception as error:
                raise_interruption(error)
                self._refused.add(module)
                refused[name] = error
                continue
            hooked[name] = weakref.ref(module), handle
        if refused:
            names, (reason, *_) = listing(refused), refused.values()
            logger.warning("wandb_gradwatch: %r leaves out %s, which refuse hooks (%s).", self._owner, names, reason)

    def _ran(
        self, name: str, seen: SeenOutput, is_end: bool, module: nn.Module, args: Any, kwargs: Any, output: Any = None
    ) -> None:
        if is_end:
            self.order.setdefault(name, len(self.order))
        self.see(lambda: seen(name, module, args, kwargs, output))

    def open(self) -> None:
        self.is_open = not self._boundary.stopped
        if self.is_open and self._on_logged is not None:
            _OPEN.hooks[self] = None

    def shut(self) -> None:
        self.is_open = False
        _OPEN.hooks.pop(self, None)

    def remove(self) -> None:
        self.shut()
        for _, handle in (pair for hooked in self._hooked.values() for pair in hooked.values()):
            handle.remove()
        self._hooked = {}

    def see(self, function: Callable[[], None]) -> None:
        """Run the function if the current forward counts; its exception is logged once and removes only this hook."""
        if self._counts():
            self._boundary.run(function)

    @dynamo_disabled
    @entry_point()
    def gradient_came(self, measure: Callable[..., None], *args: Any) -> None:
        """Call a function with the gradient of an output, which the backward continues with unchanged."""
        if self.is_open:
            self._boundary.run(measure, *args)

    @entry_point()
    def take(self, module: nn.Module, name: str, thing: Any, dims: Dims) -> None:
        """Pass on what a module logs itself, if it is a module of these models."""
        if self._on_logged is not None and (of := self.names.get(module)) is not None:
            self.order.setdefault(f"{of}.{name}", len(self.order))
            self.see(partial(self._on_logged, of, name, thing, dims))

    def caught(self, error: Exception) -> None:
        self._boundary.caught(error)

    @property
    def seconds_spent(self) -> float:
        """Seconds that the hooks have taken."""
        return self._boundary.seconds_spent

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
        # Checkpointing repeats forwards inside the backward. The re-entrant kind runs the first forward without
        # gradients, so only the repetition counts; of the other kind only the first forward counts.
        return type(torch._C._current_autograd_node()).__name__ == _REENTRANT

    def _failed(self, error: Exception) -> None:
        self.remove()
        logger.error("wandb_gradwatch: %s failed and is dropped; training goes on.", self._owner, exc_info=error)


class _OpenHooks:
    """The hooks that are open now, in the order of their opening."""

    def __init__(self) -> None:
        self.hooks: dict[ForwardHooks, None] = {}
        self._boundary = Boundary(self._failed)

    def _failed(self, error: Exception) -> None:
        text = "wandb_gradwatch: what modules log themselves is no longer measured; training goes on."
        logger.error(text, exc_info=error)

    @entry_point()
    def take(self, module: nn.Module, name: str, thing: Any, dims: Dims = None) -> None:
        """Pass on what a module logs itself to all hooks of a probe that measures such things."""
        if not isinstance(module, nn.Module):
            raise CallbackError from TypeError(
                f"MonitorMixin is for torch.nn.Module, but {type(module).__name__} is not one"
            )
        if not torch.compiler.is_compiling() and not self._boundary.stopped:
            for hooks in tuple(self.hooks):
                hooks.take(module, name, thing, dims)


_OPEN: Final = _OpenHooks()


def log_tensor(module: nn.Module, name: str, tensor: Tensor, *, dims: Dims = None) -> None:
    """Log a tensor from inside a module's forward. It is measured like an output named `<module>.<name>`.

    Does nothing unless a probe of activations watches the model and the step is sampled.

    Args:
        module: the module whose forward calls this.
        name: the name of the tensor.
        tensor: a tensor of any shape; it is not kept.
        dims: dimensions to log separately by index, with their names: {1: "head"} logs `<module>.<name>/head_0/...`.
    """
    _OPEN.take(module, name, tensor, dims)


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention: query [..., H, L, D], key and value [..., H, S, D], as in torch's function."""

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
    """Log the tensors of an attention from inside a module's forward, for `Attention` to measure.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`. Does nothing unless a probe of
    activations watches the model and the step is sampled.

    Args:
        module: the module whose forward calls this.
        query: [..., H, L, D].
        key: [..., H, S, D]; with fewer heads than the query if several query heads share one (grouped-query attention).
        value: [..., H, S, D]; optional.
        attn_mask: broadcasts to [..., H, L, S]: a bool mask, True where attention is allowed, or an additive bias.
        is_causal: each query attends only to keys up to its own position.
        scale: the factor of the logits. None: 1 / sqrt(D).
    """
    _OPEN.take(module, "attention", AttentionCall(query, key, value, attn_mask, is_causal, scale))


class MonitorMixin:
    """Adds the functions `log_tensor` and `log_attention` as methods to a module, for tensors inside its forward.

    Examples:
        class SelfAttention(MonitorMixin, nn.Module):
            def forward(self, x):
                q, k, v = self.heads(self.qkv(x))               # [batch, head, position, feature] each
                self.log_attention(q, k, v, is_causal=True)
                self.log_tensor("gate", self.gate(x))
                ...
    """

    log_tensor = log_tensor
    log_attention = log_attention


_LOGGING: Final = (log_tensor, log_attention, MonitorMixin)
