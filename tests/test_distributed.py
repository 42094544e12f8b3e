"""Several ranks under DDP, FSDP and tensor parallelism, compared with one process in float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import ranks
from rank_programs import expected

pytestmark = pytest.mark.distributed

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]


def check(results, world, steps, *, micros=1, clip=None, first=0, width=5):
    """Check every rank's sink: each has all samples of the whole model."""
    truth = expected(world, steps, micros=micros, clip=clip, width=width)
    main = results[0]
    assert main["steps"] == list(range(1, steps + 1))
    assert main["names"] == NAMES
    np.testing.assert_allclose(main["grad_norm"][first:], truth["grad_norm"][first:], rtol=2e-5)
    np.testing.assert_allclose(main["grad_norm_clipped"], truth["grad_norm_clipped"], rtol=2e-5)
    whole = np.sqrt((truth["grad_norm"] ** 2).sum(axis=1))
    np.testing.assert_allclose(main["total"][first:], whole[first:], rtol=2e-5)
    sizes = [4 * width, width, 3 * width, 3, 3, 1]
    assert main["num_elements"].tolist() == [sizes] * steps
    for other in results[1:]:
        assert other["num_snapshots"] == main["num_snapshots"]
        # One rank may have compiled its loops earlier than another, which changes the order of sums.
        np.testing.assert_allclose(other["grad_norm"], main["grad_norm"], rtol=1e-5)


DDP = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"hook": True},
    {"micros": 3},
    {"clip": 0.1},
    {"micros": 2, "clip": 0.1, "gradient_as_bucket_view": True},
    # More micro-batches before the first step than the number of resets after which updates by hand are assumed.
    {"micros": 5, "clip": 0.1},
    {"micros": 5, "clip": 0.1, "sync_every": True},
    {"micros": 5, "clip": 0.1, "sync_every": True, "gradient_as_bucket_view": True},
]
FSDP2 = [{}, {"clip": 0.1}, {"micros": 3}, {"micros": 2, "sync_every": False, "clip": 0.1}, {"offload": True}]


FSDP1 = [
    {"original": True},
    {"original": True, "clip": 0.1},
    {"original": True, "micros": 2},
    {"original": False},
    {"original": False, "clip": 0.1},
]


NAN = [  # ranks with NaN during and after the backward, which under FSDP2 leaves the average over the ranks
    {"in_backward": (1,), "after_it": ()},
    {"in_backward": (), "after_it": (1,)},
    {"in_backward": (1,), "after_it": (0,)},
]
BAD_BATCH = [{"bad": bad, "sharded": sharded} for sharded in (True, False) for bad in (0, 1)]
IN_STEP = [  # what the optimizer itself does inside its step
    {"average": "in place"},
    {"average": "replace"},
    {"average": "in place", "clip": 0.1, "kind": "by torch"},
    {"clip": 0.1, "kind": "by torch"},
    {"clip": 0.1, "kind": "by hand"},
]
OWN_PARTS = [{}, {"same_name": True}, {"inf": True}, {"frozen": True}]


@functools.cache
def on_two_ranks():
    """Run every program of this file that needs two ranks, in the same two processes."""
    calls = [("ddp", {"steps": 3} | options) for options in DDP]
    calls += [("in_step", {"steps": 3} | options) for options in IN_STEP]
    calls += [("discards", {})]
    calls += [("fsdp2", {"steps": 3} | options) for options in FSDP2]
    calls += [("fsdp2", {"steps": 3, "watch_first": True}), ("fsdp2", {"steps": 6, "log_every": 3})]
    calls += [("tensor_parallel", {"steps": 3, "watch_first": first}) for first in (False, True)]
    calls += [("fsdp1", {"steps": 3} | options) for options in FSDP1]
    calls += [("fsdp1_loss_scale", {"steps": 3, "clip": 0.1})]
    calls += [("nan_on_one_rank", options) for options in NAN]
    calls += [("nan_in_a_batch", options) for options in BAD_BATCH]
    calls += [("used_on_one_rank_only", {"steps": 3})]
    calls += [("rank_that_watches_something_else", {"steps": 3})]
    calls += [("own_parts", options) for options in OWN_PARTS]
    calls += [("two_watchers_of_one_run", {"steps": 2, "kind": kind}) for kind in ("fsdp2", "ddp")]
    calls += [("rank_that_does_not_watch", {"steps": 3})]
    results = ranks.run("rank_programs", calls, 2)
    return {repr(call): result for call, result in zip(calls, results, strict=True)}


