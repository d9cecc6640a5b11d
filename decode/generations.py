"""The text a draft head learns from: what its own target answers to prompts.

A head has to guess what this model will say, so other people's answers would teach it the wrong thing. Answers are
appended to a JSONL file as they end, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from decode.decoding import DecodeSequence
from decode.draft_planner import DraftPlanner
from decode.outbox import Outbox
from decode.scheduler import DecodeScheduler
from model.block_pool import BlockPool
from model.chat_template import ChatMessage
from model.engine import Engine
from model.runner import ModelRunner
from model.sampling_params import SamplingParams
from model.sequence import Sequence as TokenSequence
from model.tokenizer import Tokenizer

MAX_RUNNING = 256  # sequences: the products of wide batches cost least per token
MAX_STEP_TOKENS = 1024
TEMPERATURES = (0.7, 1.0)  # of the rounds after the first, which is greedy, in turn


class NoPrompts(ValueError):
    """There is nothing to answer: the message says why."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens of a conversation; those from `num_prompt_tokens` on are the target's own."""

    prompt_index: int
    round_index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int


def read_prompts(path: Path) -> list[str]:
    """The first user turn of every row of a JSONL file, each once, in a fixed shuffled order.

    A row has `turns` (a list), `prompt`, `question`, or `instruction` with the inputs of its `instances`.

    Raises:
        NoPrompts
    """
    prompts = list(dict.fromkeys(_prompts_of(path)))
    if not prompts:
        raise NoPrompts(f"{path} has no rows with turns, prompt, question or instruction")
    random.Random(0).shuffle(prompts)
    return prompts


def _prompts_of(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").split("\n"):  # strings in it may hold other separators of lines
        if not line.strip():
            continue
        row = json.loads(line)
        if "turns" in row:
            yield row["turns"][0]
        elif "instruction" in row:
            for instance in row.get("instances") or [{"input": ""}]:
                yield "\n\n".join(filter(None, (row["instruction"], instance["input"])))
        else:
            yield from (row[field] for field in ("prompt", "question") if field in row)


def read_generations(path: Path) -> list[Generation]:
    """A last line that was cut off by an interruption is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [Generation(**{**row, "token_ids": tuple(row["token_ids"])}) for row in map(json.loads, lines)]


def generate(
    runner: ModelRunner,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    path: Path,
    *,
    num_rounds: int,
    max_tokens: int,
    progress: Callable[[int], None],
) -> None:
    """Answers every prompt once a round, each round at a temperature of its own, and appends the answers to `path`."""
    _cut_unfinished_line(path)
    done = {(generation.prompt_index, generation.round_index) for generation in read_generations(path)}
    every = [(prompt_index, round_index) for round_index in range(num_rounds) for prompt_index in range(len(prompts))]
    wanted = [place for place in every if place not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:

        def ended(index: int, decoding: DecodeSequence) -> None:
            sequence = decoding.sequence
            row = (*wanted[index], tuple(sequence.token_ids), sequence.num_prompt_tokens)
            file.write(json.dumps(dict(zip(Generation.__slots__, row, strict=True))) + "\n")
            file.flush()
            done.add(wanted[index])
            progress(len(done))

        asked = [
            (tokens_of(prompts[prompt], tokenizer), _sampling(prompt, turn, tokenizer, max_tokens))
            for prompt, turn in wanted
        ]
        asyncio.run(answer(runner, asked, ended))


def _sampling(prompt_index: int, round_index: int, tokenizer: Tokenizer, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=TEMPERATURES[round_index % len(TEMPERATURES)] if round_index else 0.0,
        seed=prompt_index * 1009 + round_index,
        stop_token_ids=tokenizer.eos_token_ids,
    )


def _cut_unfinished_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def tokens_of(prompt: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_chat([ChatMessage("user", prompt)])


async def answer(
    runner: ModelRunner,
    asked: Sequence[tuple[list[int], SamplingParams]],
    ended: Callable[[int, DecodeSequence], None],
    *,
    planner: DraftPlanner | None = None,
) -> None:
    """Goes on from all these tokens, as many at once as run well; `ended` is given the index of each as it is done.

    Raises RuntimeError if one could not be answered: the log says why.
    """
    scheduler = DecodeScheduler(BlockPool(runner.num_blocks), max_running=MAX_RUNNING, planner=planner)
    engine = Engine(runner, [scheduler], max_step_tokens=MAX_STEP_TOKENS)
    running: dict[DecodeSequence, int] = {}
    waiting = list(range(len(asked)))[::-1]
    while running or waiting:
        while waiting and len(running) < MAX_RUNNING:
            index = waiting.pop()
            token_ids, sampling = asked[index]
            sequence = TokenSequence(str(index), list(token_ids), len(token_ids), sampling, runner.layout.block_size)
            decoding = DecodeSequence(sequence, Outbox())
            running[decoding] = index
            scheduler.add(decoding)
        await engine.step()
        for decoding in [decoding for decoding in running if decoding.ended_at is not None]:
            if decoding.sequence.finish_reason is None:
                raise RuntimeError(f"prompt {running[decoding]} could not be answered")
            ended(running.pop(decoding), decoding)
