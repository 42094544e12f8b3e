"""Alerts of real training loops: said when the sample arrives, and about the wiring within a step or two."""

from __future__ import annotations

import torch
from gradients import Chosen, step, watch


def test_a_sample_is_judged_when_it_arrives_and_not_with_the_ones_after_it() -> None:
    model = Chosen(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, rules=None, log_every=1000)
    for _ in range(10):
        step(model, optimizer, a=[0, 0])
    # the tenth sample without anything; nobody has asked, waited or flushed
    assert [(alert.title, alert.step) for alert in sink.alerts] == [("No gradient", 10)]
    watcher.remove()
