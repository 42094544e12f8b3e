"""The forecast of underflow against numpy's float16 and the definitions of the formats."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from grad_samples import of_norms, sample_of

from wandb_gradwatch._analysis import forecast as module
from wandb_gradwatch._analysis.forecast import FORMATS
from wandb_gradwatch.snapshot.keys import FORECASTS, forecast_key


def forecast(sample, **scale):
    """Return the forecast by format, with its numbers as attributes."""
    found = module.forecast(sample, **scale)
    return {name: SimpleNamespace(**{what: found[forecast_key(name, what)] for what in FORECASTS}) for name in FORMATS}


def test_fp16_shares_are_those_of_a_cast():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, 4000) * 10.0 ** rng.uniform(-10, 0, 4000)
    values = np.concatenate([values, np.zeros(100)]).astype(np.float32)  # zeros lose nothing: they do not count
    fp16 = forecast(sample_of({"a": values}, histogram=True))["fp16"]
    nonzero = values[values != 0]
    cast = nonzero.astype(np.float16)
    assert fp16.flush_ratio == np.mean(cast == 0)
    assert fp16.underflow_ratio == np.mean(np.abs(nonzero) < np.finfo(np.float16).tiny)
    assert fp16.headroom == pytest.approx(math.log2(65504 / np.abs(values).max()))


@pytest.mark.parametrize(
    ("name", "normal", "flush", "largest"),
    [("fp16", -14, -25, 65504), ("fp8_e5m2", -14, -17, 57344), ("fp8_e4m3", -6, -10, 448)],
)
def test_limits_are_those_of_the_formats_and_elements_at_them_are_counted_exactly(name, normal, flush, largest):
    just_below = 1 - 2.0**-20
    values = [2.0**normal, 2.0**normal * just_below, 2.0**flush * 1.01, 2.0**flush * just_below]
    of_name = forecast(sample_of({"a": values}, histogram=True))[name]
    assert of_name.underflow_ratio == 3 / 4
    assert of_name.flush_ratio == 1 / 4
    assert of_name.headroom == pytest.approx(math.log2(largest) - normal)
    # half the smallest subnormal: 10, 2 and 3 bits of mantissa below the smallest normal number, and one more
    bits = {"fp16": 10, "fp8_e5m2": 2, "fp8_e4m3": 3}[name]
    assert FORMATS[name].flush == 2.0 ** (normal - bits - 1)


def test_bf16_flushes_nothing_or_it_is_not_known():
    normal = forecast(sample_of({"a": [1.0, 2.0**-126]}, histogram=True))["bf16"]
    subnormal = forecast(sample_of({"a": [1.0, 2.0**-127]}, histogram=True))["bf16"]
    assert (normal.flush_ratio, normal.underflow_ratio, subnormal.underflow_ratio) == (0, 0, 0.5)
    assert math.isnan(subnormal.flush_ratio)  # 2^-127 would be kept, 2^-135 not: both are in the lowest bin
    # the largest bfloat16 is 0x7F7F: 1.9921875 * 2^127
    assert normal.headroom == pytest.approx(math.log2(1.9921875) + 127)


def test_a_forecast_is_over_all_elements():
    fp16 = forecast(sample_of({"a": [2.0**-30], "b": [1.0, 1.0, 4.0]}, histogram=True))["fp16"]
    assert fp16.flush_ratio == 0.25
    assert fp16.headroom == pytest.approx(math.log2(65504 / 4))


def test_a_loss_scale_moves_the_limits():
    sample = sample_of({"a": [2.0**-30, 2.0**-20, 1.0]}, histogram=True)
    assert forecast(sample)["fp16"].flush_ratio == pytest.approx(1 / 3)
    assert forecast(sample, scale=2.0**6)["fp16"].flush_ratio == 0
    assert forecast(sample, scale=2.0**17)["fp16"].headroom == pytest.approx(math.log2(65504) - 17)  # overflows


def test_without_a_histogram_or_elements_all_shares_are_missing_and_not_0():
    for sample in (
        of_norms([1.0]),
        sample_of({"a": [0.0, 0.0]}, histogram=True),
        sample_of({"a": None}, histogram=True),
    ):
        for of_name in forecast(sample).values():
            assert math.isnan(of_name.flush_ratio)
            assert math.isnan(of_name.underflow_ratio)
    assert math.isnan(forecast(sample_of({"a": [0.0]}, histogram=True))["fp16"].headroom)
    assert math.isnan(forecast(sample_of({}, histogram=True))["fp16"].flush_ratio)
