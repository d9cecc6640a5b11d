"""Whether a drafter's cache and state arrive with a hand-over: then its drafts stand as often as without one.

`python -m bench.draft_handover [--model NAME] [--drafter eagle] [--prompts DIR]`. Two clusters answer the same prompts,
greedy: one hands them over from a prefill to a decode worker, in the other one worker does both. Prints a table, and
one line of JSON last; exits with 1 if acceptance differs by more than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.prompt_sets import OWN, SETS, PromptsUnusable, conversations, read_sets
from deploy.local import ClusterConfig, LocalCluster
from model.cache_folder import default_cache
from model.model_source import ModelUnavailable, resolve_model
from model.tokenizer import Tokenizer
from protos.client import PdserveClient
from protos.values import Sampling, Summary, Usage

LARGEST_DIFFERENCE = 0.02  # relative
MAX_PROMPT_TOKENS, MAX_CONTEXT, NUM_BLOCKS = 384, 1024, 1000
DRAFT_TOKENS = 3
AT_ONCE = 8
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Run:
    """Sums over the answers to all prompts, and what each of them was."""

    num_drafted: int
    num_accepted: int
    num_received: int  # tokens of prompts whose cache was handed over
    answers: Sequence[tuple[int, ...]]

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(1, self.num_drafted)


def chosen_prompts(folder: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """From all sets in turn.

    Raises:
        PromptsUnusable: there are fewer.
    """
    sets = [conversations(texts, tokenizer, MAX_PROMPT_TOKENS) for texts in read_sets(folder, SETS).values()]
    mixed = [each[place] for place in range(max(map(len, sets))) for each in sets if place < len(each)]
    if len(mixed) < count:
        raise PromptsUnusable(f"{folder} has {len(mixed)} prompts that are short enough; {count} were asked for")
    return mixed[:count]


async def measure(
    model: str, drafter: str, prompts: Sequence[Sequence[int]], max_tokens: int, console: Console
) -> dict[str, Run]:
    config = ClusterConfig(
        model=model,
        num_decode=1,
        num_threads=1,
        worker_arguments=(
            *("--drafter", drafter, "--draft-length", "fixed", "--max-draft-tokens", str(DRAFT_TOKENS)),
            *("--num-blocks", str(NUM_BLOCKS), "--max-context", str(MAX_CONTEXT)),
        ),
    )
    runs = {}
    for name in ("handed over", "colocated"):  # a cluster each: nothing is left of the other run in a prefix cache
        async with LocalCluster(config) as cluster, PdserveClient(cluster.router_address) as client:
            if name == "colocated":
                await client.set_role("decode-0", "both")
                await client.set_role("prefill-0", "decode")
            runs[name] = await _ask_all(client, prompts, max_tokens, console, name)
    return runs


async def _ask_all(
    client: PdserveClient, prompts: Sequence[Sequence[int]], max_tokens: int, console: Console, name: str
) -> Run:
    turns = asyncio.Semaphore(AT_ONCE)
    num_done = 0

    async def ask(prompt: Sequence[int]) -> tuple[tuple[int, ...], Usage]:
        nonlocal num_done
        token_ids: list[int] = []
        async with turns:
            sampling = Sampling(temperature=0, max_tokens=max_tokens)
            async for part in client.generate(prompt, sampling=sampling, deadline_s=DEADLINE_S):
                if isinstance(part, Summary):
                    num_done += 1
                    if num_done % 20 == 0:
                        console.print(f"  {name}: {num_done} of {len(prompts)}", style="dim", highlight=False)
                    return tuple(token_ids), part.usage
                token_ids += part.token_ids
        raise RuntimeError("an answer ended without a summary")

    answered = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    usages = [usage for _, usage in answered]
    return Run(
        sum(usage.drafted_tokens for usage in usages),
        sum(usage.accepted_tokens for usage in usages),
        sum(usage.decode_received_tokens for usage in usages),
        [token_ids for token_ids, _ in answered],
    )


def report(runs: dict[str, Run], console: Console) -> float:
    """The relative difference."""
    table = Table("", "drafted", "accepted", "acceptance", "tokens received")
    for name, run in runs.items():
        share = f"{run.acceptance:.2%}"
        table.add_row(name, str(run.num_drafted), str(run.num_accepted), share, str(run.num_received))
    console.print(table)
    handed_over, colocated = runs["handed over"], runs["colocated"]
    alike = sum(a == b for a, b in zip(handed_over.answers, colocated.answers, strict=True))
    console.print(f"{alike} of {len(colocated.answers)} answers are the same", highlight=False)
    if not handed_over.num_received or colocated.num_received:
        raise RuntimeError("nothing was handed over in the first run, or something was in the second")
    return abs(handed_over.acceptance / colocated.acceptance - 1.0) if colocated.acceptance else 1.0


def main() -> None:
    arguments = _arguments()
    console, progress = Console(width=100), Console(stderr=True)
    try:
        tokenizer = Tokenizer.load(resolve_model(arguments.model, default_cache()))
        prompts = chosen_prompts(arguments.prompts, tokenizer, arguments.num_prompts)
    except (ModelUnavailable, PromptsUnusable) as error:
        raise SystemExit(f"bench.draft_handover: {error}") from None
    runs = asyncio.run(measure(arguments.model, arguments.drafter, prompts, arguments.max_tokens, progress))
    difference = report(runs, console)
    figures = {name.replace(" ", "_"): round(run.acceptance, 4) for name, run in runs.items()}
    told = {"bench": "draft_handover", "prompts": len(prompts), **figures, "difference": round(difference, 4)}
    print(json.dumps(told))
    sys.exit(int(difference > LARGEST_DIFFERENCE))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_handover", description=__doc__)
    parser.add_argument("--model", default="demo-dense", help="as for `pdserve up` (default: %(default)s)")
    parser.add_argument("--drafter", default="eagle", help="as for `pdserve up` (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, default=OWN, metavar="DIR", help="a folder of sets (default: our own)")
    parser.add_argument("--num-prompts", type=int, default=80, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.num_prompts < 1 or arguments.max_tokens < 2:
        parser.error("--num-prompts must be at least 1, --max-tokens at least 2")
    return arguments


if __name__ == "__main__":
    main()
