"""Loss scaling and clipping: true norms before and after, without any setting by the user."""

from __future__ import annotations

import gc
import math
import sys

import numpy as np
import pytest
import torch
from gradients import Chosen, of, samples, step, watch
from torch import nn

from wandb_gradwatch.metrics import Metric

SGD = torch.optim.SGD
SCALE = 65536.0


def scaler_of(scale: float = SCALE, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def amp_step(model, optimizer, scaler, *, unscale=False, clip=None, **gradients):
    optimizer.zero_grad()
    scaler.scale(model.loss(**gradients)).backward()
    if unscale or clip:
        scaler.unscale_(optimizer)
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: SGD(parameters, lr=0.1),
        lambda parameters: SGD(parameters, lr=0.1, foreach=True),
        lambda parameters: SGD(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.AdamW(parameters),
    ],
    ids=["sgd", "foreach", "fused", "fused-adamw", "adamw"],
)
def test_true_norm_under_a_loss_scale(make, unscale):
    model = Chosen(a=2)
    optimizer, scaler = make(model.parameters()), scaler_of()
    watcher, sink = watch(model)
    for _ in range(3):
        amp_step(model, optimizer, scaler, unscale=unscale, a=[3, 4])
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3]
    assert snapshot.total_grad_norm.tolist() == [5, 5, 5]
    assert snapshot.total_grad_norm_clipped == pytest.approx([5, 5, 5], rel=1e-6)
    assert snapshot.loss_scale.tolist() == [SCALE] * 3
    assert snapshot.clip_ratio == 0
    assert not snapshot.skipped.any()


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_under_a_loss_scale(fused):
    model = Chosen(a=2)
    optimizer, scaler = SGD(model.parameters(), lr=0.1, fused=fused), scaler_of()
    watcher, sink = watch(model)
    for _ in range(3):
        amp_step(model, optimizer, scaler, clip=1.0, a=[3, 4])
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [5, 5, 5]
    assert snapshot.total_grad_norm_clipped == pytest.approx([1, 1, 1], rel=1e-5)
    assert snapshot.clip_ratio == 1


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_a_skipped_sample(fused):
    model = Chosen(a=2)
    optimizer, scaler = SGD(model.parameters(), lr=0.1, fused=fused), scaler_of()
    watcher, sink = watch(model)
    for values in ([3, 4], [math.inf, 4], [3, 4]):
        amp_step(model, optimizer, scaler, a=values)
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3]
    assert snapshot.skipped.tolist() == [False, True, False]
    assert snapshot.num_inf[:, 0].tolist() == [0, 1, 0]
    assert snapshot.loss_scale.tolist() == [SCALE, SCALE, SCALE / 2]
    assert snapshot.total_grad_norm[[0, 2]].tolist() == [5, 5]


def test_a_first_step_that_is_skipped_is_step_one():
    model = Chosen(a=1)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), scaler_of()
    watcher, sink = watch(model)
    amp_step(model, optimizer, scaler, a=[math.inf])
    amp_step(model, optimizer, scaler, a=[2])
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2]
    assert snapshot.skipped.tolist() == [True, False]
    assert snapshot.total_grad_norm[1] == 2


def test_isolated_overflows_are_not_alerted_and_a_collapse_is():
    model = Chosen(a=1)
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), scaler_of()
    watcher, sink = watch(model, rules=None)
    for number in range(20):
        amp_step(model, optimizer, scaler, a=[math.inf if number == 5 else 1])
    assert not sink.alerts
    for _ in range(30):
        amp_step(model, optimizer, scaler, a=[math.inf])
    watcher.remove()
    assert "Loss scale collapse" in [alert.title for alert in sink.alerts]


def test_several_scalers_one_per_optimizer():
    model = Chosen(a=1, b=1)
    first, second = SGD([model.a], lr=0.1), SGD([model.b], lr=0.1)
    big, small = scaler_of(SCALE), scaler_of(8.0)
    watcher, sink = watch(model)
    for _ in range(3):
        model.zero_grad()
        (big.scale(model.loss(a=[3])) + small.scale(model.loss(b=[4]))).backward()
        big.step(first)
        small.step(second)
        big.update()
        small.update()
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm").tolist() == [3, 3, 3]
    assert of(snapshot, "b", "grad_norm").tolist() == [4, 4, 4]


def test_one_scaler_for_several_optimizers():
    model = Chosen(a=1, b=1)
    optimizers, scaler = [SGD([model.a], lr=0.1), SGD([model.b], lr=0.1)], scaler_of()
    watcher, sink = watch(model)
    for _ in range(3):
        model.zero_grad()
        scaler.scale(model.loss(a=[3], b=[4])).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [5, 5, 5]