def result_of(function, **arguments):
    return on_two_ranks()[repr((function, arguments))]


@pytest.mark.parametrize("options", DDP, ids=str)
def test_ddp_shows_the_averaged_gradient_once(options):
    results = result_of("ddp", steps=3, **options)
    check(results, 2, 3, micros=options.get("micros", 1), clip=options.get("clip"))


@pytest.mark.parametrize("options", IN_STEP, ids=str)
def test_what_the_optimizer_averages_and_clips_inside_its_step_is_seen(options):
    check(result_of("in_step", steps=3, **options), 2, 3, clip=options.get("clip"))


@pytest.mark.parametrize("options", FSDP2, ids=str)
def test_fsdp2_shows_the_norm_of_the_whole(options):
    results = result_of("fsdp2", steps=3, **options)
    check(results, 2, 3, micros=options.get("micros", 1), clip=options.get("clip"))
    histogram = results[0]["histogram"]
    assert histogram.tolist() == [3 * size for size in (20, 5, 15, 3, 3, 1)]


def test_a_loop_over_shards_that_discards_nan_is_told_so_once_on_each_rank():
    for messages in result_of("discards"):
        [text] = messages
        assert text.startswith("wandb_gradwatch: the training loop left step 2 out: ")


def test_fsdp2_on_four_ranks_some_shards_empty_and_hybrid_and_over_groups_of_ranks():
    calls = [("fsdp2", {"steps": 2, "mesh": mesh, "clip": 0.1}) for mesh in ([4], [2, 2])]
    calls += [("fsdp2", {"steps": 2, "clip": 0.1, "group": group}) for group in (2, 3)]
    for results in ranks.run("rank_programs", calls, 4):
        check(results, 4, 2, clip=0.1)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_two_watchers_of_one_run_watch_the_same_on_all_ranks(kind):
    """Names must match over ranks, otherwise a norm would be that of one shard, or a shard would be counted twice.

    Sharded models have the same names on ranks without a run; replicas may have other names in another sink.
    """
    norm = np.sqrt((expected(2, 2)["grad_norm"] ** 2).sum(axis=1))
    for rank, result in enumerate(result_of("two_watchers_of_one_run", steps=2, kind=kind)):
        np.testing.assert_allclose(result["norms"], [norm, norm], rtol=1e-5)
        second = "0.weight" if kind == "ddp" and rank else "model1.0.weight"
        assert [names[0] for names in result["names"]] == ["0.weight", second]


def test_fsdp2_watched_before_it_is_sharded():
    check(result_of("fsdp2", steps=3, watch_first=True), 2, 3, first=1)


def test_fsdp2_one_reduction_per_flush():
    results = result_of("fsdp2", steps=6, log_every=3)
    check(results, 2, 6)
    assert results[0]["num_snapshots"] == 2


@pytest.mark.parametrize("watch_first", [False, True])
def test_tensor_parallel_shows_the_norm_of_the_whole(watch_first):
    # Every rank has the same batch, so the expected values are those of one rank.
    check(result_of("tensor_parallel", steps=3, watch_first=watch_first), 1, 3, first=int(watch_first), width=6)


@pytest.mark.parametrize("options", FSDP1, ids=str)
def test_fsdp1_shows_the_norm_of_the_whole(options):
    results = result_of("fsdp1", steps=3, **options)
    if options["original"]:
        check(results, 2, 3, micros=options.get("micros", 1), clip=options.get("clip"))
        return
    # Without the original parameters there is one flat parameter per layer: compare the layers.
    truth = expected(2, 3, clip=options.get("clip"))
    for statistic in ("grad_norm", "grad_norm_clipped"):
        per_layer = np.sqrt((truth[statistic].reshape(3, 3, 2) ** 2).sum(axis=2))
        np.testing.assert_allclose(results[0][statistic], per_layer, rtol=2e-5)


