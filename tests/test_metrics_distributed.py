"""Metrics on several ranks: sums over shards equal the whole; what cannot be merged is left out, with a warning."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import ranks
from metric_rank_programs import expected, forwards, optimized_alone
from rank_programs import build

from wandb_gradwatch._measure.columns import NUM_BINS, bins_of

pytestmark = pytest.mark.distributed

STEPS = 3
DDP = ("ddp", {"steps": STEPS})
FSDP2 = [
    ("fsdp2", {"steps": STEPS, "mesh": [2]}),
    ("fsdp2", {"steps": STEPS, "mesh": [2, 1]}),  # replicas must count once
    ("fsdp2", {"steps": STEPS, "mesh": [2], "log_every": 3}),
]
WATCHED_FIRST = ("fsdp2", {"steps": STEPS, "mesh": [2], "watch_first": True})
FSDP1 = [("fsdp1", {"steps": STEPS, "original": original}) for original in (True, False)]
TENSOR_PARALLEL = [("tensor_parallel", {"steps": STEPS, "local_output": local}) for local in (True, False)]
HISTOGRAMS = [("parameter_histograms", {"steps": STEPS, "mesh": mesh}) for mesh in ([2], [2, 1])]
FORWARDS = ("forwards", {"steps": STEPS})
TOO_LATE = ("a_reference_that_is_made_too_late", {})
OPTIMIZED = [
    ("optimized", {"kind": "adamw"}),
    ("optimized", {"kind": "sgd"}),
    ("optimized", {"kind": "noise", "micros": 3}),
]


@functools.cache
def on_two_ranks():
    calls = [DDP, *FSDP2, WATCHED_FIRST, *FSDP1, *TENSOR_PARALLEL, *HISTOGRAMS, FORWARDS, TOO_LATE, *OPTIMIZED]
    results = ranks.run("metric_rank_programs", calls, 2)
    return {repr(call): result for call, result in zip(calls, results, strict=True)}


def result_of(call):
    return on_two_ranks()[repr(call)]


def check(found, truth, *, first=0):
    """Compare all expected numbers whose keys begin with one of these texts."""
    for key, values in truth.items():
        # Differences of float32 parameters that have moved by a thousandth of their size keep four digits.
        np.testing.assert_allclose(found[key][first:], values[first:], rtol=2e-3, atol=1e-7, err_msg=key)


def families(truth, *names):
    return {key: values for key, values in truth.items() if key.startswith(names)}


def left_out(result):
    return [text for text in result["said"] if "parameters are sharded" in text]


def test_ddp_measures_whole_parameters_and_the_logging_ranks_activations():
    main, other = result_of(DDP)
    check(main["metrics"], expected(2, STEPS))
    assert main["histogram"] == STEPS * 6 * 3  # rank 0's batch of 6, 3 features
    assert {"parameter/0.weight/own", "gradient/0.weight/own", "update/0.weight/own", "parameter/0.weight/largest"} <= (
        set(main["metrics"])
    )
    assert main["said"] == other["said"] == []


@pytest.mark.parametrize("call", FSDP2, ids=str)
def test_fsdp2_distances_are_those_of_the_whole(call):
    main, other = result_of(call)
    check(main["metrics"], expected(2, STEPS))
    assert other["num_snapshots"] == main["num_snapshots"]
    for key in families(main["metrics"], "update/", "parameter/"):
        np.testing.assert_array_equal(
            other["metrics"][key][-1], main["metrics"][key][-1]
        )  # merged numbers are equal on all ranks


@pytest.mark.parametrize("call", FSDP2, ids=str)
def test_fsdp2_users_functions_skip_shards_with_one_message_each(call):
    for result in result_of(call):
        assert not [key for key in result["metrics"] if key.startswith(("parameter/", "gradient/", "update/"))
                    and key.endswith(("/own", "/largest"))]  # fmt: skip
        assert {"activation/0/own", "activation/0/largest"} <= set(result["metrics"])
        functions, metrics = sorted(left_out(result), key=lambda text: "metrics of" in text)
        assert "functions of differences are left out for them" in functions
        assert "metrics of parameters, gradients and updates are left out for them" in metrics
        assert len(result["said"]) == 2


def test_fsdp2_a_model_may_be_watched_before_it_is_sharded():
    # The first sample began before the parameters were replaced.
    main, _ = result_of(WATCHED_FIRST)
    check(main["metrics"], expected(2, STEPS), first=1)


@pytest.mark.parametrize("call", FSDP1, ids=str)
def test_fsdp1_updates_are_those_of_the_whole(call):
    main, _ = result_of(call)
    truth = families(expected(2, STEPS), "update/", "activation/2")
    if not call[1]["original"]:  # one flat parameter per layer
        updates = {key: values for key, values in truth.items() if key.endswith("/norm") and key.startswith("update")}
        for layer in "024":
            whole = np.sqrt(updates[f"update/{layer}.weight/norm"] ** 2 + updates[f"update/{layer}.bias/norm"] ** 2)
            [key] = [key for key in main["metrics"] if key.startswith(f"update/{layer}.") and key.endswith("/norm")]
            np.testing.assert_allclose(main["metrics"][key], whole, rtol=2e-3)
        assert main["said"] == []
        return
    check(main["metrics"], truth)
    assert not families(main["metrics"], "parameter/")
    assert [text for text in left_out(main) if "distances to a reference are left out" in text]
    assert len(left_out(main)) == len(main["said"]) == 2  # one message for this probe and one for the function metrics


@pytest.mark.parametrize("call", TENSOR_PARALLEL, ids=str)
def test_tensor_parallel_distances_are_those_of_the_whole(call):
    main, _ = result_of(call)
    truth = expected(1, STEPS, width=6, same_batch=True)
    check(main["metrics"], families(truth, "update/", "parameter/", "activation/2"))
    # The last layer is whole on every rank.
    assert "parameter/4.weight/own" in main["metrics"]
    assert "parameter/0.weight/own" not in main["metrics"]


def test_activations_of_sharded_modules_equal_those_of_one_process():
    alone = forwards(0, 1, sharded=False, steps=STEPS)
    assert {"attention/attention/head_1/logit_max", "router/gate/entropy_ratio", "activation/gate/grad/norm"} <= set(
        key.replace(".grad", "/grad") for key in alone
    )
    for result in result_of(FORWARDS):
        assert set(result) == set(alone)
        for key, values in alone.items():
            np.testing.assert_allclose(result[key], values, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("call", HISTOGRAMS, ids=str)
def test_the_histograms_of_parameters_are_those_of_the_whole(call):
    main, other = result_of(call)
    assert len(main["found"]) == STEPS
    assert len(other["found"]) == STEPS  # every rank was given its own sink
    last = main["found"][-1]
    assert {f"parameters/{name}" for name in main["whole"]} == set(last)
    for name, values in main["whole"].items():  # as torch gathers them after the last update
        histogram = last[f"parameters/{name}"]
        assert histogram.counts.tolist() == np.bincount(bins_of(values.ravel()), minlength=NUM_BINS).tolist()
        assert (histogram.low, histogram.high) == (values.min(), values.max())


@pytest.mark.parametrize("call", HISTOGRAMS, ids=str)
def test_the_row_has_the_norms_of_whole_parameters_as_they_are_before_the_update(call):
    norms = {name: parameter.double().norm().item() for name, parameter in build().named_parameters()}
    first = result_of(call)[0]["rows"][0]
    for name, norm in norms.items():
        assert first[f"param_norm/{name.replace('.', '/')}"] == pytest.approx(norm)
    assert first["gradwatch/param_norm"] == pytest.approx(sum(norm**2 for norm in norms.values()) ** 0.5)


def test_a_reference_of_a_sharded_model_says_what_to_do():
    for said in result_of(TOO_LATE):
        assert said.startswith("ValueError: Reference(): the model is sharded already"), said


@pytest.mark.parametrize("call", OPTIMIZED, ids=str)
def test_states_of_the_optimizer_and_noise_scales_are_those_of_the_whole(call):
    main, other = result_of(call)
    alone = optimized_alone(**call[1])
    assert set(main) == set(other) == set(alone)
    assert call[1]["kind"] != "noise" or {"noise_scale/total/noise_scale", "noise_scale/0/cosine"} <= set(alone)
    for key, series in alone.items():
        np.testing.assert_allclose(main[key], series, rtol=1e-3 if call[1]["kind"] == "noise" else 1e-4, err_msg=key)
