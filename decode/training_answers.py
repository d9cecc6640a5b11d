"""Collects what a draft head learns from: the target's answers to a folder of prompts, and to prompts of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from decode.generations import Generation, NoPrompts, generate, read_generations, read_prompts
from decode.own_prompts import ANY_BEGINNING, CODE_BEGINNINGS, write_prompts
from model.runner import ModelRunner
from model.tokenizer import Tokenizer

SHORTEST_ANSWER = 8  # tokens; less teaches nothing

Tell = Callable[[int, int], None]
"""So many are done, of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Every file of `prompts` gets the same number of answers, however few its prompts are: the first ones greedy, then
    sampled. Each of the model's own prompts, kept in `work` like the answers, gets one."""

    prompts: Path
    work: Path
    answers_per_file: int
    num_own_prompts: int  # about anything
    num_code_prompts: int  # its own, too
    max_tokens: int  # of an answer

    @property
    def files(self) -> list[Path]:
        """Raises NoPrompts."""
        files = sorted(self.prompts.glob("*.jsonl"))
        if not files:
            raise NoPrompts(f"{self.prompts} holds no *.jsonl")
        return files


def collect_answers(
    options: AnswerOptions, runner: ModelRunner, tokenizer: Tokenizer, stage: Callable[[str], Tell]
) -> list[Generation]:
    """Each once, in the same order in every run. `stage` is told what begins, and gives whom to tell how far it is.

    Raises:
        NoPrompts
    """
    asked = []
    for file in options.files:
        prompts = read_prompts(file)[: options.answers_per_file]
        asked.append((f"answers-{file.name}", prompts, -(-options.answers_per_file // len(prompts))))
    for file, prompts in _own_prompts(options, runner, tokenizer, stage):
        asked.append((f"{file.stem}-answers.jsonl", prompts, 1))  # a file of the user's may have the same name
    unique: dict[tuple[int, ...], Generation] = {}
    for name, prompts, num_rounds in asked:
        path = options.work / name
        tell = partial(_of, stage(name), len(prompts) * num_rounds)
        generate(runner, tokenizer, prompts, path, num_rounds=num_rounds, max_tokens=options.max_tokens, progress=tell)
        unique |= {generation.token_ids: generation for generation in read_generations(path)}
    return [each for each in unique.values() if len(each.token_ids) - each.num_prompt_tokens >= SHORTEST_ANSWER]


def _own_prompts(
    options: AnswerOptions, runner: ModelRunner, tokenizer: Tokenizer, stage: Callable[[str], Tell]
) -> list[tuple[Path, list[str]]]:
    found = []
    for name, beginnings, count in (
        ("own.jsonl", ANY_BEGINNING, options.num_own_prompts),
        ("own-code.jsonl", CODE_BEGINNINGS, options.num_code_prompts),
    ):
        if count:
            path = options.work / name
            tell = partial(_of, stage(f"prompts of its own: {name}"), count)
            write_prompts(runner, tokenizer, path, count=count, beginnings=beginnings, progress=tell)
            found.append((path, read_prompts(path)))
    return found


def _of(tell: Tell, total: int, done: int) -> None:
    tell(done, total)
