"""Which backwards and optimizer steps make one sample. Pure: integers in, closed samples out.

An optimizer is a key, a parameter is a slot. The rules:

- Optimizers that step one after the other after the same backwards make one sample of all their parameters.
- A sample closes when the owner of every marked slot has stepped and so have the optimizers of the sample before; at
  the latest when the next backward begins.
- The same optimizer stepping again opens a new sample.
- An optimizer that comes late joins the sample that has just closed, unless it brings gradients from elsewhere.
- In the first sample the owners are not all known yet: a marked slot without an owner keeps it open. Later it delays
  nothing.
- Steps inside a backward (an optimizer fused into it) make one sample, closed when that backward ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Closed:
    """A sample that has just closed."""

    step: int  # its number
    stepped: frozenset[int]  # the optimizers that stepped
    marked: frozenset[int]  # the slots that received a gradient
    skipped: bool  # whether loss scaling skipped an update in it
    inside_backward: bool = False  # whether an optimizer stepped inside a backward


@dataclass
class SampleClock:
    """Turns marks, backwards and steps into samples."""

    step: int = 0  # the number of the last closed sample
    owned: dict[int, frozenset[int]] = field(default_factory=dict)  # optimizer -> its slots
    owner: dict[int, int] = field(default_factory=dict)  # slot -> optimizer
    num_changes: int = 0  # of who owns what
    marked: set[int] = field(default_factory=set)
    backwards: int = 0
    muted: int = 0  # steps with a closure under way whose further evaluations are not seen
    takes_turns: bool = False  # optimizers step in samples of their own, as those of a GAN do
    stepped: set[int] = field(default_factory=set)  # optimizers, in the open sample
    ever_stepped: set[int] = field(default_factory=set)
    _inside_backward: bool = False  # an optimizer stepped inside a backward that has not ended
    _skipped: bool = False
    _previous: frozenset[int] = frozenset()  # the optimizers of the sample before
    marked_before: frozenset[int] = frozenset()  # the slots of the sample before
    # Slots that were marked when another optimizer stepped: their gradients may be of long ago.
    waited_for: set[int] = field(default_factory=set)
    closed_any: bool = False
    _orphans: set[int] = field(default_factory=set)  # their optimizer is gone: a new one may step soon

    @property
    def open_step(self) -> int:
        """The number that the open sample will get."""
        return self.step + 1

    def own(self, optimizer: int, slots: frozenset[int]) -> None:
        """Record which slots an optimizer updates, replacing what was known of it."""
        for slot in self.owned.get(optimizer, frozenset()):
            if self.owner.get(slot) == optimizer:
                del self.owner[slot]
        self.owned[optimizer], self.num_changes = slots, self.num_changes + 1
        self.owner.update(dict.fromkeys(slots, optimizer))
        self._orphans -= slots

    def disown(self, optimizer: int) -> None:
        """Forget an optimizer that is gone; its slots wait for a successor, until the next backward at most."""
        orphans = {slot for slot in self.owned.get(optimizer, ()) if self.owner.get(slot) == optimizer}
        self.own(optimizer, frozenset())
        self._orphans |= orphans
        if optimizer in self.stepped:
            self.owned[optimizer] = frozenset(orphans)  # the open sample is still its own
        else:
            del self.owned[optimizer]
        self.ever_stepped.discard(optimizer)
        self._previous -= {optimizer}

    def backward_begins(self) -> Closed | None:
        """A new backward: a sample that already has a step is over."""
        return self.update() if self.stepped and not self._inside_backward else None

    def backward_ended(self) -> Closed | None:
        """A backward is over, and with it a sample whose optimizers stepped inside."""
        self.backwards += 1
        return self.update() if self._inside_backward else None

    def step_begins(self, optimizer: int) -> Closed | None:
        """An optimizer is about to step: for the second time in a sample means that the sample was over."""
        return self.update() if optimizer in self.stepped and not self._inside_backward else None

    def is_late(self, optimizer: int) -> bool:
        """Whether this step, with no backward before it, belongs to the sample that has just closed."""
        is_fresh = not self.stepped and not self.marked and not self.backwards
        return is_fresh and self.closed_any and optimizer not in self._previous

    def join(self, optimizer: int) -> None:
        """Count a silent late-comer among the optimizers of the sample that has just closed."""
        self._previous |= {optimizer}

    def step_ended(self, optimizer: int, *, skipped: bool = False, inside_backward: bool = False) -> Closed | None:
        """An optimizer has stepped, or was told to and loss scaling skipped it."""
        self.stepped.add(optimizer)
        self.ever_stepped.add(optimizer)
        self._skipped |= skipped
        self._inside_backward |= inside_backward
        return self.update() if not self._inside_backward and self._is_complete() else None

    def close(self) -> Closed | None:
        """End the open sample if anything stepped in it."""
        return self.update() if self.stepped else None

    def counted(self, stepped: frozenset[int]) -> None:
        """These have made the last of the samples that were only counted; others may still join it."""
        self._previous = stepped

    def discard(self) -> None:
        """Forget the open sample: its gradients led to no update."""
        self.marked.clear()  # the hooks have this set
        self.backwards = 0

    def take_back(self, num_updates: int) -> None:
        """What `update()` ended was none of the samples, and those were all so far: the open one is the first."""
        self.step -= num_updates
        self.closed_any, self.marked_before = False, frozenset()

    def _is_complete(self) -> bool:
        if not self._previous <= self.stepped:
            return False
        waiting = self.marked.difference(*[self.owned[optimizer] for optimizer in self.stepped])
        self.waited_for |= waiting
        return not waiting or (self.closed_any and waiting.isdisjoint(self.owner) and waiting.isdisjoint(self._orphans))

    def update(self) -> Closed:
        """End the open sample, also without an optimizer: then the backward, or the user, is the clock."""
        self.step += 1
        stepped, marked = frozenset(self.stepped), frozenset(self.marked)
        closed = Closed(self.step, stepped, marked, self._skipped, self._inside_backward)
        self.takes_turns |= bool(self._previous and closed.stepped and self._previous.isdisjoint(closed.stepped))
        self._previous, self.marked_before, self.closed_any = closed.stepped, closed.marked, True
        self.stepped, self._inside_backward, self._skipped = set(), False, False
        self.discard()
        return closed
