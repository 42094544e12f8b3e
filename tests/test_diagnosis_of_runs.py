"""W&B's diagnosis of a run, which reads the first key with "loss" in it, is the same with and without us."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from offline import history

import wandb_gradwatch
from wandb_gradwatch.snapshot import keys

NUM_STEPS = 60
Log = Callable[..., None]


def diagnosed(rows: list[dict[str, Any]]) -> str:
    """What `diagnose_run` of W&B's server for agents says: the halves of the first loss in the first ten rows."""
    rows = [row for row in rows if set(row) - {"_step", "_runtime", "_timestamp"}]
    found = min((key for row in rows[:10] for key in row if "loss" in key.lower()), default=None)
    if found is None:
        return "no loss"
    values = [value for row in rows if math.isfinite(value := float(row.get(found, math.nan)))]
    middle = len(values) // 2
    if not middle:
        return f"{found}: too short"
    first, second = (sum(half) / len(half) for half in (values[:middle], values[middle:]))
    if second > 1.1 * first:
        return f"{found}: diverging"
    return f"{found}: " + ("improving" if second < 0.9 * first else "flat")


def every_step(log: Log, step: int, loss: float) -> None:
    log({"loss": loss})


def rarely(log: Log, step: int, loss: float) -> None:
    if step % 12 == 0:
        log({"loss": loss})


def late(log: Log, step: int, loss: float) -> None:
    """Others first: the loss is in none of the first ten rows."""
    log({"accuracy": 1 / (1 + loss)} | ({"loss": loss} if step > 30 else {}))


def below_train(log: Log, step: int, loss: float) -> None:
    log({"train/loss": loss, "train/accuracy": 0.5})


def nested(log: Log, step: int, loss: float) -> None:
    log({"train": {"loss": loss}})


def validation(log: Log, step: int, loss: float) -> None:
    log({"lr": 0.1} | ({"val_loss": loss} if step % 5 == 0 else {}))


def own_steps(log: Log, step: int, loss: float) -> None:
    log({"accuracy": 0.5}, step=3 * step)
    log({"train_loss": loss}, step=3 * step)


def without_commits(log: Log, step: int, loss: float) -> None:
    log({"loss": loss}, commit=step % 6 == 0)


def like_transformers(log: Log, step: int, loss: float) -> None:
    if step % 5 == 0:
        log({"train/loss": loss, "train/grad_norm": 1.0, "train/global_step": step})
    if step % 20 == 0:
        log({"eval/loss": 2 * loss, "train/global_step": step})


def never(log: Log, step: int, loss: float) -> None:
    log({"accuracy": 1 / (1 + loss)})


def wandb_rows(
    run: Any, user: Callable[[Log, int, float], None], *, rate: float, scaled: bool, is_watched: bool
) -> Any:
    """The W&B history of a training whose loss is the square of a parameter, which is multiplied by 1 - 2 * rate."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), abs(rate), maximize=rate < 0)
    if is_watched:
        options = {"loss_scale": 8.0} if scaled else {}
        wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=2, rules=[], **options)
    for step in range(1, NUM_STEPS + 1):
        loss = model.weight.square().sum()
        optimizer.zero_grad()
        (loss * 8.0 if scaled else loss).backward()
        if scaled:
            model.weight.grad /= 8.0
        optimizer.step()
        user(run.log, step, loss.item())
    wandb_gradwatch.unwatch(model)
    run.finish()
    return history(run)


USERS: Mapping[str, Callable[[Log, int, float], None]] = {
    user.__name__: user
    for user in (
        *(every_step, rarely, late, below_train, nested, validation, own_steps, without_commits),
        *(like_transformers, never),
    )
}
TRAININGS = [(name, 0.01, False, "improving") for name in USERS]
TRAININGS += [("every_step", -0.01, False, "diverging"), ("below_train", 0.0, False, "flat")]
TRAININGS += [("every_step", 0.01, True, "improving"), ("rarely", -0.01, True, "diverging")]


@pytest.mark.parametrize(("user", "rate", "scaled", "expected"), TRAININGS)
def test_a_run_is_diagnosed_as_without_us(
    start_run: Callable[..., Any], user: str, rate: float, scaled: bool, expected: str
) -> None:
    plain, watched = (
        wandb_rows(start_run(), USERS[user], rate=rate, scaled=scaled, is_watched=watched) for watched in (False, True)
    )
    assert diagnosed(watched) == diagnosed(plain)
    assert diagnosed(plain) == "no loss" or diagnosed(plain).endswith(expected)
    assert (diagnosed(plain) == "no loss") == (user in ("late", "never"))
    assert any("gradwatch/grad_norm" in row for row in watched)


def rows_with_our_loss(rows: list[dict[str, Any]]) -> list[int]:
    return [place for place, row in enumerate(rows) if "gradwatch/loss" in row]


def test_our_loss_is_in_no_row_of_a_user_who_logs_one_and_ends_with_his_first(start_run: Callable[..., Any]) -> None:
    def rows_of(user: str) -> list[dict[str, Any]]:
        return wandb_rows(start_run(), USERS[user], rate=0.01, scaled=False, is_watched=True)

    assert rows_with_our_loss(rows_of("every_step")) == []
    # The rows of steps 2, 4, ... hold one of ours. The first ten are left alone; the 31st has the user's first loss.
    assert rows_with_our_loss(rows_of("late")) == [step - 1 for step in range(12, 31, 2)]
    assert rows_with_our_loss(rows_of("never")) == [step - 1 for step in range(12, NUM_STEPS + 1, 2)]


def test_whoever_logs_nothing_has_our_loss_in_the_rows_of_the_end(start_run: Callable[..., Any]) -> None:
    rows = wandb_rows(start_run(), lambda log, step, loss: None, rate=0.01, scaled=False, is_watched=True)
    found = [row["gradwatch/loss"] for row in rows if "gradwatch/loss" in row]
    assert len(found) >= NUM_STEPS / 2 - 1  # one row may be in W&B's open row before
    assert all(later < earlier for earlier, later in itertools.pairwise(found))


def test_no_key_of_the_model_but_the_loss_contains_the_word() -> None:
    written = {key for name, key in vars(keys).items() if name.isupper() and isinstance(key, str)}
    of_rows = {key for key in {*written, *keys.MODEL_KEYS} if key != keys.NUM_NONFINITE_LOSS}
    assert {key for key in of_rows if keys.OF_A_LOSS in key} == {keys.LOSS, keys.OF_A_LOSS}
