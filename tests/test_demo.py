"""The demo prints what its run's file contains."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from wandb_gradwatch import _demo as demo
from wandb_gradwatch._page.history import RunHistory
from wandb_gradwatch._page.read import read_run
from wandb_gradwatch._watch import watch

STEPS = demo.MIN_STEPS
ACCIDENT = range(STEPS // 2, STEPS // 2 + demo.ACCIDENT_STEPS)


@pytest.fixture(scope="module", autouse=True)
def _smaller() -> Iterator[None]:
    """Half of the batch: the story is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "BATCH", demo.BATCH // 2)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path, RunHistory]:
    """Exit status, what was printed, the folder, and the run as its file has it."""
    output = tmp_path_factory.mktemp("demo")
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stream):
        patch.setenv("HOME", str(output))
        status = demo.run_demo(output, steps=STEPS)
    return status, stream.getvalue(), output, read_run(output)


def test_the_accident_raises_an_alert_at_its_own_step(finished: tuple[int, str, Path, RunHistory]) -> None:
    status, _, _, history = finished
    assert status == 0
    exploding = [one for one in history.incidents if "exploding_gradient" in (one.kind, *one.kinds)]
    # The first step with the higher rate has an ordinary gradient; the ones after it have not.
    assert any(one.first_step in ACCIDENT and one.first_step > ACCIDENT.start for one in exploding)


def test_every_flush_is_a_row_and_every_parameter_has_its_series(finished: tuple[int, str, Path, RunHistory]) -> None:
    history = finished[3]
    flushed = history.steps[~np.isnan(history.values["gradwatch/grad_norm"])]
    assert flushed.tolist() == list(range(demo.LOG_EVERY, STEPS + 1, demo.LOG_EVERY))
    expected = {name.replace(".", "/") for name, _ in demo.GPT().named_parameters()}
    assert set(history.names) == expected


def test_what_is_printed_is_what_is_in_the_file(finished: tuple[int, str, Path, RunHistory]) -> None:
    _, printed, output, history = finished
    assert f"{STEPS // demo.LOG_EVERY} rows of gradients" in printed
    assert f"{sum(len(series.steps) for series in history.histograms.values())} histograms" in printed
    words = " ".join(printed.split())  # as if it were not wrapped
    for incident in history.incidents:
        assert f"{incident.title} {' '.join(incident.text.split())}" in words
    assert "watcher.summary()" in printed
    assert f"Gradients of {len(history.names)} parameters, steps 1 to {STEPS}" in words
    page = re.search(r"a page +(\S+)", printed)
    assert (Path.cwd() / page[1]).resolve() == (output / demo.PAGE_NAME).resolve()
    assert (output / demo.PAGE_NAME).stat().st_size < 1_000_000
    assert (output / demo.PAGE_NAME).stat().st_size > 0
    run_folder = re.search(r"leet (\S+)", printed)
    assert read_run(run_folder[1]).run_id == history.run_id


def test_in_a_file_the_bar_is_one_line(finished: tuple[int, str, Path, RunHistory]) -> None:
    assert finished[1].splitlines().count("  training") == 1
    assert not re.search(r"^  loss ", finished[1], re.MULTILINE)


def test_the_users_own_rows_are_all_there(finished: tuple[int, str, Path, RunHistory]) -> None:
    # The loop logs once per step; our rows ride on the user's, or come after them.
    assert finished[3].num_rows >= STEPS


def test_ctrl_c_keeps_what_was_logged_and_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = demo._batch, iter(range(1, STEPS))

    def batch(corpus: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if next(calls) == 25:
            raise KeyboardInterrupt
        return real(corpus, device)

    monkeypatch.setattr(demo, "_batch", batch)
    assert demo.run_demo(tmp_path, steps=STEPS) == 130
    history = read_run(tmp_path)
    assert "stopped by Ctrl-C at step 24" in capsys.readouterr().out
    assert history.steps.tolist() == [10, 20, 24]
    assert history.finished


def test_a_run_too_short_for_the_story_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"steps=5 is too short .* give at least {demo.MIN_STEPS}"):
        demo.run_demo(tmp_path / "never", steps=5)
    assert not (tmp_path / "never").exists()


def test_a_python_without_its_sources_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"holds 0 bytes of them; run it with a Python"):
        demo.read_corpus()


def test_a_demo_whose_alert_is_missing_says_so_by_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "watch", lambda model, **arguments: watch(model, rules=[], **arguments))
    monkeypatch.setattr(demo, "MIN_STEPS", 20)
    assert demo.run_demo(tmp_path, steps=20) == 1


def test_the_model_cannot_look_ahead() -> None:
    torch.manual_seed(0)
    model = demo.GPT()
    text_BT = torch.randint(demo.VOCABULARY, (1, demo.CONTEXT))
    changed_BT = text_BT.clone()
    changed_BT[0, -1] = (changed_BT[0, -1] + 1) % demo.VOCABULARY
    before, after = model(text_BT), model(changed_BT)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
