"""Sets of prompts to measure with: one JSONL file each, a prompt a row, its text the first of the row's `turns`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from model.chat_template import ChatMessage
from model.tokenizer import Tokenizer

OWN = Path(__file__).with_name("prompts")
SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "qa")
# A large batch has more sequences than a small set has prompts: the same prompt with another ending is another text.
ENDINGS = ("", "Explain every step.", "Be brief.", "Write for a beginner.")


class PromptsUnusable(ValueError):
    """A set of prompts is not there or cannot be read: names the file, and the line if it is one."""


def read_sets(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The prompts of these sets, in an order that is always the same but not the file's, where like stands by like."""
    sets = {}
    for name in names:
        sets[name] = _read(folder / f"{name}.jsonl")
        random.Random(0).shuffle(sets[name])
    return sets


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        there = ", ".join(sorted(each.stem for each in path.parent.glob("*.jsonl"))) or "none"
        raise PromptsUnusable(f"there is no set {path.stem} in {path.parent}; sets there are: {there}") from None
    except (OSError, ValueError) as error:
        raise PromptsUnusable(f"{path} cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            text = json.loads(line)["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise PromptsUnusable(f'{path}:{number} is not an object with "turns", a list of texts')
        prompts.append(text)
    if not prompts:
        raise PromptsUnusable(f"{path} holds no prompts")
    return prompts


def conversations(prompts: Sequence[str], tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Every prompt as a chat, then every prompt with the next ending, and so on; without those that are too long.

    Raises:
        PromptsUnusable: all of them are.
    """
    texts = [f"{prompt}\n\n{ending}" if ending else prompt for ending in ENDINGS for prompt in prompts]
    encoded = [tokenizer.encode_chat([ChatMessage("user", text)]) for text in texts]
    short = [token_ids for token_ids in encoded if len(token_ids) <= max_tokens]
    if not short:
        raise PromptsUnusable(f"all {len(prompts)} prompts of a set have more than {max_tokens} tokens")
    return short
