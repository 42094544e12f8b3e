"""The code in the README and in docs/ runs as shown, and the targets of their links exist."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from torch import nn

import wandb_gradwatch
from benchmarks import alerts
from wandb_gradwatch import ConsoleSink, MemorySink, metrics, unwatch, watch
from wandb_gradwatch._judgement.symptoms import SYMPTOMS
from wandb_gradwatch.rules._base import ShippedRule

ROOT = Path(__file__).parent.parent
PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = PAGES["README.md"]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, text in PAGES.items()
    if name != "frameworks.md"  # its scripts need two ranks: test_recipes.py
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
]
RECIPES = re.findall(r"\| `(?:with )?(watch\(.+?\))(?: as .*)?` \|$", PAGES["recipes.md"], re.MULTILINE)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)


class Model(nn.Module):
    """Has the modules that the README's snippets name: `attn` in a block, and `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(torch.relu(self.block.attn(inputs))))


def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 1e3 * nn.functional.mse_loss(outputs, targets)  # large enough for the rule about the head


@pytest.fixture
def readers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return what a snippet requires: a model, an optimizer and data; the working directory is an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WEBHOOK_URL", "http://127.0.0.1:9/")  # nothing is sent: there is no alert
    torch.manual_seed(0)
    model = Model()
    yield {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6),
        "loss_function": loss_function,
        "data": [(torch.randn(8, 4), torch.ones(8, 1)) for _ in range(3)],
    }
    unwatch()
    if wandb.run is not None:
        wandb.finish()


def train(names: dict[str, Any]) -> None:
    for inputs, targets in names["data"]:
        names["optimizer"].zero_grad()
        loss_function(names["model"](inputs), targets).backward()
        names["optimizer"].step()


def test_there_are_snippets_and_recipes_to_run() -> None:
    assert len(BLOCKS) >= 6
    assert len(RECIPES) >= 10


@pytest.mark.parametrize("block", BLOCKS)
def test_every_snippet_runs(block: str, readers_names: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    if "wandb.init" not in block:  # readers have a run already
        wandb.init(project="demo", settings=wandb.Settings(silent=True, console="off"))
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        exec(compile(block, "README.md", "exec"), readers_names)
        if "watch(" in block and "watcher.remove()" not in block:
            assert any(watcher.watches(readers_names["model"]) for watcher in wandb_gradwatch._watcher.WATCHERS)
            train(readers_names)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("title", "words"),
    [("Head too large", "head.weight has a norm of"), ("Gradient to parameter ratio", "head.weight ")],
)
def test_the_rules_of_ones_own_speak(title: str, words: str, readers_names: dict[str, Any]) -> None:
    (block,) = [param.values[0] for param in BLOCKS if f'@wandb_gradwatch.rule(title="{title}"' in param.values[0]]
    wandb.init(project="demo", settings=wandb.Settings(silent=True, console="off"))
    exec(compile(block, "README.md", "exec"), readers_names)
    (watcher,) = wandb_gradwatch._watcher.WATCHERS
    train(readers_names)
    watcher.flush()
    (incident,) = [incident for incident in watcher.verdict().incidents if incident.title == title]
    assert incident.level == "WARN"
    assert words in incident.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_valid_call(recipe: str, readers_names: dict[str, Any]) -> None:
    wandb.init(project="demo", settings=wandb.Settings(silent=True, console="off"))
    scope = {
        "watch": watch,
        "wandb": wandb,
        "MemorySink": MemorySink,
        "ConsoleSink": ConsoleSink,
        "generator": nn.Linear(2, 2),
        "discriminator": nn.Linear(2, 1),
        **readers_names,
    }
    watcher = eval(recipe.replace("\\|", "|"), scope)
    train(readers_names)
    assert watcher.parameter_names
    watcher.remove()


def test_the_tables_of_alerts_are_those_of_the_judgement() -> None:
    page = PAGES["alerts.md"]
    assert alerts.rendered(page) == page, "run python -m benchmarks.alerts"
    assert set(alerts.LOOKS_FOR) == {symptom.kind for symptom in SYMPTOMS}


def test_every_rule_of_a_metric_stands_on_the_page_of_alerts() -> None:
    shipped = [one for one in vars(metrics).values() if isinstance(one, type) and issubclass(one, ShippedRule)]
    assert len(shipped) > 5
    assert [one for one in shipped if f"| {one.title} |" not in PAGES["alerts.md"]] == []


@pytest.mark.parametrize("room", ["", ".metrics", ".rules", ".sinks", ".snapshot"])
def test_every_public_name_is_in_the_documents_and_not_in_the_list_of_all_names_alone(room: str) -> None:
    text = "\n".join(page for name, page in PAGES.items() if name != "api.md")
    public = importlib.import_module(f"wandb_gradwatch{room}").__all__
    assert [name for name in public if name != "__version__" and not re.search(rf"\b{name}\b", text)] == []


def test_links_and_the_picture_lead_to_files_that_are_there() -> None:
    # The site's builder checks the links between the pages of docs/.
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/page.png" in links
    made = {"docs/benchmarks.md"}  # generated by `make bench`, with the table of costs
    missing = [link for link in links if "://" not in link and link not in made and not (ROOT / link).is_file()]
    assert missing == []


def test_every_page_is_on_the_site_and_linked_from_the_readme_or_the_site_alone() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(PAGES) - {"README.md"}
    assert {page for page in pages if f": {page}\n" not in navigation} == set()
    assert {page for page in pages - {"index.md", "api.md"} if f"](docs/{page})" not in README} == set()


def test_the_table_of_arguments_has_those_of_watch() -> None:
    page = PAGES["api.md"]
    table = page[page.index("| argument | default |") :].split("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(inspect.signature(watch).parameters)


def test_the_examples_of_the_recipes_are_all_there_and_all_named() -> None:
    named = set(re.findall(r"examples/(\w+)\.py", PAGES["recipes.md"]))
    assert named == {path.stem for path in (ROOT / "examples").glob("*.py")}


def test_every_room_of_the_package_stands_in_the_corridors_picture() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = text[text.index("```\n gradient tensor") : text.index("The law behind it")]
    package = ROOT / "wandb_gradwatch"
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert {room for room in files | folders if room not in picture} == set()
    named = set(re.findall(r"[a-z_]+\.py", picture))
    assert {name for name in named if not list(package.rglob(name))} == set()


def test_the_way_of_a_gradient_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## The way of one gradient") : text.index("## To add a column")]
    stops = re.findall(r"`([\w/]+)\.py` `([\w.]+)`", section)
    assert len(stops) >= 25
    for path, name in stops:
        found: Any = importlib.import_module("wandb_gradwatch." + path.replace("/", ".").removesuffix(".__init__"))
        for part in name.split("."):
            found = getattr(found, part)
