"""What one rank does alone makes no other rank wait, and no row wrong: a window that cannot be merged is left out."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ranks
import torch.distributed as dist
from rank_programs import expected

from wandb_gradwatch._measure.columns import NUM_COLUMNS, Column
from wandb_gradwatch._pipeline import rank_merger
from wandb_gradwatch._pipeline.assembly import NO_HISTOGRAM
from wandb_gradwatch._pipeline.rank_merge import Outcome, RankWindow
from wandb_gradwatch._pipeline.rank_merger import RankMerger
from wandb_gradwatch._runtime import rank_session
from wandb_gradwatch._runtime.rank_session import RankSession
from wandb_gradwatch._transfer.transfers import ArrivedSample, Sample

FLUSH = [{"alone": alone} for alone in (0, 1)]
ENDS = [{"alone": alone, "how": how} for alone in (0, 1) for how in ("remove", "exception", "script")]
BUDGET = [{"alone": alone, "how": "remove", "sample_every": None, "max_overhead": 0.9} for alone in (0, 1)]
BEFORE = [{"is_alike": is_alike, "stays": stays} for is_alike in (True, False) for stays in (True, False)]
LOADED = [{"state_of": which} for which in ("every rank", "rank 0", "rank 0 alone")]


@functools.cache
def on_two_ranks() -> dict[str, list[Any]]:
    calls = [("flush", options) for options in FLUSH] + [("end", options) for options in (*ENDS, *BUDGET)]
    calls += [("remove_guard", options) for options in FLUSH]
    calls += [("watch_before", options) for options in BEFORE] + [("load", options) for options in LOADED]
    calls += [("restart", {}), ("destroy_first", {})]  # the last one ends the process group
    # Ranks that do the same wait up to a minute for each other. So a wait for a rank that does something else exceeds
    # the limit.
    return {
        repr(call): of for call, of in zip(calls, ranks.run("rank_alone_programs", calls, 2, timeout=300), strict=True)
    }


def results(function: str, **options: Any) -> list[Any]:
    return on_two_ranks()[repr((function, options))]


def norms(num_steps: int, **training: Any) -> np.ndarray:
    world = training.pop("world", 2)
    return np.sqrt((expected(world, num_steps, **training)["grad_norm"] ** 2).sum(axis=1))


def check_norms(result: dict[str, Any], **training: Any) -> None:
    """Check that every row has the norm of the whole gradient."""
    truth = norms(max(result["norms"], default=1), **training)
    np.testing.assert_allclose(list(result["norms"].values()), [truth[step - 1] for step in result["norms"]], rtol=2e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("options", FLUSH, ids=str)
def test_a_flush_on_one_rank_ends_the_window_on_all_and_later_rows_are_whole(options: dict[str, Any]) -> None:
    for result in results("flush", **options):
        assert result["windows"] == [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13]]
        assert result["said"] == []
        check_norms(result)


@pytest.mark.distributed
@pytest.mark.parametrize("options", [*ENDS, *BUDGET], ids=str)
def test_after_the_end_of_one_rank_nothing_is_written_and_that_is_said_once(options: dict[str, Any]) -> None:
    for rank, result in enumerate(results("end", **options)):
        assert max(result["norms"]) == 5
        assert result["latest"] == result["windows"][-1]
        check_norms(result)
        [text] = result["said"]
        assert "are left out of the rows" in text
        assert f"rank {options['alone']} no longer watches" in text or rank == options["alone"]


@pytest.mark.distributed
@pytest.mark.parametrize("options", FLUSH, ids=str)
def test_a_guard_that_one_rank_removes_skips_nothing_any_more_and_nobody_waits(options: dict[str, Any]) -> None:
    of_ranks = results("remove_guard", **options)
    for rank, result in enumerate(of_ranks):
        # From step 8 on one rank only abstains; in step 14 all ranks learn that all have removed the guard.
        before = result["num_listeners"][:13]
        assert result["num_listeners"] == [*before, 0, 0]
        assert min(before) > 0
        assert not any("the guard skipped" in text for text in result["said"])
        assert rank == options["alone"] or any("has failed or was removed" in text for text in result["said"])
    assert of_ranks[0]["first"] == of_ranks[1]["first"]


@pytest.mark.distributed
@pytest.mark.parametrize("options", BEFORE, ids=str)
def test_a_watcher_on_one_rank_is_not_taken_for_that_of_the_training(options: dict[str, Any]) -> None:
    for result in results("watch_before", **options):
        assert result["windows"] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]
        # A model that is never trained is told of, whoever trains another one beside it.
        assert [text for text in result["said"] if "no backward has reached the watched model" not in text] == []
        check_norms(result)


@pytest.mark.distributed
def test_a_state_of_each_rank_continues_its_window() -> None:
    for result in results("load", state_of="every rank"):
        assert result["windows"][0] == [6, 7, 8, 9, 10]
        assert result["said"] == []
        check_norms(result)


@pytest.mark.distributed
def test_a_window_of_another_rank_is_left_out() -> None:
    for result in results("load", state_of="rank 0"):
        assert result["windows"][0] == [8, 9, 10]
        check_norms(result)
        [text] = result["said"]
        assert "left out" in text


@pytest.mark.distributed
def test_ranks_of_which_one_has_loaded_a_state_have_no_steps_in_common() -> None:
    """Rank 0 counts 8, 9, ..., the other 1, 2, ...: step 8 of the one is not step 8 of the other."""
    for result in results("load", state_of="rank 0 alone"):
        assert result["windows"] == []
        [text] = result["said"]
        assert "are left out of the rows" in text


@pytest.mark.distributed
def test_a_restart_on_the_same_store_finds_nothing_of_the_first_attempt() -> None:
    for result in results("restart"):
        assert result["windows"] == [[1, 2, 3], [4, 5, 6], [7, 8]]
        assert result["said"] == []
        check_norms(result)


@pytest.mark.distributed
def test_the_last_window_is_whole_if_the_process_group_is_destroyed_before() -> None:
    for result in results("destroy_first"):
        assert result["windows"] == [[1, 2, 3, 4, 5], [6, 7]]
        check_norms(result, width=6, world=1)


def test_the_calls_of_the_user_wait_two_seconds_for_other_ranks_in_all() -> None:
    assert rank_merger.FLUSH_SECONDS + rank_merger.LAST_SECONDS + rank_merger.END_SECONDS <= 2.0


def session(monkeypatch: pytest.MonkeyPatch, process: dist.Store, rank: int, description: str) -> RankSession:
    """Call watch() in a process, which is identified by its store."""
    monkeypatch.setattr(rank_session, "_get_default_store", lambda: process)
    monkeypatch.setattr(rank_session, "dist", SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 2))
    return RankSession(description)


def settle(sessions: list[RankSession]) -> None:
    """Begin to train with these watchers, and wait for rank 0's answer."""
    for seconds in (0.0, 60.0):
        for one in sessions:
            one.settle(one.description, str, seconds=seconds)


