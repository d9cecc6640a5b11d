"""The tables of `bench.speculation` for people, and its line of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.roofline import WeightBytes
from bench.speculation_figures import Figures, percentile_90
from decode.coverage import Routing, distinct_experts

DENSE_B1_TARGETS = {"humaneval": 1.8, "mt_bench": 1.5}
EAGLE_DRAFTERS = ("eagle+ngram", "eagle")  # the first one measured is judged: it is what a worker takes by itself
SURE_ERRORS = 2.0
BEST_FIXED_TARGET, OFF_TARGET, ERROR_TARGET = 0.97, 0.98, 0.10


@dataclass(frozen=True, slots=True)
class Cell:
    """`model` is "dense", "moe" or a folder's name."""

    model: str
    batch: int
    prompt_set: str
    drafter: str
    figures: Figures

    @property
    def name(self) -> str:
        return f"{self.model} b{self.batch} {self.prompt_set} {self.drafter}"


def summary(cells: Sequence[Cell]) -> dict[str, object]:
    """The JSON. What was not measured is None."""
    dense_b1 = {
        prompt_set: next((round(cell.figures.adaptive, 3) for cell in _eagle_b1(cells, prompt_set)), None)
        for prompt_set in DENSE_B1_TARGETS
    }
    error = percentile_90([error for cell in cells for error in cell.figures.errors.values()])
    return {
        "bench": "speculation",
        "dense_b1": dense_b1,
        "adaptive_vs_best_fixed_min": _least([cell.figures.adaptive_vs_best_fixed for cell in cells]),
        "adaptive_vs_off_min": _least([cell.figures.adaptive for cell in cells]),
        "prediction_error_p90": None if error is None else round(error, 4),
    }


def _eagle_b1(cells: Sequence[Cell], prompt_set: str) -> list[Cell]:
    found = [cell for cell in cells if (cell.model, cell.batch, cell.prompt_set) == ("dense", 1, prompt_set)]
    return [cell for drafter in EAGLE_DRAFTERS for cell in found if cell.drafter == drafter]


def _judged(cells: Sequence[Cell], prompt_set: str) -> str:
    return next((cell.drafter for cell in _eagle_b1(cells, prompt_set)), "eagle")


def _least(values: Sequence[float]) -> float | None:
    return round(min(values), 3) if values else None


def speed_table(cells: Sequence[Cell], lengths: Sequence[int]) -> Table:
    """Ratios to no drafting, the predicted ones below."""
    table = Table(title="Tokens/s, ratio to no drafting (below: predicted)", title_justify="left")
    _columns(table, ["batch", "set", "drafter"], ["plain tok/s", *(f"K={count}" for count in lengths)])
    _columns(table, [], ["adaptive", "mean K", "of best"])
    for cell in cells:
        figures = cell.figures
        ratios = [f"{figures.fixed[count]:.2f}\n[dim]{figures.predicted[count]:.2f}[/]" for count in lengths]
        table.add_row(
            *(str(cell.batch), cell.prompt_set, cell.drafter, f"{figures.plain_tokens_per_s:.0f}"),
            *ratios,
            *(
                f"{figures.adaptive:.2f}",
                f"{figures.adaptive_length:.1f}",
                f"{figures.adaptive_vs_best_fixed:.3f} ±{figures.adaptive_vs_best_fixed_error:.3f}",
            ),
        )
    return table


def acceptance_table(cells: Sequence[Cell], lengths: Sequence[int]) -> Table:
    """Why: what is accepted by position, and what drafting and verifying cost."""
    longest = max((len(cell.figures.acceptance.rates) for cell in cells), default=0)
    table = Table(title="Acceptance (alpha) by position; costs in plain steps", title_justify="left")
    shown = [lengths[0], lengths[-1]] if len(lengths) > 1 else list(lengths)
    costs = [f"verify K={count}" for count in shown]
    _columns(table, ["batch", "set", "drafter"], [str(place) for place in range(1, longest + 1)])
    _columns(table, [], ["offered", "c", *costs, "alike"])
    for cell in cells:
        figures = cell.figures
        rates = ["-" if rate is None else f"{rate:.2f}" for rate in figures.acceptance.rates]
        verify = [f"{figures.verify_cost[count]:.2f}" for count in shown]
        table.add_row(
            *(str(cell.batch), cell.prompt_set, cell.drafter, *rates, f"{figures.acceptance.offered:.0%}"),
            *(f"{figures.draft_cost:.3f}", *verify, f"{figures.alike:.0%}"),
        )
    return table


