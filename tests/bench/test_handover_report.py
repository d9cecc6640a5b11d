"""What bench.handover reports, of measurements whose figures are known."""

from __future__ import annotations

import pytest

from bench.handover_report import (
    MooncakeRow,
    PacedRow,
    Row,
    first_difference_median,
    model_figures,
    mooncake_figures,
    paced_figures,
    wire_figures,
)
from bench.handover_sides import Handover
from bench.wire_error import CodingResult
from kvtransfer.eight_bit import Coding


def row(num_tokens: int, exposed_s: float, posting_s: float) -> Row:
    hidden = Handover(1.0, 1.0, exposed_s, 0.0, 0.0, 0.0, 8_000_000)
    after = Handover(1.0, 1.0, 0.02, posting_s, 0.75 * posting_s, 0.0, 8_000_000)
    return Row(num_tokens, hidden, after, raw_bytes_per_s=2e9, pull_s=0.04)


def paced(num_tokens: int, link_share: float, exposed_s: float, total_s: float) -> PacedRow:
    bare_s = num_tokens * 1e-6
    return PacedRow(num_tokens, link_share, bare_s, exposed_s, total_s, 0.0, 0.0, 0.0, 0.0)


def coding_result(coding: Coding, differing: list[int | None]) -> CodingResult:
    return CodingResult(coding, 0.50261, [0.0], [0.0], differing, 1e9, 1e9)


def test_figures_beside_the_model() -> None:
    figures = model_figures([row(256, 0.5, 0.1), row(1024, 0.01, 0.016), row(4096, 0.03, 0.008)])
    assert figures == {
        "exposed_share_1024": 0.01,
        "exposed_share_max_from_1024": 0.03,
        "vs_after_prefill": 0.5,
        "vs_pull": 0.25,
        "rate_vs_raw_nixl": 0.5,  # 8 MB in 8 ms, where NIXL alone takes 4
        "rate_vs_raw_nixl_min_from_1024": 0.25,
        "nixl_share_of_writing": 0.75,
    }


def test_paced_figures_are_those_of_the_longest_prompt_and_the_worst() -> None:
    rows = [
        paced(1000, 0.5, 0.003, 0.005),
        paced(4000, 0.5, 0.001, 0.009),
        paced(1000, 1.0, 0.009, 0.007),
        paced(4000, 1.0, 0.008, 0.006),
    ]
    assert paced_figures(rows) == {
        "exposed_at_half_link": 0.25,
        "total_at_full_link": 1.5,
        "exposed_at_half_link_max": 3.0,
        "total_at_full_link_max": 7.0,
    }


def test_mooncake_is_compared_at_the_longest_prompt() -> None:
    rows = [MooncakeRow(4096, 1e9, 9e9, 9e9, 9e9), MooncakeRow(16384, 2e9, 5e9, 3e9, 8e9)]
    assert mooncake_figures(rows) == {"vs_mooncake": 2.5, "vs_mooncake_until_accepted": 1.5}


@pytest.mark.parametrize(
    ("differing", "median"), [([5, 1, 9], 5), ([None, 3, 7], 7), ([1, None], None), ([None, 2, None], None)]
)
def test_an_answer_that_does_not_differ_counts_as_differing_last(
    differing: list[int | None], median: int | None
) -> None:
    assert first_difference_median(coding_result(Coding.INT8, differing)) == median


def test_figures_of_eight_bits() -> None:
    results = [coding_result(Coding.INT8, [None, 40, 3]), coding_result(Coding.FP8, [None, None, 3])]
    assert wire_figures(results, 32) == {
        "wire_int8": {"bytes": 0.5026, "first_difference_median": 40, "share_differing": 0.333},
        "wire_fp8": {"bytes": 0.5026, "first_difference_median": None, "share_differing": 0.333},
    }
