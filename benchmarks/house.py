"""`python -m benchmarks.house [FOLDER]`: how large and how branched each room of the package is.

A room is a folder directly in the package; all files beside the folders are the room `root`. Lines are those of
`wc -l`; code lines hold more than a comment or a docstring. A function's length counts from `def`. A branch is an `if`,
a loop, an `except`, a `case`, each further operand of `and` and `or`, and each `for` and `if` of a comprehension; a
nested function counts for itself. A constant is a name that a module assigns a number. Large are classes with more than
12 methods or 12 attributes (fields, and what methods assign to `self`).
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent.parent / "wandb_gradwatch"
LARGE: Final = 12  # methods, or attributes
_FUNCTION: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPE: Final = (*_FUNCTION, ast.ClassDef)
_BRANCH: Final = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_IS_NO_CODE: Final = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@dataclass
class Room:
    files: int = 0
    lines: int = 0
    code_lines: int = 0
    functions: int = 0
    function_lines: int = 0
    branches: int = 0
    classes: int = 0
    constants: int = 0
    large_classes: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Count the text of one file."""
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, _FUNCTION)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.files += 1
        self.lines += text.count("\n")
        self.code_lines += len(_code_lines(text, nodes))
        self.functions += len(functions)
        self.function_lines += sum((node.end_lineno or 0) - node.lineno + 1 for node in functions)
        self.branches += sum(map(_branches, functions))
        self.classes += len(classes)
        self.constants += sum(_is_constant(node) for node in tree.body)
        for node in classes:
            methods, attributes = sum(isinstance(one, _FUNCTION) for one in node.body), len(_attributes(node))
            if max(methods, attributes) > LARGE:
                self.large_classes.append(f"{node.name} ({methods} methods, {attributes} attributes)")


def rooms_of(package: Path) -> dict[str, Room]:
    """Return the rooms by name, and their sum as `all`."""
    rooms: dict[str, Room] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        for name in (inside[0] if len(inside) > 1 else "root", "all"):
            rooms.setdefault(name, Room()).add(path.read_text(encoding="utf-8"))
    return dict(sorted(rooms.items(), key=lambda item: (item[0] == "all", item[0])))


def _code_lines(text: str, nodes: list[ast.AST]) -> set[int]:
    texts = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    docstrings = [range(one.lineno, (one.end_lineno or 0) + 1) for one in texts if isinstance(one.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = [
        range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in _IS_NO_CODE and token.string
    ]
    return {line for lines in held for line in lines}.difference(*docstrings)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below this one that belong to no function or class nested in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPE):
            yield from _inside(child)


def _branches(function: ast.AST) -> int:
    nodes = list(_inside(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    loops = sum(1 + len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return sum(isinstance(node, _BRANCH) for node in nodes) + operands + loops


def _attributes(node: ast.ClassDef) -> set[str]:
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    stored = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)]
    return fields | {one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id == "self"}


def _is_constant(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    parts = [] if value is None else list(ast.walk(value))
    numbers = [one for one in parts if isinstance(one, ast.Constant) and type(one.value) in (int, float)]
    arithmetic = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return bool(numbers) and all(one in numbers or isinstance(one, arithmetic) for one in parts)


def main(package: Path = PACKAGE) -> None:
    rooms = rooms_of(package)
    print(f"{'room':14} files   lines    code  functions  length  branches  classes  large  constants")
    for name, room in rooms.items():
        length, branches = room.function_lines / (room.functions or 1), room.branches / (room.functions or 1)
        print(f"{name:14} {room.files:5} {room.lines:7} {room.code_lines:7} {room.functions:10} {length:7.1f}", end=" ")
        print(f"{branches:9.1f} {room.classes:8} {len(room.large_classes):6} {room.constants:10}")
    print("\nlarge classes:", *rooms["all"].large_classes, sep="\n  ")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
