"""Signals that come before the loss moves: four small trainings with one fault each, and the same without it.

The signal is the first alert of the metric's rule (of NoiseScale, which has none, a noise scale of 4 times its median
before). The loss has moved where the mean of its last 10 values is twice the smallest median of 50 such means before,
or not finite. Writes the table into docs/metrics.md.

    python -m benchmarks.leads [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch.metrics import (
    Attention,
    DeadExperts,
    GrowingLogits,
    ModuleProbe,
    NoiseScale,
    OptimizerState,
    OutgrownUpdate,
    Router,
    log_attention,
)
from wandb_gradwatch.metrics._metric import rules_of

PAGE: Final = Path(__file__).parent.parent / "docs/metrics.md"
BEGIN, END = "<!-- leads: written by python -m benchmarks.leads -->", "<!-- end of leads -->"
_MEAN_OF: Final = 10
_USUAL_OF: Final = 50  # means whose median is usual
_MOVED: Final = 2.0
_NOISIER: Final = 4.0

# Makes a step: its loss, before the update.
Step = Callable[[int], float]


@dataclass(frozen=True)
class Case:
    """A training with a fault from some step on, or without it.

    Args:
        name: the fault.
        signal: what tells of it.
        make: from a seed, and whether there is the fault, the model, its metric and what makes a step.
        steps: of the training.
        faulty_from: the step at which the fault begins.
    """

    name: str
    signal: str
    make: Callable[[int, bool], tuple[nn.Module, ModuleProbe, Step]]
    steps: int
    faulty_from: int


@dataclass(frozen=True)
class Outcome:
    """When the signal came, and when the loss moved; None for never."""

    signal: int | None
    loss: int | None


def quiet_features(seed: int, is_faulty: bool) -> tuple[nn.Module, ModuleProbe, Step]:
    """Most of the features are silent for 3,000 steps, then twice as large: Adam's second moment has decayed."""
    torch.manual_seed(seed)
    truth = torch.randn(272, 1)
    model = nn.ModuleDict({"loud": nn.Linear(16, 1, bias=False), "quiet": nn.Linear(256, 1, bias=False)})
    with torch.no_grad():  # it has been trained: what is left of the gradient is noise
        model["loud"].weight.copy_(truth[:16].T)
        model["quiet"].weight.copy_(truth[16:].T)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def step(number: int) -> float:
        inputs = torch.randn(128, 272)
        if is_faulty and 500 < number <= 3500:
            inputs[:, 16:] = 0.0
        if is_faulty and number > 3500:
            inputs[:, 16:] *= 2.0
        targets = inputs @ truth + 0.1 * torch.randn(128, 1)
        loss = (model["loud"](inputs[:, :16]) + model["quiet"](inputs[:, 16:]) - targets).square().mean()
        return _update(optimizer, loss)

    return model, OptimizerState(), step


class Retrieval(nn.Module):
    """Attention that finds the place whose key is the query, with logits in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, places: Tensor, asked: Tensor) -> Tensor:
        query, key = self.query(asked)[:, None], self.key(places)[:, None]
        log_attention(self, query, key)
        logits = (query.half() @ key.half().transpose(-2, -1) / 4)[:, 0].float()
        return torch.log_softmax(logits, dim=-1)


def growing_queries(seed: int, is_faulty: bool) -> tuple[nn.Module, ModuleProbe, Step]:
    """Query weights that grow by 2 % a step from step 100 on, until a logit is too large for float16."""
    torch.manual_seed(seed)
    model = Retrieval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(number: int) -> float:
        places = nn.functional.normalize(torch.randn(32, 8, 16), dim=-1)
        answer = torch.randint(8, (32,))
        asked = places[torch.arange(32), answer][:, None] + 0.1 * torch.randn(32, 1, 16)
        loss = nn.functional.nll_loss(model(places, asked)[:, 0], answer)
        value = _update(optimizer, loss)
        if is_faulty and number > 100:
            with torch.no_grad():
                model.query.weight *= 1.02
        return value

    return model, Attention(statistics=["norm"]), step


class Mixture(nn.Module):
    """Four experts, of which each token goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(tokens), dim=-1)
        best, chosen = weights.max(dim=-1)
        outputs = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        return best[:, None] * outputs[torch.arange(len(tokens)), chosen]


def absent_domain(seed: int, is_faulty: bool) -> tuple[nn.Module, ModuleProbe, Step]:
    """One of four kinds of tokens is absent for 300 steps, while weight decay wears its expert away."""
    torch.manual_seed(seed)
    model = Mixture()
    centres, maps = 4 * torch.eye(4, 8), torch.randn(4, 8, 8) / 3
    with torch.no_grad():  # each expert has its kind from the beginning
        model.gate.weight.copy_(torch.eye(4, 8))
        model.gate.bias.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)

    def step(number: int) -> float:
        kinds = torch.randint(3 if is_faulty and 400 < number <= 700 else 4, (128,))
        tokens = centres[kinds] + 0.3 * torch.randn(128, 8)
        targets = torch.einsum("ti,tij->tj", tokens, maps[kinds])
        return _update(optimizer, (model(tokens) - targets).square().mean())

    return model, Router("gate$"), step


