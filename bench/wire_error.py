"""What eight bits on the wire cost in exactness, and save in bytes.

`python -m bench.wire_error [--model NAME] [--prompts DIR]`. The model reads prompts; then it goes on greedily from its
cache as it is, and from the cache packed and unpacked in each coding. Prints how far keys and values are off in each
layer, where answers first differ and how fast packing is; one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.draft_handover import chosen_prompts
from bench.prompt_sets import OWN, PromptsUnusable
from kvtransfer.eight_bit import Coding, EightBit
from model.cache_folder import default_cache
from model.model_source import ModelUnavailable, resolve_model
from model.runner import Chunk, NonFiniteLogits, SampledToken
from model.sampling_params import SamplingParams
from model.tokenizer import Tokenizer
from model.torch_runner import TorchRunner

GREEDY = SamplingParams(max_tokens=1024, temperature=0.0)
PLACES = (1, 2, 4, 8, 16, 32, 64)
RATE_BLOCKS, RATE_ROUNDS = 64, 5


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt whose KV is in these blocks, room for its answer included, and the first token behind it."""

    prompt: Sequence[int]
    block_ids: Sequence[int]
    first_token_id: int

    def filled(self, block_size: int) -> Sequence[int]:
        return self.block_ids[: -(-len(self.prompt) // block_size)]


@dataclass(frozen=True, slots=True)
class CodingResult:
    """`differing[i]`: at which of the tokens behind the first one prompt i's answer differs, from 1; None if none does.

    Errors are by layer, relative: the root of the summed squares of what was lost over that of what there was.
    """

    coding: Coding
    bytes_ratio: float
    key_errors: Sequence[float]
    value_errors: Sequence[float]
    differing: Sequence[int | None]
    pack_bytes_per_s: float  # bytes of the cache, not of what is packed
    unpack_bytes_per_s: float

    def share_differing(self, num_tokens: int) -> float:
        """Of the prompts, within so many tokens."""
        return sum(place is not None and place <= num_tokens for place in self.differing) / len(self.differing)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """From 1; None if they are equal."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True), start=1) if a != b), None)


def prefill(runner: TorchRunner, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Prefilled]:
    """One after the other; each gets blocks of its own."""
    prefilled, first = [], 0
    for prompt in prompts:
        count = runner.layout.num_blocks(len(prompt) + max_tokens + 1)
        blocks = range(first, first + count)
        first += count
        chunk = Chunk(prompt, 0, blocks, GREEDY, prompt, len(prompt))
        prefilled.append(Prefilled(prompt, blocks, _tokens(runner, [chunk])[0]))
    return prefilled


def answers(runner: TorchRunner, prefilled: Sequence[Prefilled], max_tokens: int) -> list[list[int]]:
    """The tokens behind the first, so many for every prompt, whether or not its text has ended."""
    histories = [[*each.prompt, each.first_token_id] for each in prefilled]
    for _ in range(max_tokens):
        chunks = [
            Chunk(history[-1:], len(history) - 1, each.block_ids, GREEDY, history, len(each.prompt))
            for each, history in zip(prefilled, histories, strict=True)
        ]
        for history, token_id in zip(histories, _tokens(runner, chunks), strict=True):
            history.append(token_id)
    return [history[len(each.prompt) + 1 :] for each, history in zip(prefilled, histories, strict=True)]


def _tokens(runner: TorchRunner, chunks: Sequence[Chunk]) -> list[int]:
    token_ids = []
    for outcome in runner.execute(chunks).sampled:
        if isinstance(outcome, NonFiniteLogits):
            raise outcome
        assert isinstance(outcome, SampledToken)
        token_ids.append(outcome.token_id)
    return token_ids


def send(codec: EightBit, memory: Tensor, each: Prefilled) -> None:
    """Packs a prompt's KV and unpacks it in its place, as a hand-over would."""
    blocks = each.filled(codec.layout.block_size)
    packed = torch.zeros((len(blocks), codec.packed_bytes), dtype=torch.uint8, device=memory.device)
    for layer in memory:
        codec.pack(layer, blocks, len(each.prompt), packed)
        codec.unpack(packed, layer, blocks)


def rates(codec: EightBit, memory: Tensor) -> tuple[float, float]:
    """Bytes of a cache that are packed and unpacked in a second, a layer of up to 64 blocks at a time: medians."""
    blocks = range(min(RATE_BLOCKS, memory.shape[1]))
    packed = torch.zeros((len(blocks), codec.packed_bytes), dtype=torch.uint8, device=memory.device)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(RATE_ROUNDS):
        for layer in memory:
            started = time.perf_counter()
            codec.pack(layer, blocks, len(blocks) * codec.layout.block_size, packed)
            packed_at = time.perf_counter()
            codec.unpack(packed, layer, blocks)
            times[0].append(packed_at - started)
            times[1].append(time.perf_counter() - packed_at)
    num_bytes = len(blocks) * codec.layout.layer_block_bytes
    return num_bytes / statistics.median(times[0]), num_bytes / statistics.median(times[1])


def kv_of(memory: Tensor, each: Prefilled, block_size: int) -> Tensor:
    """Of the prompt's tokens alone: [L, H, 2, T, D] in float32."""
    blocks = memory[:, list(each.filled(block_size))]  # [L, blocks, H, 2, B, D]
    return blocks.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : len(each.prompt)].float()


def measure(runner: TorchRunner, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[CodingResult]:
    prefilled = prefill(runner, prompts, max_tokens)
    memory, size = runner.cache.memory, runner.layout.block_size
    before = memory.clone()
    exact = answers(runner, prefilled, max_tokens)
    results = []
    for coding in Coding:
        memory.copy_(before)
        codec, lost, total = EightBit(runner.layout, coding), torch.zeros(len(memory), 2), torch.zeros(len(memory), 2)
        for each in prefilled:
            send(codec, memory, each)
            was, now = kv_of(before, each, size), kv_of(memory, each, size)
            lost += (now - was).square().sum((1, 3, 4))
            total += was.square().sum((1, 3, 4))
        errors = (lost / total).sqrt()
        found = answers(runner, prefilled, max_tokens)
        differing = [first_difference(one, other) for one, other in zip(exact, found, strict=True)]
        keys, values = errors[:, 0].tolist(), errors[:, 1].tolist()
        ratio = codec.packed_bytes / runner.layout.layer_block_bytes
        results.append(CodingResult(coding, ratio, keys, values, differing, *rates(codec, memory)))
    return results


def report(results: Sequence[CodingResult], max_tokens: int, console: Console) -> None:
    table = Table("layer", *(f"{result.coding.value} {what}" for result in results for what in ("keys", "values")))
    for layer in range(len(results[0].key_errors)):
        errors = [errors[layer] for result in results for errors in (result.key_errors, result.value_errors)]
        table.add_row(str(layer), *(f"{error:.3%}" for error in errors))
    console.print(table)
    places = [place for place in PLACES if place < max_tokens] + [max_tokens]
    table = Table("answers that differ within", *(f"{place} tokens" for place in places))
    for result in results:
        table.add_row(result.coding.value, *(f"{result.share_differing(place):.0%}" for place in places))
    console.print(table)
    for result in results:
        rates = f"{result.pack_bytes_per_s / 1e9:.2f} GB/s packed, {result.unpack_bytes_per_s / 1e9:.2f} unpacked"
        console.print(f"{result.coding.value}: {result.bytes_ratio:.4f} of the bytes, {rates}", highlight=False)


def _figures(result: CodingResult, max_tokens: int) -> dict[str, object]:
    return {
        "bytes_ratio": round(result.bytes_ratio, 4),
        "worst_key_error": round(max(result.key_errors), 5),
        "worst_value_error": round(max(result.value_errors), 5),
        "share_differing": round(result.share_differing(max_tokens), 3),
        "pack_gb_per_s": round(result.pack_bytes_per_s / 1e9, 2),
        "unpack_gb_per_s": round(result.unpack_bytes_per_s / 1e9, 2),
        "first_differing": sorted(place for place in result.differing if place is not None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wire_error", description=__doc__)
    parser.add_argument("--model", default="demo-dense", help="as for `pdserve up` (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, default=OWN, metavar="DIR", help="a folder of sets (default: our own)")
    parser.add_argument("--num-prompts", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="behind the first (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.num_prompts < 1 or arguments.max_tokens < 1:
        parser.error("--num-prompts and --max-tokens must be at least 1")
    console = Console(width=100)
    try:
        folder = resolve_model(arguments.model, default_cache())
        prompts = chosen_prompts(arguments.prompts, Tokenizer.load(folder), arguments.num_prompts)
    except (ModelUnavailable, PromptsUnusable) as error:
        raise SystemExit(f"bench.wire_error: {error}") from None
    longest = max(len(prompt) for prompt in prompts) + arguments.max_tokens + 1
    num_blocks = len(prompts) * -(-longest // 16)
    runner = TorchRunner.load(folder, num_blocks=num_blocks, max_context_tokens=longest)
    results = measure(runner, prompts, arguments.max_tokens)
    report(results, arguments.max_tokens, console)
    figures = {result.coding.value: _figures(result, arguments.max_tokens) for result in results}
    print(json.dumps({"bench": "wire_error", "prompts": len(prompts), "tokens": arguments.max_tokens, **figures}))


if __name__ == "__main__":
    main()
