"""How fast the router passes tokens on, and what it adds to them on the way.

`python -m bench.router_load [--quick] [--dynamo PYTHON]`. Router, workers and those who ask are processes of their own
and speak gRPC. The workers are mocks: a clock in place of a model, behind the product's own bundling of answers, since
a timed runner could not keep the router busy. On few cores all of them share what is there: tokens/s per core, of the
router's own CPU time, is then the figure to go by. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench import router_load_report as report
from bench.router_load_asker import Load
from bench.router_load_peers import NUM_STREAMS, PeerRate, PeerUnusable, dynamo, http_rate, sglang_router
from bench.router_load_report import LatencyRow, Memory, PeerRow, RateRow
from bench.router_load_sides import Bench, Measured, Side
from bench.router_load_worker import NUM_BLOCKS, Pace
from model.kv_layout import KVLayout
from router.candidate import Role, WorkerId
from router.demand import Demand
from router.placement import place
from router.profile import WorkerProfile
from router.worker import WorkerLoad, WorkerState
from router.workers import WorkerTable

STREAMS = (1, 64, 512)
STEP_US = {1: 20_000, 64: 20_000, 512: 100_000}  # of what is asked for latency: far below what the router can do
ONE_BY_ONE = Pace(step_us=10, gathers=False)  # more than can be passed on, each token a message
AS_THEY_GATHER = Pace(step_us=500, gathers=True)
ANSWER_TOKENS = 4000
MEMORY_STREAMS, MEMORY_STEP_US, MEMORY_S = 512, 20_000, 4.0
WORKERS = (10, 100, 1000)
NUM_PLACEMENTS, PLACEMENTS_S = 200, 5.0
WARM_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    quick: bool
    dynamo: str | None
    sglang_router: str | None

    @property
    def seconds(self) -> float:
        return 2.0 if self.quick else 3.0

    @property
    def num_rounds(self) -> int:
        return 1 if self.quick else 3


class Runs:
    """Every figure is the median of some rounds, in which what is compared takes turns."""

    def __init__(self, bench: Bench, options: Options, console: Console) -> None:
        self._bench, self._options, self._console = bench, options, console

    def memory(self) -> Memory:
        """Of a router that has served nothing yet, since memory is seldom given back."""
        (router,) = self._bench.routers
        self._measure([router], 1, Pace(MEMORY_STEP_US, True), num_tokens=1)
        before = router.rss_bytes
        self._measure([router], MEMORY_STREAMS, Pace(MEMORY_STEP_US, True), warm_s=MEMORY_S)
        num_tokens = round((MEMORY_S + self._options.seconds) * 1e6 / MEMORY_STEP_US)
        return Memory(MEMORY_STREAMS, num_tokens, (router.rss_bytes - before) / MEMORY_STREAMS)

    def latencies(self) -> list[LatencyRow]:
        rows = []
        for num_streams in STREAMS:
            pace = Pace(STEP_US[num_streams], gathers=True)
            straight, through = list[Measured](), list[Measured]()
            for _ in range(self._options.num_rounds):
                straight.append(self._measure(self._bench.decode, num_streams, pace, is_straight=True))
                through.append(self._measure(self._bench.routers, num_streams, pace))
            rows.append(LatencyRow.of(num_streams, straight, through))
            self._tell(f"latency of {num_streams} streams")
        return rows

    def rates(self) -> list[RateRow]:
        rows = []
        for name, pace in (("message by message", ONE_BY_ONE), ("as they gather", AS_THEY_GATHER)):
            for num_streams in STREAMS:
                rows.append(self._rate(name, self._bench.routers, num_streams, pace))
        rows.append(self._rate("worker alone", self._bench.decode, 64, ONE_BY_ONE, is_straight=True))
        return rows

    def answers(self) -> Sequence[Measured]:
        """Of one token each."""
        pace = Pace(STEP_US[64], gathers=True)
        return [self._measure(self._bench.routers, 64, pace, num_tokens=1) for _ in range(self._options.num_rounds)]

    def scaling(self) -> float:
        """Two routers' tokens/s over one's, message by message."""
        ratios = []
        for _ in range(self._options.num_rounds):
            one, two = (self._measure(self._bench.routers[:count], 128, ONE_BY_ONE).tokens_per_s for count in (1, 2))
            ratios.append(two / one)
        return statistics.median(ratios)

    def gathered(self) -> Measured:
        """To compare a peer with."""
        return self._measure(self._bench.routers, NUM_STREAMS, AS_THEY_GATHER)

    def _rate(
        self, name: str, sides: Sequence[Side], num_streams: int, pace: Pace, *, is_straight: bool = False
    ) -> RateRow:
        rounds = [
            self._measure(sides, num_streams, pace, is_straight=is_straight) for _ in range(self._options.num_rounds)
        ]
        self._tell(f"{name}, {num_streams} streams")
        return RateRow.of(name, num_streams, rounds)

    def _measure(
        self,
        sides: Sequence[Side],
        num_streams: int,
        pace: Pace,
        *,
        num_tokens: int = ANSWER_TOKENS,
        warm_s: float = WARM_S,
        is_straight: bool = False,
    ) -> Measured:
        addresses = tuple(side.address for side in sides)

        def load(share: int, begin_s: float, end_s: float) -> Load:
            return Load(addresses, share, num_tokens, pace, begin_s, end_s, is_straight)

        return self._bench.measure(load, sides, num_streams=num_streams, warm_s=warm_s, seconds=self._options.seconds)

    def _tell(self, what: str) -> None:
        self._console.print(f"  {what}, load {os.getloadavg()[0]:.1f}", style="dim")


def placement_us(num_workers: int) -> float:
    """Of one request, with everything that the relay asks of the table for it."""
    table = WorkerTable("", clock=lambda: 0.0)  # nobody falls silent
    layout = KVLayout("mock", "float32", num_layers=1, num_kv_heads=1, head_dim=8)
    for number in range(num_workers):
        role = Role.PREFILL if number % 2 else Role.DECODE
        profile = WorkerProfile(WorkerId(f"w{number}", "1"), "mock:1", role, True, "mock", "", layout, NUM_BLOCKS)
        table.register(profile, WorkerLoad(WorkerState.READY, num_free_blocks=NUM_BLOCKS))
    demand = Demand(num_blocks=10, num_blocks_in_all=20, wants_decode=True, num_tokens=160, num_tokens_in_all=320)
    rng = random.Random(0)
    took_s: list[float] = []
    until_s = time.perf_counter() + PLACEMENTS_S
    while len(took_s) < NUM_PLACEMENTS and time.perf_counter() < until_s:
        began_s = time.perf_counter()
        place(table.snapshot(), demand, (), rng)
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s) * 1e6


def run(options: Options, console: Console) -> dict[str, object]:
    num_cores = len(os.sched_getaffinity(0))
    num_others = 1 if num_cores < 8 else 2  # askers, and decode workers
    placements = {count: placement_us(count) for count in WORKERS}
    with ExitStack() as stack:
        runs = Runs(Bench(stack, 1, num_others, num_others), options, console)
        memory, latencies, rates, answers = runs.memory(), runs.latencies(), runs.rates(), runs.answers()
        peers = list(_peers(options, runs, console))
    with ExitStack() as stack:
        scaling = Runs(Bench(stack, 2, 2, 2 * num_others), options, console).scaling()
    out = Console()
    out.print(report.latency_table(latencies))
    out.print(report.rate_table(rates, num_cores))
    out.print(report.other_table(placements, memory, answers, scaling, num_cores))
    if peers:
        out.print(report.peer_table(peers))
    return report.result(latencies, rates, placements, memory, answers, scaling, peers)


def _peers(options: Options, runs: Runs, console: Console) -> Iterator[PeerRow]:
    """Theirs and ours take turns."""
    asked = (("dynamo", options.dynamo, dynamo), ("sglang_router", options.sglang_router, sglang_router))
    for name, python, serving_peer in asked:
        if python is None:
            continue
        ours, theirs = list[Measured](), list[PeerRate]()
        try:
            with serving_peer(python) as (port, pid):
                for _ in range(options.num_rounds):
                    theirs.append(http_rate(port, pid, options.seconds))
                    ours.append(runs.gathered())
        except PeerUnusable as problem:
            console.print(f"  {name}: {problem}", style="red")
            continue
        yield PeerRow.of(name, ours, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router_load", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter with ai-dynamo, whose frontend is measured")
    parser.add_argument("--sglang-router", metavar="PYTHON", help="an interpreter with sglang-router")
    arguments = parser.parse_args()
    for python in (arguments.dynamo, arguments.sglang_router):
        if python is not None and not Path(python).exists():
            parser.error(f"there is no {python}")
    options = Options(arguments.quick, arguments.dynamo, arguments.sglang_router)
    print(json.dumps(run(options, Console(stderr=True))))


if __name__ == "__main__":
    main()