def noisier_gradients(seed: int, is_faulty: bool) -> tuple[nn.Module, ModuleProbe, Step]:
    """Gradients that become noisier from step 200 on, as by a lossy compression: the loss of a step does not see it."""
    torch.manual_seed(seed)
    truth = torch.randn(64, 1)
    model = nn.Linear(64, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-4)
    noise = [0.0]
    model.weight.register_hook(lambda gradient: gradient + noise[0] * torch.randn_like(gradient))  # type: ignore[no-untyped-call]

    def step(number: int) -> float:
        noise[0] = 2.0 * max(number - 200, 0) if is_faulty else 0.0
        optimizer.zero_grad()
        total = 0.0
        for _ in range(4):
            inputs = torch.randn(16, 64)
            loss = (model(inputs) - inputs @ truth - torch.randn(16, 1)).square().mean() / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return model, NoiseScale(), step


def _update(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


CASES: Final = (
    Case("features that come back larger after 3,000 steps", OutgrownUpdate.title, quiet_features, 3600, 3500),
    Case("query weights that grow by 2 % a step", GrowingLogits.title, growing_queries, 700, 100),
    Case("a kind of tokens that is absent for 300 steps", DeadExperts.title, absent_domain, 800, 400),
    Case("gradients that become noisier", f"noise scale, {_NOISIER:.0f} times", noisier_gradients, 500, 200),
)


def run(case: Case, seed: int, *, is_faulty: bool) -> Outcome:
    """Train, and find the steps at which the signal came and the loss moved, from the fault's begin on."""
    model, metric, step = case.make(seed, is_faulty)
    sink = MemorySink()

    def every(number: int) -> int:
        return 1 if number > case.faulty_from - 100 else 25

    watcher = wandb_gradwatch.watch(
        model, metrics=[metric], sinks=[sink], rules=rules_of([metric]), sample_every=every, log_every=10**6
    )
    losses = [step(number) for number in range(1, case.steps + 1)]
    watcher.remove()
    return Outcome(next(_signals(case, sink), None), _moved(losses, case.faulty_from))


def _signals(case: Case, sink: MemorySink) -> Iterator[int]:
    yield from (alert.step for alert in sink.alerts if alert.step > case.faulty_from)
    merged = sink.merged()
    assert merged is not None
    scale_S = merged.metrics.get("noise_scale/total/noise_scale")
    if scale_S is not None:
        is_after_S = merged.steps > case.faulty_from
        before = float(np.nanmedian(scale_S[~is_after_S]))
        yield from merged.steps[is_after_S & (scale_S > _NOISIER * before)].tolist()


def _moved(losses: list[float], after: int) -> int | None:
    means = np.convolve(losses, np.full(_MEAN_OF, 1 / _MEAN_OF), mode="valid")
    usual = np.array([np.median(means[max(end - _USUAL_OF, 0) : end]) for end in range(1, after)])
    least = float(np.nanmin(usual))
    for place in range(after - _MEAN_OF + 1, len(means)):
        if not means[place] <= _MOVED * least:
            return place + _MEAN_OF
        least = min(least, float(np.median(means[place - _USUAL_OF + 1 : place + 1])))
    return None


def table(seeds: int) -> str:
    """The table of leads, in Markdown."""
    lines = [
        "| fault | signal | step of the signal | step of the loss | lead in steps | healthy controls with a signal |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        found = [run(case, seed, is_faulty=True) for seed in range(seeds)]
        controls = [run(case, seed, is_faulty=False) for seed in range(seeds)]
        leads = [one.loss - one.signal for one in found if one.loss is not None and one.signal is not None]
        false_alarms = sum(one.signal is not None for one in controls)
        cells = [case.name, case.signal, _steps([one.signal for one in found]), _steps([one.loss for one in found])]
        lead = f"{statistics.median(leads):g} ({min(leads)} to {max(leads)})" if len(leads) == seeds else "none"
        lines.append("| " + " | ".join([*cells, lead, f"{false_alarms} of {seeds}"]) + " |")
    return "\n".join(lines)


def _steps(steps: list[Any]) -> str:
    known = [step for step in steps if step is not None]
    text = f"{statistics.median(known):g}" if known else "never"
    return text if len(known) == len(steps) else f"{text}, in {len(known)} of {len(steps)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    text = table(seeds)
    print(text)
    page = PAGE.read_text(encoding="utf-8")
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(f"{page[:begin]}\n\n{text}\n\n{page[end:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
