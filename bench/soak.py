"""Many short requests through a whole cluster: whether memory, descriptors and threads stay where they are.

`python -m bench.soak [--requests 20000]`. Router, 1 prefill and 2 decode workers as processes of their own, with NIXL;
they compute nothing, but each token depends on all KV that was handed over. Some clients leave early, some requests are
moved. Prints a table for people and one line of JSON last; ends with 1 if an answer was wrong or missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.local import ClusterConfig, LocalCluster
from model.cache_folder import default_cache
from model.config import ModelConfig
from model.kv_layout import KVLayout
from model.model_source import resolve_model
from model.timed_runner import expected_tokens
from model.tokenizer import Tokenizer
from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.values import Chunk, Sampling

NUM_PROMPTS, PROMPT_TOKENS = 200, range(4, 120)
SHORT, LONG = 12, 64  # tokens of an answer, at most
AT_ONCE = 16
LEAVES_EVERY, IS_LONG_EVERY, DRAINS_EVERY = 10, 25, 100  # requests
NUM_BLOCKS = 200  # all of them are in use before the first look
LOOKS = 10
DEADLINE_S = 60.0
LEASE_S = 3.0  # what was handed over for a client that had left meanwhile is given up after so long
TIMING = {"prefill_base_s": 0.001, "prefill_token_s": 0.00001, "decode_base_s": 0.002, "decode_sequence_s": 0.0}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one process, now."""

    rss_mb: float
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"].strip())
        )


