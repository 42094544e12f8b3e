"""Runs a step with NaN or Inf once more, to find the operation that made them."""

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
from .._runtime.sharding import has_shards, local_part, rank, world_size
from .._runtime.steps import parameters_of
from .._runtime.wrappers import TransientHook, leaves_in, unwrapped
from .search import logger, search, unchanged
from .trace import Finding

_MAX_FORWARDS: Final = 64  # kept per step; with more, the oldest are dropped
_MAX_REPLAYS: Final = 3  # per run


@dataclass
class _Forward:
    """The inputs and random state of one forward of the training, and the gradients that reached its outputs."""

    model: weakref.ref[nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    restores_random: tuple[Callable[[], None], ...]
    autocasts: tuple[torch.autocast, ...]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by the position of the output
    is_over: bool = False


class StepReplay:
    """Keeps the inputs of the open step's forwards, and runs the forwards again on request.

    With a guard (`always`) it keeps the inputs of every step, and the guard calls `look()`. Otherwise it keeps only
    those of a step after it `is_armed`, which it runs again right before the optimizer steps. `note` gets the step, the
    finding, and True if the step's alert is too early to name it. Ranks exchange findings in
    what `store` returns (None: there are no other ranks that watch).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        note: Callable[[int, str, bool], None],
        notice: Callable[[str, str], None],
        *,
        always: bool,
        boundary: ErrorBoundary,
        store: Callable[[], Store | None],
    ) -> None:
        self._note, self._notice, self._always, self._boundary, self._store = note, notice, always, boundary, store
        # An alert of NaN or Inf has come: run the next step that begins with finite parameters once more. With a guard,
        # which calls look() for its own steps: only the next step that a gradient scaler skips.
        self.is_armed = False
        self._forwards: list[_Forward] = []
        self._num_replays = 0
        self._is_asking = False  # rank 0 found nothing in its part of the batch; another rank may have
        self._last_bad = -2  # the last bad step, so that each episode is replayed only once
        self._handles: list[RemovableHandle] = []
        for model in models:
            try:
                began = model.register_forward_pre_hook(TransientHook(self, self._began), with_kwargs=True)
                self._handles += [began, model.register_forward_hook(TransientHook(self, self._ended))]
            except RuntimeError as error:
                name = type(model).__name__
                notice("no replay", f"{name} refuses hooks ({error}): a bad step is not run again to find its cause")

    def caught(self, error: Exception) -> None:
        self._boundary.caught(error)

    @property
    def is_open(self) -> bool:
        """Whether the inputs of a forward that runs now are kept."""
        keeps = (self._always or self.is_armed) and not self._boundary.in_forked_child
        return keeps and torch.is_grad_enabled() and not replay.is_running

    def close(self) -> None:
        """Remove the hooks and drop all inputs. Further calls do nothing."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def step_skipped(self, step: int) -> None:
        """A gradient scaler skips the open step, which is intended unless an alert has armed the replay."""
        if self.is_armed:
            self._look_armed(step)
        self.forget()

    def before_step(self, step: int, optimizer: Optimizer) -> None:
        self._ask()
        if self.is_armed and self._forwards and not self._always:
            # Check local shards only: gathering whole parameters would wait for ranks that are not armed.
            parts = (local_part(parameter.detach()) for parameter in parameters_of(optimizer))
            if all(bool(torch.isfinite(part).all()) for part in parts):
                self._look_armed(step)
            self.forget()

    def _look_armed(self, step: int) -> None:
        self.is_armed = False
        self.look(step, armed=True)

    def forget(self) -> None:
        """Drop the inputs of the step, because it is over."""
        self._forwards.clear()

    def look(self, step: int, *, armed: bool = False) -> None:
        """Run the open step once more if it is the first bad one of its episode, and note the first bad operation.

        An exception is logged and does not reach the training.
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
            if rank() == 0:
                self._is_asking = finding is None
            elif finding is not None and (store := self._store()) is not None:
                store.set(str(step), f"{finding.text}\nOn rank {rank()}, in its part of the batch.")
        except Exception:
            self._num_replays = _MAX_REPLAYS
            logger.exception("wandb_gradwatch could not run step %d again; training goes on, and is not replayed", step)

    def _ask(self) -> None:
        """On rank 0, if its own part of the bad step was finite: read what another rank has found in its part.

        The other rank writes it before the next step's gradients are reduced, so no rank waits after that.
        """
        if self._is_asking and (store := self._store()) is not None and store.check([key := str(self._last_bad)]):
            self._note(self._last_bad, store.get(key).decode(), True)
        self._is_asking = False

    def _began(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not model.training:
            return
        del self._forwards[: max(len(self._forwards) - _MAX_FORWARDS + 1, 0)]
        restores = [partial(torch.set_rng_state, torch.get_rng_state())]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state = torch.cuda.get_rng_state()  # is in host memory: nothing waits
            restores.append(partial(torch.cuda.set_rng_state, state, torch.cuda.current_device()))
        kinds = dict.fromkeys(("cpu", *(parameter.device.type for parameter in islice(model.parameters(), 1))))
        autocasts = (
            torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        self._forwards.append(_Forward(weakref.ref(model), args, kwargs, tuple(restores), tuple(autocasts)))

    def _ended(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Register hooks that keep the gradients of the forward's outputs."""
        running = (one for one in reversed(self._forwards) if one.model() is model and not one.is_over)
        if not model.training or (forward := next(running, None)) is None:
            return
        forward.is_over = True
        for place, (_, tensor) in enumerate(leaves_in(output)):
            if tensor.requires_grad:
                tensor.register_hook(partial(forward.gradients.__setitem__, place))  # type: ignore[no-untyped-call]

    def _is_possible(self) -> bool:
        if current_graph_task() != -1:
            return False
        models = [model for forward in self._forwards if (model := forward.model()) is not None]
        # A forward on this rank alone would hang where it waits for other ranks.
        synchronized = (isinstance(module, nn.SyncBatchNorm) for model in models for module in model.modules())
        if world_size() > 1 and (has_shards(models) or any(synchronized)):
            self._notice("replay", "a bad step is not run again: the forward of this model waits for other ranks")
            return False
        return True


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
