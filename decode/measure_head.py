"""Measures a trained head on prompts it never saw, and writes what it found into the head's card.

`python -m decode.measure_head --head DIR --prompts DIR`: how often the first, second, ... drafted token stands, by
prompt set and target, greedy. A model beside the one it was trained for may be named, too: the card then lists it as
a target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from decode.decoding import DecodeSequence
from decode.draft import DraftShape
from decode.draft_head import CARD, DraftHead, HeadCard, HeadUnusable
from decode.draft_planner import FixedDrafts
from decode.eagle import EagleDrafter
from decode.generations import NoPrompts, answer, read_prompts, tokens_of
from decode.medusa import MedusaDrafter
from decode.outlook import OutlookOf
from decode.speculative_runner import SpeculativeRunner
from decode.training_progress import HelpWithDefaults
from decode.verification import Method
from model.cache_folder import default_cache
from model.checkpoint import model_digest
from model.config import ModelConfig
from model.model_source import ModelUnavailable, resolve_model
from model.runner import Outcome, StepOutput, VerifiedDraft
from model.sampling_params import SamplingParams
from model.tokenizer import Tokenizer
from model.torch_runner import TorchRunner

NUM_BLOCKS = 2048


class Counting(FixedDrafts):
    """`num_tried[i]`: drafts with a token at position i whose tokens before it stood; `num_stood[i]` of them stood."""

    def __init__(self, num_drafts: int, max_context_tokens: int, outlook: OutlookOf) -> None:
        super().__init__(num_drafts, max_context_tokens, outlook)
        self.num_tried, self.num_stood = [0] * num_drafts, [0] * num_drafts

    def learn(self, results: Sequence[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool) -> None:
        for _, outcome in results:
            if isinstance(outcome, VerifiedDraft):
                num_accepted = len(outcome.tokens) - 1
                for position in range(min(num_accepted + 1, outcome.num_drafted)):
                    self.num_tried[position] += 1
                    self.num_stood[position] += position < num_accepted

    @property
    def acceptance(self) -> list[float]:
        """Of each position, given that all before it stand."""
        return [round(stood / max(1, tried), 4) for stood, tried in zip(self.num_stood, self.num_tried, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m decode.measure_head", description=__doc__, formatter_class=HelpWithDefaults
    )
    parser.add_argument("--head", type=Path, required=True, help="folder of the head")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of *.jsonl, a set each")
    parser.add_argument("--model", default="demo-dense", help="the target")
    parser.add_argument("--drafts", type=int, default=4, help="tokens drafted in each step")
    parser.add_argument("--max-prompts", type=int, default=80, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's own choice")
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    for name in ("drafts", "max_prompts", "max_tokens"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    try:
        _measure(given, Console(stderr=True, highlight=False))
    except (ModelUnavailable, NoPrompts, HeadUnusable) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted: the card does not have these figures.")


def _measure(given: argparse.Namespace, console: Console) -> None:
    files = sorted(given.prompts.glob("*.jsonl"))
    if not files:
        raise NoPrompts(f"{given.prompts} holds no *.jsonl")
    folder = resolve_model(given.model, default_cache())
    config = ModelConfig.from_folder(folder)
    head = DraftHead.load(given.head, HeadCard.read(given.head).kind, config, model_digest=None)
    _add_target(given.head, given.model, model_digest(folder))  # not before it is known to fit
    runner, num_drafts = _drafting(head, folder, given.drafts)
    tokenizer = Tokenizer.load(folder)
    sampling = SamplingParams(max_tokens=given.max_tokens, temperature=0.0, stop_token_ids=tokenizer.eos_token_ids)
    found = {}
    for file in files:
        planner = Counting(num_drafts, config.max_position_embeddings, runner.outlook)
        asked = [(tokens_of(prompt, tokenizer), sampling) for prompt in read_prompts(file)[: given.max_prompts]]
        asyncio.run(answer(runner, asked, lambda index, decoding: None, planner=planner))
        found[file.stem] = planner.acceptance
        shares = " ".join(f"{share:.0%}" for share in planner.acceptance)
        console.print(f"{given.model:12} {file.stem:12} {len(asked):3} prompts  accepted after those before: {shares}")
    _update(given.head, lambda raw: _about(raw).setdefault("acceptance", {}).__setitem__(given.model, found))


def _about(card: dict[str, Any]) -> dict[str, Any]:
    """Made where the card says nothing."""
    card["about"] = card.get("about") or {}
    about: dict[str, Any] = card["about"]
    return about


def _drafting(head: DraftHead, folder: Path, num_drafts: int) -> tuple[SpeculativeRunner, int]:
    """The target with this head, and how many tokens are drafted: Medusa has a head for each."""
    is_eagle = head.card.kind == "eagle"
    num_layers = EagleDrafter.num_layers if is_eagle else MedusaDrafter.num_layers
    target = TorchRunner.load(folder, num_blocks=NUM_BLOCKS, num_draft_layers=num_layers, drafter=head.name)
    if is_eagle:  # chains are what positions are counted of
        eagle = EagleDrafter(target, head, Method.BLOCK, DraftShape.CHAIN)
        return SpeculativeRunner(target, eagle, Method.BLOCK), num_drafts
    medusa = MedusaDrafter(target, head, Method.BLOCK)
    return SpeculativeRunner(target, medusa, Method.BLOCK), min(num_drafts, medusa.num_heads)


def _add_target(folder: Path, name: str, digest: str) -> None:
    _update(folder, lambda raw: raw["targets"].__setitem__(name, digest))


def _update(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / CARD
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
