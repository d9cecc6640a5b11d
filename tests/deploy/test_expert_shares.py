"""Shares of experts against those counted by hand."""

from __future__ import annotations

import pytest

from deploy.expert_shares import ExpertShares


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_shares_of_each_layer_sum_to_one_and_their_greatest_over_the_mean_is_the_imbalance() -> None:
    shares = ExpertShares(Clock())
    assert shares.layers() == []
    shares.add([[6, 2, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    shares.add([[0, 2, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    first, second = shares.layers()  # the last ran no token
    assert (first.layer, first.shares) == (0, (0.6, 0.4, 0.0, 0.0)) and first.imbalance == pytest.approx(2.4)
    assert (second.layer, second.shares, second.imbalance) == (1, (0.25, 0.25, 0.25, 0.25), 1.0)


def test_old_tokens_count_less_and_a_pause_changes_no_share() -> None:
    shares = ExpertShares(clock := Clock())
    shares.add([[8, 0]])
    clock.now += 1e6
    assert shares.layers()[0].shares == (1.0, 0.0)
    shares.add([[0, 4]])
    assert shares.layers()[0].shares == pytest.approx((0.0, 1.0))
    clock.now += 60.0  # two half-lives: the four are worth one
    shares.add([[3, 0]])
    assert shares.layers()[0].shares == pytest.approx((0.75, 0.25))


def test_a_dense_model_has_none() -> None:
    shares = ExpertShares()
    shares.add(())
    assert shares.layers() == []