def test_watchers_belong_together_by_what_they_watch_then_by_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    processes = [dist.PrefixStore("", store) for _ in range(2)]
    alone = session(monkeypatch, processes[0], 0, "model")
    assert not alone.is_found
    alone.end()
    models = [session(monkeypatch, processes[rank], rank, "model") for rank in (1, 0)]
    stages = [session(monkeypatch, processes[rank], rank, f"stage {rank}") for rank in (1, 0)]
    assert all(one.is_open for one in stages)
    settle(stages)
    for pair in (models, stages):
        keys = [one.store("any") for one in pair]
        keys[0].set("from", "other")
        assert keys[1].get("from") == b"other"
    assert not models[0].store("any").check(["nothing"])
    assert models[0].whole == ""
    assert [one.whole for one in stages] == ["{'stage 0': [0], 'stage 1': [1]}"] * 2
    for one in (*models, *stages):
        one.end()
    listed = [processes[0].get(f"gradwatch/of 2/rank/{rank}") for rank in range(2)]
    assert listed == [b"[]", b"[]"]


def test_an_answer_that_comes_while_a_rank_looks_for_others_alike_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it was overwritten, and the rows of a rank were left out."""
    store = dist.HashStore()
    processes = [dist.PrefixStore("", store) for _ in range(2)]
    stages = [session(monkeypatch, processes[rank], rank, f"stage {rank}") for rank in range(2)]
    looks = stages[0]._find

    def looks_slowly() -> object:
        found = looks()
        if threading.current_thread() is threading.main_thread():
            settle(stages)
        return found

    monkeypatch.setattr(stages[0], "_find", looks_slowly)
    assert not stages[0].is_open  # the answer has come
    assert stages[0].whole == stages[1].whole != ""
    for one in stages:
        one.end()


def test_ranks_with_different_numbers_of_different_watchers_do_not_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    processes = [dist.PrefixStore("", store) for _ in range(2)]
    watched = [(0, "evaluation"), (0, "stage 0"), (1, "stage 1")]
    sessions = [session(monkeypatch, processes[rank], rank, what) for rank, what in watched]
    settle(sessions)
    for one in sessions:
        assert one.is_found
        assert one.is_ambiguous
        assert one.store("any") is None


def test_a_watcher_of_one_rank_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    processes = [dist.PrefixStore("", store) for _ in range(2)]
    both = [session(monkeypatch, processes[rank], rank, "model") for rank in range(2)]
    for rank in range(2):
        alone = session(monkeypatch, processes[rank], rank, f"evaluation of rank {rank}")
        assert alone.is_open
        settle([alone])
        assert alone.is_found
        assert not alone.is_ambiguous
        assert (alone.store("any"), alone.whole) == (None, "")
        alone.end()
    assert all(one.store("any") is not None for one in both)


def test_watchers_of_a_process_that_died_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store, numbers = dist.HashStore(), set()
    for _ in range(3):  # attempts
        processes = [dist.PrefixStore("", store) for _ in range(2)]
        both = [session(monkeypatch, processes[rank], rank, "model") for rank in range(2)]
        extra = session(monkeypatch, processes[0], 0, "model")
        for one in both:
            one.store("any").set(f"rank {one.rank}", "")
        assert both[0].store("any").check(["rank 0", "rank 1"])
        assert not extra.is_found
        numbers.add(both[0]._session.number)
    assert len(numbers) == 3


def window(rank: int, steps: list[int]) -> RankWindow:
    """A window of one parameter, of which each rank has a shard of one element, with a gradient of 3 + rank."""
    row = np.zeros((1, NUM_COLUMNS))
    row[0, [Column.NUM_ELEMENTS, Column.GRAD_SUM_SQ]] = 1.0, (3.0 + rank) ** 2
    samples = tuple(ArrivedSample(Sample(step, False, ()), row, 1.0, False) for step in steps)
    return RankWindow(samples, NO_HISTOGRAM, ("weight",), np.array([True]))


def outcome(one: Outcome) -> tuple[list[int], list[float], bool]:
    samples = one.window.samples
    return (
        [sample.sample.step for sample in samples],
        [float(np.sqrt(sample.rows[0, Column.GRAD_SUM_SQ])) for sample in samples],
        bool(one.reason),
    )


@pytest.mark.distributed
def test_windows_of_different_steps_are_merged_where_they_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(rank_merger, "LAST_SECONDS", 60.0)
    store = dist.HashStore()
    of_ranks = [[[1, 2], [3, 4, 6, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]]
    mergers = [RankMerger(store, rank, 2) for rank in range(2)]
    for rank, merger in enumerate(mergers):
        for steps in of_ranks[rank]:
            merger.submit(window(rank, steps))
    for merger in mergers:
        merger._wait_for_outcomes(60.0)
    found = [[outcome(one) for one in merger.take()] for merger in mergers]
    for merger in mergers:
        merger.end(merge=True)
    # Shards of 3 and 4: the norm of the whole is 5.
    assert found[0] == [([1, 2], [5.0, 5.0], False), ([3, 4], [5.0, 5.0], False), ([6, 8], [5.0, 5.0], False)]
    assert found[1] == [
        ([1, 2], [5.0, 5.0], False),
        ([3, 4], [5.0, 5.0], False),
        ([5, 7], [4.0, 4.0], True),
        ([6, 8], [5.0, 5.0], False),
    ]


def test_windows_do_not_pile_up_where_another_rank_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    merger = RankMerger(dist.HashStore(), 0, 2)
    for first in range(0, 10_000, 10):
        merger.submit(window(0, list(range(first + 1, first + 11))))
    early = merger.take()
    monkeypatch.setattr(rank_merger, "LAST_SECONDS", 0.0)
    merger.end(merge=True)
    late = merger.take()
    assert len(late) * 10 <= rank_merger._MAX_SAMPLES + 20
    assert len(early) + len(late) == 1000
    assert all(one.reason for one in (*early, *late))
