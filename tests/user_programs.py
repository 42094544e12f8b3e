"""Random programs of wandb.log() calls, and the rows that such a program has without the package.

A program is a list of actions: ("log", data, step, commit) of the user, and ("own", number), a row of the package.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Action = tuple[Any, ...]
STYLES = ("implicit", "step", "jumps", "rarely", "never", "twice", "no_commit", "step_commit", "mixed")


@dataclass
class OpenRow:
    """A model of W&B's rows: there is one open row, at step `cur`."""

    cur: int = 0
    open: dict[str, Any] | None = None
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.cur:
            return
        if step is not None and step > self.cur:
            self.close()
            self.cur = step
        self.open = {**(self.open or {}), **data}
        if commit if commit is not None else step is None:
            self.close()
            self.cur += 1

    def close(self) -> None:
        if self.open is not None:
            self.rows.append((self.cur, self.open))
        self.open = None


@dataclass
class OwnRow:
    """A row of the package that holds the numbers of its windows; a large row is logged in two parts."""

    numbers: list[int]
    num_parts: int = 1
    step = None

    def merge(self, later: OwnRow) -> OwnRow:
        return OwnRow(self.numbers + later.numbers, max(self.num_parts, later.num_parts))

    def parts(self) -> list[dict[str, Any]]:
        text = ",".join(map(str, self.numbers))
        return [{"own": text}] if self.num_parts == 1 else [{"own": text}, {"own_more": text}]


def random_program(rng: random.Random, *, style: str | None = None, num_steps: int = 12) -> list[Action]:
    """Return the program of a training loop with one style of logging, with a row of the package at some steps."""
    style = style or rng.choice(STYLES)
    own_every = rng.choice((1, 1, 2, 5))
    own_first = rng.random() < 0.5
    program: list[Action] = []
    num_own = 0
    for step in range(num_steps):
        own: list[Action] = []
        if step % own_every == 0:
            own = [("own", num_own)]
            num_own += 1
        user = [
            ("log", {f"u{len(program)}_{i}": step, "loss": step}, *call)
            for i, call in enumerate(_calls(rng, style, step))
        ]
        program += own + user if own_first else user + own
    return program


def _calls(rng: random.Random, style: str, step: int) -> list[tuple[int | None, bool | None]]:
    """Return the (step, commit) of each log call at one step of training."""
    if style == "mixed":
        style = rng.choice([s for s in STYLES if s != "mixed"])
    return {
        "implicit": lambda: [(None, None)],
        "step": lambda: [(step, None)],
        "jumps": lambda: [(step * rng.choice((1, 2, 7)), None)],
        "rarely": lambda: [(rng.choice((None, step)), None)] if rng.random() < 0.15 else [],
        "never": lambda: [],
        "twice": lambda: [(step, None), (step, rng.choice((None, True)))],
        "no_commit": lambda: [(None, False)] * rng.randrange(3) + [(None, rng.choice((None, True)))],
        "step_commit": lambda: [(rng.choice((step, step + 1, 2 * step)), rng.choice((None, True, False)))],
    }[style]()


def user_rows(program: list[Action], start: int = 0) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows (step, data) that the user has without the package."""
    model = OpenRow(start)
    for kind, *arguments in program:
        if kind == "log":
            model.log(*arguments)
    model.close()
    return model.rows


def split_rows(rows: list[tuple[int, dict[str, Any]]]) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """Split logged rows into the user's (step, data) and the numbers of the package's rows, in order of arrival."""
    user, own = [], []
    for step, row in rows:
        if "own" in row:
            own += [int(number) for number in str(row["own"]).split(",")]
        data = {key: value for key, value in row.items() if key != "own" and not key.startswith("_")}
        if data:
            user.append((step, data))
    return user, own
