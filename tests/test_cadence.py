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
    ("every", "log_every", "histogram_every", "expected"),
    [
        (1, 4, None, [4, 8, 12]),
        (3, 4, None, [3, 6, 12]),  # 9 is not the last sample before the flush at 12
        (1, 4, 0, []),
        (1, 4, 6, [6, 12]),
        (4, 4, 6, [8, 12]),  # rounded up to the next sample
    ],
)
def test_histograms(every, log_every, histogram_every, expected):
    cadence = Cadence(every, log_every, histogram_every)
    found = [
        number
        for number in range(every, 13, every)
        if cadence.histogram_due(
            number, last=number - every, is_first=False, is_last=number + every > cadence.next_flush(number)
        )
    ]
    assert found == expected


def test_the_first_sample_of_a_window_has_a_histogram_by_default_only():
    assert Cadence().histogram_due(1, last=0, is_first=True, is_last=False)
    assert not Cadence(histogram_every=10).histogram_due(1, last=0, is_first=True, is_last=False)


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
    assert Plan(every=999).next_sample(40) == 1040  # the next multiple of 200 would be more than 1,000 steps away
    assert Plan(every=3001).next_sample(40) == 3500


STEP = 0.1  # seconds of a step without the monitor


@dataclass
class Simulated:
    """A simulated training under a budget: its sampled steps, and the time that monitoring has taken."""

    cost: Callable[[int], float]  # seconds of a sample, by step
    row: float = 0.0  # seconds of a row
    log_every: int = 50
    step_seconds: Callable[[int], float] = lambda _: STEP
    counting: float = 0.0  # seconds of each step that is not sampled
    once: dict[int, float] = field(default_factory=dict)  # additional seconds, by the number of the sample, from 0
    budget: Budget = field(default_factory=lambda: Budget(0.01))
    trained: float = 0.0
    spent: float = 0.0
    sampled: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def run(self, steps: int, unusual: Collection[int] = ()) -> Simulated:
        self.budget.start(0, 0.0, 0.0)
        due, plan, in_window, on_rows, on_counting = 1, Plan(), 0, 0.0, 0.0
        for number in range(1, steps + 1):
            self.trained += self.step_seconds(number)
            if number >= due:
                self.spent += self.cost(number) + self.once.get(len(self.sampled), 0.0)
                self.sampled.append(number)
                if number in unusual:
                    self.budget.look_closely()
                now = self.trained + self.spent
                plan = self.budget.after_sample(number, now, self.spent, on_rows=on_rows, on_counting=on_counting)
                due, in_window, on_rows, on_counting = plan.next_sample(number), in_window + 1, 0.0, 0.0
            else:
                self.spent += self.counting
                on_counting += self.counting
            if number % self.log_every == 0 and in_window >= plan.samples_per_row:
                self.spent += self.row
                self.rows.append(number)
                in_window, on_rows = 0, self.row
        return self

    @property
    def intervals(self) -> list[int]:
        """The numbers of steps between consecutive samples."""
        return [later - earlier for earlier, later in pairwise(self.sampled)]

    @property
    def share(self) -> float:
        return self.spent / self.trained


COSTS = [0.001, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]  # in units of a step's time
LIMIT = 0.01 * (1 + 1e-9)


# A row that costs the time of 200 steps would use all the credit of 20,000 steps.
@pytest.mark.parametrize(("cost", "row"), [(c, 0.0) for c in COSTS] + [(c, 2.0) for c in COSTS if c < 100])
def test_at_most_one_percent_and_all_of_it_where_there_is_something_to_measure(cost, row):
    seen = Simulated(lambda _: cost * STEP, row=cost * row * STEP).run(20_000)
    assert seen.sampled[0] == 1  # the first step is always sampled
    # 20,000 steps earn the time of 200 steps. At the end one sample with its row may be missing or be too many. If a
    # sample costs less than 1 % of a step, even sampling every step cannot cost more.
    last = cost * (1 + row) / 20_000
    assert seen.share <= LIMIT + last * (cost > 10)
    assert seen.share >= min(0.008, 0.01 - last, cost)


@pytest.mark.parametrize("after", COSTS)
@pytest.mark.parametrize("before", COSTS)
def test_a_cost_that_changes_in_mid_run(before, after):
    seen = Simulated(lambda number: (before if number <= 10_000 else after) * STEP).run(20_000)
    assert seen.share <= LIMIT + after / 20_000 * (after > 30)
    # Below 1 % every step is sampled, and credit is left over. Above three steps the credit or the debt of a sample may
    # remain at the end.
    if min(before, after) >= 0.01 and max(before, after) <= 3:
        assert seen.share >= 0.008