def test_fsdp1_with_its_own_gradient_scaler():
    check(result_of("fsdp1_loss_scale", steps=3, clip=0.1), 2, 3, clip=0.1)


@pytest.mark.parametrize("options", NAN, ids=str)
def test_the_rank_that_went_bad_after_the_backward_is_named(options):
    """A rank that holds NaN when the backward has averaged need not be the one that has made it."""
    main = result_of("nan_on_one_rank", **options)[0]
    is_known = not options["in_backward"]
    assert main["first_bad_rank"] is None or np.isnan(main["first_bad_rank"][:2]).all()
    [text] = [text for text in main["alerts"] if text.startswith("Step 3: ") and "NaN in the gradient" in text]
    assert ("first on rank 1" in text) == is_known
    assert ("on rank" in text) == is_known
    assert ("code between backward() and step()" in text) == is_known


@pytest.mark.parametrize("options", BAD_BATCH, ids=str)
def test_no_rank_and_no_operation_is_blamed_for_a_batch_of_another_rank(options):
    """The average is NaN on every rank: what one rank has seen of its own batch does not explain it."""
    for rank, of_rank in enumerate(result_of("nan_in_a_batch", **options)):
        [text] = [text for text in of_rank["alerts"] if text.startswith("Step 3: ") and "NaN in the gradient" in text]
        assert "on rank" not in text
        is_own = rank == options["bad"]
        assert text.startswith("Step 3: NaN or Inf in the inputs.") == is_own
        assert text.startswith("Step 3: The batch or the loss of another rank, or an operation") == (not is_own)


def test_a_parameter_that_one_rank_uses_is_averaged_and_nothing_hangs():
    results = result_of("used_on_one_rank_only", steps=3)
    np.testing.assert_allclose(results[0]["grad_norm"], results[0]["local"], rtol=1e-6)
    assert results[0]["steps"] == [1, 2, 3]


@pytest.mark.parametrize("options", OWN_PARTS, ids=str)
def test_parts_that_ranks_have_of_their_own_are_one_model(options):
    """Gradients of 3 and 4: the total norm is 5, and each rank's layer has its own name."""
    results = result_of("own_parts", **options)
    names = ["layer", "rank1.layer"] if options.get("same_name") else ["layer0", "layer1"]
    names += ["embedding"] if options.get("frozen") else []
    main = results[0]
    assert main["names"] == names
    assert main["steps"] == [1, 2, 3, 4]
    healthy = [0, 1, 3] if options.get("inf") else [0, 1, 2, 3]
    np.testing.assert_allclose(main["total"][healthy], 5.0)
    np.testing.assert_allclose(main["grad_norm"][healthy, :2], [[3.0, 4.0]] * len(healthy))
    assert [result["said"] for result in results] == [[], []]
    if options.get("inf"):
        [text] = main["alerts"]
        assert text.startswith("Step 3:")
        assert "layer1" in text
        assert main["first_bad_rank"][2] == 1
    else:
        assert main["alerts"] == []


def test_ranks_that_watch_different_parameters_write_no_row_and_say_so_once():
    for result in result_of("rank_that_watches_something_else", steps=3):
        [text] = result["said"]
        assert "steps 1 to 1 are left out of the rows" in text
        assert "which was not merged, because" in text  # which reason is found first depends on who looks first
        assert result["num_rows"] == 0
        assert result["latest"] is None


def test_a_rank_that_does_not_watch_is_not_waited_for():
    main, other = result_of("rank_that_does_not_watch", steps=3)
    [text] = main["said"]
    assert "not every rank calls watch()" in text
    assert main["num_rows"] == 0
    assert other["said"] == []
