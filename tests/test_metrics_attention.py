"""Attention: per-head statistics and entropies, against float64 and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from metric_probes import SelfAttention, seen, train, values, watch
from torch import nn
from torch.nn import functional

from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch.metrics import Attention, EntropyCollapse, MonitorMixin, log_attention
from wandb_gradwatch.metrics._transformer_layers import AttentionCall, weight_sums
from wandb_gradwatch.snapshot import Snapshot

SGD = torch.optim.SGD
INF = math.inf


def entropies(query, key, **options):
    """Return the mean entropy and the mean ratio of each head: two arrays [H]."""
    call = {"value": None, "mask": None, "is_causal": False, "scale": None} | options
    sums, _ = weight_sums(AttentionCall(query, key, **call))
    return (sums[:, 0] / sums[:, 1]).tolist(), (sums[:, 2] / sums[:, 3]).tolist()


def expected_entropy(logits):
    """Return the entropy of each row in float64, without the zeros: [..., L]."""
    weights = torch.softmax(logits.double(), dim=-1)
    return -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)


def test_equal_logits_have_the_largest_entropy():
    zeros = torch.zeros(2, 3, 5, 4)  # All logits are 0, so the weights are uniform over 5 keys.
    entropy, ratio = entropies(zeros, zeros)
    assert entropy == pytest.approx([math.log(5)] * 3)
    assert ratio == pytest.approx([1.0] * 3)
    # Causal: the query at position i has i + 1 keys. The first query has one key, so it has no ratio.
    entropy, ratio = entropies(zeros, zeros, is_causal=True)
    assert entropy == pytest.approx([sum(math.log(n) for n in range(1, 6)) / 5] * 3)
    assert ratio == pytest.approx([1.0] * 3)


def test_attention_to_a_single_key_has_no_entropy():
    query = torch.eye(4)[None, None] * 1e3
    entropy, ratio = entropies(query, query, scale=1.0)
    assert entropy == [0.0]
    assert ratio == [0.0]


@pytest.mark.parametrize("kind", ["bool", "minus_inf", "dtype_min"])
def test_masked_keys_count_neither_as_weights_nor_as_possible_keys(kind):
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    allowed = torch.rand(2, 1, 4, 6) > 0.4
    allowed[..., 0] = True
    allowed[0, :, 1] = False  # A query without an allowed key is left out of every mean.
    mask = {
        "bool": allowed,
        "minus_inf": torch.zeros(allowed.shape).masked_fill(~allowed, -INF),
        "dtype_min": torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min),
    }[kind]
    entropy, ratio = entropies(query, key, mask=mask)
    logits = (query.double() @ key.double().mT / math.sqrt(8)).masked_fill(~allowed, -INF)
    rows, places = expected_entropy(logits), allowed.sum(-1).expand(2, 3, 4)
    for head in range(3):
        any_place, choice = places[:, head] > 0, places[:, head] > 1
        assert entropy[head] == pytest.approx(rows[:, head][any_place].mean().item(), rel=1e-5)
        ratios = rows[:, head][choice] / places[:, head][choice].log()
        assert ratio[head] == pytest.approx(ratios.mean().item(), rel=1e-5)


def test_weights_are_computed_in_parts_when_there_are_many(monkeypatch):
    torch.manual_seed(0)
    query, key = torch.randn(7, 2, 4, 8), torch.randn(7, 2, 6, 8)
    mask = torch.randn(7, 1, 4, 6)
    whole = entropies(query, key, mask=mask)
    monkeypatch.setattr(
        "wandb_gradwatch.metrics._transformer_layers._WEIGHTS_AT_ONCE", 2 * 2 * 4 * 6
    )  # two of the seven items at once
    np.testing.assert_allclose(entropies(query, key, mask=mask), whole, rtol=1e-6)
    whole = entropies(query, key, is_causal=True)
    for at_once in (2 * 6, 2 * 6 * 3, 1):  # one query of one item, three queries, and less than one query
        monkeypatch.setattr("wandb_gradwatch.metrics._transformer_layers._WEIGHTS_AT_ONCE", at_once)
        np.testing.assert_allclose(entropies(query, key, is_causal=True), whole, rtol=1e-6)


@pytest.mark.parametrize("at_once", [2**24, 13])
@pytest.mark.parametrize("is_causal", [False, True])
def test_logits_are_those_of_torchs_own_formula(is_causal, at_once, monkeypatch):
    monkeypatch.setattr("wandb_gradwatch.metrics._transformer_layers._WEIGHTS_AT_ONCE", at_once)
    torch.manual_seed(0)
    query, key = 3 * torch.randn(4, 2, 5, 8), torch.randn(4, 2, 6, 8)
    logits = query.double() @ key.double().mT / math.sqrt(8)
    if is_causal:
        logits = logits.masked_fill(torch.ones(5, 6, dtype=torch.bool).triu(1), -INF)
    sums, largest = weight_sums(AttentionCall(query, key, None, None, is_causal, None))
    np.testing.assert_allclose(largest, logits.amax((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(sums[:, 4] / sums[:, 1], logits.logsumexp(-1).square().mean((0, 2)), rtol=1e-5)


class Heads(MonitorMixin, nn.Module):
    """The keys are ones and the queries are W times ones, so that every logit is W times the square root of 4."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        query = self.w * torch.ones(1, 2, 3, 4) * torch.tensor([1.0, -1.0])[:, None, None]
        self.log_attention(query, torch.ones(1, 2, 3, 4))
        return self.w * x


