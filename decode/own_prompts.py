"""Prompts that the target writes itself, for a draft head to learn from the answers.

A chat model that is given only the beginning of a user's turn writes such a turn, much like those that it was tuned on
("Magpie", Xu et al., arXiv 2406.08464): prompts on everything it knows, where a folder of prompts covers few subjects.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from decode.decoding import DecodeSequence
from decode.generations import NoPrompts, answer
from model.chat_template import ChatMessage
from model.runner import ModelRunner
from model.sampling_params import SamplingParams
from model.sequence import FinishReason
from model.tokenizer import Tokenizer

PROMPT_TOKENS = range(4, 192)  # a user's turn of another length is no prompt
TOP_P = 0.9
ANY_BEGINNING = ("",)
CODE_BEGINNINGS = (  # of prompts about code, which a small model writes few of by itself
    "Write a Python function",
    "Write a Python function that takes a list",
    "Finish this Python function:\n\ndef",
    "Implement the following function in Python.\n\ndef",
    "What does this code do?\n\ndef",
    "Write a program",
)


def write_prompts(
    runner: ModelRunner,
    tokenizer: Tokenizer,
    path: Path,
    *,
    count: int,
    beginnings: Sequence[str] = ANY_BEGINNING,
    progress: Callable[[int], None],
) -> None:
    """Lets the model write about `count` prompts, each once, in the form that `read_prompts` reads.

    Each goes on from one of `beginnings`, in turn. Those that it does not end, or ends at once, are thrown away. If
    `path` is there already nothing is done.

    Raises:
        NoPrompts: none is left, or the chat template does not render messages as they are.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts: dict[str, None] = {}
    begun = [start_of_user_turn(tokenizer, beginning) for beginning in beginnings]
    asked = [(begun[index % len(beginnings)], _sampling(index, tokenizer)) for index in range(count)]
    num_done = 0

    def ended(index: int, decoding: DecodeSequence) -> None:
        nonlocal num_done
        num_done += 1
        progress(num_done)
        sequence = decoding.sequence
        start, beginning = begun[index % len(beginnings)], beginnings[index % len(beginnings)]
        written = [token for token in sequence.token_ids[len(start) :] if token not in tokenizer.eos_token_ids]
        if sequence.finish_reason is FinishReason.STOP and len(written) in PROMPT_TOKENS:
            text = tokenizer.decode([*start, *written])  # by themselves the first of them may lose a space
            prompts[beginning + text[len(tokenizer.decode(start)) :]] = None

    asyncio.run(answer(runner, asked, ended))
    if not prompts:
        raise NoPrompts(f"none of {count} beginnings of a user's turn became a prompt")
    partial = path.with_suffix(".part")
    partial.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    partial.replace(path)


def start_of_user_turn(tokenizer: Tokenizer, beginning: str = "") -> list[int]:
    """A conversation up to where the user's first message goes on. Raises NoPrompts, see `write_prompts`."""
    marker = "(the message)"
    rendered = tokenizer.render_chat([ChatMessage("user", marker)])
    if marker not in rendered:
        raise NoPrompts("the chat template does not render messages as they are, so the model cannot write prompts")
    return tokenizer.encode_rendered(rendered[: rendered.index(marker)] + beginning)


def _sampling(index: int, tokenizer: Tokenizer) -> SamplingParams:
    return SamplingParams(
        max_tokens=PROMPT_TOKENS.stop,
        temperature=1.0,
        top_p=TOP_P,
        seed=index,
        stop_token_ids=tokenizer.eos_token_ids,
    )
