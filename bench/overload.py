"""What becomes of three times as many requests as there is capacity for.

`python -m bench.overload [--seconds 60]`. One prefill and one decode worker that take their time and compute nothing:
first as many requests as they can do, then `--times` as many come. Prints a table for people and one line of JSON last.
Ends with 1 if those that were let in came too late, the others were not refused quickly, less was done than before, or
something was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.overload_load import Clients, Shape, Tally, percentile
from bench.tiny_moe import build_tiny_moe
from deploy.local import ClusterConfig, LocalCluster
from protos.client import PdserveClient

SHAPE = Shape(num_prompt_tokens=96, num_output_tokens=16)
TIMING = {"prefill_base_s": 0.02, "prefill_token_s": 0.0004, "decode_base_s": 0.02, "decode_sequence_s": 0.0005}
AT_ONCE = 24  # of the run that finds out the capacity
MAX_QUEUE_S, TTFT_SLO_S = 1.5, 3.0  # room for what is queued on the worker, and for predictions that err
REFUSED_S, KEPT_SHARE = 0.1, 0.9
ROUTER_ARGUMENTS = ("--max-queue-s", str(MAX_QUEUE_S), "--max-backlog-s", "0.15")  # three prompts
WORKER_ARGUMENTS = ("--runner", "timed", "--num-blocks", "1000", "--max-step-tokens", "128", "--max-running", "12")
_WARM_S = 3.0
_AT_REST_S = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    capacity: Tally
    overload: Tally
    times: float
    left: dict[str, int]  # blocks by worker, and requests at the router

    @property
    def result(self) -> dict[str, Any]:
        overload = self.overload
        return {
            "bench": "overload",
            "requests": overload.num_requests,
            "completed": overload.num_completed,
            "refused": len(overload.refused_s),
            "failed": overload.failed.total(),
            "ttft_p50_s": round(percentile(overload.ttfts_s, 0.5), 3),
            "ttft_p99_s": round(percentile(overload.ttfts_s, 0.99), 3),
            "refused_p50_ms": round(1000 * percentile(overload.refused_s, 0.5), 1),
            "refused_p99_ms": round(1000 * percentile(overload.refused_s, 0.99), 1),
            "tokens_per_s": round(overload.tokens_per_s, 1),
            "tokens_per_s_at_capacity": round(self.capacity.tokens_per_s, 1),
            "kept_share": round(overload.tokens_per_s / self.capacity.tokens_per_s, 3),
            "left": sum(self.left.values()),
        }

    @property
    def defects(self) -> list[str]:
        result = self.result
        checks = {
            f"a first token after more than {TTFT_SLO_S:g} s": result["ttft_p99_s"] > TTFT_SLO_S,
            f"refused after more than {1000 * REFUSED_S:g} ms": result["refused_p99_ms"] > 1000 * REFUSED_S,
            "less was done than at capacity": result["kept_share"] < KEPT_SHARE,
            "requests that failed": result["failed"] > 0,
            "something is left": result["left"] > 0,
            "nobody was refused": result["refused"] == 0,
        }
        return [what for what, is_so in checks.items() if is_so]


async def run(seconds: float, times: float, seed: int, folder: Path, console: Console) -> Outcome:
    model, timing = folder / "model", folder / "timing.json"
    build_tiny_moe(model)
    timing.write_text(json.dumps(TIMING))
    config = ClusterConfig(
        model=str(model),
        num_threads=1,
        router_arguments=ROUTER_ARGUMENTS,
        worker_arguments=(*WORKER_ARGUMENTS, "--timing", str(timing)),
    )
    console.print("starting the cluster", style="dim")
    async with LocalCluster(config) as cluster, PdserveClient(cluster.router_address) as client:
        clients = Clients(client, SHAPE, random.Random(seed))
        await clients.saturate(AT_ONCE, _WARM_S)
        console.print("as much as it can do", style="dim")
        capacity = await clients.saturate(AT_ONCE, max(_WARM_S, seconds / 3))
        per_s = capacity.tokens_per_s / SHAPE.num_output_tokens
        console.print(f"{per_s:.1f} requests a second; now {times:g} times as many come", style="dim")
        overload = await clients.flood(times * per_s, seconds)
        return Outcome(capacity, overload, times, await _left(cluster, client))


async def _left(cluster: LocalCluster, client: PdserveClient) -> dict[str, int]:
    """Waits until all is given back first."""
    give_up_at = time.monotonic() + _AT_REST_S
    while True:
        workers = (await cluster.workers()).values()
        left = {worker.worker_id: worker.num_used_blocks for worker in workers}
        left["router"] = (await client.get_status()).num_requests_in_flight
        if not any(left.values()) or time.monotonic() > give_up_at:
            return left
        await asyncio.sleep(0.2)


def report(outcome: Outcome, console: Console) -> None:
    result, overload = outcome.result, outcome.overload
    table = Table(show_header=False, box=None)
    for name, value in (
        ("requests", f"{overload.num_requests}   in {overload.seconds:.0f} s, {outcome.times:g} times the capacity"),
        ("answered", f"{overload.num_completed}"),
        ("first token, p50 and p99", f"{result['ttft_p50_s']:.2f} s, {result['ttft_p99_s']:.2f} s"),
        ("refused", f"{len(overload.refused_s)}"),
        ("to say so, p50 and p99", f"{result['refused_p50_ms']:.1f} ms, {result['refused_p99_ms']:.1f} ms"),
        ("failed", f"{overload.failed.total()}   {dict(overload.failed) or ''}"),
        (
            "tokens per second",
            f"{overload.tokens_per_s:.0f}   {100 * result['kept_share']:.0f} % of {outcome.capacity.tokens_per_s:.0f} "
            "at capacity",
        ),
        ("left", str({name: number for name, number in outcome.left.items() if number} or "nothing")),
    ):
        table.add_row(name, value)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--times", type=float, default=3.0, help="the capacity")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(run(arguments.seconds, arguments.times, arguments.seed, Path(folder), console))
    report(outcome, Console())
    for defect in outcome.defects:
        console.print(defect, highlight=False)
    print(json.dumps(outcome.result))
    sys.exit(1 if outcome.defects else 0)


if __name__ == "__main__":
    main()
