"""Ranks(): statistics of each rank against float64; a flipped bit and a slow rank are attributed to the right rank."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from gradients import Chosen
from metric_probes import values, watch
from rank_programs import build

from wandb_gradwatch._capture.probes import WatchedTensor
from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch._measure.elements import bits_of
from wandb_gradwatch._measure.probe_values import ArrivedSums
from wandb_gradwatch.metrics import Ranks, SlowRank
from wandb_gradwatch.metrics._forward_hooks import ModuleIndex
from wandb_gradwatch.metrics._module_probe import ReadByProbe
from wandb_gradwatch.metrics._ranks import _FIELDS
from wandb_gradwatch.snapshot import Snapshot

STEPS = 16
HEALTHY = ("side_by_side", {"steps": 12})
FAULTY = ("side_by_side", {"steps": STEPS, "flip_on": 2, "late_on": 3})
NAN = ("side_by_side", {"steps": 3, "nan_on": 1})
MICROS = [("side_by_side", {"steps": 4, "micros": 2, "no_sync": no_sync}) for no_sync in (True, False)]
SHARDED = ("side_by_side", {"steps": 4, "micros": 2, "no_sync": False, "sharded": [4]})
REPLICATED = [("side_by_side", {"steps": 8, "sharded": [2, 2]} | flip) for flip in ({}, {"flip_on": 2})]
OPTIONS = [
    ("side_by_side", {"steps": 4} | options)
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"scale": 1024.0})
]
UNWATCHED = [(name, arguments | {"is_watched": False}) for name, arguments in (*MICROS, *OPTIONS[:2])]
AT_EXIT = ("side_by_side", {"steps": 6, "script_ends": True})
BY_HAND = ("side_by_side", {"steps": 4, "by_hand": True})


@functools.cache
def on_four_ranks() -> dict[str, list[Any]]:
    calls = [HEALTHY, FAULTY, NAN, *MICROS, *OPTIONS, *UNWATCHED, SHARDED, *REPLICATED, BY_HAND, AT_EXIT]
    return {repr(call): of for call, of in zip(calls, ranks.run("metric_rank_programs", calls, 4), strict=True)}


def results(call: Any) -> list[Any]:
    return on_four_ranks()[repr(call)]


def alerts(call: Any, title: str) -> list[tuple[int, str]]:
    """Return the step and text of the alerts with this title, which must be equal on all ranks but rank 0.

    Rank 0 compares replicas in the background as well: if that is done in time, it knows the layer and the exact step.
    """
    of_ranks = [[alert[1:] for alert in result["alerts"] if alert[0] == title] for result in results(call)]
    [of_rank_0, first, *others] = of_ranks
    assert all(other == first for other in others)
    assert [step for step, _ in of_rank_0] == [step for step, _ in first]
    return first


@pytest.mark.distributed
@pytest.mark.parametrize("call", [HEALTHY, FAULTY, *MICROS, *OPTIONS, BY_HAND], ids=str)
def test_local_norms_and_losses_are_each_ranks_own(call: Any) -> None:
    # The first step of several backwards is left out, because nothing was copied in it.
    first = int(call[1].get("micros", 1) > 1)
    for result in results(call):
        for rank, other in enumerate(results(call)):
            expected = np.linalg.norm(other["own"], axis=1)
            found = result["metrics"][f"ranks/rank_{rank}/local_norm"]
            assert np.isnan(found[:first]).all()
            np.testing.assert_allclose(found[first:], expected[first:], rtol=1e-4)
            np.testing.assert_allclose(result["metrics"][f"ranks/rank_{rank}/loss"], other["losses"], rtol=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("call", [HEALTHY, *MICROS], ids=str)
def test_values_that_are_equal_on_all_ranks_are_counted_once(call: Any) -> None:
    averaged = np.linalg.norm(np.mean([result["own"] for result in results(call)], axis=0), axis=1)
    for result in results(call):
        np.testing.assert_allclose(result["norm"], averaged, rtol=1e-5)
        assert result["histograms"] == {
            f"parameters/{name}": parameter.numel() for name, parameter in build().named_parameters()
        }


@pytest.mark.distributed
def test_the_extremes_and_the_median_have_their_ranks() -> None:
    metrics = results(HEALTHY)[0]["metrics"]
    norms = np.stack([metrics[f"ranks/rank_{rank}/local_norm"] for rank in range(4)], axis=1)
    assert (metrics["ranks/highest/local_norm_rank"] == norms.argmax(axis=1)).all()
    assert (metrics["ranks/lowest/local_norm"] == norms.min(axis=1)).all()
    assert (
        metrics["ranks/median/local_norm"] == np.sort(norms, axis=1)[:, 1]
    ).all()  # the lower of the two middle values


@pytest.mark.distributed
def test_a_flipped_bit_names_its_rank() -> None:
    metrics = results(FAULTY)[1]["metrics"]
    # Every second sample has a checksum: steps 1, 3, 5, ...; the bit is flipped before step 4.
    assert metrics["ranks/all/apart"][::2].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert np.isnan(metrics["ranks/all/apart"][1::2]).all()
    assert metrics["ranks/rank_2/apart"][::2].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert not np.nansum([metrics[f"ranks/rank_{rank}/apart"] for rank in (0, 1, 3)])
    [(step, text)] = alerts(FAULTY, "Ranks disagree")
    assert step == 5
    assert "The parameters of rank 2 are not those that most ranks have" in text


@pytest.mark.distributed
def test_a_rank_that_comes_late_is_named() -> None:
    metrics = results(FAULTY)[0]["metrics"]
    assert (metrics["ranks/rank_3/seconds"] > 10).all()
    assert (metrics["ranks/median/seconds"] < 1).all()
    [(step, text)] = alerts(FAULTY, "Slow rank")
    assert step == 8
    assert "Rank 3 has needed more than 1.5 times as long as the median rank for 8 samples" in text


@pytest.mark.distributed
def test_a_healthy_training_is_silent() -> None:
    assert not alerts(HEALTHY, "Ranks disagree")
    assert not alerts(HEALTHY, "Slow rank")
    assert np.nansum(results(HEALTHY)[0]["metrics"]["ranks/all/apart"]) == 0


@pytest.mark.distributed
def test_a_gradient_that_is_not_finite_on_one_rank_only_names_it() -> None:
    for rank, result in enumerate(results(NAN)):
        first = result["metrics"]["gradwatch/first_nonfinite_rank"]
        assert np.isnan(first[:-1]).all()
        assert first[-1] == 1
        [incident] = [one for one in result["nan"] if one.kind == "nan_gradient"]
        assert (incident.rank, incident.layers[0].name) == (1, "4.bias")
        assert incident.cause == ("nonfinite_inputs" if rank == 1 else "another_rank")
        assert np.isnan(result["metrics"]["ranks/rank_1/local_norm"][-1])


@pytest.mark.distributed
def test_ranks_with_shards_have_a_loss_and_no_gradient_of_their_own() -> None:
    for result in results(SHARDED):
        names = {key.split("/", 2)[2] for key in result["metrics"] if key.startswith("ranks/rank_")}
        assert names == {"loss"}


@pytest.mark.distributed
@pytest.mark.parametrize(("call", "apart"), list(zip(REPLICATED, [0, 2], strict=True)), ids=["healthy", "flipped"])
def test_replicas_of_a_shard_are_compared(call: Any, apart: int) -> None:
    # Ranks 0 and 2 hold the first half, ranks 1 and 3 the second. If two replicas differ, either may be wrong.
    for result in results(call):
        assert result["metrics"]["ranks/all/apart"][::2].tolist() == [0, 0, apart, apart]
        assert result["metrics"]["ranks/rank_2/apart"][-2] == result["metrics"]["ranks/rank_0/apart"][-2] == apart / 2
        assert result["metrics"]["ranks/rank_1/apart"][-2] == result["metrics"]["ranks/rank_3/apart"][-2] == 0
    told = alerts(call, "Ranks disagree")
    assert [step for step, _ in told] == [5] * (apart > 0)
    assert all("The parameters of ranks 0, 2 are not" in text for _, text in told)


@pytest.mark.distributed
@pytest.mark.parametrize("call", [HEALTHY, *MICROS, *OPTIONS], ids=str)
def test_the_noise_scale_of_ranks_is_that_of_the_definition(call: Any) -> None:
    first = int(call[1].get("micros", 1) > 1)
    own_SRE = np.stack([result["own"] for result in results(call)], axis=1)[first:]
    small, big = (own_SRE**2).sum(2).mean(1), (own_SRE.mean(1) ** 2).sum(1)
    signal, noise = (4 * big - small) / 3, (small - big) / (1 - 1 / 4)
    expected = np.array([noise[: end + 1].mean() / signal[: end + 1].mean() for end in range(len(signal))])
    products = [np.mean([of[i] @ of[j] for i in range(4) for j in range(4) if i != j]) for of in own_SRE]
    for result in results(call):
        found = result["metrics"]
        np.testing.assert_allclose(
            found["noise_scale/total/noise_scale"][first:], np.where(expected > 0, expected, np.nan), rtol=1e-3
        )
        np.testing.assert_allclose(found["noise_scale/total/cosine"][first:], products / small, rtol=1e-3)


@pytest.mark.distributed
def test_gradients_averaged_after_the_backward_have_no_noise_scale_and_a_message_says_so() -> None:
    for result in results(BY_HAND):
        assert not [key for key in result["metrics"] if key.startswith("noise_scale")]
        assert len([text for text in result["said"] if "they are equal, or averaged later" in text]) == 1


@pytest.mark.distributed
@pytest.mark.parametrize(("watched", "unwatched"), list(zip([*MICROS, *OPTIONS[:2]], UNWATCHED, strict=True)), ids=str)
def test_the_training_is_bitwise_the_same(watched: Any, unwatched: Any) -> None:
    assert [result["parameters"] for result in results(watched)] == results(unwatched)


@pytest.mark.distributed
def test_the_end_of_the_script_waits_for_no_rank_and_loses_no_row() -> None:
    for result in results(AT_EXIT):
        assert result["steps"] == [1, 2, 3, 4, 5, 6]
        compared = result["metrics"]["ranks/median/loss"]
        assert np.isfinite(compared[:4]).all()
        assert np.isnan(compared[4:]).all()


def test_the_wait_for_other_ranks_inside_a_backward_is_not_the_ranks_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("_ranks", "_module_probe"):
        monkeypatch.setattr(f"wandb_gradwatch.metrics.{user}.world_size", lambda: 2)
    now, probe, model = [100.0], Ranks(), Chosen(a=1)
    probe._clock = lambda: now[0]
    probe.bind(ModuleIndex([("", model)]))
    tensor = WatchedTensor("a", model.a.detach(), torch.ones(1))
    probe.start(True, False)
    # 3 s until the first backward's gradient, which then waits 7 s; 2 s more until the second's, which waits 5 s.
    for own, waits in ((3, 7), (2, 5)):
        now[0] += own
        probe.gradient_arrived("a", torch.ones(1))
        now[0] += waits
        probe.gradients_ready([tensor])
    probe.before_update([tensor])
    now[0] += 1
    probe.after_update([tensor])
    found = probe.take()["ranks"]
    assert found.values[_FIELDS.index("seconds")] == 5
    now[0] += 4  # the sample is closed in the middle of the next step
    probe.start(True, False)
    probe.gradient_arrived("a", torch.ones(1))
    assert probe.take()["ranks"].values[_FIELDS.index("seconds")] == 4


def test_one_process_has_nothing_to_compare() -> None:
    model = Chosen(a=2)
    watcher, sink = watch(model, [Ranks()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(a=[1.0, 2.0]).backward()
    optimizer.step()
    assert values(watcher, sink) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = tensor.element_size() * 8
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    found = {int(bits_of(tensor))}
    for bit in range(words):
        flipped = tensor.clone()
        flipped.view(-1)[7:8].view(integers).bitwise_xor_(-(1 << bit) if bit == words - 1 else 1 << bit)
        assert int(bits_of(flipped)) % 2**48 != int(bits_of(tensor)) % 2**48
        found.add(int(bits_of(flipped.T)))
    assert len(found) > 1
    assert int(bits_of(tensor.T)) == int(bits_of(tensor)), "whatever the order"


def of_ranks(num: int, **fields: Any) -> dict[str, float]:
    """Return the numbers that Ranks() derives from fields: one value for all ranks, or a dict by rank."""
    whole = {"is_there": 1.0, "square": 4.0, "loss": 1.0, "seconds": 0.1, "checksum": 7.0, "layout": 3.0}
    whole |= {"own_sum": np.nan, "averaged_sum": np.nan} | fields
    rows = [
        [of.get(rank, 0.0) if isinstance(of, dict) else of for of in map(whole.get, _FIELDS)] for rank in range(num)
    ]
    sums = ArrivedSums(tuple(np.ravel(rows).tolist()), ReadByProbe(len(_FIELDS), side_by_side=True), None)
    return dict(Ranks().derive({"ranks": sums}))


def test_a_contribution_that_the_average_lacks_names_its_rank() -> None:
    # Norms of 2 and sums of 1, 2, 3: their mean is 2; without that of rank 1 it is (1 + 3) / 3.
    own = {0: 1.0, 1: 2.0, 2: 3.0}
    found = of_ranks(3, own_sum=own, averaged_sum=4 / 3)
    assert found["ranks/all/lost_rank"] == 1
    assert found["ranks/all/average_error"] == pytest.approx((2 - 4 / 3) / 2)
    whole = of_ranks(3, own_sum=own, averaged_sum=2.0 + 1e-6)
    assert whole["ranks/all/average_error"] == pytest.approx(5e-7)
    assert "ranks/all/lost_rank" not in whole
    compressed = of_ranks(3, own_sum=own, averaged_sum=1.9)  # what no single rank explains
    assert compressed["ranks/all/average_error"] == pytest.approx(0.05)
    assert "ranks/all/lost_rank" not in compressed
    averaged_later = of_ranks(3, own_sum=own, averaged_sum=own)
    assert "ranks/all/average_error" not in averaged_later


def test_of_a_thousand_ranks_only_those_that_are_apart_have_keys_of_their_own() -> None:
    found = of_ranks(1000, checksum=dict.fromkeys(range(1000), 7.0) | {700: 8.0}, loss={700: 3.0})
    assert {key for key in found if key.startswith("ranks/rank_")} == {"ranks/rank_700/apart"}
    assert found["ranks/highest/loss_rank"] == 700
    assert found["ranks/all/apart"] == 1


@pytest.mark.parametrize(
    ("checksum", "layout", "apart"),
    [
        ({0: 1.0, 1: 2.0}, 3.0, {0, 1}),  # either of two may be wrong
        ({0: 1.0, 1: 1.0, 2: 2.0}, 3.0, {2}),
        ({0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}, {0: 5.0, 1: 5.0, 2: 6.0, 3: 6.0}, set()),  # two stages of a pipeline
        ({0: 1.0, 1: float("nan")}, 3.0, set()),  # a rank without whole parameters
    ],
    ids=["two", "three", "stages", "nothing"],
)
def test_a_rank_is_apart_from_most_that_hold_the_same_parameters(checksum: Any, layout: Any, apart: set[int]) -> None:
    found = of_ranks(len(checksum), checksum=checksum, layout=layout)
    assert {rank for rank in range(len(checksum)) if found.get(f"ranks/rank_{rank}/apart")} == apart
    assert found["ranks/all/apart"] == len(apart)


def test_sums_that_are_not_merged_give_no_numbers() -> None:
    assert of_ranks(4, is_there={2: 1.0}) == {}


def snapshot(**metrics: Any) -> Snapshot:
    num = len(next(iter(metrics.values())))
    named = {f"ranks/{key.replace('__', '/')}": np.array(of, dtype=float) for key, of in metrics.items()}
    return Snapshot(np.arange(num), (), np.full((num, 0, NUM_COLUMNS), np.nan), metrics=named)


def test_a_rank_is_slow_if_it_is_the_slowest_in_every_sample() -> None:
    slow = {"highest__seconds": [0.3] * 20, "median__seconds": [0.1] * 20}
    always, turns = [3.0] * 20, [float(step % 4) for step in range(20)]
    assert next(alert.step for alert in SlowRank().check(snapshot(**slow, highest__seconds_rank=always))) == 7
    assert not list(SlowRank().check(snapshot(**slow, highest__seconds_rank=turns)))
    little = {"highest__seconds": [0.003] * 20, "median__seconds": [0.001] * 20}
    assert not list(SlowRank().check(snapshot(**little, highest__seconds_rank=always)))


def test_a_resumed_rule_continues_from_its_saved_state() -> None:
    of = snapshot(highest__seconds=[0.3] * 10, median__seconds=[0.1] * 10, highest__seconds_rank=[1.0] * 10)
    assert [alert.step for alert in SlowRank().check(of)] == [7, 8, 9]
    first, second = SlowRank(), SlowRank()
    assert [alert.step for sample in range(8) for alert in first.check(of.sample(sample))] == [7]
    second.load_state_dict(first.state_dict())
    assert [alert.step for sample in (8, 9) for alert in second.check(of.sample(sample))] == [8, 9]
