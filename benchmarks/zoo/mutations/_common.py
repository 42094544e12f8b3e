"""What several mutations need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..loop import Loop

NEVER: Final = 10**9
Spec = str | Sequence[Any]


def clock(loop: Loop) -> list[int]:
    """The number of the step that is made, as the only element."""
    now = [0]
    loop.before.append(lambda loop, step: now.__setitem__(0, step))
    return now
