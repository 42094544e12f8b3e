"""What each picture shows, what healthy looks like, and what to do otherwise: the same words on the page, in the report
and in the workspace. They stand in assets/words.txt, three lines for each picture, its key in brackets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ASSETS: Final = Path(__file__).parent / "assets"


class Words(NamedTuple):
    """The words beside one picture."""

    title: str
    healthy: str
    otherwise: str


def _read() -> Iterator[tuple[str, Words]]:
    for paragraph in (ASSETS / "words.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        title, healthy, otherwise = paragraph.splitlines()
        key, _, title = title.removeprefix("[").partition("] ")
        yield key, Words(title, healthy, otherwise)


WORDS: Final[Mapping[str, Words]] = dict(_read())
