"""The requests of bench.goodput: real texts joined to prompts of several lengths, the same for every side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.prompt_sets import SETS, PromptsUnusable, read_sets

LENGTHS, QUICK_LENGTHS = (300, 600, 1000, 1500), (150, 300, 450, 600)  # tokens of prompts, of each as many
SHORTEST_OUTPUT, LONGEST_OUTPUT = 32, 128
MEAN_OUTPUT = (SHORTEST_OUTPUT + LONGEST_OUTPUT) / 2


class Encoder(Protocol):
    """Of a `Tokenizer`, what is needed here."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Sequence[int]
    num_output_tokens: int


class Requests:
    """Request n of a seed always joins the same texts. A run's number comes before them, so that no prefix cache has
    what another run asked."""

    def __init__(
        self, texts: Sequence[Sequence[int]], tokenizer: Encoder, seed: int, lengths: Sequence[int] = LENGTHS
    ) -> None:
        self._texts = texts
        self.lengths = lengths
        self._tokenizer = tokenizer
        self._seed = seed

    @classmethod
    def read(cls, folder: Path, tokenizer: Encoder, seed: int, lengths: Sequence[int] = LENGTHS) -> Requests:
        """Raises PromptsUnusable: a set is missing, cannot be read, or there is no text in any."""
        texts = [tokenizer.encode(f"{text}\n\n") for of_set in read_sets(folder, SETS).values() for text in of_set]
        if not any(texts):
            raise PromptsUnusable(f"the texts in {folder} are all empty")
        return cls(texts, tokenizer, seed, lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def make(self, run: int, number: int, length: int | None = None) -> Request:
        """`length` in tokens instead of a random one; `run` and `number` below 10,000 have heads of one length."""
        rng = random.Random(f"{self._seed} {number}")
        drawn, num_output_tokens = rng.choice(self.lengths), rng.randint(SHORTEST_OUTPUT, LONGEST_OUTPUT)
        length = length or drawn
        prompt = self._tokenizer.encode(f"Conversation {run:04} {number:04}.\n\n")
        while len(prompt) < length:
            prompt += rng.choice(self._texts)
        return Request(prompt[:length], num_output_tokens)

    def of_run(self, run: int, count: int) -> list[Request]:
        return [self.make(run, number) for number in range(count)]
