"""The page's one-sentence verdict: the fault, its step, its cause, and its consequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wandb_gradwatch._analysis.formatting import FOUND_PREFIX
from wandb_gradwatch._page.history import OwnSeries, RecordedAlert, RunHistory
from wandb_gradwatch._page.payload import build_payload
from wandb_gradwatch._page.verdict import cause_of, fold, judge

STEPS = np.arange(10, 301, 10)
CALM = np.ones(30)


def said(title: str, step: int, cause: str, level: str = "ERROR") -> RecordedAlert:
    text = f"Step {step}: a fact.\nWorst layers: a 1.\nProbable cause: {cause}. Remedy: look (at it)."
    return RecordedAlert(title, text, level, step)


def run_of(
    *alerts: RecordedAlert, norm: object = CALM, loss: dict[int, float] | None = None, **more: object
) -> RunHistory:
    """Return a run of 300 steps with a row of gradients every 10; the loss is 2.5 except at the given steps."""
    values = {"gradwatch/grad_norm_max": np.asarray(norm), **more.pop("values", {})}  # type: ignore[dict-item]
    own_steps = np.arange(1.0, 301)
    own = {"loss": OwnSeries(own_steps, np.array([(loss or {}).get(int(step), 2.5) for step in own_steps]))}
    return RunHistory(Path("run-x.wandb"), "x", STEPS, values, own=own, alerts=alerts, **more)  # type: ignore[arg-type]


def at(row: int, value: float, until: int | None = None) -> np.ndarray:
    """Return ones, with another value in the given rows."""
    norm = CALM.copy()
    norm[row : row + 1 if until is None else until] = value
    return norm


EXPLOSION = said("Exploding gradient", 151, "learning rate too high (the update of step 150 (344x) is large)")
NAN = (
    "not clear: either learning rate too high (552 % per step), or inputs that are not finite (at 156); a run with a "
    "tenth of the learning rate tells them apart"
)


MOODS = {
    "Broke": "bad",
    "NaN": "bad",
    "Ended": "bad",
    "Unusual": "careful",
    "No": "good",
}  # by the first word of the sentence
SENTENCES: dict[str, RunHistory] = {
    # The window of steps 151 to 160 is row 15; the row of step 170 is the first with usual norms again.
    "Broke at step 151: learning rate too high; NaN or Inf from 156; usual again at step 170": run_of(
        EXPLOSION,
        said("Parameters grow too fast", 153, "learning rate too high (35 %)"),
        said("NaN gradient", 156, NAN),
        norm=at(15, 2.9e22),
        loss=dict.fromkeys(range(156, 160), np.nan),
    ),
    "Broke at step 201: learning rate too high, or inputs that are not finite; not usual again by step 300": run_of(
        said("NaN gradient", 201, NAN), norm=at(20, np.nan, 30), loss=dict.fromkeys(range(201, 301), np.nan)
    ),
    "Broke at step 101: one bad batch; usual again at step 120": run_of(
        said("Exploding gradient", 101, "one bad batch (of step 101)"), norm=at(10, 50)
    ),
    "Broke at step 101: aten.log in a, b.py:3, made 2 Inf of 4; usual again at the next measured step, 110": run_of(
        said("NaN gradient", 101, f"{FOUND_PREFIX}aten.log in a, b.py:3, made 2 Inf of 4 (at (0,), (1,)).\nIt read")
    ),
    "Unusual from step 40 or in steps 31 to 39, which were not measured: saturating activations": run_of(
        said("Vanishing gradient", 40, "saturating activations (norms fall 4e3x)", "WARN")
    ),
    "Broke at step 100 or in steps 91 to 99, which were not measured: frozen or unused layers": run_of(
        said("Initial weights", 1, "poor initialisation", "WARN"),
        said("No gradient", 100, "frozen or unused layers (a, b)"),
    ),
    # Without any alert, the logged values show it: the row of steps 41 to 50.
    "NaN or Inf from step 50 or in steps 41 to 49, which were not measured; "
    "usual again at the next measured step, 60": run_of(values={"gradwatch/num_nan": at(4, 7) - 1}, norm=at(4, np.nan)),
    "Ended early: no alert in 30 of 300 steps measured; the process ended with exit code 1": run_of(exit_code=1),
    "No alert in 30 of 300 steps measured": run_of(),
    "No alert so far in 30 of 300 steps measured": run_of(finished=False),
    "No alert but a remark at step 30 (one bad batch) in 30 of 300 steps measured": run_of(
        said("Exploding gradient", 30, "one bad batch", "INFO")
    ),
}


@pytest.mark.parametrize("text", SENTENCES)
def test_one_sentence_describes_the_training(text: str) -> None:
    verdict = judge(SENTENCES[text])
    assert (verdict.mood, verdict.text) == (MOODS[text.split()[0].rstrip(":")], text)
    assert build_payload(SENTENCES[text])[0]["verdict"] == {"mood": verdict.mood, "text": text}


def test_a_loss_scaler_that_skips_overflows_is_no_accident() -> None:
    values = {"gradwatch/num_inf": at(4, 7) - 1, "gradwatch/num_skipped_steps": at(4, 2) - 1}
    assert judge(run_of(values=values)) == judge(run_of())


def test_an_alert_without_a_cause_is_described_by_its_title() -> None:
    assert cause_of(RecordedAlert("Head too large", "head.weight has a norm of 12", "WARN", 3)) == "head too large"
    assert cause_of(RecordedAlert("NaN gradient", "12 elements", "ERROR", 3)) == "NaN gradient"


def test_alerts_are_folded_by_title_and_the_most_severe_come_first() -> None:
    alerts = [
        said("Layer spread", 5, "depth", "WARN"),
        said("NaN gradient", 40, "x"),
        said("Exploding gradient", 20, "x", "WARN"),
        said("Exploding gradient", 30, "x"),
    ]
    assert [[alert.step for alert in group] for group in fold(alerts)] == [[20, 30], [40], [5]]
    payload = build_payload(run_of(*alerts))[0]["alerts"]
    assert [(alert["title"], alert["level"], [one["step"] for one in alert["times"]]) for alert in payload] == [
        ("Exploding gradient", "ERROR", [20, 30]),
        ("NaN gradient", "ERROR", [40]),
        ("Layer spread", "WARN", [5]),
    ]