def expert_table(cells: Sequence[Cell], lengths: Sequence[int], routing: Routing) -> Table:
    """Distinct experts of a layer in steps of B (K + 1) rows, over all sets and drafters."""
    table = Table(title="Distinct experts per layer, mean over the cells of a batch", title_justify="left")
    _columns(table, [], ["batch", "K", "rows", "measured", "N(rows)", "with β", "β"])
    for batch in sorted({cell.batch for cell in cells}):
        of_batch = [cell.figures for cell in cells if cell.batch == batch]
        betas = [figures.beta for figures in of_batch if figures.beta is not None]
        beta = sum(betas) / len(betas) if betas else 1.0
        for count in (0, *lengths):
            rows = batch * (count + 1)
            measured = [figures.experts[rows] for figures in of_batch if rows in figures.experts]
            if measured:
                with_beta = distinct_experts(routing, batch * (count + 1) ** beta)
                numbers = (sum(measured) / len(measured), distinct_experts(routing, rows), with_beta)
                table.add_row(str(batch), str(count), str(rows), *(f"{n:.2f}" for n in numbers), f"{beta:.2f}")
    return table


def roofline_line(weights: WeightBytes, bytes_per_s: float, cells: Sequence[Cell]) -> str:
    """Of the plain step at the smallest batch."""
    batch = min(cell.batch for cell in cells)
    of_batch = [cell.figures for cell in cells if cell.batch == batch]
    step_s = min(figures.plain_step_s for figures in of_batch)
    num_bytes = weights.per_step(of_batch[0].experts.get(batch))
    return (
        f"Roofline: a plain step at batch {batch} reads {num_bytes / 1e6:.0f} MB of weights from memory; at the "
        f"{bytes_per_s / 1e9:.1f} GB/s that it gives that takes {num_bytes / bytes_per_s * 1e3:.1f} ms; "
        f"measured were {step_s * 1e3:.1f} ms."
    )


def target_table(cells: Sequence[Cell]) -> Table:
    found = summary(cells)
    dense_b1 = found["dense_b1"]
    assert isinstance(dense_b1, dict)
    table = Table(title="Targets", title_justify="left")
    _columns(table, [""], ["measured", "target"])
    table.add_column("")
    for name, target in DENSE_B1_TARGETS.items():
        value = dense_b1[name]
        shown = "-" if value is None else f"{value:.3f}"
        table.add_row(f"{_judged(cells, name)}, dense, batch 1, {name}", shown, f">= {target}", _verdict(value, target))
    best = [(cell.figures.adaptive_vs_best_fixed, cell.figures.adaptive_vs_best_fixed_error) for cell in cells]
    off = [(cell.figures.adaptive, cell.figures.adaptive_error) for cell in cells]
    table.add_row("adaptive / best fixed K, least", *_least_row(best, BEST_FIXED_TARGET))
    table.add_row("adaptive / no drafting, least", *_least_row(off, OFF_TARGET))
    error = found["prediction_error_p90"]
    assert error is None or isinstance(error, float)
    missed = None if error is None else -error
    measured = "-" if error is None else f"{error:.1%}"
    table.add_row("error of the prediction, p90", measured, f"<= {ERROR_TARGET:.0%}", _verdict(missed, -ERROR_TARGET))
    return table


def _least_row(ratios: Sequence[tuple[float, float]], target: float) -> tuple[str, str, str]:
    """Of ratios with their errors, one a cell: the least, and how many miss the target by more than SURE_ERRORS."""
    if not ratios:
        return "-", f">= {target}", "not measured"
    value, error = min(ratios)
    below = sum(ratio + SURE_ERRORS * its_error < target for ratio, its_error in ratios)
    verdict = f"missed in {below} of {len(ratios)}" if below else "within the error"
    if value >= target:
        verdict = "met"
    return f"{value:.3f} ±{error:.3f}", f">= {target}", verdict


def _verdict(value: float | None, target: float) -> str:
    return "not measured" if value is None else "met" if value >= target else "missed"


def _columns(table: Table, left: Sequence[str], right: Sequence[str]) -> None:
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