@pytest.mark.parametrize("unscale", [False, True])
def test_two_watchers_of_one_optimizers_models_both_divide_by_the_scale(unscale):
    models = Chosen(a=2), Chosen(a=2)
    optimizer, scaler = SGD([model.a for model in models], lr=0.1), scaler_of()
    watched = [watch(model) for model in models]
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(models[0].loss(a=[3, 4]) + models[1].loss(a=[6, 8])).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if unscale and number % 2:
            optimizer.step()  # the loop steps by itself what a scaler has divided
        else:
            scaler.step(optimizer)
        scaler.update()
    for (watcher, sink), norm in zip(watched, (5, 10), strict=True):
        snapshot = samples(watcher, sink)
        assert snapshot.total_grad_norm.tolist() == [norm] * 4
        assert snapshot.loss_scale.tolist() == [SCALE] * 4
        assert not snapshot.skipped.any()


def test_fsdps_own_scaler_is_followed_if_it_is_imported_after_the_first_watch(monkeypatch):
    """A second watch() wraps what is new. Without it, the gradients of FSDP1 seemed 65536 times as large."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    models, original = [nn.Linear(2, 1), nn.Linear(2, 1)], ShardedGradScaler.scale
    with monkeypatch.context() as before_the_import:
        before_the_import.delitem(sys.modules, "torch.distributed.fsdp")
        first, _ = watch(models[0])
    assert ShardedGradScaler.scale is original
    second, _ = watch(models[1])
    assert ShardedGradScaler.scale is not original
    second.remove()
    first.remove()
    assert ShardedGradScaler.scale is original


def test_an_optimizer_without_the_scaler_is_not_divided():
    model = Chosen(a=1, b=1)
    scaled, plain, scaler = SGD([model.a], lr=0.1), SGD([model.b], lr=0.1), scaler_of()
    watcher, sink = watch(model)
    for _ in range(3):
        model.zero_grad()
        scaler.scale(model.loss(a=[3])).backward()
        scaler.step(scaled)
        scaler.update()
        model.zero_grad()
        model.loss(b=[4]).backward()
        plain.step()
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm")[0::2].tolist() == [3, 3, 3]
    assert of(snapshot, "b", "grad_norm")[1::2].tolist() == [4, 4, 4]


def test_an_optimizer_that_has_stepped_before_any_scaler_was_used_is_known_to_have_none():
    model = Chosen(a=1, b=1)
    scaled, plain, scaler = SGD([model.a], lr=0.1), SGD([model.b], lr=0.1), scaler_of()
    largest = Metric("largest", lambda gradient: gradient.abs().max(), on="gradient", match="b")
    watcher, sink = watch(model, metrics=[largest])
    for _ in range(2):
        model.zero_grad()
        model.loss(b=[4]).backward()
        plain.step()
        amp_step(model, scaled, scaler, a=[3])
    metrics = samples(watcher, sink).metrics
    assert metrics["gradient/b/largest"][0::2].tolist() == [4, 4]


@pytest.mark.parametrize("scale", [SCALE, 1000.0, None])  # a power of two, none, and a disabled scaler
def test_norms_histograms_and_the_dead_threshold_are_in_true_units(scale):
    model = Chosen(a=4)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), scaler_of(scale or SCALE, enabled=scale is not None)
    watcher, sink = watch(model, dead_threshold=1e-6)
    amp_step(model, optimizer, scaler, a=[1e-7, 1e-7, 3, 4])
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm[0] == pytest.approx(5, rel=1e-6)
    assert of(snapshot, "a", "dead_ratio") == 0.5
    assert snapshot.abs_quantile(0.5)[0] == pytest.approx(1e-7, rel=0.5)
    np.testing.assert_array_equal(snapshot.loss_scale, [math.nan if scale is None else scale])


def test_accumulation_under_a_loss_scale():
    model = Chosen(a=1)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), scaler_of()
    watcher, sink = watch(model)
    for micro_batches in (3, 3, 2, 3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            scaler.scale(model.loss(a=[1])).backward()
        scaler.step(optimizer)
        scaler.update()
    assert of(samples(watcher, sink), "a", "grad_norm").tolist() == [3, 3, 2, 3]


def hand_written(parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.2)


def hand_written_through_data(parameters):
    for parameter in parameters:
        parameter.grad.data.mul_(0.2)


def replaced(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad * 0.2


def total_and_clip(parameters):
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)


CLIPPERS = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    **({"total": total_and_clip} if hasattr(nn.utils, "get_total_norm") else {}),  # from torch 2.6
    "by hand": hand_written,
    "by hand, through .data": hand_written_through_data,
    "replaced": replaced,
}


@pytest.mark.parametrize("clip", CLIPPERS.values(), ids=CLIPPERS)
def test_clipping_shows_both_norms(clip):
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(6):
        optimizer.zero_grad()
        model.loss(a=[3], b=[4]).backward()
        clip(model.parameters())
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [5] * 6
    assert snapshot.total_grad_norm_clipped == pytest.approx([1] * 6, rel=1e-5)
    assert snapshot.clip_ratio == 1
    assert snapshot.grad_norm_clipped[0] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_clipping_by_value():
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    model.loss(a=[3], b=[-4]).backward()
    nn.utils.clip_grad_value_(model.parameters(), 2.0)
    optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.grad_norm.tolist() == [[3, 4]]
    assert snapshot.grad_norm_clipped.tolist() == [[2, 2]]


def replace_gradients(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad / 1024


def divide_in_place(parameters):
    for parameter in parameters:
        parameter.grad /= 1024


def divide_without_a_trace(parameters):
    for parameter in parameters:
        parameter.grad.data.div_(1024)


def divide_all_at_once(parameters):
    torch._foreach_div_([parameter.grad for parameter in parameters], 1024)


def scaled_by_hand(divide, *, clip=None, accumulate=1, **options):
    model = Chosen(a=2, b=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, **options)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(accumulate):
            (model.loss(a=[3, 0], b=[-4]) * 1024 / accumulate).backward()
        divide(list(model.parameters()))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return samples(watcher, sink)


@pytest.mark.parametrize(
    "divide", [divide_in_place, replace_gradients, divide_all_at_once, divide_without_a_trace], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scale_that_is_divided_out_by_hand_is_no_clipping_where_it_is_told(divide, accumulate):
    snapshot = scaled_by_hand(divide, loss_scale=1024, accumulate=accumulate)
    assert snapshot.total_grad_norm.tolist() == [5] * 6  # a power of two: nothing is rounded
    assert snapshot.total_grad_norm_clipped.tolist() == [5] * 6
    assert snapshot.clip_ratio == 0
    assert snapshot.loss_scale.tolist() == [1024] * 6
    assert of(snapshot, "b", "grad_min").tolist() == [-4] * 6
    assert snapshot.dead_ratio.tolist() == [[0.5, 0]] * 6


@pytest.mark.parametrize("kind", ["function", "tensor"])
def test_a_number_of_tokens_that_is_counted_over_micro_batches_divides_all_of_them(kind):
    """The norm and the loss are those of the sum over all tokens: 3 * 5 / 48, and 3 * (3 - 4) / 48."""
    counted = torch.zeros(())
    model = Chosen(a=2)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, loss_scale=counted if kind == "tensor" else lambda step: counted.item())
    for _ in range(3):
        optimizer.zero_grad()
        counted.zero_()
        for _ in range(3):
            counted += 16
            model.loss(a=[3, -4]).backward()
        model.a.grad /= counted
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm == pytest.approx([15 / 48] * 3)
    assert snapshot.metrics["gradwatch/loss"] == pytest.approx([-3 / 48] * 3)


def test_metrics_of_gradients_are_told_of_a_scale_by_hand():
    largest = Metric("largest", lambda gradient: gradient.abs().max(), on="gradient", match="b")
    snapshot = scaled_by_hand(divide_in_place, loss_scale=1024, metrics=[largest])
    assert snapshot.metrics["gradient/b/largest"].tolist() == [4] * 6


def test_a_scaler_that_stepped_before_watching_ended_is_forgotten():
    """Pre-training with a scaler, then fine-tuning without one: the optimizer and the scaler still exist."""
    model = Chosen(a=1)
    optimizer, scaler = SGD(model.parameters(), lr=0.0), scaler_of()
    watcher, _ = watch(model)
    amp_step(model, optimizer, scaler, a=[3])
    watcher.remove()
    largest = Metric("largest", lambda gradient: gradient.abs().max(), on="gradient")
    watcher, sink = watch(model, metrics=[largest])
    for _ in range(3):
        step(model, optimizer, a=[3])
    assert samples(watcher, sink).metrics["gradient/a/largest"].tolist() == [3] * 3


def test_clipping_after_a_scale_was_divided_out_by_hand_is_seen():
    snapshot = scaled_by_hand(divide_in_place, loss_scale=1024, clip=1.0)
    assert snapshot.total_grad_norm.tolist() == [5] * 6
    assert snapshot.total_grad_norm_clipped == pytest.approx([1] * 6, rel=1e-5)
    assert snapshot.clip_ratio == 1


def test_where_it_is_not_told_it_looks_like_clipping():
    snapshot = scaled_by_hand(divide_in_place)
    assert snapshot.total_grad_norm.tolist() == [5 * 1024] * 6
    assert snapshot.total_grad_norm_clipped.tolist() == [5] * 6
    assert snapshot.clip_ratio == 1


def test_a_clip_that_does_not_bite_is_none():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, log_every=10)
    for number in range(10):
        optimizer.zero_grad()
        model.loss(a=[10 if number < 3 else 0.5]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert snapshot.clip_ratio == pytest.approx(0.3)
    assert snapshot.total_grad_norm.tolist() == [10] * 3 + [0.5] * 7


def test_what_torch_clips_after_an_unexpectedly_short_accumulation_is_seen_before(caplog):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for micro_batches in (3, 3, 3, 3, 3, 2, 3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model.loss(a=[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    snapshot = samples(watcher, sink)
    assert of(snapshot, "a", "grad_norm").tolist() == [3, 3, 3, 3, 3, 2, 3]
    assert of(snapshot, "a", "grad_norm_clipped") == pytest.approx([1] * 7, rel=1e-5)
    assert snapshot.clip_ratio == 1
    assert "could not be seen" not in caplog.text


def test_training_under_amp_and_clipping_is_bitwise_the_same():
    def train(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), scaler_of(growth_interval=3)
        watcher = watch(model)[0] if watched else None
        for seed in range(10):
            batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        if watcher is not None:
            watcher.remove()
        return model.state_dict()

    plain, watched = train(False), train(True)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_a_new_scaler_for_every_epoch():
    model = Chosen(a=2)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    for _ in range(3):
        scaler = scaler_of()
        for _ in range(2):
            amp_step(model, optimizer, scaler, a=[3, 4])
        del scaler
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [5] * 6
    assert snapshot.clip_ratio == 0


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling_that_ends_and_begins_in_the_middle(fused):
    model = Chosen(a=2)
    optimizer, scaler = SGD(model.parameters(), lr=0.0, fused=fused), scaler_of()
    watcher, sink = watch(model, rules=None)
    for scaled in (False, True, True, False, False, True):
        if scaled:
            amp_step(model, optimizer, scaler, a=[3, 4])
        else:
            step(model, optimizer, a=[3, 4])
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm.tolist() == [5] * 6
    assert snapshot.total_grad_norm_clipped == pytest.approx([5] * 6)
    assert not sink.alerts


def _trained_with_a_scaler() -> list[float]:
    model, scaler = Chosen(a=2), scaler_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model)
    for _ in range(3):
        amp_step(model, optimizer, scaler, unscale=True, a=[3, 4])
    return samples(watcher, sink).loss_scale.tolist()


def _around(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


@pytest.mark.parametrize("undone", ["while we watch", "after we left"])
def test_what_others_replaced_before_us_and_put_back_is_wrapped_again(undone, monkeypatch):
    cls = torch.amp.GradScaler
    model, originals = Chosen(a=1), (cls.scale, cls.unscale_)
    with monkeypatch.context() as theirs:
        for name in ("scale", "unscale_"):
            theirs.setattr(cls, name, _around(getattr(cls, name)))
        watcher, _ = watch(model)
        if undone == "after we left":
            watcher.remove()
    watcher.remove()
    assert (cls.scale, cls.unscale_) == originals
    assert _trained_with_a_scaler() == [SCALE] * 3
    assert (cls.scale, cls.unscale_) == originals


def test_a_second_watcher_finds_what_others_threw_away_since_the_first():
    cls = torch.amp.GradScaler
    originals = cls.scale, cls.unscale_
    first, _ = watch(model := Chosen(a=1))
    cls.scale, cls.unscale_ = originals
    assert _trained_with_a_scaler() == [SCALE] * 3
    first.remove()
    assert model.a.requires_grad
    assert (cls.scale, cls.unscale_) == originals


def test_a_model_that_is_freed_while_another_is_unwatched_leaves_nothing_half_wrapped():
    """The garbage collector may run between any two lines of ours, and a freed model unsubscribes as well."""
    cls = torch.amp.GradScaler
    originals, threshold = (cls.scale, cls.unscale_), gc.get_threshold()
    last, _ = watch(model := Chosen(a=1))
    gc.collect()
    gc.disable()
    watch(dead := Chosen(a=1))
    dead.__dict__["itself"] = dead
    del dead
    gc.set_threshold(1)
    gc.enable()
    try:
        last.remove()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert model.a.requires_grad
    assert (cls.scale, cls.unscale_) == originals
    assert _trained_with_a_scaler() == [SCALE] * 3
