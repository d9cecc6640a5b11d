from __future__ import annotations

import random
import statistics

import pytest

from protos.errors import InvalidArgument
from router.forecast import Forecast, Lengths


def test_lengths_are_those_of_a_log_normal_with_this_mean_and_percentile() -> None:
    lengths = Lengths.of("prompt", 1000, 2000)
    rng = random.Random(3)
    drawn = sorted(lengths.quantile(rng.random()) for _ in range(100_000))
    assert statistics.fmean(drawn) == pytest.approx(1000, rel=0.02)
    assert drawn[90_000] == pytest.approx(2000, rel=0.02)
    assert lengths.quantile(0.9) == pytest.approx(2000)
    assert statistics.fmean(lengths.samples()) == pytest.approx(1000)
    assert statistics.pvariance(drawn) / 1000**2 == pytest.approx(lengths.variability, rel=0.06)


def test_lengths_all_alike() -> None:
    lengths = Lengths.of("prompt", 1500)
    assert (lengths.quantile(0.99), lengths.samples(), lengths.variability) == (1500, (1500,), 0)


@pytest.mark.parametrize("p90", [900, 2300])
def test_a_percentile_that_no_lengths_have_is_refused_with_its_range(p90: float) -> None:
    """The 90th percentile of a log-normal is at most exp(1.2816^2 / 2) = 2.273 times its mean."""
    with pytest.raises(InvalidArgument, match=r"--prompt-tokens.*from 1000 to 2273") as refused:
        Lengths.of("--prompt-tokens", 1000, p90)
    assert refused.value.field == "--prompt-tokens"


def test_forecast_of_recorded_requests() -> None:
    """Gaps of 1, 1 and 4 s: mean 2, variance 2, so 2 / 4 = 0.5. Lengths 100 and 300: mean 200, variance 10,000."""
    forecast = Forecast.of_requests([0.0, 1.0, 2.0, 6.0], [100, 300, 100, 300], [10, 10, 10, 10], cache_hit_rate=0.25)
    assert forecast.requests_per_s == 0.5
    assert forecast.arrival_variability == pytest.approx(0.5)
    assert forecast.prompt.mean == 200
    assert forecast.prompt.variability == pytest.approx(0.25)
    assert forecast.answer == Lengths(10, 0)
    with pytest.raises(InvalidArgument, match="a trace of 1 requests"):
        Forecast.of_requests([1.0], [1], [1])


@pytest.mark.parametrize(
    ("field", "value"),
    [("requests_per_s", 0.0), ("cache_hit_rate", 1.0), ("arrival_variability", -1.0), ("requests_per_s", float("inf"))],
)
def test_fields_out_of_range_are_named(field: str, value: float) -> None:
    given = {"requests_per_s": 1.0, "cache_hit_rate": 0.0, "arrival_variability": 1.0} | {field: value}
    with pytest.raises(InvalidArgument, match=field) as refused:
        Forecast(prompt=Lengths(10), answer=Lengths(10), **given)
    assert refused.value.field == field
