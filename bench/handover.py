"""What a hand-over adds to the time to first token when it hides behind prefill, and when it follows it.

`python -m bench.handover [--quick] [--model DIR]`. The product's sender, receiver, services and NIXL in two processes,
the real model in one of them. Prints a table for people and one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client import REGISTRY
from rich.console import Console
from rich.table import Table

from bench.awake import kept_awake
from kvtransfer.agent import Region, WriteState
from kvtransfer.geometry import CacheSpan
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.outgoing import Outgoing
from kvtransfer.sender import Sender
from kvtransfer.ticket import HandoverTarget, SenderIdentity
from model.block_pool import BlockPool, hash_blocks
from model.cache_folder import default_cache
from model.demo_models import DENSE, build
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, NonFiniteLogits, SampledToken
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner

PROMPTS = (256, 1024, 4096)
CHUNK_TOKENS = 512
NUM_BLOCKS = 1024
RAW_DESCRIPTOR_BYTES = 1 << 20
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Handover:
    """`ttft_s` is from asking for the ticket to the first token, `exposed_s` from there to the record accepted."""

    ttft_s: float
    exposed_s: float
    posting_s: float  # the transfer thread's time
    sent_bytes: int

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.ttft_s


class PrefillSide:
    """A prefill worker reduced to one sequence at a time."""

    def __init__(self, runner: TorchRunner, agent: NixlAgent, target: HandoverTarget) -> None:
        self._runner = runner
        self._target = target
        self._pool = BlockPool(runner.num_blocks)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._num_attempts = 0
        self._sender = Sender(
            agent,
            self._pool,
            CacheSpan(runner.layout, runner.cache_address, runner.num_blocks),
            SenderIdentity("bench", "bench"),
        )

    async def hand_over(self, token_ids: list[int], *, layer_by_layer: bool) -> Handover:
        """Prefills a prompt that neither side has seen, and sends it while computing or when it is computed."""
        num_tokens, num_blocks = len(token_ids), self._runner.layout.num_blocks(len(token_ids))
        posted_before = _posting_s()
        started = time.perf_counter()
        outgoing = await self._reserve(token_ids)
        blocks = self._pool.allocate(num_blocks)
        outgoing.hold(blocks)
        first_token_id = 0
        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            hook = self._hook(outgoing, blocks, start, end, num_tokens) if layer_by_layer else None
            first_token_id = await self._run(token_ids, start, end, blocks, hook)
        computed = time.perf_counter()
        if not layer_by_layer:
            outgoing.write_all_layers(0, blocks)
        stats = await outgoing.commit(first_token_id, num_tokens)
        committed = time.perf_counter()
        self._pool.release(blocks)
        return Handover(computed - started, committed - computed, _posting_s() - posted_before, stats.sent_bytes)

    async def close(self) -> None:
        await self._sender.close()
        self._compute.shutdown()

    async def _reserve(self, token_ids: list[int]) -> Outgoing:
        self._num_attempts += 1
        return await self._sender.reserve(
            self._target,
            attempt_id=f"attempt-{self._num_attempts}",
            request_id="bench",
            num_tokens=len(token_ids),
            block_hashes=hash_blocks(token_ids, self._runner.layout.block_size),
            timeout_s=30.0,
        )

    async def _run(self, token_ids: list[int], start: int, end: int, blocks: list[int], hook: LayerDone | None) -> int:
        if end < len(token_ids):
            chunk = Chunk(token_ids[start:end], start, blocks)
        else:
            chunk = Chunk(token_ids[start:end], start, blocks, GREEDY, token_ids, len(token_ids))
        execute = self._runner.execute
        output = await asyncio.get_running_loop().run_in_executor(self._compute, lambda: execute([chunk], hook))
        token = output.sampled[0]
        if isinstance(token, NonFiniteLogits):
            raise token
        return token.token_id if isinstance(token, SampledToken) else 0

    def _hook(self, outgoing: Outgoing, blocks: list[int], start: int, end: int, num_tokens: int) -> LayerDone:
        block_size = self._runner.layout.block_size
        first, stop = start // block_size, -(-end // block_size) if end == num_tokens else end // block_size
        return lambda layer: outgoing.write(layer, first, blocks[first:stop])


@dataclass(frozen=True, slots=True)
class Row:
    num_tokens: int
    hidden: Handover  # medians over the rounds
    after: Handover
    raw_bytes_per_s: float


def _median(handovers: list[Handover]) -> Handover:
    return Handover(
        statistics.median(one.ttft_s for one in handovers),
        statistics.median(one.exposed_s for one in handovers),
        statistics.median(one.posting_s for one in handovers),
        handovers[0].sent_bytes,
    )


def _posting_s() -> float:
    return REGISTRY.get_sample_value("pdserve_kvtransfer_write_seconds_total") or 0.0


class RawWrites:
    """NIXL alone: the same bytes in 1 MB descriptors, each time from and to memory that was not touched just before."""

    def __init__(self, agent: NixlAgent, peer_name: str, local_address: int, remote_address: int, size: int) -> None:
        self._agent, self._peer_name = agent, peer_name
        self._local_address, self._remote_address, self._size = local_address, remote_address, size
        self._at = 0

    def seconds(self, num_bytes: int) -> float:
        if self._at + num_bytes > self._size:
            self._at = 0
        stop = self._at + num_bytes
        regions = [
            Region(self._local_address + at, self._remote_address + at, min(RAW_DESCRIPTOR_BYTES, stop - at))
            for at in range(self._at, stop, RAW_DESCRIPTOR_BYTES)
        ]
        self._at = stop
        started = time.perf_counter()
        write = self._agent.write(self._peer_name, regions)
        while write.poll() is WriteState.MOVING:
            time.sleep(0)
        if write.poll() is WriteState.FAILED:
            raise RuntimeError("a raw NIXL write failed")
        return time.perf_counter() - started


@asynccontextmanager
async def decode_side(folder: Path, layout: KVLayout) -> AsyncIterator[dict[str, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.handover_decode",
        str(folder),
        json.dumps(asdict(layout)),
        str(NUM_BLOCKS),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


async def measure(folder: Path, num_threads: int, rounds: Callable[[int], int], console: Console) -> list[Row]:
    runner = TorchRunner.load(folder, num_blocks=NUM_BLOCKS, num_threads=num_threads)
    agent = NixlAgent(f"prefill-{os.getpid()}", runner.cache_address, NUM_BLOCKS * runner.layout.block_bytes)
    async with decode_side(folder, runner.layout) as decode, kept_awake(decode["address"], runner.layout):
        prefill = PrefillSide(runner, agent, HandoverTarget("decode", decode["address"], decode["epoch"]))
        size = NUM_BLOCKS * runner.layout.block_bytes
        raw = RawWrites(agent, decode["epoch"], runner.cache_address, int(decode["base_address"]), size)
        rng = random.Random(0)
        rows: list[Row] = []
        try:
            await prefill.hand_over(_prompt(rng, 1024, runner), layer_by_layer=True)  # connects
            for num_tokens in PROMPTS:
                rows.append(await _row(prefill, raw, runner, rng, num_tokens, rounds(num_tokens)))
                console.print(f"  {num_tokens} tokens measured", style="dim")
        finally:
            await prefill.close()
            agent.close()
    return rows


async def _row(
    prefill: PrefillSide, raw: RawWrites, runner: TorchRunner, rng: random.Random, num_tokens: int, rounds: int
) -> Row:
    """Medians over rounds in each of which every way has its turn."""
    hidden, after, raw_seconds = [], [], []
    for _ in range(rounds):
        hidden.append(await prefill.hand_over(_prompt(rng, num_tokens, runner), layer_by_layer=True))
        after.append(await prefill.hand_over(_prompt(rng, num_tokens, runner), layer_by_layer=False))
        raw_seconds.append(raw.seconds(after[-1].sent_bytes))
    return Row(num_tokens, _median(hidden), _median(after), after[0].sent_bytes / statistics.median(raw_seconds))


def _prompt(rng: random.Random, num_tokens: int, runner: TorchRunner) -> list[int]:
    return [rng.randrange(runner.config.vocab_size) for _ in range(num_tokens)]


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=title)
    for name in ("tokens", "MB", "TTFT ms", "exposed ms", "share", "after ms", "share", "GB/s", "raw GB/s"):
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
            f"{row.after.sent_bytes / row.after.posting_s / 1e9:.2f}",
            f"{row.raw_bytes_per_s / 1e9:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--model", type=Path, help="a folder (default: the dense demo model)")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of the prefill side")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    folder = arguments.model or build(DENSE, default_cache(), console)

    def rounds(num_tokens: int) -> int:
        return (1 if arguments.quick else 3) if num_tokens == max(PROMPTS) else (3 if arguments.quick else 9)

    rows = asyncio.run(measure(folder, arguments.threads, rounds, console))
    Console().print(_table(rows, f"Hand-over beside prefill of {folder.name}, {arguments.threads} thread(s)"))
    of_1024, largest = next(row for row in rows if row.num_tokens == 1024), rows[-1]
    result = {
        "bench": "handover",
        "exposed_share_1024": round(of_1024.hidden.exposed_share, 4),
        "vs_after_prefill": round(of_1024.hidden.exposed_s / of_1024.after.exposed_s, 3),
        "rate_vs_raw_nixl": round(largest.after.sent_bytes / largest.after.posting_s / largest.raw_bytes_per_s, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
