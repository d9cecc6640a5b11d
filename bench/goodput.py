"""The highest rate that keeps to its SLOs: a prefill and a decode worker beside two that do both, on the same cores.

`python -m bench.goodput [--quick]`. The real demo model; Poisson arrivals of real texts, the same for both, by turns.
Goodput is the rate at which nine of ten requests have their first token and the later ones in time. At the lower of the
two rates the times are compared. Prints a table for people and one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.goodput_load import Figures, ask, one, play, poisson
from bench.goodput_search import RateSearch
from bench.prompt_sets import OWN, SETS, read_sets
from deploy.local import ClusterConfig, LocalCluster
from model.cache_folder import default_cache
from model.model_source import resolve_model
from model.tokenizer import Tokenizer
from protos.client import PdserveClient
from router.outcomes import Slo

APART, TOGETHER = "1 prefill, 1 decode", "2 that do both"
CLAIMED = {"goodput_ratio": 1.35, "ttft_p90_ratio": 3.0, "tpot_p90_ratio": 1.5}  # by a textbook, for large GPUs
TTFT_TIMES, TPOT_TIMES = 5.0, 2.5  # of what an idle worker takes: the SLOs, where none are given


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: `num_rates` for each side with `num_requests` each, and `num_repeats` at the same rate."""

    num_requests: int
    num_rates: int
    num_repeats: int
    num_unloaded: int
    seed: int
    slo_ttft_s: float | None
    slo_tpot_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`rates`: the highest, by side. `same_per_s`: the rate of `figures`."""

    slo: Slo
    rates: dict[str, float]
    same_per_s: float
    figures: dict[str, Figures]

    @property
    def result(self) -> dict[str, Any]:
        """Ratios are above 1 where separate pools are better."""
        apart, together = self.figures[APART], self.figures[TOGETHER]
        return {
            "bench": "goodput",
            "goodput_ratio": _ratio(self.rates[APART], self.rates[TOGETHER]),
            "rate_pd": round(self.rates[APART], 3),
            "rate_colocated": round(self.rates[TOGETHER], 3),
            "rate_compared": round(self.same_per_s, 3),
            "ttft_p90_ratio": _ratio(together.ttft_p90_s, apart.ttft_p90_s),
            "tpot_p90_ratio": _ratio(together.tpot_p90_s, apart.tpot_p90_s),
            "worst_gap_ratio": _ratio(together.worst_gap_s, apart.worst_gap_s),
            "slo_ttft_s": round(self.slo.ttft_s, 3),
            "slo_tpot_s": round(self.slo.tpot_s, 4),
        }


def _ratio(value: float, other: float) -> float | None:
    return round(value / other, 3) if other else None


async def measure(
    sides: dict[str, PdserveClient], text: Sequence[int], plan: Plan, tell: Callable[[str], None]
) -> Outcome:
    tell("idle workers")
    slo, alone_s = await _unloaded(sides, text, plan)
    searches = {side: RateSearch(1.0 / alone_s) for side in sides}
    for number in range(plan.num_rates):
        for side, client in sides.items():
            search = searches[side]
            tell(f"rate {number + 1} of {plan.num_rates}, {side}: {search.next_per_s:.2f} requests a second")
            figures = await play(client, poisson(text, search.next_per_s, plan.num_requests, plan.seed + number))
            search.tried(figures.attainment(slo))
            tell(f"  {figures.attainment(slo):.0%} of {len(figures.answers)} within the SLOs")
    rates = {side: search.best_per_s for side, search in searches.items()}
    same_per_s = min(filter(None, rates.values()), default=1.0 / alone_s)
    return Outcome(slo, rates, same_per_s, await _compare(sides, text, plan, same_per_s, tell))


async def _unloaded(sides: dict[str, PdserveClient], text: Sequence[int], plan: Plan) -> tuple[Slo, float]:
    """The SLOs; and what a request takes that is alone."""
    rng = random.Random(plan.seed)
    requests = [one(text, rng) for _ in range(plan.num_unloaded)]
    answers = [await ask(client, request) for request in requests for client in sides.values()]
    failed = next((answer.error for answer in answers if answer.error), "")
    if failed:
        raise SystemExit(f"Error: a request to idle workers failed: {failed}")
    ttft_s, tpot_s = (fmean(values) for values in ([a.ttft_s for a in answers], [a.tpot_s for a in answers]))
    num_later = fmean(request.num_output_tokens - 1 for request in requests)
    slo = Slo(plan.slo_ttft_s or TTFT_TIMES * ttft_s, plan.slo_tpot_s or TPOT_TIMES * tpot_s)
    return slo, ttft_s + num_later * tpot_s


async def _compare(
    sides: dict[str, PdserveClient], text: Sequence[int], plan: Plan, per_s: float, tell: Callable[[str], None]
) -> dict[str, Figures]:
    found: dict[str, list[Figures]] = {side: [] for side in sides}
    for number in range(plan.num_repeats):
        requests = poisson(text, per_s, plan.num_requests, plan.seed + 1000 + number)
        for side, client in sides.items():
            tell(f"{number + 1} of {plan.num_repeats} at the same rate, {side}: {per_s:.2f} requests a second")
            found[side].append(await play(client, requests))
    return {side: Figures([a for figures in several for a in figures.answers]) for side, several in found.items()}


async def run(plan: Plan, prompts: Path, console: Console) -> Outcome:
    folder = resolve_model("demo-dense", default_cache())
    texts = [text for several in read_sets(prompts, SETS).values() for text in several]
    random.Random(plan.seed).shuffle(texts)
    text = Tokenizer.load(folder).encode("\n\n".join(texts))
    while len(text) < 20_000:
        text = text + text[1:]
    apart = ClusterConfig(str(folder), num_threads=1, spill=True)
    together = ClusterConfig(str(folder), num_prefill=0, num_decode=0, num_colocated=2, num_threads=1)
    console.print("starting two clusters", style="dim")
    async with AsyncExitStack() as stack:
        clusters = {APART: LocalCluster(apart), TOGETHER: LocalCluster(together)}
        sides = {}
        for side, cluster in clusters.items():
            await stack.enter_async_context(cluster)
            sides[side] = await stack.enter_async_context(PdserveClient(cluster.router_address))
        return await measure(sides, text, plan, lambda what: console.print(what, style="dim", highlight=False))


def table_of(outcome: Outcome) -> Table:
    slo, result = outcome.slo, outcome.result
    title = f"first token within {slo.ttft_s:.2f} s, later ones within {1000 * slo.tpot_s:.0f} ms"
    table = Table("", APART, TOGETHER, "ratio", "textbook", title=title, box=None)
    rows: list[tuple[str, Callable[[str], str], str]] = [
        ("requests/s, 90 % within", lambda side: f"{outcome.rates[side]:.2f}", "goodput_ratio"),
        ("first token, p90 (s)", lambda side: f"{outcome.figures[side].ttft_p90_s:.2f}", "ttft_p90_ratio"),
        ("per token, p90 (ms)", lambda side: f"{1000 * outcome.figures[side].tpot_p90_s:.1f}", "tpot_p90_ratio"),
        ("worst gap (s)", lambda side: f"{outcome.figures[side].worst_gap_s:.2f}", "worst_gap_ratio"),
        ("within both", lambda side: f"{outcome.figures[side].attainment(slo):.0%}", ""),
        ("not answered", lambda side: f"{outcome.figures[side].num_failed}", ""),
    ]
    for name, value, key in rows:
        ratio = result.get(key)
        claimed = CLAIMED.get(key)
        shown = "" if ratio is None else f"{ratio:.2f}", "" if claimed is None else f"{claimed:.2f}"
        table.add_row(name, value(APART), value(TOGETHER), *shown)
    table.caption = f"times at {outcome.same_per_s:.2f} requests a second"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.goodput", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look that ends within 50 s; rates are rough")
    parser.add_argument("--requests", type=int, default=60, help="at each rate")
    parser.add_argument("--rates", type=int, default=6, help="that are tried, of each")
    parser.add_argument("--prompts", type=Path, default=OWN, help="a folder of prompt sets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slo-ttft", type=float, help=f"seconds; default: {TTFT_TIMES:g} times what idle workers take")
    parser.add_argument("--slo-tpot", type=float, help=f"seconds; default: {TPOT_TIMES:g} times what idle workers take")
    given = parser.parse_args()
    for name in ("requests", "rates", "slo_ttft", "slo_tpot"):
        value = getattr(given, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    plan = Plan(given.requests, given.rates, 2, 6, given.seed, given.slo_ttft, given.slo_tpot)
    if given.quick:
        plan = replace(plan, num_requests=5, num_rates=2, num_repeats=1, num_unloaded=1)
    outcome = asyncio.run(run(plan, given.prompts, Console(stderr=True)))
    Console().print(table_of(outcome))
    print(json.dumps(outcome.result))


if __name__ == "__main__":
    main()
