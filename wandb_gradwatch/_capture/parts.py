"""What the capture consists of: one owner for each state, and what several of them have to be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._guard.guard import SkipGuard
from .._guard.step_skipping import StepSkipping
from .._nonfinite.replay import StepReplay
from .._runtime.error_boundary import ErrorBoundary
from .._runtime.notices import Notices
from .._runtime.sharding import Shards
from .._transfer.sample_buffer import SampleBuffer
from .by_hand import UpdatesByHand
from .cadence import Budget, Cadence
from .gradient_versions import GradientVersions, was_seen
from .hooks import BackwardHooks, HookSync
from .loss import SampleLoss
from .measurer import MeasureOptions
from .optimizer_registry import OptimizerRegistry
from .parameter_registry import ParameterRegistry
from .probes import Probe, Probes
from .schedule import Schedule
from .wiring import Wiring


@dataclass(frozen=True)
class CaptureConfig:
    """Which steps are measured, what is measured in them, and what cannot be found out from the training itself."""

    cadence: Cadence  # which steps are measured and flushed
    measured: MeasureOptions  # what is measured of each gradient
    budget: Budget  # says which steps are measured where the cadence leaves that open
    # The optimizer that owns every parameter that no other one owns (it holds master weights)
    optimizer: Optimizer | None = None
    scaler: GradScaler | None = None  # the gradient scaler to assume until one is seen
    start_step: int = 0  # the number of the last step before the first one
    probes: tuple[Probe, ...] = ()  # what else measures at sampled steps
    guard: SkipGuard | None = None  # decides which steps are not applied; None: all are


class CaptureParts:
    """The owners."""

    def __init__(
        self,
        registry: ParameterRegistry,
        window: SampleBuffer,
        config: CaptureConfig,
        boundary: ErrorBoundary,
        hooks: BackwardHooks,
    ) -> None:
        self.registry, self.window, self.boundary, self.hooks = registry, window, boundary, hooks
        self.notices = notices = Notices()  # what is to be said
        self.clock = hooks.clock  # the open step, and what was marked in it
        self.schedule = Schedule(self.clock, config.cadence, config.budget)  # what is due
        self.shards = Shards()
        self.thread = boundary.thread
        self.hook_sync = HookSync(registry, self.clock, hooks, self.shards, window, notices)
        self.optimizers = OptimizerRegistry(registry, self.clock, config.optimizer)
        self.seen = GradientVersions()  # the open sample's gradients
        self.by_hand = UpdatesByHand(registry, self.seen, notices, excluded=config.optimizer is not None)
        self.probes = Probes(config.probes)
        self.loss = SampleLoss()
        self.wiring = Wiring(registry, self.optimizers, notices)
        self.replay: StepReplay | None = None  # runs a step that a scaler left out once more
        self.guard = None  # what withholds gradients from optimizers
        if config.guard is not None:
            known = self.optimizers.names
            self.guard = StepSkipping(config.guard, window, self.shards, registry.names, known, notices)

    @property
    def merges_ranks(self) -> bool:
        """Whether windows are merged over the ranks; the same on each of them."""
        return self.shards.any or self.probes.need_ranks

    def optimizer_found(self) -> None:
        """An optimizer is the clock, or the user: what looked like updates by hand before it was not."""
        if self.by_hand.possible and (taken_back := self.by_hand.exclude()):
            self.clock.take_back(taken_back)
            self.window.leave_out_sent(self.clock.open_step)
            self.schedule.take_back(taken_back)

    @property
    def is_measured(self) -> bool:
        """Whether the open step's gradients are looked at: a guard judges every one."""
        return self.guard is not None or self.schedule.is_sampled

    @property
    def rows_are_read(self) -> bool:
        """Whether the open step's rows are for more than a guard that judges by the norm."""
        return self.schedule.is_sampled or (self.guard is not None and self.guard.needs_rows)

    def joins_silently(self, optimizer: Optimizer, key: int) -> bool:
        """Whether a late step belongs to the last sample: it does unless it brings gradients of its own.

        Gradients that nothing marked are leftovers of an optimizer that is known, or of one that steps for the first
        time after a sample that did not wait for it; otherwise they may be new, from a backward whose hooks were blind.
        """
        if not self.clock.is_late(key):
            return False
        if key in self.clock.ever_stepped:
            return True
        entries = self.optimizers.entries(optimizer)
        unseen = [slot for slot, p in entries if p.grad is not None and not was_seen(p.grad)]
        marked = self.clock.waited_for | self.clock.marked_before
        return not unseen or (self.schedule.last_sample != self.clock.step and marked.issuperset(unseen))
