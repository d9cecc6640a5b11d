from __future__ import annotations

import math
from typing import Any

import pytest

from model.sampling_params import InvalidSampling, SamplingParams

LIMITS = [
    ("max_tokens", [1, 10**6], [0, -1]),
    ("min_tokens", [0, 8], [-1, 9]),  # max_tokens is 8
    ("temperature", [0.0, 1e-9, 100.0], [-0.1, 100.1, math.inf, math.nan]),
    ("top_k", [0, 1, 10**6], [-1]),
    ("top_p", [1e-9, 1.0], [0.0, 1.1, -1.0, math.nan]),
    ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
    ("repetition_penalty", [0.01, 100.0], [0.0, 0.009, 100.1, -1.0, math.inf, math.nan]),
    ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
    ("seed", [0, 2**64 - 1], [-1, 2**64]),
    ("stop_token_ids", [(), (0,), tuple(range(64))], [tuple(range(65)), (-1,), (5, -1)]),
    ("stop", [(), ("a",) * 16, ("é" * 128,)], [("a",) * 17, ("",), ("a", "é" * 129)]),
    (
        "logit_bias",
        [(), ((0, -100.0), (5, 100.0)), tuple((token_id, 0.0) for token_id in range(1024))],
        [
            tuple((token_id, 0.0) for token_id in range(1025)),
            ((-1, 0.0),),
            *(((5, 1.0), (6, bias)) for bias in (100.1, -100.1, math.inf, math.nan)),
        ],
    ),
    ("num_logprobs", [None, 0, 20], [-1, 21]),
    ("num_prompt_logprobs", [None, 0, 20], [-1, 21]),
]


def made(field: str, value: object) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": 8, field: value}
    return SamplingParams(**values)


@pytest.mark.parametrize(("field", "good", "bad"), LIMITS)
def test_limits_name_the_field(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        params = made(field, value)
        assert getattr(params, field) == value
    for value in bad:
        with pytest.raises(InvalidSampling) as raised:
            made(field, value)
        assert raised.value.field == field.removeprefix("num_")
        assert str(raised.value) == f"{raised.value.field} {raised.value.problem}"


def test_what_a_row_needs() -> None:
    assert SamplingParams(max_tokens=1, temperature=0.0).is_greedy
    assert not SamplingParams(max_tokens=1, temperature=1e-9).is_greedy
    assert not SamplingParams(max_tokens=1).has_penalties
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert made(penalty, 0.5).has_penalties
