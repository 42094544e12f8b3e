"""When samples, histograms and flushes are due, and how a budget decides when samples are taken."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from gradients import Chosen, samples, step, watch

import wandb_gradwatch
from wandb_gradwatch._capture.cadence import Budget, Cadence, Plan, on_ladder
from wandb_gradwatch._capture.clock import SampleClock
from wandb_gradwatch._capture.schedule import RankPlans, Schedule


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Rows at 4, 8, ... The last sample of the first row and of the tenth one after it has a histogram.
        ({}, [4, 44]),
        ({"sample_every": 3}, [3, 42]),  # the rows hold the samples 3; 6; 9 and 12; ...; the eleventh row holds 42
        ({"histogram_every": 0}, []),
        ({"histogram_every": 20}, [20, 40]),
        ({"histogram_every": 18, "sample_every": 4}, [20, 36]),  # at the next sample
    ],
)
def test_rows_with_histograms(options, expected):
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, **{"log_every": 4} | options)
    for _ in range(47):
        step(model, optimizer, a=[1])
    watcher.remove()
    assert [at for snapshot in sink.snapshots for at in snapshot.histogram_steps] == expected


@pytest.mark.parametrize("value", [0, -0.1, 1, 1.5, True, "1%"])
def test_a_budget_that_makes_no_sense(value):
    with pytest.raises(ValueError, match=re.escape(f"max_overhead={value!r} must be above 0 and below 1")):
        Budget(value)


@pytest.mark.parametrize(("steps", "expected"), [(0.3, 1), (1, 1), (4, 2), (5, 5), (19, 10), (999, 500), (1000, 1000)])
def test_the_ladder(steps, expected):
    assert on_ladder(steps) == expected


def test_a_plan_never_comes_early_and_keeps_to_round_steps():
    # 39 steps after 40 is 79; the largest round number up to a quarter of 39 is 5, whose next multiple is 80.
    assert Plan(every=39).next_sample(40) == 80
    assert Plan(every=1).next_sample(40) == 41
    assert Plan(every=3001).next_sample(40) == 3500


STEP = 0.1  # seconds of a step without the monitor
SHARE = 0.01
NEARLY = 1 + 1e-9


@dataclass
class Simulated:
    """A training on a simulated clock: its sampled steps and rows, and the time that monitoring has taken."""

    cost: Callable[[int], float]  # seconds of a sample, by step
    row: float = 0.0  # seconds of a row
    step_seconds: Callable[[int], float] = lambda _: STEP
    counting: float = 0.0  # seconds of each step that is not sampled
    once: dict[int, float] = field(default_factory=dict)  # additional seconds, by the number of the sample, from 0
    before: float = 0.0  # seconds from the start of the program to watch()
    cadence: Cadence = field(default_factory=lambda: Cadence(None))
    trained: float = 0.0
    spent: float = 0.0
    sampled: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    largest_excess: float = -math.inf  # seconds beyond one percent and a second, at any sample from the third on

    def run(self, steps: int, unusual: Collection[int] = ()) -> Simulated:
        clock = SampleClock()
        schedule = Schedule(clock, self.cadence, Budget(SHARE))
        schedule.start(0.0, 0.0, before=self.before)
        for number in range(1, steps + 1):
            self.trained += self.step_seconds(number)
            is_sampled = schedule.is_sampled
            if is_sampled:
                self.spent += self.cost(number) + self.once.get(len(self.sampled), 0.0)
                self.sampled.append(number)
                schedule.add_sample(number, skipped=False, now=self.trained + self.spent, seconds_spent=self.spent)
                if len(self.sampled) > 2:
                    self.largest_excess = max(self.largest_excess, self.spent - SHARE * self.trained - 1.0)
            else:
                self.spent += self.counting
                schedule.seconds_on_others += self.counting
            clock.step = number
            if schedule.window_is_full(number):
                self.spent += self.row
                self.rows.append(number)
                schedule.seconds_on_rows += self.row
                schedule.begin_window()
            schedule.open()
            if is_sampled and number in unusual:
                schedule.look_closely()
        return self

    @property
    def promised(self) -> float:
        """The seconds that monitoring may have taken: a share of the training's time, and the seconds at the start."""
        return SHARE * self.trained + min(1.0, (self.trained + self.before) / 10)

    @property
    def intervals(self) -> list[int]:
        """The numbers of steps between consecutive samples."""
        return [later - earlier for earlier, later in pairwise(self.sampled)]


