"""What a hand-over adds to the time to first token when it hides behind prefill, and when it follows it.

`python -m bench.handover [--quick] [--model DIR]`. The product's sender, receiver, services and NIXL in two processes,
the real model in one of them; and a timed one that makes KV as fast as a GPU would, at half the link's own rate and at
all of it. Prints tables for people and one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.awake import kept_awake
from bench.handover_sides import Handover, PrefillSide, RawWrites, decode_side, median
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.ticket import HandoverTarget
from model.cache_folder import default_cache
from model.demo_models import DENSE, build
from model.runner import ModelRunner
from model.timed_runner import StepTiming, TimedRunner
from model.torch_runner import TorchRunner

PROMPTS, LONG_PROMPT = (256, 1024, 4096), 16384
NUM_BLOCKS = 1100
PACED_TOKENS = (1024, 4096, 16384)
LINK_SHARES = (0.5, 1.0)  # of the rate of NIXL alone: how fast KV is made


@dataclass(frozen=True, slots=True)
class Row:
    num_tokens: int
    hidden: Handover  # medians over the rounds
    after: Handover
    raw_bytes_per_s: float
    pull_s: float

    @property
    def rate_vs_raw(self) -> float:
        return self.after.sent_bytes / self.after.posting_s / self.raw_bytes_per_s


@dataclass(frozen=True, slots=True)
class PacedRow:
    """KV that takes `1 / link_share` of the bare transfer time to make. Times in bare transfers of as many bytes."""

    num_tokens: int
    link_share: float
    bare_s: float
    exposed: float
    total: float


class Bench:
    """`decode` says where the decode side is. Every way has its turn in each round."""

    def __init__(self, decode: dict[str, str], console: Console) -> None:
        self._target = HandoverTarget("decode", decode["address"], decode["epoch"])
        self._remote_address = int(decode["base_address"])
        self._console = console
        self._rng = random.Random(0)

    async def rows(self, runner: TorchRunner, num_prompts: tuple[int, ...], rounds: Callable[[int], int]) -> list[Row]:
        rows = []
        async with AsyncExitStack() as stack:
            prefill, raw = await self._side(stack, "torch", runner)
            for num_tokens in num_prompts:
                rows.append(await self._row(prefill, raw, runner, num_tokens, rounds(num_tokens)))
                self._console.print(f"  {num_tokens} tokens measured", style="dim")
        return rows

    async def paced_rows(self, runner: TorchRunner, link_bytes_per_s: float, num_rounds: int) -> list[PacedRow]:
        """At shares of the rate that was measured beside the model; the bare transfer is measured anew in each."""
        rows = []
        for share in LINK_SHARES:
            token_s = runner.layout.token_bytes / (share * link_bytes_per_s)
            timing = StepTiming(prefill_base_s=0.0, prefill_token_s=token_s, prefill_pair_s=0.0)
            timed = TimedRunner(runner.layout, NUM_BLOCKS, timing, vocab_size=runner.config.vocab_size)
            async with AsyncExitStack() as stack:
                prefill, raw = await self._side(stack, f"timed-{share:g}", timed)
                for num_tokens in PACED_TOKENS:
                    handovers, bare = [], []
                    for _ in range(num_rounds):
                        prompt = self._prompt(num_tokens, 1000)
                        handovers.append(await prefill.hand_over(prompt, layer_by_layer=True))
                        bare.append(raw.write_s(handovers[-1].sent_bytes))
                    found, bare_s = median(handovers), statistics.median(bare)
                    exposed, total = found.exposed_s / bare_s, (found.ttft_s + found.exposed_s) / bare_s
                    rows.append(PacedRow(num_tokens, share, bare_s, exposed, total))
        return rows

    async def _side(self, stack: AsyncExitStack, name: str, runner: ModelRunner) -> tuple[PrefillSide, RawWrites]:
        """Connected, and warm."""
        size = NUM_BLOCKS * runner.layout.block_bytes
        agent = NixlAgent(f"{name}-{os.getpid()}", runner.cache_address, size)
        stack.callback(agent.close)
        prefill = PrefillSide(runner, agent, self._target)
        stack.push_async_callback(prefill.close)
        await prefill.hand_over(self._prompt(1024, 1000), layer_by_layer=True)
        return prefill, RawWrites(agent, self._target.epoch, runner.cache_address, self._remote_address, size)

    async def _row(
        self, prefill: PrefillSide, raw: RawWrites, runner: TorchRunner, num_tokens: int, rounds: int
    ) -> Row:
        hidden, after = list[Handover](), list[Handover]()
        raw_s, pull_s = list[float](), list[float]()
        for _ in range(rounds):
            for found, layer_by_layer in ((hidden, True), (after, False)):
                prompt = self._prompt(num_tokens, runner.config.vocab_size)
                found.append(await prefill.hand_over(prompt, layer_by_layer=layer_by_layer))
            num_bytes = after[-1].sent_bytes
            raw_s.append(raw.write_s(num_bytes))
            pull_s.append(await prefill.round_trip_s(runner.layout) + raw.read_s(num_bytes))
        raw_bytes_per_s = after[0].sent_bytes / statistics.median(raw_s)
        return Row(num_tokens, median(hidden), median(after), raw_bytes_per_s, statistics.median(pull_s))

    def _prompt(self, num_tokens: int, vocab_size: int) -> list[int]:
        return [self._rng.randrange(vocab_size) for _ in range(num_tokens)]


async def measure(folder: Path, num_threads: int, quick: bool, console: Console) -> tuple[list[Row], list[PacedRow]]:
    prompts = PROMPTS if quick else (*PROMPTS, LONG_PROMPT)

    def rounds(num_tokens: int) -> int:
        if num_tokens >= PROMPTS[-1]:
            return 1 if quick or num_tokens == LONG_PROMPT else 3
        return 3 if quick else 9

    runner = TorchRunner.load(folder, num_blocks=NUM_BLOCKS, num_threads=num_threads)
    async with decode_side(folder, runner.layout, NUM_BLOCKS) as decode, kept_awake(decode["address"], runner.layout):
        bench = Bench(decode, console)
        rows = await bench.rows(runner, prompts, rounds)
        link = statistics.median(row.raw_bytes_per_s for row in rows)
        paced = await bench.paced_rows(runner, link, 3 if quick else 9)
    return rows, paced


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for name in ("tokens", "MB", "TTFT", "exposed", "share", "after", "share", "pull", "rate", "NIXL alone"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_tokens),
            f"{row.hidden.sent_bytes / 1e6:.1f}",
            f"{row.hidden.ttft_s * 1e3:.0f}",
            f"{row.hidden.exposed_s * 1e3:.2f}",
            f"{row.hidden.exposed_share:.2%}",
            f"{row.after.exposed_s * 1e3:.2f}",
            f"{row.after.exposed_share:.2%}",
            f"{row.pull_s * 1e3:.2f}",
            f"{row.after.sent_bytes / row.after.posting_s / 1e9:.2f}",
            f"{row.raw_bytes_per_s / 1e9:.2f}",
        )
    return table


def _paced_table(rows: list[PacedRow]) -> Table:
    title = "Hand-over beside KV that is made as fast as a GPU would; times in bare transfers"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for name in ("tokens", "made at", "bare ms", "exposed", "until accepted"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_tokens),
            f"{row.link_share:.0%} of the link",
            f"{row.bare_s * 1e3:.2f}",
            f"{row.exposed:.2f}",
            f"{row.total:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no prompt of 16384 tokens")
    parser.add_argument("--model", type=Path, help="a folder (default: the dense demo model)")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of the prefill side")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    folder = arguments.model or build(DENSE, default_cache(), console)
    rows, paced = asyncio.run(measure(folder, arguments.threads, arguments.quick, console))
    out = Console()
    title = f"Hand-over beside prefill of {folder.name}, {arguments.threads} thread(s); times in ms, rates in GB/s"
    out.print(_table(rows, title))
    out.print(_paced_table(paced))
    of_1024 = next(row for row in rows if row.num_tokens == 1024)
    from_1024 = [row for row in rows if row.num_tokens >= 1024]
    result = {
        "bench": "handover",
        "exposed_share_1024": round(of_1024.hidden.exposed_share, 4),
        "exposed_share_max_from_1024": round(max(row.hidden.exposed_share for row in from_1024), 4),
        "vs_after_prefill": round(of_1024.hidden.exposed_s / of_1024.after.exposed_s, 3),
        "vs_pull": round(of_1024.hidden.exposed_s / of_1024.pull_s, 3),
        "rate_vs_raw_nixl": round(rows[-1].rate_vs_raw, 3),
        "rate_vs_raw_nixl_min_from_1024": round(min(row.rate_vs_raw for row in from_1024), 3),
        "exposed_at_half_link": round(max(row.exposed for row in paced if row.link_share == 0.5), 3),
        "total_at_full_link": round(max(row.total for row in paced if row.link_share == 1.0), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