@pytest.mark.parametrize("seed", range(20))
def test_whatever_has_happened_the_next_sample_comes_as_soon_as_it_is_earned_twice(seed):
    # One-time costs, such as a compilation, a page, an alert or a slow disk: up to the time of 10,000 steps.
    chance = random.Random(seed)
    once = {number: STEP * 10 ** chance.uniform(0, 4) for number in chance.sample(range(0, 60, 3), 4)} | {0: 500 * STEP}
    begins = [0, *sorted(chance.randrange(20_000) for _ in range(3))]
    costs = [10 ** chance.uniform(-2, 0.69) for _ in begins]  # up to the time of 5 steps
    seen = Simulated(
        lambda n: STEP * next(c for b, c in zip(begins[::-1], costs[::-1], strict=True) if n >= b), once=once
    )
    seen.run(40_000)
    assert max(seen.intervals) <= 1000  # so a persistent NaN is found within 1,000 steps
    # For a sample of one step's time 100 steps earn it once, and 200 twice. A fifth is lost by rounding the interval. A
    # new cost is known after three samples.
    settled = [interval for interval, at in zip(seen.intervals, seen.sampled, strict=False) if at > begins[-1] + 5_000]
    dear = [number in once for number in range(len(seen.sampled))][-len(settled) - 1 : -1]
    assert all(i <= max(2 * 100 * costs[-1] * 1.25, 2) for i, is_dear in zip(settled, dear, strict=True) if not is_dear)


def test_what_takes_long_once_is_paid_back_with_half_of_what_is_earned():
    # The first sample costs 1,500 steps' time. Of the 200 that 20,000 steps earn, half pays for samples of one step.
    seen = Simulated(lambda _: STEP, once={0: 1500 * STEP}).run(20_000)
    assert 80 <= len(seen.sampled) <= 2 + 100


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_steps_that_become_slower_or_faster(factor):
    seen = Simulated(lambda _: 0.3 * STEP, step_seconds=lambda n: STEP * (factor if n > 10_000 else 1)).run(20_000)
    assert 0.008 <= seen.share <= LIMIT


@pytest.mark.parametrize(("cost", "expected"), [(0.001, 10), (1.0, 10), (10.0, 5), (100.0, 2)])
def test_the_first_steps_are_sampled_as_long_as_that_is_paid_back(cost, expected):
    # A debt of 50 steps' time is allowed: five samples of 10. The second sample is always taken.
    assert Simulated(lambda _: cost * STEP).run(10).sampled == list(range(1, expected + 1))


def test_after_the_first_steps_the_debt_is_paid_back_while_samples_go_on():
    # Ten samples of one step's time: a debt of what 1,000 steps earn. Half of the credit pays for more samples: 5 or 4.
    sampled = Simulated(lambda _: STEP).run(2_000).sampled[10:]
    assert len([number for number in sampled if number <= 1_000]) >= 4


def test_something_unusual_is_looked_at_step_by_step():
    # Of 200 steps' time in 20,000 steps a tenth is saved: 20 samples of one step's time, or 32 of half a step.
    for cost, expected in ((1.0, 18), (0.5, Budget.BURST)):
        first = Simulated(lambda _, cost=cost: cost * STEP).run(20_000)
        at = first.sampled[-1]
        seen = Simulated(lambda _, cost=cost: cost * STEP).run(at + 100, unusual=(at,))
        burst = [number for number in seen.sampled if at < number <= at + Budget.BURST]
        assert burst[:expected] == list(range(at + 1, at + 1 + expected))
        assert len(seen.sampled) - len(first.sampled) <= Budget.BURST + 1
        assert seen.share <= 0.0101


def test_what_is_unusual_at_every_sample_costs_no_more_than_what_is_not():
    # Like a persistent NaN: every sample starts a burst.
    clock = SampleClock()
    schedule = Schedule(clock, Cadence(None), Budget(0.01))
    schedule.start(0.0, 0.0)
    sampled: list[int] = []
    for number in range(1, 20_001):
        is_sampled = schedule.is_sampled
        if is_sampled:
            sampled.append(number)
            spent = len(sampled) * STEP
            schedule.add_sample(number, skipped=False, now=number * STEP + spent, seconds_spent=spent)
        clock.step = number
        schedule.open()
        if is_sampled:
            schedule.look_closely()
    assert 160 <= len(sampled) <= 200  # each costs the time of one step


