"""Imports between the rooms of the package point in one direction: each room imports only those in MAY_IMPORT."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "wandb_gradwatch"
ROOT = Path(__file__).parent.parent / PACKAGE

# The rooms that each room may import. A room is a file or folder directly in the package; "" is its __init__.py.
MAY_IMPORT: dict[str, set[str]] = {
    "_arguments": set(),
    "_output": {"_analysis"},
    "_interruptions": set(),
    "_boundary": {"_interruptions"},
    "_measure": {"_interruptions"},
    "_runtime": {"_interruptions", "_boundary"},
    "_engines": {"_boundary", "_runtime"},
    "_nonfinite": {"_runtime", "_analysis"},
    "_transfer": {"_measure", "snapshot"},
    "_guard": {
        "_arguments",
        "_boundary",
        "_nonfinite",
        "_measure",
        "_transfer",
        "_runtime",
        "snapshot",
        "_analysis",
        "rules",
    },
    "_capture": {
        "_interruptions",
        "_boundary",
        "_engines",
        "_nonfinite",
        "_measure",
        "_transfer",
        "_runtime",
        "_guard",
        "snapshot",
    },
    "snapshot": {"_measure"},
    "_judgement": {"_measure", "snapshot", "_analysis"},
    "_analysis": {"_measure", "snapshot"},
    "rules": {"_measure", "snapshot", "_analysis", "_judgement"},
    "_summary": {"_boundary", "_judgement", "_measure", "snapshot", "_analysis", "rules", "_output"},
    "sinks": {"_interruptions", "_judgement", "_boundary", "_measure", "snapshot", "_analysis", "rules", "_output"},
    "_page": {"_judgement", "_measure", "snapshot", "_analysis", "rules", "_output"},
    "_report": {"_judgement", "_measure", "snapshot", "_analysis", "rules", "_output", "_page"},
    "_pipeline": {
        "_interruptions",
        "_boundary",
        "_measure",
        "_transfer",
        "_runtime",
        "_capture",
        "snapshot",
        "_analysis",
        "rules",
        "_judgement",
        "sinks",
    },
    "metrics": {
        "_arguments",
        "_interruptions",
        "_boundary",
        "_measure",
        "snapshot",
        "_analysis",
        "rules",
        "_runtime",
        "_capture",
    },
    "_config": {"_capture", "rules", "sinks"},
}
_BELOW_WATCHER = set(MAY_IMPORT) - {"_page", "_report", "metrics"}
MAY_IMPORT["_watcher"] = _BELOW_WATCHER
_BELOW_WATCH = set(MAY_IMPORT)
MAY_IMPORT["_watch"] = _BELOW_WATCH - {"_page", "_report"}
MAY_IMPORT[""] = _BELOW_WATCH | {"_watch"}
for _top in ("integrations", "_demo", "_doctor", "_cli"):
    MAY_IMPORT[_top] = _BELOW_WATCH | {"_watch", "_watcher", ""}
MAY_IMPORT["_cli"] |= {"_demo", "_doctor"}
MAY_IMPORT["__main__"] = {"_cli"}

WITHOUT_TORCH = (
    "snapshot", "_judgement", "_analysis", "rules", "_summary", "sinks", "_page", "_report", "_output",
    "_arguments", "_interruptions", "_boundary",
)  # fmt: skip
WITHOUT_TORCH_FILES = (
    f"{PACKAGE}._measure.columns",
    f"{PACKAGE}._capture.cadence",
    f"{PACKAGE}._pipeline.alert_manager",
    f"{PACKAGE}._pipeline.recorder",
)
WITH_WANDB = ("sinks", "_page", "_report", "_watch", "_demo", "_doctor", "_cli")
WITH_COMPILER = {  # compiler -> the only module that imports it
    "triton": f"{PACKAGE}._measure.cuda",
    "numba": f"{PACKAGE}._measure.cpu_loops",
    "llvmlite": f"{PACKAGE}._measure.cpu_loops",
}
OPTIONAL = {
    "accelerate", "ignite", "lightning", "llvmlite", "numba", "pytorch_lightning", "requests", "rich", "tqdm",
    "transformers", "triton", "wandb_workspaces",
}  # fmt: skip


class Import(NamedTuple):
    importer: str
    imported: str  # the full name of a module of the package, or the name of another top-level package
    at_import_time: bool  # False inside a function, or under TYPE_CHECKING


class Source(NamedTuple):
    text: str
    is_package: bool  # whether it is an __init__.py, whose relative imports start in the package itself


Sources = dict[str, Source]  # by full module name


def parse_sources(texts: dict[str, str]) -> Sources:
    """Return sources by module; `texts` maps paths relative to the package's parent, with slashes, to texts."""
    sources = {}
    for path, text in texts.items():
        module = path.removesuffix(".py").replace("/", ".")
        sources[module.removesuffix(".__init__")] = Source(text, path.endswith("/__init__.py"))
    return sources


