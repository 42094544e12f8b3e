"""From hooks, optimizer steps and loss scalers to rows in the window: what is measured when.

    a parameter is marked             BackwardHooks -> _mark
    a backward has ended              BackwardHooks -> _backward_ended     measure every gradient that is there
    an optimizer is about to step     StepHooks     -> before_step         measure what was missed; what was clipped
    an optimizer has stepped          StepHooks     -> after_step          perhaps the sample is complete
    a scaler unscales, or skips       ScaleBook     -> before_unscale, step_skipped

The SampleClock says when a sample is complete; it is then committed to the window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..cadence import Budget, Cadence
from ..window import Sample, Window
from .agreement import Agreements
from .by_hand import UpdatesByHand
from .clock import Closed, SampleClock
from .containment import Containment, contained
from .gauge import Gauge, MeasureOptions
from .hooks import BackwardHooks, current_graph_task
from .owners import Owners
from .probes import Probe, Probes
from .roster import Roster
from .scaling import SCALES
from .seen import Entry, was_seen
from .sharding import Shards, fsdp1_flat_parameters
from .steps import STEP_HOOKS
from .timing import DeviceTimer
from .withholding import Judge, Withholding

# Old code clips through `p.grad.data`, which leaves no trace in the version counter. The first samples and every
# flushed one are compared by value; one difference there, and every sample is.
_COMPARED_SAMPLES: Final = 3

# This many backwards that only accumulate, without a step, are worth a word.
_PATIENCE_IN_BACKWARDS: Final = 1000

_NO_SLOT: Final = -1

CADENCE_METRIC: Final = "gradwatch/sample_every"  # the cadence that max_overhead has come to
GUARD_METRIC: Final = "gradwatch/num_guarded_steps"  # withheld since the sample before; only with a guard


@dataclass(frozen=True)
class SamplerEvents:
    """What a sampler tells its watcher.

    Args:
        deliver: it is a good moment to hand over what has arrived.
        notice: something to be said once, by kind and text.
        no_gradient: gradients are computed and lead to no update (text, step): to be said once, as an alert.
        judge: decides, at every step, whether its gradients are used; None: they are.
    """

    deliver: Callable[[], None]
    notice: Callable[[str, str], None]
    no_gradient: Callable[[str, int], None]
    judge: Judge | None = None


class Sampler:
    """Owns the hooks and the open sample.

    Args:
        roster: the watched parameters.
        window: where rows go.
        cadence: which steps are measured and flushed.
        options: what is measured.
        events: how the watcher hears of it.
        containment: where all of it runs.
        optimizer: an optimizer to take for the owner of every parameter that no other one owns (master weights).
        scaler: the gradient scaler to assume until one is seen.
        start_step: the number of the last step before the first one.
        probes: what else measures at sampled steps.
        budget: stretches the cadence where the monitor costs too much.
    """

    def __init__(
        self,
        roster: Roster,
        window: Window,
        cadence: Cadence,
        options: MeasureOptions,
        events: SamplerEvents,
        containment: Containment,
        *,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        start_step: int = 0,
        probes: Sequence[Probe] = (),
        budget: Budget | None = None,
    ) -> None:
        self._roster = roster
        self._window = window
        self._cadence = cadence
        self._budget = budget
        self._events = events
        self.containment = containment
        self.clock = SampleClock(step=start_step)
        self._owners = Owners(roster, self.clock, self._rescan, optimizer)
        self._timer = DeviceTimer() if budget is not None else None
        self._gauge = Gauge(window, self._owners, options, self._timer)
        self._hooks = BackwardHooks(on_mark=self._mark, on_begin=self._backward_begins, on_end=self._backward_ended)
        self.withholding = Withholding(events.judge, window) if events.judge is not None else None
        self._agreements = Agreements()
        self._muted = 0
        self._reached: set[int] = set()  # slots marked in the backward under way
        self._probes = Probes(probes)

        # The open sample.
        self._compared: tuple[int, ...] = ()
        self._joining: int | None = None
        self._being_unscaled: list[Entry] = []

        # What was learnt.
        self._backwards_per_sample: deque[int] = deque(maxlen=4)
        self._trust_versions = True
        self._by_hand = UpdatesByHand(roster, self._gauge.seen, excluded=optimizer is not None)
        self._samples_in_window = 0
        self._num_samples = 0
        self._seconds_between = 0.0  # spent on guarding steps between samples: no cadence makes them fewer
        self._seconds_at_commit = 0.0

        if scaler is not None:
            SCALES.use(scaler)
        self.shards = Shards()
        self._roster_version = self._roster_changes = -1

    def start(self) -> None:
        """Hook everything; what can raise for a bad argument has done so before."""
        self._follow(self._roster.scan(), said=False)
        self._start_probes()
        SCALES.subscribe(self)
        STEP_HOOKS.subscribe(self)

    def stop(self) -> None:
        """Remove every hook and wrapper. Idempotent."""
        self.containment.stopped = True
        STEP_HOOKS.unsubscribe(self)
        SCALES.unsubscribe(self)
        self._hooks.remove()
        if self.withholding is not None:
            self.withholding.release()
        self._probes.close()

    # ---- marks and backwards

    def _mark(self, slot: int) -> None:
        if not self._muted and slot != _NO_SLOT:
            self.clock.marked.add(slot)
            self._reached.add(slot)

    @contained
    def _backward_begins(self) -> None:
        STEP_HOOKS.drop_raised()  # a step that raised must not leave us muted
        self._reached.clear()
        if not self._muted:
            self._commit(self.clock.backward_begins())

    @contained
    def _backward_ended(self) -> None:
        if self._muted:
            return
        if self._by_hand.possible:
            if self.clock.backwards and self._by_hand.were_reset(self._reached):
                self._close_update_by_hand()
                self.clock.marked |= self._reached
            self._by_hand.remember_parameters()
        if self._is_measured:
            entries = self._rescan()
            if self.clock.backwards + 1 >= self._expected_backwards:
                self._measure_present(entries)
            else:
                self._gauge.note(entries)
        elif self._by_hand.possible:
            self._gauge.note(self._roster.scan())
        self._commit(self.clock.backward_ended())
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
    def _histogram_is_due(self) -> bool:
        first_of_window = self._samples_in_window == 0
        return self._is_due and self._cadence.histogram_due(self.clock.open_step, first_of_window=first_of_window)

    @property
    def _is_measured(self) -> bool:
        """Whether the open step's gradients are looked at: a guard judges every one."""
        return self.withholding is not None or self._is_due

    @property
    def _rows_are_read(self) -> bool:
        """Whether the open step's rows are for more than a guard that judges by the norm."""
        return self._is_due or (self.withholding is not None and self.withholding.needs_rows)

    @property
    def _expected_backwards(self) -> int:
        """How many backwards the open sample will have: the fewest of the last samples, so that none is missed."""
        return min(self._backwards_per_sample, default=1)

    def _rescan(self) -> list[Entry]:
        """Walk the model, and follow what is new in it."""
        entries = self._roster.scan()
        if self._roster.changes != self._roster_changes or self.shards.uses_fsdp1 or self._some_are_unmarked(entries):
            self._follow(entries)
        return entries

    def _some_are_unmarked(self, entries: Iterable[Entry]) -> bool:
        """Whether a gradient is there that no hook has told of: a hook is gone with a tensor that was swapped."""
        marked = self.clock.marked
        return any(slot not in marked and parameter.grad is not None for slot, parameter in entries)

    def _follow(self, entries: Sequence[Entry], *, said: bool = True) -> None:
        """Hook what is new, and make room for it."""
        self._roster_changes = self._roster.changes
        self._window.resize(len(self._roster.names))
        if self._roster.version != self._roster_version:
            self._roster_version = self._roster.version
            self.shards.update(entries, self._roster.models())
        if self.shards.uses_fsdp1:  # the leaves of its backward are not the model's parameters: they tell when it ends
            entries = [*entries, *((_NO_SLOT, leaf) for leaf in fsdp1_flat_parameters(self._roster.models()))]
        new = [slot for slot in self._hooks.follow(entries) if slot != _NO_SLOT]
        if new and said:
            self._events.notice(
                "new parameters",
                f"now following parameters that were added, replaced or unfrozen after watch(): {self._names(new)}",
            )

    def _measure_present(self, entries: Iterable[Entry]) -> None:
        """Measure every gradient that is there, marked or not: some hooks are blind (swapped tensors)."""
        present = [entry for entry in entries if entry[1].grad is not None]
        self._measure(present)
        unmarked = sorted(slot for slot, _ in present if slot not in self.clock.marked)
        if unmarked:
            self._window.drop_zero_rows(unmarked)

    def _measure(self, present: Sequence[Entry]) -> None:
        self._gauge.measure(present, histogram=self._histogram_is_due, parameters=self._rows_are_read)
        if self._probes and self._is_due:
            tensors = self._gauge.watched(present, self._roster.names, scaled=True)
            self._probes.gradients_ready(tensors)

    def _names(self, slots: Iterable[int], limit: int = 3) -> str:
        names = [self._roster.names[slot] for slot in slots]
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        return ", ".join(names[:limit]) + more

    # ---- optimizer steps

    def follows(self, optimizer: Optimizer) -> bool:
        """See StepListener."""
        try:
            answer = self._owners.known_to_follow(optimizer)
        except Exception:  # comes again below, where it is contained and reported
            answer = None
        if answer is not None:
            return answer
        follows = False

        def ask() -> None:
            nonlocal follows
            follows = self._owners.learn(optimizer)

        self.containment.run(ask)
        return follows

    def is_part_of(self, inner: Optimizer, outer: Optimizer) -> bool:
        """See StepListener."""
        return self._owners.slots(inner) <= self._owners.slots(outer)

    @contained
    def before_closure(self, optimizer: Optimizer) -> None:
        """See StepListener."""
        self._optimizer_found()
        self._commit(self.clock.step_begins(self._owners.key(optimizer)))

    @contained
    def before_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """See StepListener."""
        self._optimizer_found()
        SCALES.note_step(optimizer)
        key = self._owners.key(optimizer)
        if inside_backward:
            self._hooks.arm(current_graph_task())
        self._commit(self.clock.step_begins(key))
        if not inside_backward:
            self._deliver()
            if self._joins_silently(optimizer, key):
                self._joining = key
                return
        if self._is_measured:
            self._inspect(optimizer, inside_backward=inside_backward)
        if self._probes and self._is_due:
            tensors = self._gauge.watched(self._owners.entries(optimizer), self._roster.names, scaled=False)
            self._probes.before_update(tensors)
        if self.withholding is not None:  # last: what follows it up is the step, and then release()
            entries = self._owners.entries(optimizer)
            function = self.withholding.needs_rows
            agreement = self._agreements.of(entries, self.shards, self._roster.version, function=function)
            self.withholding.decide(
                optimizer, self.clock.open_step, entries, agreement, inside_backward=inside_backward
            )

    @contained
    def after_step(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """See StepListener."""
        if self.withholding is not None:
            self.withholding.release(optimizer)
        key = self._owners.key(optimizer)
        if self._joining == key:
            self._joining = None
            self.clock.join(key)
            return
        if self._probes and self._is_due:
            tensors = self._gauge.watched(self._owners.entries(optimizer), self._roster.names, scaled=False)
            self._probes.after_update(tensors)
        self._step_done(key, skipped=False, inside_backward=inside_backward)

    @contained
    def step_skipped(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        if self.follows(optimizer):
            self._optimizer_found()
            key = self._owners.key(optimizer)
            self._commit(self.clock.step_begins(key))
            self._step_done(key, skipped=True, inside_backward=False)

    def _joins_silently(self, optimizer: Optimizer, key: int) -> bool:
        """A late step belongs to the last sample, unless it brings gradients of its own.

        Gradients that nothing marked are leftovers of an optimizer that is known, or of one that steps for the first
        time after a sample that did not wait for it; else they may be new, from a backward whose hooks were blind.
        """
        if not self.clock.is_late(key):
            return False
        if self.clock.has_stepped(key):
            return True
        present = [(slot, p.grad) for slot, p in self._owners.entries(optimizer) if p.grad is not None]
        if self._cadence.sample_due(self.clock.step):
            return all(was_seen(gradient) for _, gradient in present)
        return self.clock.were_in_last_sample(slot for slot, _ in present)

    def _step_done(self, key: int, *, skipped: bool, inside_backward: bool) -> None:
        self._commit(self.clock.step_ended(key, skipped=skipped, inside_backward=inside_backward))
        if current_graph_task() == -1:  # never deliver from within a tensor hook
            self._deliver()

    def _inspect(self, optimizer: Optimizer, *, inside_backward: bool) -> None:
        """Compare what the optimizer is about to use with what was measured, and measure what is not known yet."""
        entries = self._owners.entries(optimizer)
        found = self._gauge.seen.inspect(entries, inside_backward=inside_backward)
        if inside_backward:
            self.clock.marked.update(slot for slot, _ in found.late)
        self._gauge.correct_scale(optimizer)
        if found.gone:
            self._window.clear(found.gone)
        if found.nothing_is_left:
            self._events.no_gradient(
                f"in step {self.clock.open_step} every gradient was already None when the optimizer stepped, "
                "though the backward had computed them. Call zero_grad() after step(), or before backward().",
                self.clock.open_step,
            )
        if found.late:
            self._measure(found.late)
        if found.unclear:
            entries = self._rescan()  # nothing marked them: hook what was unfrozen
            if not self.clock.backwards:  # assigned by hand, and for every optimizer that is going to step
                self.clock.marked.update(slot for slot, parameter in entries if parameter.grad is not None)
            self._gauge.measure_after_clipping(found.unclear, optimizer)
            self._events.notice(
                "unclipped gradient not seen",
                f"the gradients of {self._names(slot for slot, _ in found.unclear)} could not be seen before clipping "
                f"in step {self.clock.open_step}: their grad_norm is missing there, grad_norm_clipped is there",
            )
        modified = found.changed
        if found.unchanged and self._must_compare_values:
            self._compared += tuple(slot for slot, _ in found.unchanged)
            modified = modified + found.unchanged
        if modified and self._rows_are_read:
            self._gauge.measure_received(modified, optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # set by a scaler where the optimizer itself skips
        if found_inf is not None:
            self._window.set_found_inf(found_inf)

    @property
    def _must_compare_values(self) -> bool:
        return (
            not self._trust_versions
            or self._num_samples < _COMPARED_SAMPLES
            or self._cadence.is_last_before_flush(self.clock.open_step)
        )

    def distrust_versions(self) -> None:
        """A gradient was modified without a trace: compare every sample by value from now on."""
        self._trust_versions = False

    # ---- loss scale

    @contained
    def before_unscale(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        self._being_unscaled = []
        if not self._is_measured or not self.follows(optimizer):
            return
        found = self._gauge.seen.inspect(self._owners.entries(optimizer), inside_backward=False)
        self._being_unscaled = found.late + found.unchanged
        if found.late:
            self._measure(found.late)

    @contained
    def after_unscale(self, optimizer: Optimizer) -> None:
        """See ScaleListener."""
        there = [(slot, parameter.grad) for slot, parameter in self._being_unscaled if parameter.grad is not None]
        self._gauge.seen.remember([slot for slot, _ in there], [gradient for _, gradient in there], measured=True)
        self._being_unscaled = []

    # ---- updates without an optimizer

    def _optimizer_found(self) -> None:
        """An optimizer is the clock: what looked like updates by hand before it was not."""
        if self._by_hand.possible and (taken_back := self._by_hand.exclude()):
            self.clock.step -= taken_back
            self._window.forget_sent()
            self._samples_in_window = 0

    def _close_update_by_hand(self) -> None:
        is_proof = self._by_hand.count()
        self._commit(self.clock.update())
        if is_proof:
            self._say_by_hand()

    def _say_by_hand(self) -> None:
        self._events.notice(
            "no optimizer",
            "no optimizer step was seen that updates a watched parameter, so every backward after which the gradients "
            "were reset counts as a step; pass optimizer= if there is one, or call watcher.step() after each update",
        )

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, in plain numbers."""
        return {
            "step": self.clock.step,
            "backwards_per_sample": list(self._backwards_per_sample),
            "trust_versions": self._trust_versions,
            "num_samples": self._num_samples,
            "samples_in_window": self._samples_in_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.clock.step = int(state["step"])
        self._backwards_per_sample.extend(int(number) for number in state["backwards_per_sample"])
        self._trust_versions = bool(state["trust_versions"])
        self._num_samples = int(state["num_samples"])
        self._samples_in_window = int(state["samples_in_window"])

    def step(self) -> None:
        """The user says that an update has been made."""
        self._by_hand.exclude()
        self._commit(self.clock.update())

    # ---- the end of a sample

    def end_sample(self, *, final: bool = False) -> None:
        """Close the open sample, if it has had a step, or an update by hand.

        Args:
            final: nothing comes any more: without any optimizer the last backward was for an update by hand.
        """
        if closed := self.clock.close():
            self._commit(closed)
        elif self._by_hand.possible and self.clock.backwards and (final or self._by_hand.has_updated()):
            self._close_update_by_hand()
            if self._by_hand.settle():
                self._say_by_hand()

    def _commit(self, closed: Closed | None) -> None:
        if closed is None:
            return
        if closed.backwards:
            self._backwards_per_sample.append(closed.backwards)
        if self.withholding is not None:
            self.withholding.end_step(closed.step)
        if self._cadence.sample_due(closed.step):
            self._window_commit(closed)
        elif self.withholding is not None:
            self._window.discard()
            self._seconds_between += self.containment.seconds_spent - self._seconds_at_commit
        self._seconds_at_commit = self.containment.seconds_spent
        self._gauge.begin_sample()
        self._compared = ()
        if self._cadence.flush_due(closed.step) and self._samples_in_window:
            self.flush_window()
        self._start_probes()

    def _start_probes(self) -> None:
        if self._probes:
            self._probes.start(self._is_due, self._is_due and self._histogram_is_due)

    def _window_commit(self, closed: Closed) -> None:
        updated = tuple(tuple(sorted(self.clock.owned.get(key, ()))) for key in sorted(closed.stepped))
        if updated:
            not_stepped = sorted(set(self._gauge.seen.slots).difference(*updated))
            if not_stepped:
                self._window.clear(not_stepped)
        found = self._probes.take()
        if self._budget is not None and not self._is_sharded:
            now, spent = time.perf_counter(), self.seconds_spent - self._seconds_between
            spent += self._timer.seconds() if self._timer is not None else 0.0
            self._cadence = self._budget.after_sample(self._cadence, closed.step, now, spent)
            found[CADENCE_METRIC] = torch.tensor(float(self._cadence.sample_every), device="cpu")
        if self.withholding is not None:
            found[GUARD_METRIC] = self.withholding.take_count()
        self._window.commit(Sample(closed.step, closed.skipped, updated, self._compared), found)
        self._samples_in_window += 1
        self._num_samples += 1

    @property
    def seconds_spent(self) -> float:
        """Everything that watching has taken on the host so far."""
        return self.containment.seconds_spent + self._probes.seconds_spent

    @property
    def _is_sharded(self) -> bool:
        """Ranks that merge their windows must sample the same steps: none may choose for itself.

        To choose together they would have to wait for each other: a rank learns of the others' windows in the
        background, at a step of its own.
        """
        if self.shards.any:
            self._events.notice("budget", "max_overhead has no effect on a sharded model; use sample_every=")
        return self.shards.any

    def flush_window(self) -> None:
        """End the window after the last committed sample."""
        self._window.flush()
        self._samples_in_window = 0

    def _deliver(self) -> None:
        if not self._by_hand.withholds:
            self._events.deliver()
