"""A step that a guard leaves out for NaN or Inf is run once more, and looked at: which operation made it?"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._runtime.autograd import current_graph_task, replay
from .._runtime.error_boundary import ErrorBoundary
from .._runtime.sharding import local_part, rank, world_size
from .._runtime.steps import STEP_HOOKS, StepListener
from .._runtime.wrappers import TransientHook, unwrapped
from .search import search, tensors_of, unchanged
from .trace import Finding

logger: Final = logging.getLogger("wandb_gradwatch")

_MAX_FORWARDS: Final = 64  # of a step; of more, the first are forgotten
_MAX_REPLAYS: Final = 3  # of a run


@dataclass
class _Forward:
    """What a forward of the training began with, and the gradients that came back to what it ended with."""

    model: weakref.ref[nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    restores_random: tuple[Callable[[], None], ...]
    autocasts: tuple[torch.autocast, ...]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by the place of the output


class StepReplay(StepListener):
    """Keeps what the forwards of the open step began with, and runs them again when asked.

    It keeps that of every step where a guard asks by `look()` (`always`), otherwise only that of the step after
    `arm()`, which is then run again by itself, right before its optimizer steps. `note` takes a step, what was found in
    it, and whether the alert of that step comes too early to name it; in the store, None for one rank, ranks meet.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        note: Callable[[int, str, bool], None],
        notice: Callable[[str, str], None],
        *,
        always: bool,
        open_step: Callable[[], int],
        boundary: ErrorBoundary,
        store: Store | None,
    ) -> None:
        self._note, self._notice, self._open_step, self._boundary = note, notice, open_step, boundary
        self._models = [weakref.ref(model) for model in models]
        self._always, self._is_armed = always, False
        self._forwards: list[_Forward] = []
        self._num_replays = 0
        self._store = store
        self._is_asking = False  # of rank 0: another rank may have found what it has not
        self._last_bad = -2  # the step, so that one episode is replayed once
        self._handles: list[RemovableHandle] = []
        for model in models:
            self._handles.append(model.register_forward_pre_hook(_InTraining(self, self.began), with_kwargs=True))
            self._handles.append(model.register_forward_hook(_InTraining(self, self.ended)))
        if not always:
            STEP_HOOKS.subscribe(self)

    @property
    def is_keeping(self) -> bool:
        return (self._always or self._is_armed) and not self._boundary.in_forked_child

    def close(self) -> None:
        """Remove the hooks, and keep nothing. Idempotent."""
        STEP_HOOKS.unsubscribe(self)
        while self._handles:
            self._handles.pop().remove()
        self._forwards.clear()

    def arm(self) -> None:
        """Something is not finite: run the next step that begins with finite parameters once more.

        With a guard, which asks for its own steps, only the next one that a gradient scaler leaves out.
        """
        self._is_armed = True

    def step_skipped(self) -> None:
        """A gradient scaler has left the open step out: by design, unless an alert says otherwise."""
        if self._is_armed:
            self._look_armed()
        self.forget()

    def _look_armed(self) -> None:
        self._is_armed = False
        self.look(self._open_step(), armed=True)

    def follows(self, optimizer: Optimizer) -> bool:
        if not self.is_keeping or not self._forwards:
            return False
        models = [model for reference in self._models if (model := reference()) is not None]
        ours = {id(parameter) for model in models for parameter in model.parameters()}
        return any(id(parameter) in ours for parameter in _stepped_by(optimizer))

    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        # Of shards only what is here: to ask for the whole would wait for ranks that are not armed.
        if all(bool(torch.isfinite(local_part(parameter.detach())).all()) for parameter in _stepped_by(optimizer)):
            self._look_armed()
        self.forget()

    def forget(self) -> None:
        """The step is over: its inputs are not kept any longer."""
        self._forwards.clear()

    def look(self, step: int, *, armed: bool = False) -> None:
        """Run the open step once more, if it is the first bad one of its episode, and note which operation was first.

        What goes wrong here is said, and does not reach the training.
        """
        is_same_episode, self._last_bad = step == self._last_bad + 1, step
        if is_same_episode or self._num_replays >= _MAX_REPLAYS or not self._forwards or not self._is_possible():
            return
        self._num_replays += 1
        try:
            findings = (_run_again(forward) for forward in self._forwards)
            finding = next((found for found in findings if found is not None), None)
            if finding is not None:
                self._note(step, finding.text, armed)
            if self._store is not None and rank() == 0:
                self._is_asking = finding is None
            elif self._store is not None and finding is not None:
                text = f"{step} {finding.text}\nOn rank {rank()}, in its part of the batch."
                self._store.set(str(self._num_replays), text)
        except Exception:
            self._num_replays = _MAX_REPLAYS
            logger.exception("wandb_gradwatch could not run step %d again; training goes on, and is not replayed", step)

    def ask(self) -> None:
        """On rank 0, whose part of the bad step was well: another rank has said what it has found in its own.

        It has done so before the reduction of the next step's gradients, so that nobody waits after that.
        """
        key = str(self._num_replays)
        if self._is_asking and self._store is not None and self._store.check([key]):
            step, _, found = self._store.get(key).decode().partition(" ")
            self._note(int(step), found, True)
        self._is_asking = False

    def began(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        del self._forwards[: max(len(self._forwards) - _MAX_FORWARDS + 1, 0)]
        restores = [partial(torch.set_rng_state, torch.get_rng_state())]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state = torch.cuda.get_rng_state()  # lies on the host: nothing waits
            restores.append(partial(torch.cuda.set_rng_state, state, torch.cuda.current_device()))
        kinds = dict.fromkeys(("cpu", *(parameter.device.type for parameter in islice(model.parameters(), 1))))
        autocasts = (
            torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        self._forwards.append(_Forward(weakref.ref(model), args, kwargs, tuple(restores), tuple(autocasts)))

    def ended(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It has ended: gradients will come back to its output."""
        if not self._forwards:
            return
        gradients = self._forwards[-1].gradients
        for place, tensor in enumerate(tensors_of(output)):
            if tensor.requires_grad:
                tensor.register_hook(partial(gradients.__setitem__, place))  # type: ignore[no-untyped-call]

    def _is_possible(self) -> bool:
        if current_graph_task() != -1 or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return False
        models = [model for forward in self._forwards if (model := forward.model()) is not None]
        if world_size() > 1 and any(map(_waits_for_ranks, models)):
            self._notice("replay", "a bad step is not run again: the forward of this model waits for other ranks")
            return False
        return True


class _InTraining(TransientHook):
    """Calls one of a replay's methods for forwards of the training that are to be remembered."""

    def __init__(self, owner: StepReplay, method: Callable[[nn.Module, Any, Any], None]) -> None:
        self._owner, self._method = owner, method

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        # First of all, so that a compiler which traces this sees a constant, and guards nothing.
        if torch.compiler.is_compiling() or not self._owner.is_keeping:
            return
        if torch.is_grad_enabled() and module.training and not replay.is_running:
            self._method(module, args, last)


def _stepped_by(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _run_again(forward: _Forward) -> Finding | None:
    model = forward.model()
    if model is None:
        return None
    root = unwrapped(model)
    with ExitStack() as stack:
        stack.enter_context(unchanged(root))
        for restore in forward.restores_random:
            restore()
        for autocast in forward.autocasts:
            stack.enter_context(autocast)
        return search(root, forward.args, forward.kwargs, gradients=forward.gradients)


def _waits_for_ranks(model: nn.Module) -> bool:
    """Whether a forward of this rank alone would hang."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) or any(
        local_part(parameter) is not parameter or type(parameter).__name__ == "FlatParameter"
        for parameter in model.parameters()
    )