def read_sources() -> Sources:
    paths = sorted(ROOT.rglob("*.py"))
    return parse_sources({p.relative_to(ROOT.parent).as_posix(): p.read_text(encoding="utf-8") for p in paths})


def imports_of(sources: Sources) -> list[Import]:
    return [i for module, source in sources.items() for i in _visit(module, ast.parse(source.text), sources, True)]


def _visit(module: str, node: ast.AST, sources: Sources, at_import_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, _known(alias.name, sources), at_import_time)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(module, child, sources)
            for alias in child.names:
                yield Import(module, _known(f"{base}.{alias.name}", sources), at_import_time)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _visit(module, ast.Module(child.body, []), sources, False)
            yield from _visit(module, ast.Module(child.orelse, []), sources, at_import_time)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _visit(module, child, sources, at_import_time and not inside)


def _absolute(module: str, node: ast.ImportFrom, sources: Sources) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    here = parts if sources[module].is_package else parts[:-1]
    return ".".join(here[: len(here) - (node.level - 1)] + (node.module.split(".") if node.module else []))


def _known(name: str, sources: Sources) -> str:
    """Return the longest prefix of a dotted name that is a module of the package, otherwise its top-level package."""
    if name.split(".")[0] != PACKAGE:
        return name.split(".")[0]
    while name not in sources and "." in name:
        name = name.rpartition(".")[0]
    return name


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def wrong_arrows(imports: Iterable[Import]) -> list[str]:
    """Return the imports between rooms that MAY_IMPORT does not allow."""
    wrong = []
    for importer, imported, _ in imports:
        if imported.split(".")[0] != PACKAGE:
            continue
        here, there = room_of(importer), room_of(imported)
        if here not in MAY_IMPORT:
            wrong.append(f"{importer}: give its room a line in MAY_IMPORT, and DESIGN's picture in CONTRIBUTING.md one")
        elif here != there and there not in MAY_IMPORT[here]:
            wrong.append(f"{importer} imports {imported}")
    return wrong


def misplaced_packages(imports: Iterable[Import]) -> list[str]:
    """Return imports of torch, wandb or a compiler in modules that must not have them, even inside functions."""
    wrong = []
    for importer, imported, _ in imports:
        room = room_of(importer)
        torch_free = room in WITHOUT_TORCH or importer in WITHOUT_TORCH_FILES
        if (
            (imported == "torch" and torch_free)
            or (imported == "wandb" and room not in WITH_WANDB)
            or WITH_COMPILER.get(imported, importer) != importer
        ):
            wrong.append(f"{importer} imports {imported}")
    return wrong


def loaded_with(module: str, imports: Iterable[Import], *, stop_at_root: bool) -> dict[str, str]:
    """Return every module that importing a module loads, each with the module that imports it.

    Args:
        stop_at_root: ignore the imports of the package's own __init__.py.
    """
    by_importer: dict[str, list[str]] = {}
    for importer, imported, at_import_time in imports:
        if at_import_time:
            by_importer.setdefault(importer, []).append(imported)
    seen: dict[str, str] = {module: module}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        parents = [current.rpartition(".")[0]] if current.startswith(f"{PACKAGE}.") else []
        for imported in by_importer.get(current, []) + parents:
            if imported not in seen and not (stop_at_root and imported == PACKAGE):
                seen[imported] = current
                waiting.append(imported)
    return seen


@pytest.fixture(scope="module")
def sources() -> Sources:
    return read_sources()


@pytest.fixture(scope="module")
def imports(sources: Sources) -> list[Import]:
    return imports_of(sources)


def test_no_arrow_turns_back(imports: list[Import]) -> None:
    assert wrong_arrows(imports) == []


def test_the_rooms_form_no_circle() -> None:
    order = list(TopologicalSorter(MAY_IMPORT).static_order())  # raises CycleError
    assert order.index("_measure") < order.index("snapshot") < order.index("sinks") < order.index("_watch")