class Soak:
    """Asks again and again, and counts. `answers` are what the prompts have to be answered with."""

    def __init__(self, client: PdserveClient, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        self._client = client
        self._prompts, self._answers = prompts, answers
        self._rng = random.Random(1)
        self.num_asked = self.num_wrong = self.num_failed = self.num_left = self.num_moved = 0

    async def ask(self, num_requests: int) -> None:
        """Ends when so many more have been answered, or have gone."""
        until = self.num_asked + num_requests

        async def one_after_another() -> None:
            while self.num_asked < until:
                self.num_asked += 1
                await self._ask_one(self.num_asked)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(one_after_another())

    async def _ask_one(self, number: int) -> None:
        if number % DRAINS_EVERY == 0:
            source = f"decode-{number // DRAINS_EVERY % 2}"
            await self._client.set_draining(source, True)
            await self._client.set_draining(f"decode-{1 - number // DRAINS_EVERY % 2}", False)
        index, num_tokens = self._rng.randrange(len(self._prompts)), self._rng.randint(1, SHORT)
        if number % IS_LONG_EVERY == 0:
            num_tokens = LONG
        stays_for = self._rng.randint(0, 2) if number % LEAVES_EVERY == 0 else None
        sampling = Sampling(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        got: list[int] = []
        parts = self._client.generate(self._prompts[index], sampling=sampling, deadline_s=DEADLINE_S)
        try:
            async for part in parts:
                if not isinstance(part, Chunk):
                    self.num_moved += part.usage.num_moves
                    break
                got += part.token_ids
                if stays_for is not None and len(got) >= stays_for:
                    self.num_left += 1
                    num_tokens = len(got)
                    break
        except ServiceError as error:
            self.num_failed += 1
            print(f"request {number} failed: {error}", file=sys.stderr)
            return
        finally:
            await parts.aclose()
        self.num_wrong += got != self._answers[index][:num_tokens]


async def run(model: str, num_requests: int, console: Console) -> dict[str, object]:
    folder = resolve_model(model, default_cache())
    prompts, answers = _prompts(folder)
    with tempfile.TemporaryDirectory() as scratch:
        timing = Path(scratch) / "timing.json"
        timing.write_text(json.dumps(TIMING))
        config = ClusterConfig(
            model=str(folder),
            num_decode=2,
            num_threads=1,
            worker_arguments=(
                *("--runner", "timed", "--timing", str(timing)),
                *("--num-blocks", str(NUM_BLOCKS), "--lease-s", str(LEASE_S)),
            ),
        )
        async with LocalCluster(config) as cluster, PdserveClient(cluster.router_address) as client:
            soak, seen = Soak(client, prompts, answers), list[dict[str, Footprint]]()
            names = ("router", *config.worker_roles)
            began_at = time.monotonic()
            for look in range(LOOKS):
                await soak.ask(num_requests * (look + 1) // LOOKS - soak.num_asked)
                seen.append({name: Footprint.of(cluster.pid(name)) for name in names})
                rss = " / ".join(f"{seen[-1][name].rss_mb:.0f}" for name in names)
                line = f"  {soak.num_asked} requests, {time.monotonic() - began_at:.0f} s, {rss} MB"
                console.print(line, style="dim")
            num_left_blocks = await _blocks_left(cluster)
            took_s = time.monotonic() - began_at
    settled = seen[LOOKS // 3 - 1]
    Console().print(_table(settled, seen[-1], soak, took_s))
    return {
        "bench": "soak",
        "requests": soak.num_asked,
        "wrong": soak.num_wrong,
        "failed": soak.num_failed,
        "moved": soak.num_moved,
        "leaked_blocks": num_left_blocks,
        "requests_per_s": round(soak.num_asked / took_s, 1),
        "rss_growth_mb": round(max(seen[-1][name].rss_mb - settled[name].rss_mb for name in names), 1),
        "descriptor_growth": max(seen[-1][name].num_descriptors - settled[name].num_descriptors for name in names),
        "thread_growth": max(seen[-1][name].num_threads - settled[name].num_threads for name in names),
    }


def _prompts(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what timed workers of this model answer to them."""
    config, rng = ModelConfig.from_folder(folder), random.Random(0)
    layout = KVLayout("", config.dtype, config.num_layers, config.num_kv_heads, config.head_dim)
    eos = {*config.eos_token_ids, *Tokenizer.load(folder).eos_token_ids}
    prompts = [[rng.randrange(100, 1000) for _ in range(rng.choice(PROMPT_TOKENS))] for _ in range(NUM_PROMPTS)]
    answers = [
        expected_tokens(prompt, LONG, layout, vocab_size=config.vocab_size, never_sampled=eos) for prompt in prompts
    ]
    return prompts, answers


async def _blocks_left(cluster: LocalCluster) -> int:
    """Blocks in use once nothing runs any more; those of clients that left in the middle take a moment."""
    for _ in range(100):
        left = sum(worker.num_used_blocks for worker in (await cluster.workers()).values())
        if left == 0:
            break
        await asyncio.sleep(0.1)
    return left


def _table(before: dict[str, Footprint], after: dict[str, Footprint], soak: Soak, took_s: float) -> Table:
    title = f"{soak.num_asked} requests in {took_s:.0f} s: {soak.num_left} left, {soak.num_moved} were moved"
    table = Table(title=title, caption="after a third of the requests, and at the end")
    for heading in ("process", "MB", "end", "fds", "end", "threads", "end"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for name, now in after.items():
        was = before[name]
        numbers = (
            *(f"{was.rss_mb:.1f}", f"{now.rss_mb:.1f}", f"{was.num_descriptors}", f"{now.num_descriptors}"),
            *(f"{was.num_threads}", f"{now.num_threads}"),
        )
        table.add_row(name, *numbers)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="in all (default: 20000)")
    parser.add_argument("--model", default="demo-dense", help="whose sizes and tokens (default: demo-dense)")
    arguments = parser.parse_args()
    if arguments.requests < LOOKS:
        parser.error(f"--requests is {arguments.requests}; it must be at least {LOOKS}")
    result = asyncio.run(run(arguments.model, arguments.requests, Console(stderr=True)))
    print(json.dumps(result))
    if result["wrong"] or result["failed"] or result["leaked_blocks"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
