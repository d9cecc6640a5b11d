from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import REGISTRY

from deploy.worker_metrics import imbalance, observe_step
from model.runner import Chunk, SampledToken, StepOutput, VerifiedDraft


def value(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def test_imbalance_is_the_busiest_expert_over_the_mean() -> None:
    even, all_on_one = [5, 5, 5, 5], [20, 0, 0, 0]
    assert imbalance(np.array([even])) == 1.0
    assert imbalance(np.array([all_on_one])) == 4.0
    assert imbalance(np.array([even, all_on_one])) == 2.5
    assert imbalance(np.array([all_on_one, [0, 0, 0, 0]])) == 4.0  # the last layer of a step that wants no token


def test_drafted_tokens_ran_through_the_model_and_failures_are_counted() -> None:
    names = (
        "pdserve_worker_step_tokens_total",
        "pdserve_draft_failures_total",
        "pdserve_worker_expert_imbalance_ratio_sum",
    )
    before = [value(name) for name in names]
    token = SampledToken(3)
    chunks = [Chunk([1], 4, [0]), Chunk([1], 4, [1]), Chunk([1, 2, 3], 0, [2])]
    outcomes = (VerifiedDraft((token, token), 4), token, None)
    observe_step(chunks, StepOutput(outcomes, 0.01, [[9, 3, 0, 0], [3, 3, 3, 3]], num_failed_drafts=2))
    after = [value(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [5 + 4, 2, pytest.approx((3.0 + 1.0) / 2)]
