"""Integrations are optional: frameworks are imported only when used, and errors name a missing framework."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, inherited, script

FRAMEWORKS = ("lightning", "pytorch_lightning", "ignite", "transformers", "accelerate", "peft")


def run(program: str) -> str:
    environment = {**inherited(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["lightning", "ignite", "transformers"])
def test_a_missing_framework_names_its_extra(extra: str) -> None:
    program = f"""
import sys
from collections.abc import Callable
sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))  # None: the import fails
try:
    import wandb_gradwatch.integrations.{extra}
except ImportError as error:
    print(error)
"""
    said = run(program)
    assert f"run: pip install 'wandb-gradwatch[{extra}]'" in said
    assert said.startswith(f"wandb_gradwatch.integrations.{extra} needs ")


def test_pytorch_lightning_alone_is_enough(tmp_path: Path) -> None:
    """Train and resume in a process in which `lightning` cannot be imported."""
    pytest.importorskip("pytorch_lightning")
    done = script(ROOT / "tests/oldest_frameworks.py", "pytorch_lightning", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("watches with pytorch_lightning ")


@pytest.mark.parametrize(
    "options",
    [
        {"log": "grads"}, {"include": "("}, {"exclude": 5}, {"sample_every": 0}, {"log_every": 0.5},
        {"histogram_every": -1}, {"max_overhead": 0}, {"group_by": "layer"}, {"details": ["size"]}, {"metrics": [3]},
        {"rules": [3]}, {"sinks": [print]}, {"on_alert": 5}, {"guard": "no"}, {"on_nonfinite": True},
        {"dead_threshold": -1}, {"optimizer": "adam"}, {"scaler": 8.0}, {"loss_scale": 0}, {"start_step": -1},
        {"backend": "gpu"}, {"run": "mine"},
    ],
    ids=str,
)  # fmt: skip
def test_what_watch_refuses_is_refused_when_the_callback_is_made_in_the_same_words(options: dict[str, Any]) -> None:
    import torch

    from wandb_gradwatch import watch
    from wandb_gradwatch.integrations._session import Session

    with pytest.raises((TypeError, ValueError)) as of_watch:
        watch(torch.nn.Linear(1, 1), **{"sinks": [], **options})
    options = dict(options)
    run = options.pop("run", None)
    with pytest.raises((TypeError, ValueError)) as of_callback:
        Session("Callback", options, reserved=(), run=run)
    assert str(of_callback.value) == str(of_watch.value)


def test_that_list_has_every_argument_of_watch() -> None:
    import inspect

    from wandb_gradwatch import watch

    (marks,) = test_what_watch_refuses_is_refused_when_the_callback_is_made_in_the_same_words.pytestmark
    tried = {name for options in marks.args[1] for name in options}
    assert tried == set(inspect.signature(watch).parameters) - {"model"}


def test_the_rules_are_those_that_watch_takes() -> None:
    """A trainable layer that is never used raises an alert, a frozen one does not; metrics bring their own rules."""
    import torch
    from torch import nn

    from wandb_gradwatch import MemorySink, watch
    from wandb_gradwatch.integrations._session import Session
    from wandb_gradwatch.metrics import Activations

    def alerts_of(begin: Callable[..., object], end: Callable[[], None], memory: MemorySink) -> list[tuple[str, str]]:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("used", "unused", "frozen")})
        model["frozen"].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        begin(model)
        for number in range(107):
            optimizer.zero_grad()
            loss = model["used"](torch.full((1, 2), float("inf") if number == 105 else 1.0)).sum()
            (loss if number != 105 else 0 * model["used"].weight.sum()).backward()
            optimizer.step()
        end()
        return [(alert.title, alert.text) for alert in memory.alerts]

    memory, other = MemorySink(), MemorySink()
    session = Session("Ours", {"metrics": [Activations()]}, reserved=())
    ours = alerts_of(lambda model: session.begin(model, sinks=[memory], sample_every=1), session.end, memory)
    watchers = []
    plain = alerts_of(
        lambda model: watchers.append(watch(model, sinks=[other], metrics=[Activations()], sample_every=1)),
        lambda: watchers[0].remove(),
        other,
    )
    texts = dict(ours)  # other rules alert for this unusual training, too
    assert texts.keys() >= {"Non-finite activation", "No gradient"}
    assert "unused.weight" in texts["No gradient"]
    assert "frozen." not in texts["No gradient"]
    assert ours == plain


def test_options_may_be_none_as_in_watch() -> None:
    from torch import nn

    from wandb_gradwatch.integrations._session import Session

    session = Session("Ours", dict.fromkeys(("metrics", "rules", "sinks")), reserved=())
    session.begin(nn.Linear(1, 1))
    assert session.watcher is not None
    session.end()


def test_the_last_sample_is_judged_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    """A layer is unused for the 100th time in the last update of its optimizer, whose sample is open until the end."""
    import torch
    from torch import nn

    from wandb_gradwatch import MemorySink
    from wandb_gradwatch.integrations._session import Session

    model, memory = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("a", "b", "unused")}), MemorySink()
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=1e-4) for name in ("a", "b")]
    optimizers[0].add_param_group({"params": model["unused"].parameters()})
    session = Session("Ours", {}, reserved=())
    session.begin(model, sinks=[memory], sample_every=1)
    for number in range(199):  # optimizers in turn, as in a GAN: a sample stays open until the next backward
        name = ("a", "b")[number % 2]
        model[name](torch.ones(1, 1)).sum().backward()
        optimizers[number % 2].step()
        optimizers[number % 2].zero_grad()
    assert not memory.alerts
    session.end()
    assert [(alert.title, alert.step) for alert in memory.alerts] == [("No gradient", 199)]
    assert "raised and is dropped" not in caplog.text


def test_the_documentation_names_the_floors_and_the_newest_versions_that_are_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    floors = dict(re.findall(r'"([a-z-]+)>=([\d.]+)"', project))
    page = (ROOT / "docs/frameworks.md").read_text(encoding="utf-8")
    newest = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, package in {
        "Lightning": "lightning",
        "Ignite": "pytorch-ignite",
        "transformers": "transformers",
        "Accelerate": "accelerate",
    }.items():
        assert re.search(rf"^\|.*{name} {re.escape(floors[package])}\b[^.]", page, re.MULTILINE), (name, "floor")
        assert re.search(rf"^Tested up to .*{name} {re.escape(newest[package])}\b", page, re.MULTILINE), (
            name,
            "newest",
        )