def grown(sizes):
    """Train with one of these values of W in each step."""
    model = Heads()
    watcher, sink = watch(model, [Attention(statistics=["norm"])])
    optimizer = SGD(model.parameters(), lr=0.0)
    for size in sizes:
        with torch.no_grad():
            model.w.fill_(size)
        train(model, [torch.ones(1)], optimizer=optimizer)
    return values(watcher, sink), list(sink.alerts)


def test_the_predicted_crossing_of_the_limit_is_right_for_geometric_growth():
    # The logit is 2 * 1.05^step: 10, where the extrapolation begins, from step 33 on; 100 at ln(50) / ln(1.05) = 80.2.
    found, alerts = grown([1.05**step for step in range(1, 45)])
    np.testing.assert_allclose(found["attention/root/head_0/logit_max"], 2 * 1.05 ** np.arange(1, 45), rtol=1e-5)
    np.testing.assert_allclose(found["attention/root/head_1/logit_max"], -2 * 1.05 ** np.arange(1, 45), rtol=1e-5)
    # log(3 exp(x)) of every query: (x + log 3)^2
    expected = (2 * 1.05 ** np.arange(1, 45) + math.log(3)) ** 2
    np.testing.assert_allclose(found["attention/root/head_0/logsumexp_sq"], expected, rtol=1e-5)
    assert (alerts[0].title, alerts[0].step) == ("Attention logits grow", 33)
    assert "crosses 100 at about step 80." in alerts[0].text


def test_logits_that_stay_or_grow_no_further_are_no_alarm():
    wobbling = 12 + np.sin(np.arange(60))
    growing_slowly = 10 * 1.001 ** np.arange(60)
    small = 1e-3 * 1.1 ** np.arange(60)  # up to 0.6, which is too small to predict anything about 100
    for sizes in (wobbling, growing_slowly, small):
        assert not grown(sizes)[1]


def test_queries_that_share_a_key_are_grouped():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    grouped = entropies(query, key)
    repeated = entropies(query, key.repeat_interleave(2, dim=1))  # heads 0, 1 share key 0; heads 2, 3 key 1
    np.testing.assert_allclose(grouped, repeated)


