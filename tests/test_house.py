"""benchmarks.house counts what a reader would count."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house

FILE = '''"""A module.

Two lines of it are text."""

from typing import Final

LIMIT: Final = 2**10  # a number
NAMES = ("a", "b")
SHARE, TEXT = 0.5, "no number alone"
LEAST = -1
ON = True


class Large:
    """Has thirteen attributes: one field and twelve of `self`."""

    first: int

    def __init__(self, other):
        (self.a, self.b, self.c) = self.d = range(3)
        self.e = self.f = self.g = self.h = 0
        self.i = self.j = self.k = self.l = 1
        other.m = self.first = 2  # not its own, and a field already

    def branches(self, items):
        if items and not self.a or self.b:  # an if, and two further operands
            return [one for one in items if one]  # a for and an if

        def nested():
            """Only its own."""
            return 1 if self.c else 2

        return nested

'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "_room").mkdir()
    (tmp_path / "_room" / "file.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "_room" / "__init__.py").write_text('"""Nothing."""\n', encoding="utf-8")
    (tmp_path / "main.py").write_text("async def main():\n    async for _ in ():\n        pass\n", encoding="utf-8")
    return tmp_path


def test_the_counts_of_a_room_are_those_of_a_reader(package: Path) -> None:
    rooms = house.rooms_of(package)
    assert list(rooms) == ["_room", "root", "all"]
    room = rooms["_room"]
    assert (room.files, room.lines) == (2, FILE.count("\n") + 1)
    # An import, 5 assignments, the class and its field, 5 lines of __init__, and 6 of `branches`: its def, the if, two
    # returns, and the def and the return of `nested`.
    assert room.code_lines == 1 + 5 + 2 + 5 + 6
    # __init__ has 5 lines, `branches` 9 with the empty ones and `nested`, and `nested` 3.
    assert (room.functions, room.function_lines) == (3, 5 + 9 + 3)
    assert room.branches == 3 + 2 + 1
    assert room.constants == 2  # LIMIT and LEAST
    assert (room.classes, room.large_classes) == (1, ["Large (2 methods, 13 attributes)"])
    assert (rooms["root"].functions, rooms["root"].branches) == (1, 1)
    assert rooms["all"].lines == room.lines + rooms["root"].lines


def test_the_table_has_every_room_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    house.main()
    printed = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1:] for line in printed.partition("\n\n")[0].splitlines()[1:]}
    folders = {path.parent.name for path in house.PACKAGE.glob("*/__init__.py")}
    assert set(table) == {*folders, "root", "all"}
    files = list(house.PACKAGE.rglob("*.py"))
    assert table["all"][:2] == [str(len(files)), str(sum(one.read_text(encoding="utf-8").count("\n") for one in files))]
