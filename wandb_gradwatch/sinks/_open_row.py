"""W&B's rule for log calls, mirrored: which row is open, and whether a call closes it."""

from __future__ import annotations


def closes(step: int | None, commit: bool | None) -> bool:
    """Whether a log call with these arguments closes the row that it goes to."""
    return bool(commit) if commit is not None else step is None


class OpenRow:
    """The row that W&B holds open. Owns what is known of it; changes only when it is told of a call or a step.

    Args:
        step: its step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.has_own = False  # a row of ours is in it already
        self.timestamp: float | None = None  # one that the user gave for it

    def drops(self, step: int | None) -> bool:
        """Whether W&B drops a call with this step."""
        return step is not None and step < self.step

    def is_left_by(self, step: int | None) -> bool:
        """Whether a call with this step closes the row and opens a later one."""
        return step is not None and step > self.step

    def note_call(self, step: int | None, commit: bool | None, *, own: bool = False) -> None:
        """A call that W&B does not drop has been made; own: with a row of ours."""
        if step is not None:
            self.note_step(step)
        self.has_own |= own
        if closes(step, commit):
            self.note_step(self.step + 1)

    def note_step(self, step: int) -> None:
        """This step is open now: a larger one than before is another row."""
        if step > self.step:
            self.step, self.has_own, self.timestamp = step, False, None
