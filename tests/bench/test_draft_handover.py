"""What is asked, and what becomes of the figures; the measurement itself is the bench."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.draft_handover import Run, chosen_prompts, report
from bench.prompt_sets import SETS, PromptsUnusable
from model.tokenizer import Tokenizer
from tests.cluster.tiny_model import build_tiny_moe


def told(handed_over: Run, colocated: Run) -> tuple[float, str]:
    page = io.StringIO()
    return report({"handed over": handed_over, "colocated": colocated}, Console(file=page, width=100)), page.getvalue()


def test_difference_is_relative() -> None:
    difference, page = told(Run(200, 38, 900, [(1,), (2,)]), Run(200, 40, 0, [(1,), (3,)]))
    assert difference == pytest.approx(0.05)
    assert "19.00%" in page and "20.00%" in page and "1 of 2 answers are the same" in page


def test_drafts_that_never_stand_prove_nothing() -> None:
    assert told(Run(200, 0, 900, [(1,)]), Run(200, 0, 0, [(1,)]))[0] == 1.0


@pytest.mark.parametrize(("received", "received_colocated"), [(0, 0), (900, 5)])
def test_runs_that_were_not_what_they_are_called_are_refused(received: int, received_colocated: int) -> None:
    with pytest.raises(RuntimeError, match="nothing was handed over in the first run"):
        told(Run(200, 38, received, [(1,)]), Run(200, 40, received_colocated, [(1,)]))


def test_prompts_are_taken_from_all_sets_in_turn(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(build_tiny_moe(tmp_path / "model"))
    for name in SETS:
        rows = [json.dumps({"turns": [f"{name} {number}"]}) + "\n" for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    prompts = [tokenizer.decode(prompt) for prompt in chosen_prompts(tmp_path, tokenizer, 12)]
    assert [next(name for name in SETS if name in prompt) for prompt in prompts[:10]] == [*SETS, *SETS]
    with pytest.raises(PromptsUnusable, match="has 60 prompts that are short enough; 61 were asked for"):
        chosen_prompts(tmp_path, tokenizer, 61)
