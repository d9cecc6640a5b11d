"""The line of JSON: always the same keys, null where nothing was measured, of cells the worst."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from rich.console import Console

from bench.roofline import WeightBytes
from bench.speculation_figures import Acceptance, Figures
from bench.speculation_report import (
    Cell,
    acceptance_table,
    expert_table,
    roofline_line,
    speed_table,
    summary,
    target_table,
)
from decode.coverage import Routing

KEYS = ["bench", "dense_b1", "adaptive_vs_best_fixed_min", "adaptive_vs_off_min", "prediction_error_p90"]


def cell(
    prompt_set: str,
    fixed: Mapping[int, float],
    adaptive: float,
    *,
    drafter: str = "eagle",
    batch: int = 1,
    model: str = "dense",
    predicted: Mapping[int, float] | None = None,
    error: float = 0.02,
) -> Cell:
    figures = Figures(
        plain_tokens_per_s=50.0,
        plain_step_s=0.02,
        fixed=fixed,
        best_fixed=max([1.0, *fixed.values()]),
        predicted=predicted or fixed,
        adaptive=adaptive,
        adaptive_error=0.02,
        adaptive_vs_best_fixed_error=error,
        adaptive_length=2.5,
        acceptance=Acceptance((0.7, None), ((0.7, None),), 1.0),
        draft_cost=0.05,
        verify_cost=dict.fromkeys(fixed, 1.2),
        experts={1: 2.0, 4: 4.0},
        beta=0.6,
        alike=1.0,
    )
    return Cell(model, batch, prompt_set, drafter, figures)


def test_nothing_measured_is_null() -> None:
    assert summary([]) == {
        "bench": "speculation",
        "dense_b1": {"humaneval": None, "mt_bench": None},
        "adaptive_vs_best_fixed_min": None,
        "adaptive_vs_off_min": None,
        "prediction_error_p90": None,
    }
    assert list(summary([])) == KEYS


def test_heads_that_are_not_there_are_null_and_the_rest_is_told() -> None:
    found = summary([cell("humaneval", {1: 1.2}, 1.1, drafter="ngram")])
    assert found["dense_b1"] == {"humaneval": None, "mt_bench": None}
    assert found["adaptive_vs_best_fixed_min"] == pytest.approx(1.1 / 1.2, abs=1e-3)
    assert list(found) == KEYS


def test_dense_b1_is_eagle_on_the_dense_model_at_batch_1() -> None:
    cells = [
        cell("humaneval", {1: 3.0}, 3.0, model="moe"),
        cell("humaneval", {1: 3.0}, 3.0, batch=4),
        cell("humaneval", {1: 3.0}, 3.0, drafter="medusa"),
        cell("humaneval", {1: 1.9, 3: 2.0}, 1.95),
        cell("mt_bench", {1: 1.5}, 1.5),
    ]
    assert summary(cells)["dense_b1"] == {"humaneval": 1.95, "mt_bench": 1.5}
    cells.append(cell("mt_bench", {1: 1.4}, 1.4, drafter="eagle+ngram"))  # which a worker takes by itself
    assert summary(cells)["dense_b1"] == {"humaneval": 1.95, "mt_bench": 1.4}


def test_no_drafting_is_one_of_the_fixed_lengths() -> None:
    found = summary([cell("qa", {1: 0.8, 3: 0.5}, 0.96), cell("qa", {1: 2.0}, 1.98)])
    assert found["adaptive_vs_best_fixed_min"] == 0.96
    assert found["adaptive_vs_off_min"] == 0.96


def test_error_is_of_every_fixed_length_of_every_cell() -> None:
    exact = cell("qa", {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, 4.0)
    wrong = cell("qa", {1: 2.0}, 2.0, predicted={1: 2.5})
    assert wrong.figures.errors == {1: 0.25}
    # Errors 0, 0, 0, 0, 0.25: nine tenths of the way is 3.6 steps in, so 0.6 of the last one.
    assert summary([exact, wrong])["prediction_error_p90"] == pytest.approx(0.15)


def test_a_target_is_missed_where_chance_does_not_explain_it() -> None:
    def verdict(*cells: Cell) -> str:
        console = Console(file=io.StringIO(), width=140)
        console.print(target_table(cells))
        assert isinstance(console.file, io.StringIO)
        return next(line for line in console.file.getvalue().splitlines() if "best fixed K" in line)

    well, noisy = cell("qa", {3: 1.5}, 1.5), cell("qa", {3: 1.0}, 0.9, error=0.04)
    assert " met " in verdict(well)
    assert "0.900 ±0.040" in verdict(well, noisy) and "within the error" in verdict(well, noisy)
    assert "missed in 1 of 3" in verdict(well, noisy, cell("qa", {3: 1.0}, 0.92, error=0.02))


def test_tables_can_be_printed() -> None:
    cells = [cell("qa", {1: 1.2, 3: 1.4}, 1.39, batch=batch) for batch in (1, 4)]
    out = Console(file=io.StringIO(), width=140)
    out.print(speed_table(cells, (1, 3)))
    out.print(acceptance_table(cells, (1, 3)))
    out.print(expert_table(cells, (1, 3), Routing(8, 2)))
    out.print(target_table(cells))
    out.print(target_table([]))
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "1.40" in text and "0.993" in text  # a ratio; 1.39 of 1.4
    assert "5.47" in text  # 8 (1 - 0.75^4)
    assert "not measured" in text


def test_roofline_counts_the_experts_that_a_step_touches() -> None:
    line = roofline_line(WeightBytes(100_000_000, 800_000_000, 8), 10e9, [cell("qa", {1: 1.0}, 1.0)])
    assert "reads 300 MB of weights" in line and "takes 30.0 ms" in line and "measured were 20.0 ms" in line