def test_a_row_waits_for_samples_that_cost_twice_as_much():
    # A row costs as much as seven samples, and holds about twice as many.
    seen = Simulated(lambda _: STEP, row=7 * STEP, log_every=1).run(20_000)
    settled = [len([number for number in steps if number > 5_000]) for steps in (seen.sampled, seen.rows)]
    assert 11 <= settled[0] / settled[1] <= 17


@pytest.mark.parametrize(("counting", "share", "least"), [(0.003, 0.01, 120), (0.005, 0.01, 80), (0.02, 0.0235, 50)])
def test_what_counting_steps_takes_is_part_of_the_budget_and_no_cost_of_a_sample(counting, share, least):
    # Samples of one step's time: 0.7 % of 20,000 steps are 140 samples, 0.5 % are 100; rounding and savings take some.
    # If counting costs more than the whole budget, half of one percent is left for samples, which come when it has
    # earned twice their cost: after 400 steps, and 50 of them take 0.25 %.
    seen = Simulated(lambda _: STEP, counting=counting * STEP).run(20_000)
    assert seen.share <= share
    assert len(seen.sampled) >= least


def test_while_the_first_steps_may_make_debt_unusual_samples_are_followed_closely():
    # A sample of half a step's time. Ten of them are a debt of 5 steps' time, which later samples repay: they are 100
    # steps apart. An unusual one is followed by 8 others on credit, and there are 32 of these in all.
    assert [
        sum(gap == 1 for gap in Simulated(lambda _: 0.5 * STEP).run(1200, unusual=unusual).intervals)
        for unusual in ((), range(150, 250), range(150, 1200))
    ] == [9, 9 + 8, 9 + 32]


def test_two_ranks_of_unequal_speed_sample_the_same_steps():
    # A sample costs one step's time on rank 0, and two on rank 1.
    store = torch.distributed.HashStore()
    ranks = []
    for rank in range(2):
        clock = SampleClock()
        schedule = Schedule(clock, Cadence(None, log_every=20), Budget(0.01))
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
    assert 0.005 <= ranks[0][2][0] / (20_000 * STEP) <= LIMIT


def test_a_run_that_goes_on_samples_every_tenth_step_until_rank_0_has_said_how_many():
    clock = SampleClock()
    before = Schedule(clock, Cadence(None, log_every=20), Budget(0.01)).state_dict() | {"step": 500, "num_samples": 40}
    schedule = Schedule(clock, Cadence(None, log_every=20), Budget(0.01))
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


def test_by_default_the_first_steps_are_sampled_and_later_fewer():
    seen = trained(60, sample_every=None, max_overhead=1e-6)
    # A millionth does not cover another sample for hours. On a busy machine even the first ten samples may exceed the
    # allowed debt of 0.25 s or of fifty steps' time.
    assert list(seen.steps) == list(range(1, len(seen) + 1))
    assert 1 <= len(seen) <= 10


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
    said = "What happened between steps {} and {} was not measured."
    # Every fourth step is sampled: 4, 8 and 12. If every step is sampled, the text has no such line.
    assert (f"\n{said.format(4, 8)}\nProbable cause: " in nan.text) == (every == 4)
    assert mine.text == ("norm 3" if every == 1 else f"norm 3\n{said.format(8, 12)}")
    assert ("between steps" in nan.text) == (every == 4)


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


def test_what_an_alert_takes_makes_no_samples_fewer(monkeypatch):
    # Each callback takes an hour, which must not count as monitoring: samples continue at their cadence.
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def wait(alert: wandb_gradwatch.Alert) -> None:
        clock[0] += 3600.0

    rules = [wandb_gradwatch.rules.NaNGradient()]
    watcher, sink = watch(model, sample_every=None, on_alert=wait, rules=rules)
    for number in range(1, 31):
        clock[0] += 1.0
        step(model, optimizer, a=[math.nan if number == 5 else 1])
    seen = samples(watcher, sink)
    assert list(seen.steps) == list(range(1, 31))
    assert clock[0] == 3630.0


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

    # A tenth of what 20,000 steps earn is saved: 20 steps' time, and 32 samples take 16.
    train(20_000)
    schedule.load_state_dict(schedule.state_dict())
    train(100)
    assert [n for n in sampled if n > 20_000][: Budget.BURST] == list(range(20_001, 20_001 + Budget.BURST))
