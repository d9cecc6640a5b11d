from __future__ import annotations

from deploy.back_off import BackOff


def test_delays_double_up_to_the_longest_and_end() -> None:
    back_off = BackOff(first_s=1, longest_s=5, max_in_a_row=4)
    assert [back_off.after_run_of(0.1) for _ in range(6)] == [1, 2, 4, 5, None, None]


def test_a_long_run_starts_the_count_anew() -> None:
    back_off = BackOff(first_s=1, max_in_a_row=2, stable_s=60)
    assert [back_off.after_run_of(run_s) for run_s in (0, 59, 60, 1, 1)] == [1, 2, 1, 2, None]
