"""From hooks, optimizer steps and loss scalers to rows in the window: what is measured, when, and from which gradient.

    a parameter is marked             BackwardHooks -> _mark
    a backward has ended              BackwardHooks -> _backward_ended     measure every gradient that is there
    an optimizer is about to step     StepHooks     -> before_step         measure what was missed; what was clipped
    an optimizer has stepped          StepHooks     -> after_step          perhaps the sample is complete
    a scaler unscales, or skips       ScaleBook     -> before_unscale, step_skipped

The SampleClock says when a sample is complete; it is then committed to the window.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..cadence import Cadence
from ..statistics.columns import NUM_COLUMNS, SCALE_POWER
from ..statistics.measure import measure, sum_sq
from ..window import Sample, Window
from .clock import Closed, SampleClock
from .hooks import BackwardHooks, current_graph_task
from .roster import Roster
from .scaling import SCALES, scale_tensor
from .sharding import local_part
from .steps import STEP_HOOKS

Arguments = ParamSpec("Arguments")
Entry = tuple[int, Tensor]  # a slot and its parameter

# Old code clips through `p.grad.data`, which leaves no trace in the version counter. The first samples and every
# flushed one are compared by value; one difference there, and every sample is.
_CHECKED_SAMPLES: Final = 3

# This many resets of the gradients without any optimizer mean that the user updates by hand.
_RESETS_THAT_PROVE: Final = 3

# This many backwards that only accumulate, without a step, are worth a word.
_PATIENCE_IN_BACKWARDS: Final = 1000


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured of each gradient."""

    parameters: bool
    dead_threshold: float
    backend: str


@dataclass(frozen=True)
class SamplerEvents:
    """What a sampler tells its watcher.

    Args:
        deliver: it is a good moment to hand over what has arrived.
        notice: something to be said once, by kind and text.
        no_gradient: gradients are computed and lead to no update: to be said once, as an alert.
        failed: an exception inside the monitor.
    """

    deliver: Callable[[], None]
    notice: Callable[[str, str], None]
    no_gradient: Callable[[str, int], None]
    failed: Callable[[Exception], None]


@dataclass
class _Seen:
    """A gradient as the last backward left it: the same tensor, unmodified, has the same id and version."""

    tensor_id: int
    version: int
    measured: bool

    def is_unmodified(self, gradient: Tensor) -> bool:
        return self.tensor_id == id(gradient) and self.version == gradient._version


