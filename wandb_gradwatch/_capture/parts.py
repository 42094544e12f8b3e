"""The parts of the capture, one owner for each piece of state, and the queries that need several parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._guard.guard import SkipGuard
from .._guard.step_skipping import StepSkipping
from .._nonfinite.replay import StepReplay
from .._runtime.autograd import Entry, num_nodes_made
from .._runtime.backwards import TrainingThread
from .._runtime.error_boundary import ErrorBoundary
from .._runtime.notices import Notices
from .._runtime.sharding import Shards, fsdp1_flat_parameters
from .._transfer.sample_buffer import SampleBuffer
from .cadence import Budget, Cadence
from .clock import SampleClock
from .forward_facts import ForwardFacts
from .gradient_versions import GradientVersions, mark_as_older_than_its_hook, was_seen
from .group_facts import GroupFacts
from .hooks import NO_SLOT, GradientHooks
from .loss import SampleLoss
from .optimizer_registry import OptimizerRegistry
from .parameter_registry import ParameterRegistry
from .probes import Probe, Probes
from .scaling import GivenScale, LossScale
from .schedule import Schedule
from .updates import Updates
from .wiring import Wiring


@dataclass(frozen=True)
class CaptureConfig:
    """Which steps are measured, what is measured at them, and facts that cannot be detected from the training."""

    cadence: Cadence  # when steps are measured and windows are flushed
    budget: Budget  # decides which steps are measured if cadence.sample_every is None
    dead_threshold: float = 0.0  # |g| <= this is dead
    backend: str = "auto"  # as given to watch()
    histograms: bool = True  # whether to take the histograms of gradients that are due
    # What the user's code divides the gradients by after the backward: a number, a tensor, which is read when the
    # gradients are measured, or a function of the step. None: a scaler divides them, or nothing does.
    loss_scale: GivenScale | None = None
    # The optimizer that updates master weights: it owns every parameter that no other optimizer owns
    optimizer: Optimizer | None = None
    scaler: GradScaler | None = None  # the gradient scaler to assume until another one scales a loss
    start_step: int = 0  # the number of the last step already made
    probes: tuple[Probe, ...] = ()  # additional measurements at sampled steps
    guard: SkipGuard | None = None  # decides which steps are not applied; None: every step is applied


class CaptureParts:
    """The objects that own the state of the capture."""

    def __init__(
        self,
        registry: ParameterRegistry,
        window: SampleBuffer,
        config: CaptureConfig,
        boundary: ErrorBoundary,
        hooks: GradientHooks,
    ) -> None:
        self.registry, self.window, self.boundary, self.hooks = registry, window, boundary, hooks
        self.notices = notices = Notices()  # messages and alerts for the watcher to deliver
        self.clock = SampleClock(step=config.start_step)  # the open step and its marked slots
        self.schedule = Schedule(self.clock, config.cadence, config.budget)  # what is due at the open step
        self.shards = Shards()
        self.thread = TrainingThread()
        # `registry.changes` and `registry.version` when parameters were last hooked
        self._followed = self._version = -1
        self.optimizers = OptimizerRegistry(registry, self.clock, config.optimizer)
        self.loss_scale = LossScale(config.loss_scale, self.optimizers, self.clock)
        self.seen = GradientVersions()  # the versions of the open sample's gradients
        self.updates = Updates(registry, notices, by_steps=config.optimizer is not None)
        self.probes = Probes(config.probes)
        self.loss = SampleLoss()
        self.forward_facts = ForwardFacts(hooks)
        self.group_facts = GroupFacts(registry)
        self.wiring = Wiring(registry, self.optimizers, self.clock, notices)
        self.last_node = -1  # number of autograd nodes that had been made at the last step
        self.replay: StepReplay | None = None  # runs a step with NaN or Inf a second time
        self.guard = None  # skips unhealthy steps
        if config.guard is not None:
            self.guard = StepSkipping(config.guard, window, self.shards, self.optimizers.names, notices)

    @property
    def merges_ranks(self) -> bool:
        """Whether windows are merged over the ranks; the same on every rank."""
        return self.shards.any or self.probes.need_ranks

    def settle(self) -> None:
        """Move what is pending to the open sample, because a backward has ended or an optimizer is about to step."""
        self.loss.settle()
        self.forward_facts.settle()

    @property
    def is_measured(self) -> bool:
        """Whether the open step's gradients are measured; with a guard those of every step are."""
        return self.guard is not None or self.schedule.is_sampled

    @property
    def rows_are_read(self) -> bool:
        """Whether anything reads the open step's whole rows; a guard may need the norms only."""
        return self.schedule.is_sampled or (self.guard is not None and self.guard.needs_rows)

    def joins_silently(self, optimizer: Optimizer, key: int) -> bool:
        """Whether a step that is late belongs to the last sample; it does not if it may use new gradients.

        Gradients are old if they have been looked at. If the last step was not sampled, none of its gradients was: then
        those of an optimizer that has stepped before are old, too, and at a first step those that are marked, unless a
        forward has run since: parameters that were replaced have no hook, and inherit the marks.
        """
        entries = self.optimizers.entries(optimizer)
        unseen = [slot for slot, p in entries if p.grad is not None and not was_seen(p.grad)]
        if not unseen or self.schedule.last_sample == self.clock.step:
            return not unseen
        if key in self.clock.ever_stepped:
            return True
        marked = self.clock.waited_for | self.clock.marked_before
        return marked.issuperset(unseen) and self.last_node == num_nodes_made()

    def unmarked(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries that are not marked in the open sample."""
        marked = self.clock.marked
        if marked.issuperset(map(itemgetter(0), entries)):  # the usual case
            return []
        return [entry for entry in entries if entry[0] not in marked]

    def follow(self) -> list[Entry]:
        """Walk the model and hook new, replaced, unfrozen and swapped parameters. Returns all watched parameters."""
        entries = self.registry.scan()
        # An unmarked gradient may mean that its hook is gone with a swapped tensor.
        if (
            self.registry.changes != self._followed
            or self.shards.uses_fsdp1
            or any([p.grad is not None for slot, p in self.unmarked(entries)])
        ):
            is_first, self._followed = self._version == -1, self.registry.changes
            self.window.resize(len(self.registry.names))
            if self.registry.version != self._version:
                self._version = self.registry.version
                self.shards.update(entries, self.registry.models())
            new = [slot for slot in self.hooks.follow(self._leaves(entries)) if slot != NO_SLOT]
            for slot, parameter in entries if new else ():
                if parameter.grad is not None and slot in new:
                    mark_as_older_than_its_hook(parameter.grad)
            if new and not is_first:
                self.notices.say(
                    "new parameters",
                    "now following parameters that were added, replaced or unfrozen after watch(): "
                    + self.registry.some_names(new),
                )
        return entries

    def _leaves(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """The leaves that a backward reaches: FSDP1's flat parameters are not among the model's own."""
        if not self.shards.uses_fsdp1:
            return entries
        return [*entries, *((NO_SLOT, leaf) for leaf in fsdp1_flat_parameters(self.registry.models()))]

    def take_off_hooks(self) -> None:
        """Remove the hooks from all parameters until the next `follow`. Not to be called inside a backward.

        The empty dictionaries that torch visits are removed too, unless another thread may be visiting them now.
        """
        self.hooks.take_off(() if self.thread.has_company else self._leaves(self.registry.scan()))
        self._followed = -1

    def would_tell(self, parameter: Tensor) -> bool:
        """Whether a backward that reaches this parameter is noted."""
        return not self.shards.uses_fsdp1 and self.hooks.is_hooked(parameter)
