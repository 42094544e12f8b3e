"""Messages to the user: alerts on standard error, the line at the end, and messages that are logged once."""

from __future__ import annotations

import math

import pytest
import torch
from gradients import Chosen, only, step, watch

import wandb_gradwatch
from wandb_gradwatch import Alert, ConsoleSink, MemorySink, Sink

SGD = torch.optim.SGD


def train(gradients, **options):
    """Train one step with each of these gradients of one element, then remove the watcher."""
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model, **{"rules": [only("nan_gradient")]} | options)
    for gradient in gradients:
        step(model, optimizer, a=[gradient])
    watcher.remove()


def warn_at_2(snapshot):
    return Alert("Two", "It is step 2.", 2, "WARN") if snapshot.steps[0] == 2 else None


def test_an_error_is_said_on_standard_error_once_in_an_incident_and_the_end_is_the_verdict(capsys):
    train([1, 1, math.nan, math.nan, 1], rules=[only("nan_gradient"), warn_at_2])
    said = capsys.readouterr().err
    assert said.count("wandb_gradwatch: ERROR: Step 3: ") == said.count("ERROR") == 1
    assert said.splitlines()[-1].startswith("wandb_gradwatch: broke at step 3: ")
    assert said.splitlines()[-1].endswith("; 1 more incident; 5 of 5 steps measured.")
    assert "It is step 2." not in said  # warnings go to the sinks only


@pytest.mark.parametrize(
    ("every", "ending"),
    [
        (1, "no alert in 4 of 4 steps measured."),
        (3, "no alert in 1 of 4 steps measured."),
        (9, "nothing was measured in 4 steps."),
    ],
)
def test_a_run_without_alerts_ends_with_how_much_of_it_was_measured(capsys, every, ending):
    train([1, 1, 1, 1], sample_every=every)
    assert capsys.readouterr().err == f"wandb_gradwatch: {ending}\n"


def test_a_model_that_makes_no_step_ends_without_a_word(capsys):
    train([])
    assert capsys.readouterr().err == ""


def test_after_a_restart_the_steps_before_are_not_counted(capsys):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    first, _ = watch(model, start_step=100)
    step(model, optimizer, a=[1])
    state = first.state_dict()
    first.remove()
    second, _ = watch(model)
    second.load_state_dict(state)
    for _ in range(2):
        step(model, optimizer, a=[1])
    second.remove()
    endings = [f"wandb_gradwatch: no alert in {steps} measured." for steps in ("1 of 1 step", "2 of 2 steps")]
    assert capsys.readouterr().err.splitlines() == endings


def test_the_last_line_has_the_command_that_shows_the_page(offline_run, capsys, monkeypatch):
    monkeypatch.chdir(offline_run.settings.wandb_dir)
    train([math.nan], sinks=None, run=offline_run)
    last = capsys.readouterr().err.splitlines()[-1]
    words, _, command = last.partition("wandb-gradwatch view ")
    assert words.startswith("wandb_gradwatch: broke at step 1: ")
    assert words.endswith("; 1 of 1 step measured. To see the page of the run: ")
    assert command.startswith("offline-run-")  # below the working directory
    assert command.endswith(offline_run.id)


@pytest.mark.parametrize("to_file", [False, True])
def test_a_console_in_the_terminal_says_it_instead_and_one_in_a_file_does_not(tmp_path, capsys, to_file):
    with open(tmp_path / "log.txt", "w") as file:
        train([math.nan], sinks=[ConsoleSink(file if to_file else None)])
    assert capsys.readouterr().err.count("ERROR") == 1


def test_print_is_a_callback_that_people_can_read(capsys):
    train([1, 1], rules=[warn_at_2], on_alert=print)
    assert capsys.readouterr().out == "WARN at step 2: Two\n    It is step 2.\n"


def test_a_sink_that_declares_nothing_of_its_own_is_one():
    """Every method of a sink has a default: windows, errors with their recording and the end work without overrides."""

    class Silent(Sink):
        pass

    memory = MemorySink()
    train([1, math.nan], sinks=[Silent(), memory])
    assert (len(memory.snapshots), len(memory.alerts), memory.closed) == (2, 1, True)
    with pytest.raises(TypeError, match=r"sinks=.* must be a list of sinks, derived from wandb_gradwatch\.Sink"):
        watch(Chosen(a=1), sinks=[object()])


def test_what_lasts_is_said_once_and_at_the_end_with_its_count(said):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(3):
        model.loss(a=[1]).backward()
        optimizer.zero_grad()  # between the backward and the step
        optimizer.step()
    assert [alert.incident.cause for alert in sink.alerts] == ["gradients_zeroed"]
    (incident,) = watcher.verdict().incidents
    assert (incident.first_step, incident.last_step) == (1, 3)
    watcher.remove()
    (again,) = [text for text in said() if "times in all" in text]
    assert again.startswith("wandb_gradwatch: 3 times in all measured steps: step 1: every gradient was already None")


def test_a_resumed_training_does_not_say_again_what_it_has_said():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    state, alerts = None, []
    for _ in range(2):
        watcher, _ = watch(model, on_alert=alerts.append)
        if state is not None:
            watcher.load_state_dict(state)
        model.loss(a=[1]).backward()
        optimizer.zero_grad()
        optimizer.step()
        state = watcher.state_dict()
        watcher.remove()
    assert len(alerts) == 1


def test_layers_in_a_plain_list_are_not_registered_and_that_is_what_is_said():
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [torch.nn.Linear(1, 1) for _ in range(3)]

    with pytest.raises(ValueError, match="no parameter is registered in Plain, whose 'layers' is a plain list of modu"):
        wandb_gradwatch.watch(Plain(), sinks=[])
    with pytest.raises(ValueError, match="no parameter is registered in ReLU; pass the model that is trained"):
        wandb_gradwatch.watch(torch.nn.ReLU(), sinks=[])
