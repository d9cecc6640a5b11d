"""A runner that computes nothing: it takes the time a calibrated model says, and its tokens prove the KV cache right.

Every token writes words into the cache that depend on it and on all tokens before it; a sampled token is a function of
words read back from every layer of every block of its sequence. A block that was not transferred, or was overwritten,
gives another token than `expected_tokens` says. No torch. Letters: L layers, N blocks, H heads, B block size, T tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from model.kv_layout import DTYPE_BYTES, KVLayout
from model.prompt_scores import ScoredTokens
from model.runner import Chunk, LayerDone, Logprobs, NoDrafting, SampledToken, StepOutput

if TYPE_CHECKING:
    from torch import Tensor

Words: TypeAlias = NDArray[np.uint64]
Ints: TypeAlias = NDArray[np.int64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How long a step takes. The defaults are about what a 135M-parameter model takes on two CPU cores."""

    prefill_base_s: float = 0.020
    prefill_token_s: float = 0.0006
    prefill_pair_s: float = 1e-7  # per token of the chunk and token of context: quadratic in the prompt
    decode_base_s: float = 0.022
    decode_sequence_s: float = 0.001
    decode_context_token_s: float = 1e-6
    scale: float = 1.0  # of everything: 0.1 plays a tenfold faster machine

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0.0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be 0 or more")

    @classmethod
    def load(cls, path: Path) -> StepTiming:
        """From a JSON object with some of the fields; the others keep their defaults. Raises ValueError."""
        values = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ValueError(f"{path} has {', '.join(unknown)}; a step timing has {', '.join(names)}")
        return cls(**values)

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Of one forward over all chunks. A chunk of one token costs what decode costs."""
        prefill = [(len(chunk.token_ids), chunk.start + len(chunk.token_ids)) for chunk in chunks]
        decode = [context for num_tokens, context in prefill if num_tokens == 1]
        prefill = [(num_tokens, context) for num_tokens, context in prefill if num_tokens > 1]
        total_s = self.prefill_base_s if prefill else self.decode_base_s
        total_s += sum(n * self.prefill_token_s + n * context * self.prefill_pair_s for n, context in prefill)
        total_s += len(decode) * self.decode_sequence_s + sum(decode) * self.decode_context_token_s
        return self.scale * total_s


class TimedRunner(NoDrafting):
    """Implements ModelRunner. `never_sampled` are usually the end tokens, so that answers are as long as asked for."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        timing: StepTiming,
        *,
        vocab_size: int,
        never_sampled: Collection[int] = (),
    ) -> None:
        head_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
        if head_bytes % _WORD_BYTES:
            raise ValueError(
                f"a token's head takes {head_bytes} bytes; a timed cache needs a multiple of {_WORD_BYTES}"
            )
        self._layout = layout
        self._num_blocks = num_blocks
        self._timing = timing
        self._token_ids = _sampled_ids(vocab_size, never_sampled)
        shape = (layout.num_layers, num_blocks, layout.num_kv_heads, 2, layout.block_size, head_bytes // _WORD_BYTES)
        self._cache: Words = np.empty(shape, dtype=np.uint64)
        self._cache.fill(0)  # touched now, so that page faults do not add to the first steps
        self._layers = np.arange(layout.num_layers)
        places = np.arange(layout.num_layers * layout.num_kv_heads * 2, dtype=np.uint64)
        self._keys = _mix(places + np.uint64(1)).reshape(layout.num_layers, layout.num_kv_heads, 2)

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def timing(self) -> StepTiming:
        return self._timing

    @property
    def kernels(self) -> str:
        return "timed"

    @property
    def cache_address(self) -> int:
        return int(self._cache.ctypes.data)

    @property
    def cache_memory(self) -> Tensor:
        import torch  # whoever wants a tensor has it

        return torch.from_numpy(self._cache.view(np.int32))

    @property
    def cache_device_id(self) -> int:
        return -1

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        """Takes as long as the timing says; `layer_done` comes as evenly as the layers of a real model would."""
        start_s = time.perf_counter()
        step_s = self._timing.step_s(chunks)
        num_layers = self._layout.num_layers
        blocks, slots = self._places(chunks)
        words = np.concatenate([self._words(chunk) for chunk in chunks])  # [T, L, H, 2]
        for chunk in chunks:
            _score_prompt(chunk)
        sampled: tuple[SampledToken | None, ...] = ()
        for layer in range(num_layers):
            self._cache[layer, blocks, :, :, slots, 0] = words[:, layer]
            if layer == num_layers - 1:
                sampled = self._sample(chunks)
            if layer_done is not None:
                _sleep_until(start_s + step_s * (layer + 1) / num_layers)
                layer_done(layer)
        _sleep_until(start_s + step_s)
        return StepOutput(sampled, time.perf_counter() - start_s)

    def _places(self, chunks: Sequence[Chunk]) -> tuple[Ints, Ints]:
        """Block and slot of every token that is run, [T] each."""
        blocks, slots = [], []
        for chunk in chunks:
            positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
            block_ids = np.asarray(chunk.block_ids, dtype=np.int64)
            if not 0 <= block_ids.min() <= block_ids.max() < self.num_blocks:
                raise ValueError(f"block ids {block_ids.min()} to {block_ids.max()} in a cache of {self.num_blocks}")
            blocks.append(block_ids[positions // self._layout.block_size])
            slots.append(positions % self._layout.block_size)
        return np.concatenate(blocks), np.concatenate(slots)

    def _words(self, chunk: Chunk) -> Words:
        """What a chunk writes, [T, L, H, 2]: a running sum per layer, which goes on from what the cache holds."""
        chain = np.zeros(self._layout.num_layers, dtype=np.uint64)
        if chunk.start:
            block, slot = divmod(chunk.start - 1, self._layout.block_size)
            chain = self._cache[:, chunk.block_ids[block], 0, 0, slot, 0] ^ self._keys[:, 0, 0]
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.uint64)
        token_ids = np.asarray(chunk.token_ids, dtype=np.uint64)
        links = _mix(token_ids * np.uint64(_FACTORS[0]) + positions * np.uint64(_GOLDEN))[:, None]  # [T, 1]
        added = _mix(links + self._layers.astype(np.uint64))  # [T, L]
        chains: Words = chain + added.cumsum(axis=0, dtype=np.uint64)
        words: Words = chains[:, :, None, None] ^ self._keys
        return words

    def _sample(self, chunks: Sequence[Chunk]) -> tuple[SampledToken | None, ...]:
        wanting = [chunk for chunk in chunks if chunk.sampling is not None]
        token_ids = iter(self._next_tokens(wanting) if wanting else ())
        return tuple(None if chunk.sampling is None else _certain(next(token_ids), chunk) for chunk in chunks)

    def _next_tokens(self, chunks: Sequence[Chunk]) -> list[int]:
        """Reads one word of each layer of each block. Which one moves on with the length, first over the lanes (head
        and part), then over the slots, so that each word has its turn within 2 * H * B steps. Nothing is remembered
        from step to step: it would hide what happens to the cache."""
        block_size, num_lanes = self._layout.block_size, self._layout.num_kv_heads * 2
        lengths = np.array([len(chunk.history) for chunk in chunks])
        num_blocks = -(-lengths // block_size)
        starts = np.cumsum(num_blocks) - num_blocks
        length = np.repeat(lengths, num_blocks)[:, None]  # of all sequences' blocks in one list, [*, 1]
        index = np.arange(num_blocks.sum())[:, None] - np.repeat(starts, num_blocks)[:, None]
        blocks = np.concatenate([chunk.block_ids[:n] for chunk, n in zip(chunks, num_blocks.tolist(), strict=True)])
        turn = length + index + self._layers  # [*, L]
        slots = turn // num_lanes % np.minimum(block_size, length - index * block_size)
        blocks = self._layers * self.num_blocks + blocks[:, None]
        rows = (blocks * num_lanes + turn % num_lanes) * block_size + slots
        words = self._cache.reshape(-1).take(rows * self._cache.shape[-1])  # much cheaper than an index per dimension
        keyed = words + (index * len(self._layers) + self._layers).astype(np.uint64) * np.uint64(_GOLDEN)
        sums = np.add.reduceat(_mix(keyed).sum(axis=1, dtype=np.uint64), starts)
        salts = np.array([_salt(chunk) for chunk in chunks], dtype=np.uint64)
        choices = _mix(sums + salts) % np.uint64(len(self._token_ids))
        return [int(self._token_ids[choice]) for choice in choices.tolist()]


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    layout: KVLayout,
    *,
    vocab_size: int,
    never_sampled: Collection[int] = (),
    seed: int = 0,
) -> list[int]:
    """What a TimedRunner must say after `prompt` if nobody touched its cache, worked out without any cache.

    `seed` is the sampling seed, or 0 for greedy."""
    num_layers, num_lanes, block_size = layout.num_layers, layout.num_kv_heads * 2, layout.block_size
    ids = _sampled_ids(vocab_size, never_sampled).tolist()
    tokens: list[int] = []
    chains = [[0] for _ in range(num_layers)]
    for token in prompt:
        _extend(chains, token)
    while True:
        length = len(chains[0]) - 1
        total = 0
        for index in range(-(-length // block_size)):
            for layer, chain in enumerate(chains):
                turn = length + index + layer
                position = index * block_size + turn // num_lanes % min(block_size, length - index * block_size)
                key = _mix_int(layer * num_lanes + turn % num_lanes + 1)
                total += _mix_int((chain[position + 1] ^ key) + (index * num_layers + layer) * _GOLDEN)
        tokens.append(ids[_mix_int(total + _mix_int(seed) + length) % len(ids)])
        if len(tokens) == num_tokens:
            return tokens
        _extend(chains, tokens[-1])


def _extend(chains: list[list[int]], token: int) -> None:
    link = _mix_int(token * _FACTORS[0] + (len(chains[0]) - 1) * _GOLDEN)
    for layer, chain in enumerate(chains):
        chain.append((chain[-1] + _mix_int(link + layer)) & _MASK)


def _sampled_ids(vocab_size: int, never_sampled: Collection[int]) -> Ints:
    return np.setdiff1d(np.arange(vocab_size), np.fromiter(never_sampled, dtype=np.int64))


def _salt(chunk: Chunk) -> int:
    """Two seeds give two answers, as sampling would."""
    assert chunk.sampling is not None
    seed = 0 if chunk.sampling.is_greedy else chunk.sampling.seed
    return (_mix_int(seed) + len(chunk.history)) & _MASK


def _certain(token_id: int, chunk: Chunk) -> SampledToken:
    """The runner's distribution has all its mass on one token."""
    assert chunk.sampling is not None
    if chunk.sampling.num_logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, Logprobs(0.0, ((token_id, 0.0),) if chunk.sampling.num_logprobs else ()))


def _score_prompt(chunk: Chunk) -> None:
    """By the same distribution: each token was certain."""
    if chunk.scores is None:
        return
    positions = chunk.scores.wanted(chunk.start + len(chunk.token_ids))
    if not positions:
        return
    ids = np.array(chunk.history[positions.start + 1 : positions.stop + 1], np.int32).reshape(-1, 1)
    ids = ids[:, : chunk.scores.num_alternatives]
    zeros = np.zeros(len(positions), np.float32)
    chunk.scores.add(ScoredTokens(zeros, ids, np.zeros(ids.shape, np.float32)))


def _mix(values: Words) -> Words:
    """SplitMix64's output function; arrays of numpy wrap silently."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FACTORS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * _FACTORS[0] & _MASK
    value = (value ^ (value >> 27)) * _FACTORS[1] & _MASK
    return value ^ (value >> 31)


def _sleep_until(moment_s: float) -> None:
    remaining_s = moment_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