VARIANTS = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True, "batch_first": True},
    {"add_zero_attn": True, "batch_first": True},
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention_agrees_with_the_weights_that_torch_returns(variant, masked):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **variant)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, inputs):
            return self.attention(*inputs, **masks, need_weights=False)[0]

    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 5, variant.get("kdim", 8)), None
    value = torch.randn(3, 5, variant.get("vdim", 8))
    inputs = (query, key, value)
    if not variant.get("batch_first"):
        inputs = tuple(tensor.transpose(0, 1) for tensor in inputs)
    masks = {}
    if masked:
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, 3:] = True  # True excludes a key
        masks = {"attn_mask": torch.randn(4, 5), "key_padding_mask": torch.zeros(3, 5).masked_fill(padding, -INF)}
    model = Model()
    found = seen(model, [Attention()], [inputs], optimizer=SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        weights = module(*inputs, **masks, need_weights=True, average_attn_weights=False)[1].double()
    rows = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    for head in range(2):
        assert found[f"attention/attention/head_{head}/entropy"][0] == pytest.approx(
            rows[:, head].mean().item(), rel=1e-5
        )
    projected = functional.linear(
        query, module.in_proj_weight[:8] if module.in_proj_weight is not None else module.q_proj_weight,
        None if module.in_proj_bias is None else module.in_proj_bias[:8],
    )  # fmt: skip
    for head in range(2):
        own = projected[..., 4 * head : 4 * head + 4].detach().double()
        assert found[f"attention/attention/head_{head}/query_norm"][0] == pytest.approx(own.norm().item(), rel=1e-5)
        assert found[f"attention/attention/head_{head}/query_std"][0] == pytest.approx(
            own.std(unbiased=False).item(), rel=1e-4
        )


def test_match_chooses_among_the_multihead_attentions():
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    found = seen(layers, [Attention(r"layers\.1")], [torch.randn(3, 2, 8)])
    assert {key.split("/")[1] for key in found} == {"layers.1.self_attn"}


def test_a_custom_module_logs_its_attention():
    torch.manual_seed(0)
    model = nn.Sequential(SelfAttention(), nn.Linear(8, 1))
    x = torch.randn(3, 5, 8)
    found = seen(model, [Attention()], [x], optimizer=SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        q, k, _ = (t.unflatten(-1, (2, 4)).transpose(1, 2).double() for t in model[0].qkv(x).chunk(3, dim=-1))
    logits = (q @ k.mT / 2).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -INF)
    for head in range(2):
        assert found[f"attention/0/head_{head}/entropy"][0] == pytest.approx(
            expected_entropy(logits)[:, head].mean().item(), rel=1e-5
        )
        assert found[f"attention/0/head_{head}/key_norm"][0] == pytest.approx(k[:, head].norm().item(), rel=1e-5)
        assert found[f"attention/0/head_{head}/gate_norm"][0] == pytest.approx(2 * q[:, head].norm().item(), rel=1e-5)


def test_without_weights_only_the_statistics_of_heads_are_measured():
    found = seen(nn.Sequential(SelfAttention(), nn.Linear(8, 1)), [Attention(weights=False)], [torch.randn(2, 5, 8)])
    names = {key.rpartition("/")[2] for key in found}
    assert "query_norm" in names
    assert not any(name.startswith(("entropy", "log")) for name in names)
    assert Attention(weights=False).brings == ()


def test_micro_batches_are_averaged_over_queries_and_autocast_takes_no_digits():
    torch.manual_seed(0)
    model, parts = SelfAttention(), torch.randn(5, 6, 8).split([1, 4])
    whole, sink = watch(model, [Attention()])
    train(model, [torch.cat(parts)], optimizer=SGD(model.parameters(), lr=0.0))
    at_once = values(whole, sink)
    watcher, sink = watch(model, [Attention()])
    for part in parts:
        model(part).sum().backward()
    SGD(model.parameters(), lr=0.0).step()
    merged = values(watcher, sink)
    for key in at_once:
        assert merged[key][0] == pytest.approx(at_once[key][0], rel=1e-5, abs=1e-7), key


def test_the_functions_work_without_the_mixin():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x):
            log_attention(self, x, x)
            return x * self.w

    model = Plain()
    found = seen(model, [Attention(statistics=["norm"])], [torch.zeros(1, 2, 3, 4)])
    assert found["attention/root/head_1/entropy_ratio"].tolist() == [pytest.approx(1.0)]
    assert "attention/root/head_1/value_norm" not in found


def collapse(history, **options):
    """Return the steps with a finding, for S pairs of entropy ratios: those of two heads of one module."""
    ratios = np.array(history, dtype=float)
    snapshot = Snapshot(
        steps=np.arange(1, len(ratios) + 1),
        names=("p",),
        rows=np.full((len(ratios), 1, NUM_COLUMNS), np.nan),
        metrics={f"attention/block.0/head_{head}/entropy_ratio": ratios[:, head] for head in range(2)},
    )
    rule, steps = EntropyCollapse(**options), []
    for index in range(len(snapshot)):  # one sample at a time, as in a training
        steps += [alert.step for alert in rule.check(snapshot.sample(index))]
        fresh = EntropyCollapse(**options)
        fresh.load_state_dict(rule.state_dict())
        rule = fresh
    return steps


def test_entropy_collapse_needs_all_heads_several_samples_and_a_healthy_start():
    assert collapse([[0.9, 0.9]] + [[0.001, 0.01]] * 4, patience=3) == [4, 5]
    assert collapse([[0.9, 0.9]] + [[0.001, 0.5]] * 9, patience=3) == [], "one head may copy"
    assert collapse([[0.001, 0.001]] * 9, patience=3) == [], "it was so from the start"
    assert collapse([[0.9, 0.9], [0.0, 0.0], [0.0, 0.0], [0.9, 0.9], [0.0, 0.0]], patience=3) == []
    assert collapse([[0.9, 0.9], [0.0, 0.0], [math.nan, math.nan], [0.0, 0.0], [0.0, 0.0]], patience=3) == [5]


def test_the_rule_comes_with_the_probe_and_names_the_module():
    torch.manual_seed(0)
    model, alerts = SelfAttention(), []
    watcher, _ = watch(model, [Attention()], on_alert=alerts.append)
    optimizer = SGD(model.parameters(), lr=0.0)
    for step in range(8):
        train(model, [torch.randn(2, 5, 8) * (1e4 if step >= 2 else 0.1)], optimizer=optimizer)
    watcher.remove()
    assert [(alert.title, alert.step) for alert in alerts] == [
        ("Attention logits grow", 3),  # the logits are 1e8 or larger
        ("Attention entropy collapse", 7),  # the fifth sample with low entropies
    ]
    assert "above the limit of 100" in alerts[0].text
    assert "root (at most" in alerts[1].text
