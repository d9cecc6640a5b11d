"""What a hand-over adds to the time to first token when it hides behind prefill, and when it follows it.

`python -m bench.handover [--quick] [--mooncake PYTHON]`. The product's sender, receiver, services and NIXL in two
processes, the real model in one of them; and KV made as a GPU makes it, at half the link's own rate and at all of it.
Exposed is then at least the record: a gRPC call, in which the decode side checks the blocks. Both are shown beside it:
they bound what a short prompt can reach. Prints tables for people and one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench import handover_report as report
from bench import wire_error
from bench.awake import kept_awake
from bench.draft_handover import chosen_prompts
from bench.handover_report import FULL_LINK, HALF_LINK, MooncakeRow, PacedRow, Row
from bench.handover_sides import DecodeSide, Handover, PrefillSide, RawWrites, TimedAgent, decode_side, median
from bench.mooncake_rates import MooncakeUnusable, mooncake_rates
from bench.paced_runner import PacedRunner
from bench.prompt_sets import OWN
from deploy.options import VERIFIED_KV
from model.cache_folder import default_cache
from model.demo_models import DENSE, build
from model.runner import ModelRunner
from model.tokenizer import Tokenizer
from model.torch_runner import TorchRunner

PROMPTS, LONG_PROMPT = (256, 1024, 4096), 16384
NUM_BLOCKS = 1100
PACED_TOKENS = (1024, 4096, 16384)
TOLD_TOKENS = 2048  # how often progress is, within a prompt


@dataclass(frozen=True, slots=True)
class Options:
    quick: bool
    num_threads: int
    verify_kv: str

    @property
    def prompts(self) -> tuple[int, ...]:
        return PROMPTS if self.quick else (*PROMPTS, LONG_PROMPT)

    @property
    def num_rounds(self) -> int:
        return 3 if self.quick else 9

    def model_rounds(self, num_tokens: int) -> int:
        if num_tokens < PROMPTS[-1]:
            return self.num_rounds
        return 1 if self.quick or num_tokens == LONG_PROMPT else 3

    @property
    def wire_prompts(self) -> int:
        return 4 if self.quick else 20

    @property
    def wire_tokens(self) -> int:
        return 32 if self.quick else 64


@dataclass(frozen=True, slots=True)
class Found:
    rows: Sequence[Row]
    paced: Sequence[PacedRow]
    mooncake: Sequence[MooncakeRow]
    checked_share: float


class Bench:
    """Every way has its turn in each round."""

    def __init__(self, decode: DecodeSide, options: Options, console: Console) -> None:
        self._decode = decode
        self._options = options
        self._console = console
        self._rng = random.Random(0)

    async def rows(self, runner: TorchRunner) -> list[Row]:
        rows = []
        async with AsyncExitStack() as stack:
            prefill, raw = await self._side(stack, "torch", runner)
            for num_tokens in self._options.prompts:
                rows.append(await self._row(prefill, raw, runner, num_tokens))
                self._tell(f"{num_tokens} tokens measured")
        return rows

    async def paced_rows(
        self, runner: PacedRunner, mooncake: Mapping[int, float]
    ) -> tuple[list[PacedRow], list[MooncakeRow]]:
        """`mooncake`: its rates by number of tokens, where it is compared with."""
        rows, beside = [], []
        async with AsyncExitStack() as stack:
            prefill, raw = await self._side(stack, "paced", runner)
            for share in (HALF_LINK, FULL_LINK):
                rows += [await self._paced_row(prefill, raw, runner, num_tokens, share) for num_tokens in PACED_TOKENS]
                self._tell(f"KV made at {share:.0%} of the link's rate measured")
            for num_tokens, rate in mooncake.items():
                beside.append(await self._beside_mooncake(prefill, raw, runner, num_tokens, rate))
        return rows, beside

    async def _side(self, stack: AsyncExitStack, name: str, runner: ModelRunner) -> tuple[PrefillSide, RawWrites]:
        """Connected, and warm."""
        size = NUM_BLOCKS * runner.layout.block_bytes
        agent = TimedAgent(f"{name}-{os.getpid()}", runner.cache_address, size)
        stack.callback(agent.close)
        target = self._decode.target
        prefill = PrefillSide(runner, agent, target)
        stack.push_async_callback(prefill.close)
        await prefill.hand_over(self._prompt(1024, 1000), layer_by_layer=True)
        return prefill, RawWrites(agent, target.epoch, runner.cache_address, self._decode.base_address, size)

    async def _row(self, prefill: PrefillSide, raw: RawWrites, runner: TorchRunner, num_tokens: int) -> Row:
        def computed(count: int) -> None:
            if num_tokens == LONG_PROMPT and count % TOLD_TOKENS == 0:
                self._tell(f"{count} of {num_tokens} tokens computed")

        hidden, after = list[Handover](), list[Handover]()
        raw_s, pull_s = list[float](), list[float]()
        for _ in range(self._options.model_rounds(num_tokens)):
            for found, layer_by_layer in ((hidden, True), (after, False)):
                prompt = self._prompt(num_tokens, runner.config.vocab_size)
                found.append(await prefill.hand_over(prompt, layer_by_layer=layer_by_layer, computed=computed))
            num_bytes = after[-1].sent_bytes
            raw_s.append(raw.write_s(num_bytes))
            pull_s.append(await prefill.round_trip_s(runner.layout) + raw.read_s(num_bytes))
        raw_bytes_per_s = after[0].sent_bytes / statistics.median(raw_s)
        return Row(num_tokens, median(hidden), median(after), raw_bytes_per_s, statistics.median(pull_s))

    async def _paced_row(
        self, prefill: PrefillSide, raw: RawWrites, runner: PacedRunner, num_tokens: int, share: float
    ) -> PacedRow:
        """The bare transfer is measured first, for how fast KV is made, and again beside each hand-over."""
        num_bytes = runner.layout.num_blocks(num_tokens) * runner.layout.block_bytes
        rounds = range(self._options.num_rounds)
        bare_s = [raw.write_s(num_bytes) for _ in rounds]
        runner.pace(statistics.median(bare_s) / num_tokens / share)
        handovers, round_trip_s, checking_s = list[Handover](), list[float](), list[float]()
        for _ in rounds:
            runner.renew()
            checked_s = await self._decode.checking_s()
            handovers.append(await prefill.hand_over(self._prompt(num_tokens, 1000), layer_by_layer=True))
            checking_s.append(await self._decode.checking_s() - checked_s)
            round_trip_s.append(await prefill.round_trip_s(runner.layout))
            bare_s.append(raw.write_s(num_bytes))
        found = median(handovers)
        return PacedRow(
            num_tokens,
            share,
            statistics.median(bare_s),
            found.exposed_s,
            statistics.median(handover.computing_s + handover.exposed_s for handover in handovers),
            found.posting_s,
            found.record_s,
            statistics.median(round_trip_s),
            statistics.median(checking_s),
        )

    async def _beside_mooncake(
        self, prefill: PrefillSide, raw: RawWrites, runner: PacedRunner, num_tokens: int, rate: float
    ) -> MooncakeRow:
        runner.pace(0.0)
        after, raw_s = list[Handover](), list[float]()
        for _ in range(self._options.num_rounds):
            runner.renew()
            after.append(await prefill.hand_over(self._prompt(num_tokens, 1000), layer_by_layer=False))
            raw_s.append(raw.write_s(after[-1].sent_bytes))
        written_s = statistics.median(handover.exposed_s - handover.record_s for handover in after)
        found = median(after)
        seconds = (written_s, found.exposed_s, statistics.median(raw_s))
        return MooncakeRow(num_tokens, rate, *(found.sent_bytes / each for each in seconds))

    def _prompt(self, num_tokens: int, vocab_size: int) -> list[int]:
        return [self._rng.randrange(vocab_size) for _ in range(num_tokens)]

    def _tell(self, what: str) -> None:
        self._console.print(f"  {what}", style="dim", highlight=False)


async def measure(
    folder: Path, runner: TorchRunner, options: Options, mooncake: Mapping[int, float], console: Console
) -> Found:
    layout = runner.layout
    runner.cache.memory.zero_()  # a page that was never written costs nothing to read
    async with decode_side(folder, layout, NUM_BLOCKS, options.verify_kv) as decode, kept_awake(decode.address, layout):
        bench = Bench(decode, options, console)
        rows = await bench.rows(runner)
        paced, beside = await bench.paced_rows(PacedRunner(layout, NUM_BLOCKS), mooncake)
    return Found(rows, paced, beside, decode.checked_share)


def main() -> None:
    arguments = _arguments()
    console, out = Console(stderr=True), Console(width=120)
    options = Options(arguments.quick, arguments.threads, arguments.verify_kv)
    folder = arguments.model or build(DENSE, default_cache(), console)
    runner = TorchRunner.load(folder, num_blocks=NUM_BLOCKS, num_threads=options.num_threads)
    mooncake = _mooncake(arguments.mooncake, runner, options) if arguments.mooncake else {}
    found = asyncio.run(measure(folder, runner, options, mooncake, console))
    prompts = chosen_prompts(OWN, Tokenizer.load(folder), options.wire_prompts)
    wire = wire_error.measure(runner, prompts, options.wire_tokens)
    title = f"Beside prefill of {folder.name}, {options.num_threads} thread(s); times in ms, rates in GB/s"
    out.print(report.model_table(found.rows, title))
    out.print(report.paced_table(found.paced, options.verify_kv, found.checked_share))
    out.print(report.wire_table(wire, options.wire_tokens))
    result: dict[str, object] = {
        "bench": "handover",
        **report.model_figures(found.rows),
        **report.paced_figures(found.paced),
        **report.wire_figures(wire, options.wire_tokens),
        "verify_kv": options.verify_kv,
        "checked_share": found.checked_share,
    }
    if found.mooncake:
        out.print(report.mooncake_table(found.mooncake))
        result |= report.mooncake_figures(found.mooncake)
    print(json.dumps(result))


def _mooncake(python: str, runner: TorchRunner, options: Options) -> dict[int, float]:
    """By number of tokens."""
    counts = {runner.layout.num_blocks(num_tokens): num_tokens for num_tokens in PACED_TOKENS}
    try:
        rates = mooncake_rates(python, runner.layout, NUM_BLOCKS, list(counts), options.num_rounds)
    except MooncakeUnusable as error:
        raise SystemExit(f"bench.handover: Mooncake cannot be run by {python}: {error}") from None
    return {counts[count]: rate for count, rate in rates.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, and no prompt of 16384 tokens for the model"
    )
    parser.add_argument("--model", type=Path, help="a folder (default: the dense demo model)")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of the prefill side")
    parser.add_argument(
        "--verify-kv",
        choices=VERIFIED_KV,
        default="auto",
        help="as for `pdserve worker`, of the decode side (default: %(default)s)",
    )
    parser.add_argument(
        "--mooncake",
        metavar="PYTHON",
        help="compare with Mooncake's transfer engine: an interpreter that has the wheel "
        "mooncake-transfer-engine-non-cuda. It writes over TCP; UCX_TLS=tcp has NIXL do so, too",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
