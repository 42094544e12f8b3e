"""The run of examples/everything_on.py holds every metric, and the coordinate check prints both scalings."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from processes import ROOT, script
from test_examples import run_example

pytestmark = pytest.mark.slow


def test_everything_is_measured_in_one_run(tmp_path: Path) -> None:
    printed, history = run_example("everything_on", tmp_path, SAMPLE_EVERY="4")
    assert "final loss" in printed
    share = re.search(r"sampled steps, 1 in 4: [0-9.]+ ms per step; monitoring takes ([0-9.]+)% of the time", printed)
    assert share is not None
    assert float(share[1]) == pytest.approx(100 * history.values["gradwatch/overhead_ratio"][-1], abs=0.06)
    assert float(share[1]) > 0
    costs = dict(re.findall(r"([0-9.]+) ms per sampled step: (.+)", printed))
    of_metrics = {metric.partition("(")[0] for metric in costs.values()}
    assert of_metrics == {
        *("Activations", "Attention", "FunctionMetrics", "NoiseScale", "OptimizerState"),
        *("Ranks", "Reference", "Router", "Spectrum", "Updates"),
    }
    assert sum(map(float, costs)) > 0
    page = (tmp_path / "everything_on.html").read_text(encoding="utf-8")
    assert '"key":"attention"' in page
    assert "attention/blocks/0/attn/head_3/entropy" not in history.own
    values = history.values
    for key in (
        "gradwatch/grad_norm",
        "activation/blocks/3/std",
        "activation/blocks/0/mlp/1/norm",
        "activation/blocks/1/kurtosis",
        "activation/blocks/2/difference",
        "attention/blocks/0/attn/head_3/entropy",
        "attention/blocks/0/attn/head_0/query_abs_max",
        "update/blocks/1/mlp/0/weight/ratio",
        "attention/blocks/0/attn/head_3/logit_max",
        "noise_scale/total/noise_scale",
        "router/blocks/2/mlp/gate/load_max_ratio",
        "optimizer_state/blocks/1/mlp/0/weight/update_rms",
        "optimizer_state/blocks/1/mlp/0/weight/stale_ratio",
        "parameter/head/weight/relative_difference",
        "parameter/blocks/0/attn/qkv/weight/rms",
        "parameter/blocks/0/attn/qkv/weight/stable_rank",
        "gradient/blocks/0/attn/qkv/weight/largest_singular_value",
        "activation/blocks/3/mlp/0/input/rms",
        "activation/blocks/3/mlp/0/grad/norm",
    ):
        assert np.isfinite(values[key][-1]), key
    assert values["parameter/head/weight/difference"][-1] > 0, "the model has moved away from its start"
    # An update of AdamW with learning rate 1e-3 has entries of about that: the ratio is near 1e-2 for weights of 0.1.
    assert 1e-4 < values["update/blocks/1/mlp/0/weight/ratio"][-1] < 1e-1
    assert history.alerts == ()
    assert {"blocks/0", "blocks/1/mlp/1", "head"} <= set(history.family_histograms["activation"])
    assert history.family_histograms["activation"]["blocks/0"].counts.sum() == 16 * 64 * 128  # one batch, in two halves


def test_on_two_ranks_the_cost_of_comparing_them_is_printed(tmp_path: Path) -> None:
    printed, history = run_example("everything_on", tmp_path, world=2, SAMPLE_EVERY="8")
    cost = re.search(r"([0-9.]+) ms per sampled step: Ranks\(\)", printed)
    assert cost is not None
    assert float(cost[1]) > 0
    assert np.isfinite(history.values["ranks/highest/local_norm"][-1])
    assert history.values["ranks/all/apart"][-1] == 0


def test_the_coordinate_check_draws_both_scalings(tmp_path: Path) -> None:
    result = script(ROOT / "examples/coordinate_check.py", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "coordinate_check_standard.svg",
        "coordinate_check_mup.svg",
    }
    standard, mup = (
        [float(part.split(": ")[1]) for part in line.split(" of ")[1].split(", ")]
        for line in result.stdout.splitlines()
    )
    drawn = (tmp_path / "coordinate_check_mup.svg").read_text()
    assert drawn.count("<polyline") == 3 + 2  # the first layer's input is the data, which never changes
    assert min(standard[1:]) > 0.7
    assert max(map(abs, mup)) < 0.2
