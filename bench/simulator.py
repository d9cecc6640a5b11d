"""How close the simulator comes to a real cluster, and how fast it is.

`python -m bench.simulator [--seconds 60] [--requests 1000000]`. One trace goes through a real router with timed workers
(2 prefill, 2 decode, one of which flips in the middle) and through the simulator; then a thousand workers are played.
Prints a table for people and one line of JSON last. Ends with 1 if the two differ by more than they may.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.simulator_reality import Measured, Setting, Times, measure, play, settled
from model.kv_layout import KVLayout
from router.candidate import Role
from router.outcomes import Slo, Totals
from router.scenario import Delays, Scenario, WorkerSpec
from router.simulator import simulate
from router.step_costs import StepCosts
from router.synthetic_trace import Lengths, Phase, synthetic_trace

SLOS = (Slo(0.5, 0.075), Slo(0.8, 0.085), Slo(1.2, 0.1))
NUM_SEEDS = 5  # of simulations: ties between workers are broken by chance, in a real router as well
MOST_SLO_DIFFERENCE, MOST_TIME_DIFFERENCE = 0.03, 0.1

# About an 8B model on one H100, with 8 KV heads of 128 in 32 layers.
LARGE = StepCosts(0.010, 5e-5, 5e-10, 0.012, 1.5e-4, 2e-8)
LARGE_LAYOUT = KVLayout("", "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128)
PREFILL_SHARE, PER_WORKER_S = 0.4, 4.0


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    real: float
    simulated: Sequence[float]  # by seed
    is_share: bool = False

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.is_share else f"{1000 * value:.1f} ms"

    @property
    def mean(self) -> float:
        return statistics.mean(self.simulated)

    @property
    def difference(self) -> float:
        """In points of a share, and else relative."""
        return self.mean - self.real if self.is_share else self.mean / self.real - 1

    @property
    def is_close(self) -> bool:
        return abs(self.difference) <= (MOST_SLO_DIFFERENCE if self.is_share else MOST_TIME_DIFFERENCE)


def figures(setting: Setting, measured: Measured) -> list[Figure]:
    real = settled(measured.times)
    played = [settled(play(setting, measured, seed)) for seed in range(NUM_SEEDS)]

    def figure(name: str, of: Callable[[Sequence[Times]], float], *, is_share: bool = False) -> Figure:
        return Figure(name, of(real), [of(times) for times in played], is_share)

    found = [figure(f"{slo.ttft_s:g} s and {1000 * slo.tpot_s:g} ms met", within(slo), is_share=True) for slo in SLOS]
    for share in (0.5, 0.9):
        found.append(figure(f"ttft p{100 * share:.0f}", quantile(share, lambda times: times.ttft_s)))
        found.append(figure(f"tpot p{100 * share:.0f}", quantile(share, lambda times: times.tpot_s)))
    return found


def within(slo: Slo) -> Callable[[Sequence[Times]], float]:
    return lambda times: statistics.mean(t.ttft_s <= slo.ttft_s and t.tpot_s <= slo.tpot_s for t in times)


def quantile(share: float, of: Callable[[Times], float]) -> Callable[[Sequence[Times]], float]:
    return lambda times: sorted(map(of, times))[int(share * len(times))]


def at_scale(num_workers: int, num_requests: int) -> tuple[Totals, float]:
    """What came of it, and how long it took."""
    num_prefill, per_s = round(PREFILL_SHARE * num_workers), PER_WORKER_S * num_workers
    workers = [
        WorkerSpec(
            f"w{index}",
            Role.PREFILL if index < num_prefill else Role.DECODE,
            LARGE,
            num_blocks=30_000,
            max_step_tokens=2048,
            max_running=128,
            link_bytes_per_s=25e9,
        )
        for index in range(num_workers)
    ]
    scenario = Scenario(workers, LARGE_LAYOUT, Delays(message_s=0.0005, hand_over_s=0.002, report_s=1.0))
    load = Phase(num_requests / per_s, per_s, Lengths(1500, 0.8, 16, 8192), Lengths(220, 0.8, 2, 2000))
    gc.collect()
    gc.freeze()
    gc.disable()  # a simulation leaves no circles behind
    began_at = time.perf_counter()
    totals = simulate(scenario, synthetic_trace([load], seed=1))
    took_s = time.perf_counter() - began_at
    gc.enable()
    return totals, took_s


def table_of(found: Sequence[Figure], measured: Measured) -> Table:
    table = Table(
        "", "real", "simulated", "difference", "by chance", title=f"{len(measured.times)} requests, one trace", box=None
    )
    for each in found:
        table.add_row(
            each.name,
            each.shown(each.real),
            each.shown(each.mean),
            f"{100 * each.difference:+.1f} {'points' if each.is_share else '%'}{'' if each.is_close else '  !'}",
            f"{each.shown(min(each.simulated))} to {each.shown(max(each.simulated))}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulator", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the trace that is played both ways")
    parser.add_argument("--per-s", type=float, default=3.5, help="requests of that trace in a second")
    parser.add_argument("--prefill", type=int, default=2, help="workers")
    parser.add_argument("--decode", type=int, default=2, help="workers")
    parser.add_argument("--workers", type=int, default=1000, help="of the large simulation")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the large simulation; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    setting = Setting(arguments.prefill, arguments.decode, arguments.per_s, arguments.seconds, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(setting, Path(folder)))
    found = figures(setting, measured)
    console.print(table_of(found, measured))
    console.print(
        f"beside the timing: {1000 * measured.message_s:.2f} ms a message, {1000 * measured.step_s:.2f} ms a step"
    )
    result: dict[str, Any] = {
        "bench": "simulator",
        "slo_difference_max": round(max(abs(each.difference) for each in found if each.is_share), 4),
        "time_difference_max": round(max(abs(each.difference) for each in found if not each.is_share), 4),
    }
    if arguments.requests:
        totals, took_s = at_scale(arguments.workers, arguments.requests)
        console.print(
            f"{totals.num_requests} requests on {arguments.workers} workers in {took_s:.0f} s: {totals.duration_s:.0f} "
            f"s of theirs, {1e6 * took_s / totals.num_requests:.0f} us each; {dict(totals.errors) or 'none'} failed"
        )
        result |= {"requests": totals.num_requests, "workers": arguments.workers, "seconds": round(took_s, 1)}
    print(json.dumps(result))
    sys.exit(0 if all(each.is_close for each in found) else 1)


if __name__ == "__main__":
    main()
