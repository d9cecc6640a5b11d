"""Sets of prompts are read whole, in an order of their own, or refused with the place that is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from bench.prompt_sets import ENDINGS, OWN, SETS, PromptsUnusable, conversations, read_sets
from model.chat_template import ChatMessage
from model.tokenizer import Tokenizer


class WordTokenizer:
    """A token a word, and one before all."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        (message,) = messages
        assert message.role == "user"
        return [1, *(hash(word) % 1000 for word in message.content.split())]


WORDS = cast(Tokenizer, WordTokenizer())


def write(path: Path, prompts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"turns": [prompt, "And then?"]}) + "\n" for prompt in prompts))


def test_own_sets_are_complete() -> None:
    sets = read_sets(OWN, SETS)
    assert list(sets) == list(SETS)
    prompts = [prompt for texts in sets.values() for prompt in texts]
    assert all(8 <= len(texts) <= 12 for texts in sets.values())
    assert len(set(prompts)) == len(prompts)
    assert all("def " in prompt for prompt in sets["humaneval"])


def test_first_turns_in_an_order_that_stays(tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    write(tmp_path / "mine.jsonl", prompts)
    write(tmp_path / "other.jsonl", ["not asked for"])
    first, second = read_sets(tmp_path, ["mine"]), read_sets(tmp_path, ["mine"])
    assert first == second
    assert Counter(first["mine"]) == Counter(prompts)
    assert first["mine"] != prompts


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "there is no set mine in .*; sets there are: none"),
        ("", "mine.jsonl holds no prompts"),
        ('{"turns": ["a"]}\n{"turns": []}\n', "mine.jsonl:2"),
        ('{"turns": ["a"]}\n{"prompt": "b"}\n', "mine.jsonl:2"),
        ('{"turns": [7]}\n', "mine.jsonl:1"),
        ("[]\n", "mine.jsonl:1"),
        ("not JSON\n", "mine.jsonl:1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "mine.jsonl").write_text(content)
    with pytest.raises(PromptsUnusable, match=problem):
        read_sets(tmp_path, ["mine"])


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    chats = conversations(["one two", "three"], WORDS, max_tokens=100)
    assert len(chats) == 2 * len(ENDINGS)
    assert [len(chat) for chat in chats[:2]] == [3, 2]
    assert len({tuple(chat) for chat in chats}) == len(chats)


def test_long_prompts_are_left_out() -> None:
    prompts = ["word " * 20, "short"]
    chats = conversations(prompts, WORDS, max_tokens=10)
    assert len(chats) == len(ENDINGS)
    assert max(map(len, chats)) <= 10
    with pytest.raises(PromptsUnusable, match="more than 1 tokens"):
        conversations(prompts, WORDS, max_tokens=1)