def test_torch_wandb_and_compilers_stay_where_they_belong(imports: list[Import]) -> None:
    assert misplaced_packages(imports) == []


def test_rooms_without_torch_do_not_get_it_through_a_neighbour(sources: Sources, imports: list[Import]) -> None:
    torch_free = [m for m in sources if room_of(m) in WITHOUT_TORCH or m in WITHOUT_TORCH_FILES]
    assert torch_free, "no room was looked at"
    found = {m: loaded_with(m, imports, stop_at_root=True).get("torch") for m in torch_free}
    assert {m: asker for m, asker in found.items() if asker} == {}


def test_importing_the_package_imports_no_extra(imports: list[Import]) -> None:
    loaded = loaded_with(PACKAGE, imports, stop_at_root=False)
    assert {name: asker for name, asker in loaded.items() if name in OPTIONAL} == {}


def test_the_package_imports_where_no_extra_is_installed_and_imports_no_compiler() -> None:
    # Import torch and wandb first, because they import some of these. None in sys.modules makes an import fail.
    program = f"import sys, torch, wandb\nsys.modules.update(dict.fromkeys({sorted(OPTIONAL)!r}))\n"
    program += f"import {PACKAGE}, {PACKAGE}.integrations\nassert 'torch._dynamo' not in sys.modules, 'seconds'"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_optional_packages_are_those_of_pyproject() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\n", text, re.DOTALL)
    assert section is not None
    distributions = re.findall(r'"([a-zA-Z0-9-]+)[>=]', section[1])
    modules = {"pytorch-ignite": "ignite"}
    assert {modules.get(name, name.replace("-", "_")) for name in distributions} <= OPTIONAL


BAD_SOURCES = parse_sources(
    {
        f"{PACKAGE}/__init__.py": "from ._watch import watch",
        f"{PACKAGE}/_watch.py": "import requests\nfrom .rules import Alert",
        f"{PACKAGE}/_measure/__init__.py": "",
        f"{PACKAGE}/_measure/cpu.py": "import triton\nimport torch\nimport numba",
        f"{PACKAGE}/_measure/columns.py": "def f():\n    from ..snapshot import Snapshot\n    import wandb",
        f"{PACKAGE}/snapshot.py": "from ._measure import cpu",
        f"{PACKAGE}/rules/__init__.py": f"import torch\nimport {PACKAGE}._watch",
        f"{PACKAGE}/sinks/__init__.py": "from ..rules import Alert\nfrom .. import _doctor",
        f"{PACKAGE}/_doctor.py": "",
        f"{PACKAGE}/attic.py": "from . import rules",
    }
)


@pytest.mark.parametrize(
    "arrow",
    [
        f"{PACKAGE}._measure.columns imports {PACKAGE}.snapshot",
        f"{PACKAGE}.rules imports {PACKAGE}._watch",
        f"{PACKAGE}.sinks imports {PACKAGE}._doctor",
        f"{PACKAGE}.attic: give its room a line",
    ],
)
def test_an_arrow_that_turns_back_is_found(arrow: str) -> None:
    assert any(found.startswith(arrow) for found in wrong_arrows(imports_of(BAD_SOURCES)))


@pytest.mark.parametrize(
    "misplaced",
    [
        f"{PACKAGE}.rules imports torch",
        f"{PACKAGE}._measure.columns imports wandb",
        f"{PACKAGE}._measure.cpu imports triton",
        f"{PACKAGE}._measure.cpu imports numba",
    ],
)
def test_a_misplaced_package_is_found(misplaced: str) -> None:
    assert misplaced in misplaced_packages(imports_of(BAD_SOURCES))


def test_torch_through_a_neighbour_is_found() -> None:
    loaded = loaded_with(f"{PACKAGE}.snapshot", imports_of(BAD_SOURCES), stop_at_root=True)
    assert loaded["torch"] == f"{PACKAGE}._measure.cpu"


def test_an_extra_at_import_time_is_found_and_a_lazy_one_is_not() -> None:
    loaded = loaded_with(PACKAGE, imports_of(BAD_SOURCES), stop_at_root=False)
    assert loaded["requests"] == f"{PACKAGE}._watch"
    assert "wandb" not in loaded  # because columns imports it inside a function


def test_an_import_for_type_checkers_is_not_at_import_time() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numba\nelse:\n    import rich"
    found = {i.imported: i.at_import_time for i in imports_of(parse_sources({f"{PACKAGE}/rules.py": text}))}
    assert (found["numba"], found["rich"]) == (False, True)
