"""Decides which backwards and optimizer steps make one sample. Pure: integers in, closed samples out.

An integer key stands for an optimizer, an integer slot for a parameter. The rules:

- Optimizers that step one after the other after the same backwards make one sample of all their parameters.
- A sample closes when the owners of all marked slots and the optimizers of the previous sample have stepped; at the
  latest when the next backward begins.
- A second step of the same optimizer opens a new sample.
- An optimizer that steps late, without a backward before, joins the last closed sample unless its gradients are new.
- In the first sample not all owners are known yet: a marked slot without an owner keeps it open. In later samples such
  a slot delays nothing; in the first ten, only if it is expected that an optimizer will step it.
- Steps inside a backward (an optimizer fused into it) make one sample, closed when that backward ends.
"""

from dataclasses import dataclass, field
from typing import Final

_FIRST: Final = 10  # number of samples that wait for optimizers that have not stepped yet


@dataclass(frozen=True)
class Closed:
    """A sample that has just closed."""

    step: int  # its number
    stepped: frozenset[int]  # the optimizers that stepped
    marked: frozenset[int]  # the slots that received a gradient
    skipped: bool  # whether loss scaling skipped one of its updates
    inside_backward: bool = False  # whether an optimizer stepped inside a backward


@dataclass
class SampleClock:
    step: int = 0  # the number of the last closed sample
    owned: dict[int, frozenset[int]] = field(default_factory=dict)  # optimizer -> its slots
    owner: dict[int, int] = field(default_factory=dict)  # slot -> optimizer
    num_changes: int = 0  # how often the ownership has changed
    marked: set[int] = field(default_factory=set)
    backwards: int = 0
    takes_turns: bool = False  # successive samples have different optimizers, as in a GAN
    stepped: set[int] = field(default_factory=set)  # optimizers that stepped in the open sample
    ever_stepped: set[int] = field(default_factory=set)
    _inside_backward: bool = False  # an optimizer stepped inside a backward that has not ended
    _skipped: bool = False
    previous: frozenset[int] = frozenset()  # the optimizers of the previous sample
    marked_before: frozenset[int] = frozenset()  # the slots marked in the previous sample
    # Slots that were marked but not updated when another optimizer stepped: their gradients may be old.
    waited_for: set[int] = field(default_factory=set)
    num_closed: int = 0  # number of samples closed since the capture began
    expected: frozenset[int] = frozenset()  # slots of optimizers that exist, but have not stepped yet
    _orphans: set[int] = field(default_factory=set)  # slots whose optimizer was deleted: a new one may step soon

    @property
    def open_step(self) -> int:
        """The number that the open sample will get."""
        return self.step + 1

    @property
    def last_step(self) -> int:
        """The number of the last step, also of one whose sample only waits for optimizers that are not known."""
        is_made = self.stepped and self.previous <= self.stepped and self._waiting().isdisjoint(self.owner)
        return self.step + bool(is_made and not self._inside_backward)

    def own(self, optimizer: int, slots: frozenset[int]) -> None:
        """Record which slots an optimizer updates, instead of those recorded before."""
        for slot in self.owned.get(optimizer, frozenset()):
            if self.owner.get(slot) == optimizer:
                del self.owner[slot]
        self.owned[optimizer], self.num_changes = slots, self.num_changes + 1
        self.owner.update(dict.fromkeys(slots, optimizer))
        self._orphans -= slots

    def disown(self, optimizer: int) -> None:
        """Forget a deleted optimizer. Its marked slots keep the sample open for a successor until the next backward."""
        orphans = {slot for slot in self.owned.get(optimizer, ()) if self.owner.get(slot) == optimizer}
        self.own(optimizer, frozenset())
        self._orphans |= orphans
        if optimizer in self.stepped:
            self.owned[optimizer] = frozenset(orphans)  # it belongs to the open sample
        else:
            del self.owned[optimizer]
        self.ever_stepped.discard(optimizer)
        self.previous -= {optimizer}

    def backward_begins(self) -> Closed | None:
        """Close the open sample if an optimizer has stepped in it, and not inside a backward that still runs."""
        return None if self._inside_backward else self.close()

    def backward_ended(self) -> Closed | None:
        """Close the open sample if an optimizer has stepped inside the backward."""
        self.backwards += 1
        return self.update() if self._inside_backward else None

    def step_begins(self, optimizer: int) -> Closed | None:
        """Close the open sample if this optimizer has already stepped in it."""
        return self.update() if optimizer in self.stepped and not self._inside_backward else None

    def is_late(self, optimizer: int) -> bool:
        """Whether this optimizer, which had no part in the last closed sample, steps without a backward since then."""
        is_fresh = not (self.stepped or self.marked or self.backwards)
        return is_fresh and self.num_closed > 0 and optimizer not in self.previous

    def were_just_updated(self, optimizer: int) -> bool:
        """Whether the optimizers of the last closed sample own all slots of this one."""
        return self.owned[optimizer] <= frozenset().union(*(self.owned.get(key, ()) for key in self.previous))

    def join(self, optimizer: int) -> None:
        self.previous |= {optimizer}

    def step_ended(self, optimizer: int, *, skipped: bool = False, inside_backward: bool = False) -> Closed | None:
        """Close the open sample if it is complete with this step, made or skipped by loss scaling."""
        self.stepped.add(optimizer)
        self.ever_stepped.add(optimizer)
        self._skipped |= skipped
        self._inside_backward |= inside_backward
        return self.update() if not self._inside_backward and self._is_complete() else None

    def close(self) -> Closed | None:
        """Close the open sample if an optimizer has stepped in it."""
        return self.update() if self.stepped else None

    def discard(self) -> None:
        """Forget the marks and backwards of the open sample."""
        self.marked, self.backwards = set(), 0

    def _is_complete(self) -> bool:
        if not self.previous <= self.stepped:
            return False
        waiting = self._waiting()
        self.waited_for |= waiting
        if not self.num_closed or not waiting:
            return not waiting
        expected = self.expected if self.num_closed < _FIRST else ()
        return all(map(waiting.isdisjoint, (self.owner, self._orphans, expected)))

    def _waiting(self) -> set[int]:
        """The marked slots that no optimizer has updated in the open sample."""
        return self.marked.difference(*map(self.owned.__getitem__, self.stepped))

    def update(self) -> Closed:
        """Close the open sample, even if no optimizer has stepped: a backward or the user can make an update too."""
        self.step, self.num_closed = self.step + 1, self.num_closed + 1
        stepped, marked = frozenset(self.stepped), frozenset(self.marked)
        closed = Closed(self.step, stepped, marked, self._skipped, self._inside_backward)
        self.takes_turns |= bool(self.previous and closed.stepped and self.previous.isdisjoint(closed.stepped))
        self.previous, self.marked_before = closed.stepped, closed.marked
        self.stepped, self._inside_backward, self._skipped = set(), False, False
        self.discard()
        return closed