class UserCallbackError(Exception):
    """Carries an exception that a callback of the user's raised on purpose through our containment."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _contained(
    method: Callable[Concatenate[Sampler, Arguments], None],
) -> Callable[Concatenate[Sampler, Arguments], None]:
    """Keep our own mistakes out of the training loop: the one place where they are caught."""

    @functools.wraps(method)
    def contained(self: Sampler, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if self.stopped:
            return
        began = time.perf_counter() if not self._depth else 0.0
        try:
            with self._lock, torch.no_grad():
                self._depth += 1
                try:
                    method(self, *args, **kwargs)
                finally:
                    self._depth -= 1
                    if not self._depth:
                        self.seconds_spent += time.perf_counter() - began
        except UserCallbackError as raised:
            raise raised.error from None
        except Exception as error:
            self._events.failed(error)

    contained._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast("Callable[Concatenate[Sampler, Arguments], None]", contained)


class Sampler:
    """Owns the hooks and the open sample.

    Args:
        roster: the watched parameters.
        window: where rows go.
        cadence: which steps are measured and flushed.
        options: what is measured.
        events: how the watcher hears of it.
        optimizer: an optimizer to take for the owner of every parameter that no other one owns (master weights).
        scaler: the gradient scaler to assume until one is seen.
        start_step: the number of the last step before the first one.
    """

    def __init__(
        self,
        roster: Roster,
        window: Window,
        cadence: Cadence,
        options: MeasureOptions,
        events: SamplerEvents,
        *,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        start_step: int = 0,
    ) -> None:
        self._roster = roster
        self._window = window
        self._cadence = cadence
        self._options = options
        self._events = events
        self.clock = SampleClock(step=start_step)
        self.stopped = False
        self._lock = threading.RLock()
        self._depth = 0  # of our own calls: one that runs inside another is not timed twice
        self.seconds_spent = 0.0  # on the host, in hooks and callbacks
        self._muted = 0
        self._hooks = BackwardHooks(on_mark=self._mark, on_begin=self._backward_begins, on_end=self._backward_ended)

        # Optimizers by key; the fingerprint tells when the parameter groups or the roster have changed.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._optimizer_of: dict[int, weakref.ref[Optimizer]] = {}
        self._appointed = weakref.ref(optimizer) if optimizer is not None else None
        self._num_keys = 0

        # The open sample.
        self._seen: dict[int, _Seen] = {}  # by slot
        self._assumed_scaler: dict[int, GradScaler | None] = {}  # by slot, where a scaler is in use
        self._checked: tuple[int, ...] = ()
        self._joining: int | None = None
        self._unscaled_in_place: list[Entry] = []

        # What was learnt.
        self._backwards_per_sample: deque[int] = deque(maxlen=4)
        self._trust_versions = True
        self._owner_seen = optimizer is not None
        self._provisional = 0  # samples without an optimizer, before it is clear that there is none
        self.updates_by_hand = False
        self._samples_in_window = 0
        self._num_samples = 0

        self._follow(first=True)
        if scaler is not None:
            SCALES.use(scaler)
        SCALES.subscribe(self)
        STEP_HOOKS.subscribe(self)

    def stop(self) -> None:
        """Remove every hook and wrapper. Idempotent."""
        self.stopped = True
        STEP_HOOKS.unsubscribe(self)
        SCALES.unsubscribe(self)
        self._hooks.remove()

    # ---- marks and backwards

    def _mark(self, slot: int) -> None:
        if not self._muted:
            self.clock.marked.add(slot)

    @_contained
    def _backward_begins(self) -> None:
        STEP_HOOKS.drop_raised()  # a step that raised must not leave us muted
        if self._muted:
            return
        if closed := self.clock.backward_begins():
            self._commit(closed)

    @_contained
    def _backward_ended(self) -> None:
        if self._muted:
            return
        if not self._owner_seen and self.clock.backwards and self._were_reset():
            self._close_update_by_hand()
        if self._is_due:
            entries = self._follow()
            if self.clock.backwards + 1 >= self._expected_backwards:
                self._measure_present(entries)
            else:
                self._note_versions(entries)
        elif not self._owner_seen:
            self._note_versions(self._roster.scan())
        if closed := self.clock.backward_ended():
            self._commit(closed)
        if self.clock.backwards == _PATIENCE_IN_BACKWARDS:
            self._events.no_gradient(
                f"{_PATIENCE_IN_BACKWARDS} backwards have gone by without an optimizer step that updates a watched "
                "parameter. Is the step missing, or does the optimizer hold other tensors than the model?",
                self.clock.open_step,
            )
        self._deliver()

    def mute(self, muted: bool) -> None:
        """See StepListener."""
        self._muted += 1 if muted else -1

    @property
    def _is_due(self) -> bool:
        return self._cadence.sample_due(self.clock.open_step)

    @property
    def _expected_backwards(self) -> int:
        """How many backwards the open sample will have: the fewest of the last samples, so that none is missed."""
        return min(self._backwards_per_sample, default=1)

    # ---- optimizers

    def follows(self, optimizer: Optimizer) -> bool:
        """See StepListener."""
        if self.stopped:
            return False
        known = self._optimizers.get(optimizer)
        if known is not None and known[1] == self._fingerprint(optimizer):
            return known[0] >= 0
        return self._learn(optimizer) >= 0

    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        """See StepListener."""
        owned = self.clock.owned
        return owned.get(self._key(inner), frozenset()) <= owned.get(self._key(outer), frozenset())

    @_contained
    def before_closure(self, optimizer: Optimizer) -> None:
        """See StepListener."""
        self._optimizer_found()
        if closed := self.clock.step_begins(self._key(optimizer)):
            self._commit(closed)

    @_contained
    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """See StepListener."""
        self._optimizer_found()
        SCALES.note_step(optimizer)
        key = self._key(optimizer)
        if inside_backward:
            self._hooks.arm(current_graph_task())
        if closed := self.clock.step_begins(key):
            self._commit(closed)
        if not inside_backward:
            self._deliver()
        if self.clock.joins_silently(key) and not inside_backward:
            self._joining = key
        elif self._is_due:
            self._inspect(optimizer, inside_backward=inside_backward)

    @_contained
    def after_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """See StepListener."""
        key = self._key(optimizer)
        if self._joining == key:
            self._joining = None
            self.clock.join(key)
            return
        self._step_done(key, skipped=False, inside_backward=inside_backward)

    @_contained
    def step_skipped(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        if self.follows(optimizer):
            self._optimizer_found()
            key = self._key(optimizer)
            if closed := self.clock.step_begins(key):
                self._commit(closed)
            self._step_done(key, skipped=True, inside_backward=False)

    def _step_done(self, key: int, *, skipped: bool, inside_backward: bool) -> None:
        if closed := self.clock.step_ended(key, skipped=skipped, inside_backward=inside_backward):
            self._commit(closed)
        if current_graph_task() == -1:  # never deliver from within a tensor hook
            self._deliver()

    def _key(self, optimizer: Optimizer) -> int:
        known = self._optimizers.get(optimizer)
        return known[0] if known is not None else self._learn(optimizer)

    def _fingerprint(self, optimizer: Optimizer) -> int:
        return hash((self._roster.version, *[len(group["params"]) for group in optimizer.param_groups]))

    def _learn(self, optimizer: Optimizer) -> int:
        """Find out what an optimizer owns; returns its key, -1 if that is nothing watched."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        slot_of_id = self._roster.slot_of_id
        if any(id(parameter) not in slot_of_id for parameter in parameters):
            self._follow()  # replaced or added since the last look
            slot_of_id = self._roster.slot_of_id
        slots = {slot_of_id[id(parameter)] for parameter in parameters if id(parameter) in slot_of_id}
        if self._appointed is not None and self._appointed() is optimizer:
            slots |= set(range(len(self._roster.names))) - self.clock.owner.keys()
        known = self._optimizers.get(optimizer)
        if not slots:
            key = -1
        elif known is not None and known[0] >= 0:
            key = known[0]
        else:
            self._num_keys += 1
            key = self._num_keys
            self._optimizer_of[key] = weakref.ref(optimizer, functools.partial(self._optimizer_gone, key))
        if key >= 0:
            self.clock.own(key, frozenset(slots))
        self._optimizers[optimizer] = (key, self._fingerprint(optimizer))
        return key

    def _optimizer_gone(self, key: int, _: object) -> None:
        self._optimizer_of.pop(key, None)
        self.clock.disown(key)

    # ---- updates without an optimizer

    def _optimizer_found(self) -> None:
        """An optimizer is the clock: what looked like updates by hand before it was not."""
        if self._provisional and not self.updates_by_hand:
            self.clock.step -= self._provisional
            self._window.forget_sent()
            self._samples_in_window = 0
        self._provisional = 0
        self._owner_seen = True
        self.updates_by_hand = False

    def _were_reset(self) -> bool:
        """Accumulation adds to the same tensor, once: same id, version + 1. Anything else is a reset."""
        for slot, parameter in self._roster.scan():
            seen, gradient = self._seen.get(slot), parameter.grad
            if seen is not None and gradient is not None:
                return not (seen.tensor_id == id(gradient) and seen.version + 1 == gradient._version)
        return False

    def _close_update_by_hand(self) -> None:
        """Without any optimizer, gradients that were reset between two backwards tell of an update between them."""
        if not self.updates_by_hand:
            self._provisional += 1
        self._commit(self.clock.update())
        if self._provisional >= _RESETS_THAT_PROVE:
            self.accept_updates_by_hand()

    def accept_updates_by_hand(self) -> None:
        """Take the backwards for the clock, as no optimizer was ever seen to step."""
        if self._owner_seen or self.updates_by_hand:
            return
        self.updates_by_hand = True
        self._events.notice(
            "no optimizer",
            "no optimizer step was seen that updates a watched parameter, so every backward after which the gradients "
            "were reset counts as a step; pass optimizer= if there is one, or call watcher.step() after each update",
        )

    def end_sample(self) -> None:
        """Close the open sample, if it has had a step, or a backward where there is no optimizer."""
        if closed := self.clock.close():
            self._commit(closed)
        elif not self._owner_seen and self.clock.backwards:
            self._close_update_by_hand()
            self.accept_updates_by_hand()

    def step(self) -> None:
        """The user says that an update has been made."""
        self._owner_seen = True
        self._commit(self.clock.update())

    # ---- measuring

    def _follow(self, *, first: bool = False) -> list[Entry]:
        """Walk the model, hook what is new, and make room for it."""
        entries = self._roster.scan()
        self._window.resize(len(self._roster.names))
        new = self._hooks.follow(entries)
        if new and not first:
            self._events.notice(
                "new parameters",
                f"now following parameters that were added, replaced or unfrozen after watch(): {self._names(new)}",
            )
        return entries

    def _names(self, slots: Iterable[int], limit: int = 3) -> str:
        names = [self._roster.names[slot] for slot in slots]
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        return ", ".join(names[:limit]) + more

    def _note_versions(self, entries: Iterable[Entry]) -> None:
        """Remember what the gradients are, without looking into them."""
        for slot, parameter in entries:
            gradient = parameter.grad
            if gradient is not None:
                self._seen[slot] = _Seen(id(gradient), gradient._version, measured=False)

    def _measure_present(self, entries: Iterable[Entry]) -> None:
        """Measure every gradient that is there, marked or not: some hooks are blind (swapped tensors)."""
        present = [(slot, parameter) for slot, parameter in entries if parameter.grad is not None]
        self._measure(present)
        unmarked = sorted(slot for slot, _ in present if slot not in self.clock.marked)
        if unmarked:
            self._window.drop_zero_rows(unmarked)

    def _measure(self, present: Iterable[Entry]) -> None:
        """Measure gradients that are as the backward left them: scaled, unclipped."""
        step = self.clock.open_step
        histogram = self._cadence.histogram_due(step, first_of_window=self._samples_in_window == 0)
        for scaler, device, entries in self._grouped(present):
            slots, gradients, parameters = _columns(entries)
            inverse_scale = None
            if scaler is not None and (scale := scale_tensor(scaler)) is not None:
                self._window.set_loss_scale(scale)
                inverse_scale = scale.double().reciprocal().to(device, non_blocking=True)
            rows = measure(
                gradients,
                parameters if self._options.parameters else None,
                dead_threshold=self._options.dead_threshold,
                inverse_scale=inverse_scale,
                histogram=histogram,
                backend=self._options.backend,
            )
            self._window.write(slots, rows, step=step)
            for slot, parameter in entries:
                gradient = parameter.grad
                assert gradient is not None
                self._seen[slot] = _Seen(id(gradient), gradient._version, measured=True)
                if scaler is not None:
                    self._assumed_scaler[slot] = scaler

    def _measure_after_clipping(self, present: Iterable[Entry], optimizer: Optimizer) -> None:
        """Measure gradients that may have been clipped since the backward, and say so."""
        for _, _, entries in self._grouped(present, scaled=False):
            slots, gradients, parameters = _columns(entries)
            rows = measure(
                gradients,
                parameters if self._options.parameters else None,
                inverse_scale=_pending_inverse_scale(optimizer, gradients[0].device),
                backend=self._options.backend,
            )
            self._window.write_after_clipping(slots, rows)
            self._events.notice(
                "unclipped gradient not seen",
                f"the gradients of {self._names(slots)} could not be seen before clipping in step "
                f"{self.clock.open_step}: their grad_norm is missing there, grad_norm_clipped is there",
            )

    def _measure_received(self, present: Iterable[Entry], optimizer: Optimizer) -> None:
        """One cheap pass over gradients that changed between the backward and the step."""
        for _, device, entries in self._grouped(present, scaled=False):
            slots, gradients, _ = _columns(entries)
            inverse_scale = _pending_inverse_scale(optimizer, device)
            received = sum_sq(gradients, inverse_scale=inverse_scale, backend=self._options.backend)
            self._window.write_received(slots, received)

    def _grouped(
        self, present: Iterable[Entry], *, scaled: bool = True
    ) -> Iterable[tuple[GradScaler | None, torch.device, list[Entry]]]:
        """Entries by scaler and device, each group in ascending slots."""
        groups: dict[tuple[int, torch.device], tuple[GradScaler | None, list[Entry]]] = {}
        any_scaler = scaled and SCALES.scaler_of(None) is not None
        for slot, parameter in present:
            gradient = parameter.grad
            assert gradient is not None
            scaler = self._scaler_of_slot(slot) if any_scaler else None
            key = (id(scaler), gradient.device)
            if key not in groups:
                groups[key] = (scaler, [])
            groups[key][1].append((slot, parameter))
        for (_, device), (scaler, entries) in groups.items():
            yield scaler, device, sorted(entries, key=_slot)

    def _scaler_of_slot(self, slot: int) -> GradScaler | None:
        owner = self.clock.owner.get(slot)
        reference = self._optimizer_of.get(owner) if owner is not None else None
        return SCALES.scaler_of(reference() if reference is not None else None)

    def _inspect(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Compare what the optimizer is about to use with what was measured, and measure what is not known yet."""
        late: list[Entry] = []  # as the backward left it, and not measured
        changed: list[Entry] = []  # measured, and modified since
        unclear: list[Entry] = []  # not measured, and perhaps modified
        unchanged: list[Entry] = []
        gone: list[int] = []  # seen, and taken away before the step
        for slot, parameter in self._entries_of(optimizer):
            gradient, seen = parameter.grad, self._seen.get(slot)
            if gradient is None:
                if seen is not None:
                    gone.append(slot)
            elif inside_backward:
                self.clock.marked.add(slot)
                late.append((slot, parameter))
            elif seen is None:
                unclear.append((slot, parameter))
            elif seen.is_unmodified(gradient):
                (unchanged if seen.measured else late).append((slot, parameter))
            else:
                (changed if seen.measured else unclear).append((slot, parameter))
        self._correct_scale(optimizer)
        if gone:
            self._window.clear(gone)
            if not (late or changed or unclear or unchanged):
                self._events.no_gradient(
                    f"in step {self.clock.open_step} every gradient was already None when the optimizer stepped, "
                    "though the backward had computed them. Call zero_grad() after step(), or before backward().",
                    self.clock.open_step,
                )
        if late:
            self._measure(late)
        if unclear:
            self._measure_after_clipping(unclear, optimizer)
        if unchanged and self._must_compare_values:
            self._checked += tuple(slot for slot, _ in unchanged)
            changed += unchanged
        if changed:
            self._measure_received(changed, optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # set by a scaler where the optimizer itself skips
        if found_inf is not None:
            self._window.set_found_inf(found_inf)

    @property
    def _must_compare_values(self) -> bool:
        return (
            not self._trust_versions
            or self._num_samples < _CHECKED_SAMPLES
            or self._cadence.flush_due(self.clock.open_step)
        )

    def distrust_versions(self) -> None:
        """A gradient was modified without a trace: compare every sample by value from now on."""
        self._trust_versions = False

    def _entries_of(self, optimizer: Optimizer) -> list[Entry]:
        slot_of_id = self._roster.slot_of_id
        if self._appointed is not None and self._appointed() is optimizer:
            owned = self.clock.owned[self._key(optimizer)]
            return [(slot, parameter) for slot, parameter in self._roster.scan() if slot in owned]
        return [
            (slot, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (slot := slot_of_id.get(id(parameter))) is not None
        ]

    # ---- loss scale

    @_contained
    def before_unscale(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        self._unscaled_in_place = []
        if not self._is_due or not self.follows(optimizer):
            return
        late = []
        for slot, parameter in self._entries_of(optimizer):
            gradient, seen = parameter.grad, self._seen.get(slot)
            if gradient is not None and seen is not None and seen.is_unmodified(gradient):
                self._unscaled_in_place.append((slot, parameter))
                if not seen.measured:
                    late.append((slot, parameter))
        if late:
            self._measure(late)

    @_contained
    def after_unscale(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        for slot, parameter in self._unscaled_in_place:
            gradient = parameter.grad
            if gradient is not None:
                self._seen[slot] = _Seen(id(gradient), gradient._version, measured=True)
        self._unscaled_in_place = []

    def _correct_scale(self, optimizer: Optimizer) -> None:
        """Undo a loss scale that was assumed before it was known who steps this optimizer."""
        if not self._assumed_scaler:
            return
        actual = SCALES.scaler_of(optimizer)
        wrong: dict[int, tuple[GradScaler, list[int]]] = {}
        for slot in sorted(self.clock.owned[self._key(optimizer)]):
            assumed = self._assumed_scaler.pop(slot, None)
            if assumed is not None and assumed is not actual:
                wrong.setdefault(id(assumed), (assumed, []))[1].append(slot)
        for assumed, slots in wrong.values():
            factor = scale_tensor(assumed)
            if factor is None:
                continue
            factor = factor.double()
            if actual is not None and (scale := scale_tensor(actual)) is not None:
                factor = factor / scale.double()
            powers = torch.ones(NUM_COLUMNS, dtype=torch.float64, device=factor.device)
            for column, power in SCALE_POWER.items():
                powers[column] = factor**power
            self._window.rescale(slots, powers)

    # ---- the end of a sample

    def _commit(self, closed: Closed) -> None:
        if closed.backwards:
            self._backwards_per_sample.append(closed.backwards)
        if self._cadence.sample_due(closed.step):
            self._window_commit(closed)
        self._seen.clear()
        self._assumed_scaler.clear()
        self._checked = ()
        if self._cadence.flush_due(closed.step) and self._samples_in_window:
            self.flush_window()

    def _window_commit(self, closed: Closed) -> None:
        if closed.stepped:
            not_stepped = sorted(slot for slot in self._seen if self.clock.owner.get(slot) not in closed.stepped)
            if not_stepped:
                self._window.clear(not_stepped)
        updated = tuple(tuple(sorted(self.clock.owned.get(key, ()))) for key in sorted(closed.stepped))
        self._window.commit(Sample(closed.step, closed.skipped, updated, self._checked))
        self._samples_in_window += 1
        self._num_samples += 1

    def flush_window(self) -> None:
        """End the window after the last committed sample."""
        self._window.flush()
        self._samples_in_window = 0

    def _deliver(self) -> None:
        if not self._provisional or self.updates_by_hand:
            self._events.deliver()


def _slot(entry: Entry) -> int:
    return entry[0]


def _columns(entries: list[Entry]) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Slots, local gradients and local parameters of entries that all have a gradient."""
    slots = [slot for slot, _ in entries]
    gradients = [local_part(gradient) for _, parameter in entries if (gradient := parameter.grad) is not None]
    return slots, gradients, [local_part(parameter.detach()) for _, parameter in entries]


def _pending_inverse_scale(optimizer: Optimizer, device: torch.device) -> Any:
    """What an optimizer that unscales by itself is still going to divide by; None for every other."""
    grad_scale = getattr(optimizer, "grad_scale", None)
    return None if grad_scale is None else grad_scale.double().reciprocal().reshape(()).to(device, non_blocking=True)
