"""What bench.goodput found: a table, the ratios beside those of the textbook, and the line of JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.goodput_figures import SHARE, Played, Slo, ratio

PD, COLOCATED, VLLM_PD, VLLM_COLOCATED = "1P1D", "colocated", "vLLM 1P1D", "vLLM colocated"
TEXTBOOK = {"goodput_ratio": 1.35, "ttft_p90_ratio": 3.0, "tpot_p90_ratio": 1.5}  # what separate pools are said to give
AIM_OVER_VLLM = 1.5
_ABOUT = {
    "goodput_ratio": "requests/s within the SLOs, 1P1D over colocated",
    "ttft_p90_ratio": "TTFT p90, colocated over 1P1D",
    "tpot_p90_ratio": "TPOT p90, colocated over 1P1D",
    "worst_gap_ratio": "worst gap between tokens, colocated over 1P1D",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`highest`: the rate that each side keeps, 0 where it keeps none. `compared`: all sides at `common_per_s`."""

    model: str
    slo: Slo
    seconds: float
    highest: Mapping[str, float]
    common_per_s: float
    compared: Mapping[str, Played]

    @property
    def ratios(self) -> dict[str, float | None]:
        """Above 1: separate pools are better."""
        pd, colocated = self.compared[PD], self.compared[COLOCATED]
        return {
            "goodput_ratio": ratio(self.highest[PD], self.highest[COLOCATED]),
            "ttft_p90_ratio": ratio(colocated.ttft_s(SHARE), pd.ttft_s(SHARE)),
            "tpot_p90_ratio": ratio(colocated.tpot_s(SHARE), pd.tpot_s(SHARE)),
            "worst_gap_ratio": ratio(colocated.worst_gap_s, pd.worst_gap_s),
        }

    @property
    def vllm_ratios(self) -> dict[str, float | None]:
        """Ours over theirs: like over like, and the better of ours over the better of theirs. Empty without vLLM."""
        if VLLM_PD not in self.highest:
            return {}
        ours, theirs = ((self.highest[a], self.highest[b]) for a, b in ((PD, COLOCATED), (VLLM_PD, VLLM_COLOCATED)))
        return {
            "over_vllm_pd": ratio(ours[0], theirs[0]),
            "over_vllm_colocated": ratio(ours[1], theirs[1]),
            "over_vllm": ratio(max(ours), max(theirs)),
        }

    @property
    def result(self) -> dict[str, object]:
        names = {PD: "pd", COLOCATED: "colocated", VLLM_PD: "vllm_pd", VLLM_COLOCATED: "vllm_colocated"}
        ratios = {**self.ratios, **self.vllm_ratios}
        return {
            "bench": "goodput",
            **{name: None if value is None else round(value, 3) for name, value in ratios.items()},
            **{f"rate_{names[side]}": round(per_s, 4) for side, per_s in self.highest.items()},
            "common_rate": round(self.common_per_s, 4),
            "slo_ttft_s": round(self.slo.ttft_s, 3),
            "slo_tpot_s": round(self.slo.tpot_s, 4),
            "requests_compared": self.compared[PD].num_requests,
            "seconds": self.seconds,
            "model": self.model,
            "load": round(os.getloadavg()[0], 1),
        }


def report(outcome: Outcome, console: Console) -> None:
    console.print(_table(outcome))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "measured", "textbook"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, value in outcome.ratios.items():
        textbook = f"{TEXTBOOK[name]:.2f} x" if name in TEXTBOOK else "-"
        table.add_row(_ABOUT[name], _times(value), textbook)
    console.print(table)
    for name, value in outcome.vllm_ratios.items():
        aim = f", aim {AIM_OVER_VLLM} x" if name == "over_vllm" else ""
        console.print(f"{name.replace('_', ' ')}: {_times(value)} the requests/s within the SLOs{aim}", highlight=False)


def _table(outcome: Outcome) -> Table:
    slo = outcome.slo
    title = (
        f"{SHARE:.0%} of requests within {slo.ttft_s:.2f} s to the first token and {1000 * slo.tpot_s:.0f} ms a token"
    )
    compared = next(iter(outcome.compared.values()))
    caption = (
        f"times: all at {outcome.common_per_s:.3f} requests/s, {compared.num_requests} requests each; "
        f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"
    )
    table = Table(title=title, caption=caption)
    headings = (
        "highest rate",
        "TTFT p50",
        "p90",
        "TPOT p50",
        "p90",
        "worst gap",
        "in time",
        "failed",
        "handed over",
        "cached",
    )
    for heading in ("", *headings):
        table.add_column(heading, justify="right" if heading else "left")
    for name, played in outcome.compared.items():
        highest = outcome.highest[name]
        table.add_row(
            name,
            f"{highest:.3f}/s" if highest else "none",
            *(f"{played.ttft_s(share):.2f} s" for share in (0.5, SHARE)),
            *(f"{1000 * played.tpot_s(share):.0f} ms" for share in (0.5, SHARE)),
            f"{1000 * played.worst_gap_s:.0f} ms",
            f"{played.num_kept(slo) / played.num_requests:.0%}",
            str(played.num_failed or "-"),
            f"{played.share_received:.0%}",
            str(played.num_cached or "-"),
        )
    return table


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} x"