COSTS = [0.001, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]  # of a sample, in units of a step's time


@pytest.mark.parametrize("step_seconds", [0.0003, 0.003, 0.1])
@pytest.mark.parametrize("cost", COSTS)
def test_one_percent_and_a_second_and_all_of_it_where_there_is_something_to_measure(cost, step_seconds):
    seen = Simulated(lambda _: cost * step_seconds, step_seconds=lambda _: step_seconds).run(30_000)
    assert seen.sampled[0] == 1  # the first step is always sampled
    # Two samples show what a sample costs: 20 s, if one takes 100 steps of 0.1 s.
    assert seen.largest_excess <= max(2 * cost * step_seconds - 1.0, 1e-9)
    assert seen.spent <= seen.promised * NEARLY
    # A quarter may be kept back for a burst, and the interval is rounded up by a quarter at most. Where every step is
    # sampled, no more can be taken.
    assert seen.spent >= min(0.75 * seen.promised - 1.25 * cost * step_seconds, 30_000 * cost * step_seconds) / NEARLY


@pytest.mark.parametrize("row", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("cost", [0.1, 1.0, 10.0])
def test_rows_have_a_price_of_their_own_and_take_at_most_two_fifths(cost, row):
    seen = Simulated(lambda _: cost * STEP, row=cost * row * STEP).run(30_000)
    assert seen.rows[0] == 50
    assert all(number % 50 == 0 for number in seen.rows)
    # Nothing is known of the price of the first row. After it, no row and no sample exceeds what is promised.
    assert seen.spent <= (SHARE * seen.trained + 1.0) * NEARLY + cost * row * STEP
    assert (len(seen.rows) - 1) * cost * row * STEP <= 0.4 * seen.promised * NEARLY
    # A row needs a sample, and comes at a multiple of 50 steps.
    assert len(seen.rows) >= min(30_000 // 50, 0.3 * seen.promised / (cost * row * STEP) - 1, len(seen.sampled) / 2)


def test_a_short_training_of_cheap_steps_is_measured_nearly_whole():
    # A minute of steps of 10 ms, samples of 0.8 ms and rows of 3.4 ms: 6,000 samples and 120 rows take 5.2 s, of which
    # 1.6 s are promised. Ten seconds, in which a tenth of the time may be taken, are measured whole.
    seen = Simulated(lambda _: 0.0008, row=0.0034, step_seconds=lambda _: 0.01, before=2.0).run(6_000)
    assert seen.sampled[:900] == list(range(1, 901))
    assert len(seen.sampled) >= 1_000


def test_a_script_of_four_hundred_steps_of_a_millisecond():
    # Samples of 0.8 ms, after a first one of 30 ms; rows of 4 ms; two seconds of imports and wandb.init() before.
    seen = Simulated(
        lambda _: 0.0008, row=0.004, step_seconds=lambda _: 0.001, before=2.0, once={0: 0.03}, cadence=Cadence(None)
    ).run(400)
    assert len(seen.sampled) >= 40
    assert max(seen.intervals) <= 25
    assert len(seen.rows) >= 6


@pytest.mark.parametrize("after", COSTS)
@pytest.mark.parametrize("before", COSTS)
def test_a_cost_that_changes_in_mid_run(before, after):
    seen = Simulated(lambda number: (before if number <= 10_000 else after) * STEP).run(20_000)
    # A new cost is known after two samples, and may be exceeded by these.
    assert seen.spent <= (SHARE * seen.trained + 1.0) * NEARLY + 2 * after * STEP


@pytest.mark.parametrize("seed", range(20))
def test_after_a_slow_write_samples_go_on_at_half_the_rate(seed):
    # One-time costs, such as a compilation, a page, an alert or a slow disk: up to the time of 10,000 steps.
    chance = random.Random(seed)
    once = {number: STEP * 10 ** chance.uniform(0, 4) for number in chance.sample(range(0, 60, 3), 4)} | {0: 500 * STEP}
    cost = 10 ** chance.uniform(-2, 0.69)  # up to the time of 5 steps
    seen = Simulated(lambda _: STEP * cost, once=once).run(40_000)
    # 200 steps earn two steps' time; a quarter is lost by rounding.
    assert max(seen.intervals) <= max(math.ceil(2 * 100 * cost) * 1.25, 2)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_steps_that_become_slower_or_faster(factor):
    seen = Simulated(lambda _: 0.3 * STEP, step_seconds=lambda n: STEP * (factor if n > 10_000 else 1)).run(20_000)
    assert 0.74 * seen.promised <= seen.spent <= seen.promised * NEARLY + 0.3 * STEP


def test_something_unusual_is_looked_at_step_by_step():
    # 30,000 steps of 0.1 s promise 31 s. A burst of samples of one step's time takes 3.2 s, which were kept back.
    first = Simulated(lambda _: STEP).run(30_000)
    at = first.sampled[-1]
    seen = Simulated(lambda _: STEP).run(at + 100, unusual=(at,))
    # The next step has begun when the sample is found to be unusual.
    assert [number for number in seen.sampled if number > at][: Budget.BURST] == list(
        range(at + 2, at + 2 + Budget.BURST)
    )
    assert seen.largest_excess <= 1e-9


def test_what_is_unusual_at_every_sample_costs_no_more_than_what_is_not():
    # Like a persistent NaN: every sample starts a burst.
    seen = Simulated(lambda _: STEP).run(20_000, unusual=range(20_000))
    assert seen.largest_excess <= 1e-9


@pytest.mark.parametrize(("counting", "least"), [(0.003, 100), (0.02, 80)])
def test_what_counting_steps_takes_is_part_of_the_budget_and_no_cost_of_a_sample(counting, least):
    # 20,000 steps earn 200 steps' time, and counting takes 60 or 400 of it. If it takes more than the whole budget,
    # samples still come when twice their cost has been earned: after 200 steps, rounded up by a quarter at most.
    seen = Simulated(lambda _: STEP, counting=counting * STEP).run(20_000)
    assert len(seen.sampled) >= least


@pytest.mark.parametrize("row", [0.0, 1.0, 100.0])
def test_rows_that_the_user_asks_for_come_exactly_then_each_with_a_sample_of_its_step(row):
    # Samples of one step's time, so that one step in 100 would be measured.
    seen = Simulated(lambda _: STEP, row=row * STEP, cadence=Cadence(None, log_every=30)).run(20_000)
    assert seen.rows == list(range(30, 20_001, 30))
    assert set(seen.rows) <= set(seen.sampled)
    # Whatever rows cost is no cost of monitoring.
    assert seen.sampled == Simulated(lambda _: STEP, cadence=Cadence(None, log_every=30)).run(20_000).sampled


def test_two_ranks_of_unequal_speed_sample_the_same_steps():
    # A sample costs one step's time on rank 0, and two on rank 1.
    store = torch.distributed.HashStore()
    ranks = []
    for rank in range(2):
        clock = SampleClock()
        schedule = Schedule(clock, Cadence(None, log_every=20), Budget(SHARE))
        schedule.ranks = RankPlans(lambda: store, leads=rank == 0)
        schedule.start(0.0, 0.0)
        ranks.append((clock, schedule, [0.0], []))
    for number in range(1, 20_001):
        for rank, (clock, schedule, spent, sampled) in enumerate(ranks):
            schedule.open()
            if schedule.is_sampled:
                spent[0] += STEP * (rank + 1)
                sampled.append(number)
                now = number * STEP + spent[0]
                schedule.add_sample(number, skipped=False, now=now, seconds_spent=spent[0], must_agree=True)
            clock.step = number
            if schedule.window_is_full(number):
                schedule.begin_window()
            elif rank == 0 and number % 1000 == 7:  # flushed by the user, on this rank alone
                schedule.begin_window(is_full=False)
    assert ranks[0][3] == ranks[1][3]
    assert ranks[0][3][:10] == list(range(1, 11))


def test_a_plan_of_rank_0_is_kept_to_what_is_promised():
    # The rows come when they may. A plan holds for a whole window, which the start of a run does not pay for.
    clock = SampleClock()
    schedule = Schedule(clock, Cadence(None), Budget(SHARE))
    store = torch.distributed.HashStore()
    schedule.ranks = RankPlans(lambda: store, leads=True)
    schedule.start(0.0, 0.0)
    spent = 0.0
    for number in range(1, 50_001):
        schedule.open()
        if schedule.is_sampled:
            spent += STEP
            schedule.add_sample(number, skipped=False, now=number * STEP + spent, seconds_spent=spent)
        clock.step = number
        if schedule.window_is_full(number):
            spent += STEP
            schedule.seconds_on_rows += STEP
            schedule.begin_window()
    promised = SHARE * 50_000 * STEP + 1.0
    assert 0.6 * promised <= spent <= promised * NEARLY


def test_a_run_that_goes_on_samples_every_tenth_step_until_rank_0_has_said_how_many():
    clock = SampleClock()
    before = Schedule(clock, Cadence(None), Budget(SHARE)).state_dict() | {"step": 500, "num_samples": 40}
    schedule = Schedule(clock, Cadence(None), Budget(SHARE))
    schedule.ranks = RankPlans(torch.distributed.HashStore, leads=False)
    schedule.start(0.0, 0.0)
    schedule.load_state_dict(before)
    sampled = []
    for number in range(501, 541):
        schedule.open()
        if schedule.is_sampled:
            sampled.append(number)
            schedule.add_sample(number, skipped=False, now=number * STEP, seconds_spent=0.0)
        clock.step = number
    assert len(sampled) <= 5


def test_a_plan_takes_effect_at_the_next_exchange_and_without_one_shards_keep_theirs_and_replicas_use_their_own():
    store = torch.distributed.HashStore()
    leader, other = (RankPlans(lambda: store, leads=leads) for leads in (True, False))
    # In steps, not in numbers of exchanges: the other rank has made one more, on its own.
    assert other.exchange(1, Plan(2), must_agree=True) is None
    for plans in (leader, other):
        assert plans.exchange(20, Plan(7, 3), must_agree=True) is None
    for plans in (leader, other):
        assert plans.exchange(40, Plan(8), must_agree=True) == Plan(7, 3)
    # Rank 0 no longer watches: its last plan takes effect, and there is no other.
    assert other.exchange(60, Plan(9), must_agree=True) == Plan(8)
    assert other.exchange(80, Plan(10), must_agree=True) is None
    assert other.exchange(100, Plan(11), must_agree=False) == Plan(11)


def test_only_the_last_plans_of_rank_0_stay_in_the_store():
    store = torch.distributed.HashStore()
    plans = RankPlans(lambda: store, leads=True)
    for number in range(100):
        plans.exchange(number, Plan(7), must_agree=True)
    assert store.num_keys() < 10


def test_a_rank_uses_its_own_plan_where_not_every_rank_watches():
    plans = RankPlans(lambda: None, leads=False)
    assert plans.exchange(20, Plan(7), must_agree=True) == Plan(7)


def trained(steps, **options):
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, **options)
    for _ in range(steps):
        step(model, optimizer, a=[1])
    return samples(watcher, sink)


def test_a_number_is_exactly_that_whatever_it_costs():
    assert list(trained(9, sample_every=3, max_overhead=1e-6).steps) == [3, 6, 9]


def test_a_function_of_the_step():
    assert list(trained(12, sample_every=lambda number: 1 if number <= 3 else 4).steps) == [1, 2, 3, 4, 8, 12]
    assert list(trained(9, sample_every=lambda number: number in (2, 7)).steps) == [2, 7]


def test_every_row_says_how_far_back_the_sample_before_is():
    seen = trained(12, sample_every=lambda number: 1 if number <= 3 else 4)
    assert list(seen.metrics["gradwatch/sample_every"]) == [1, 1, 1, 1, 4, 4]


@pytest.mark.parametrize("every", [1, 4])
def test_an_alert_from_a_sparse_cadence_names_its_interval(every):
    alerts: list[wandb_gradwatch.Alert] = []
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def own(snapshot):
        return f"norm {snapshot.total_grad_norm[0]:g}" if snapshot.total_grad_norm[0] == 3 else None

    rules = [*wandb_gradwatch.default_rules(), wandb_gradwatch.rule(title="Mine")(own)]
    watcher, _ = watch(model, rules=rules, sample_every=every, on_alert=alerts.append)
    for number in range(1, 13):
        step(model, optimizer, a=[math.nan if number == 8 else 3 if number == 12 else 1])
    watcher.remove()
    nan, mine = (next(alert for alert in alerts if alert.title == title) for title in ("NaN gradient", "Mine"))
    # Every fourth step is sampled: 4, 8 and 12. If every step is sampled, the text has no such line.
    assert ("Steps 5 to 7 were not measured." in nan.text) == (every == 4)
    assert nan.incident.unmeasured_from == (5 if every == 4 else None)
    assert mine.text == "norm 3"  # the words of the user are the user's


@pytest.mark.parametrize("value", [-1, 0.5, "2", None])
def test_a_function_that_gives_no_whole_number_is_refused_at_once(value):
    with pytest.raises(ValueError, match=re.escape(f"sample_every(1) = {value!r} must be a whole number, at least 0")):
        watch(Chosen(a=1), sample_every=lambda _: value)


def test_a_sample_that_is_unusual_has_the_next_steps_looked_at():
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mine = wandb_gradwatch.rule(title="Mine")(lambda snapshot: "2" if snapshot.total_grad_norm[0] == 2 else None)
    watcher, _ = watch(model, rules=[mine])
    looked: list[int] = []
    watcher._sampler.parts.schedule.look_closely = lambda: looked.append(int(watcher.step))
    for value in (1, 1, 1, 1, 2, 4, 1, 1, float("nan"), 1):
        step(model, optimizer, a=[value])
    watcher.remove()
    # Step 5 has an alert, but twice the usual norm is not unusual. Four times the usual norm is, and so is NaN.
    assert looked == [5, 6, 9]


def test_what_an_alert_takes_is_no_cost_of_a_sample(monkeypatch):
    # Samples take no time on this clock, and each of three callbacks an hour: samples go on at every step.
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def wait(alert: wandb_gradwatch.Alert) -> None:
        clock[0] += 3600.0

    def at(number: int) -> wandb_gradwatch.Rule:
        return wandb_gradwatch.rule(title=f"At {number}")(lambda snapshot: "!" if number in snapshot.steps else None)

    rules = [at(number) for number in (5, 6, 7)]
    watcher, sink = watch(model, sample_every=None, log_every=None, on_alert=wait, rules=rules)
    for _ in range(30):
        clock[0] += 1.0
        step(model, optimizer, a=[1])
    assert list(samples(watcher, sink).steps) == list(range(1, 31))
    assert clock[0] == 30.0 + 3 * 3600.0


def test_the_first_steps_after_a_restart_are_sampled_one_by_one():
    clock = SampleClock(step=0)
    schedule = Schedule(clock, Cadence(sample_every=None), Budget(0.01))
    schedule.start(0.0, 0.0)
    sampled: list[int] = []

    def train(steps: int) -> None:
        for _ in range(steps):
            schedule.open()
            if schedule.is_sampled:
                sampled.append(clock.open_step)
            clock.step += 1
            spent = len(sampled) * 0.5 * STEP
            if sampled[-1] == clock.step:
                schedule.add_sample(clock.step, skipped=False, now=clock.step * STEP + spent, seconds_spent=spent)

    # What 32 samples take is kept back.
    train(20_000)
    schedule.load_state_dict(schedule.state_dict())
    train(100)
    assert [n for n in sampled if n > 20_000][: Budget.BURST] == list(range(20_001, 20_001 + Budget.BURST))
