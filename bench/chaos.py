"""Whether answers stay right while workers die, stop, lose messages and fail to write.

`python -m bench.chaos [--seconds 45] [--seed 0]`. Two prefill and two decode workers under load, every answer compared
with a plain run. Prints a table, and one line of JSON last; exits with 1 if a token was wrong, a request lost or
hung, or a block still held once all is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.chaos_load import Load, Tally, questions
from bench.chaos_storm import Storm, injected
from bench.tiny_moe import build_tiny_moe
from deploy.local import ROUTER, ClusterConfig, LocalCluster

NUM_QUESTIONS = 40
AT_REST_S = 20.0  # two leases, a peer's silence, a quarantine, and a busy machine
TELL_S = 5.0
WORKER_ARGUMENTS = ("--dtype", "float32", "--num-blocks", "400", "--max-step-tokens", "96", "--lease-s", "2")


@dataclass(frozen=True, slots=True)
class Outcome:
    tally: Tally
    faults: Counter[str]
    leaked: dict[str, int]  # blocks by worker
    defects: list[str]  # from the logs: the last line of each traceback
    seconds: float

    @property
    def is_good(self) -> bool:
        tally = self.tally
        return not (tally.num_wrong or tally.num_lost or tally.num_hung or self.leaked)


async def run(arguments: argparse.Namespace, folder: Path, console: Console) -> Outcome:
    rng = random.Random(arguments.seed)
    console.print("the plain run", style="dim")
    asked = questions(build_tiny_moe(folder), rng, NUM_QUESTIONS)
    console.print("starting the cluster", style="dim")
    config = ClusterConfig(
        model=str(folder),
        num_prefill=2,
        num_decode=2,
        num_threads=1,
        worker_arguments=WORKER_ARGUMENTS,
        router_arguments=("--direct",),
        environment={"PDSERVE_FAULTS": "none"},
    )
    async with LocalCluster(config) as cluster:
        load = Load(cluster.router_address, asked, rng, arguments.at_once)
        storm = Storm(cluster, random.Random(arguments.seed + 1))
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(_tell(load.tally, cluster, storm, console))
            loading = tasks.create_task(load.run())
            storming = tasks.create_task(storm.run())
            await asyncio.sleep(arguments.seconds)
            storming.cancel()
            await asyncio.wait([storming])
            await storm.calm()
            load.stop()
            await loading
            telling.cancel()
        seconds = time.monotonic() - started
        console.print("waiting until all is quiet", style="dim")
        leaked = await _leaked_blocks(cluster)
        if arguments.keep_logs:
            _keep_logs(cluster, arguments.keep_logs)
        return Outcome(load.tally, storm.counts + injected(cluster), leaked, _defects(cluster), seconds)


async def _tell(tally: Tally, cluster: LocalCluster, storm: Storm, console: Console) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(TELL_S)
        num_faults = (storm.counts + injected(cluster)).total()
        console.print(
            f"{time.monotonic() - started:4.0f} s  {tally.num_requests} requests, {tally.num_completed} completed, "
            f"{tally.failed.total()} failed, {num_faults} faults; wrong, lost, hung: "
            f"{tally.num_wrong}, {tally.num_lost}, {tally.num_hung}",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )


async def _leaked_blocks(cluster: LocalCluster) -> dict[str, int]:
    """By worker, those in quarantine among them; waits for them to be given back first."""
    give_up_at = time.monotonic() + AT_REST_S
    while True:
        workers = (await cluster.workers()).values()
        used = {worker.worker_id: worker.num_used_blocks for worker in workers if worker.num_used_blocks}
        if not used or time.monotonic() > give_up_at:
            return used
        await asyncio.sleep(0.2)


def _defects(cluster: LocalCluster) -> list[str]:
    """What no process should ever say."""
    found = []
    for name in (ROUTER, *cluster.config.worker_roles):
        _, *tracebacks = cluster.log_path(name).read_text(errors="replace").split("Traceback (most recent call last)")
        for traceback in tracebacks:
            last = next((line for line in traceback.splitlines()[1:] if line and not line.startswith(" ")), "?")
            found.append(f"{name}: {last}")
    return found


def _keep_logs(cluster: LocalCluster, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ROUTER, *cluster.config.worker_roles):
        (folder / f"{name}.log").write_text(cluster.log_path(name).read_text(errors="replace"))


def report(outcome: Outcome, console: Console) -> None:
    tally = outcome.tally
    table = Table(show_header=False, box=None)
    for name, value in (
        ("requests", f"{tally.num_requests}   in {outcome.seconds:.0f} s"),
        (
            "completed",
            f"{tally.num_completed}   "
            f"{tally.num_retries} retries, {tally.num_resumes} resumes, {tally.num_moves} moves",
        ),
        ("left by their clients", str(tally.num_left)),
        ("failed", f"{tally.failed.total()}   {_listed(tally.failed)}"),
        ("faults", f"{outcome.faults.total()}   {_listed(outcome.faults)}"),
        ("worst time to a first token", f"{tally.worst_ttft_s:.1f} s"),
        ("worst gap between tokens", f"{tally.worst_gap_s:.1f} s"),
        ("wrong tokens", str(tally.num_wrong)),
        ("lost", str(tally.num_lost)),
        ("hung", str(tally.num_hung)),
        ("blocks leaked", f"{sum(outcome.leaked.values())}   {_listed(Counter(outcome.leaked))}"),
        ("tracebacks", f"{len(outcome.defects)}   {_listed(Counter(outcome.defects))}"),
    ):
        table.add_row(name, value)
    console.print(table)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="of disturbances")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and disturbances; not of what falls together")
    parser.add_argument("--at-once", type=int, default=6, help="requests")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="of all processes")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(run(arguments, Path(folder), console))
    for remark in outcome.tally.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    report(outcome, Console())
    result = {
        "bench": "chaos",
        "requests": outcome.tally.num_requests,
        "completed": outcome.tally.num_completed,
        "failed": outcome.tally.failed.total(),
        "faults": outcome.faults.total(),
        "wrong": outcome.tally.num_wrong,
        "lost": outcome.tally.num_lost,
        "hung": outcome.tally.num_hung,
        "leaked_blocks": sum(outcome.leaked.values()),
        "tracebacks": len(outcome.defects),
    }
    print(json.dumps(result))
    sys.exit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    main()
