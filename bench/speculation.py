"""How much faster drafting makes decoding, and how well the worker chooses how much to draft and foresees the gain.

`python -m bench.speculation [--quick] [--prompts DIR] [--models dense,moe] ...`. Greedy, on runner and scheduler, with
no network. Prints tables for people, and one line of JSON last; Ctrl-C ends it with what has been measured.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.decode_run import SaidOutlooks
from bench.drafters import DRAFTERS, plan_drafter
from bench.prompt_sets import OWN, SETS, PromptsUnusable, conversations, read_sets
from bench.roofline import WeightBytes, memory_bandwidth
from bench.speculation_cell import LONGEST_DRAFT, Contest, Effort
from bench.speculation_report import (
    Cell,
    acceptance_table,
    expert_table,
    roofline_line,
    speed_table,
    summary,
    target_table,
)
from decode.coverage import ExpertCoverage, Routing
from decode.draft import DraftShape
from decode.draft_head import HeadCard
from decode.draft_planner import AdaptiveDrafts
from decode.draft_policy import DraftPolicy
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from deploy.drafting import DrafterPlan
from model.cache_folder import default_cache
from model.config import ModelConfig
from model.demo_models import DENSE, MOE, build
from model.kv_cache import CacheDoesNotFit
from model.sampling_params import SamplingParams
from model.tokenizer import Tokenizer
from model.torch_runner import TorchRunner

MODELS = {"dense": DENSE, "moe": MOE}
BLOCK_SIZE = 16
MAX_PROMPT_TOKENS = 512
QUICK_SECONDS = 50.0
LEAVING_SECONDS = 11.0  # of those, to start Python and to print
FULL_CELL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    batches: Sequence[int]
    sets: Mapping[str, list[str]]  # prompts
    drafters: Sequence[str]
    lengths: Sequence[int]
    max_tokens: int
    effort: Effort
    heads: Mapping[str, Path]
    shape: DraftShape


class Bench:
    """Cells of one model after another. `ends_at`: seconds are shared out among the cells that are left."""

    def __init__(self, grid: Grid, console: Console, ends_at: float | None) -> None:
        self._grid = grid
        self._console = console
        self._ends_at = ends_at
        self.max_context = MAX_PROMPT_TOKENS + grid.max_tokens

    def cells(self, model: str, folder: Path, num_models_left: int) -> Iterator[Cell]:
        plans = self._plans(model, folder)
        if not plans:
            return
        tokenizer = Tokenizer.load(folder)
        prompts = self._conversations(tokenizer)
        target = self._load(folder, plans, prompts)
        sampling = SamplingParams(self._grid.max_tokens, temperature=0.0, stop_token_ids=tokenizer.eos_token_ids)
        num_left = len(plans) * len(self._grid.batches) * len(prompts) * num_models_left
        how_long = f"{num_left // num_models_left} cells of about {self._effort(num_left).seconds:.0f} s"
        self._say(f"{model}: {how_long}, {target.kernels} kernels")
        for plan in plans:
            contest = self._contest(plan, target, sampling)
            for batch in self._grid.batches:
                for name, texts in prompts.items():
                    begin = time.perf_counter()
                    effort = self._effort(num_left)
                    figures = contest.measure(texts, batch, effort, warm_up=name == next(iter(prompts)))
                    cell = Cell(model, batch, name, plan.kind, figures)
                    self._tell(cell, time.perf_counter() - begin)
                    num_left -= 1
                    yield cell

    def _plans(self, model: str, folder: Path) -> list[DrafterPlan]:
        plans = []
        for kind in self._grid.drafters:
            try:
                plans.append(self._plan(kind, MODELS.get(model, ""), folder))
            except ValueError as error:
                self._console.print(f"{model}, {kind}: left out, {error}", highlight=False)
        return plans

    def _plan(self, kind: str, model: str, folder: Path) -> DrafterPlan:
        grid = self._grid
        return plan_drafter(
            kind, model, folder, heads=grid.heads, max_context_tokens=self.max_context, shape=grid.shape
        )

    def _conversations(self, tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
        return {name: conversations(texts, tokenizer, MAX_PROMPT_TOKENS) for name, texts in self._grid.sets.items()}

    def _load(self, folder: Path, plans: Sequence[DrafterPlan], prompts: Mapping[str, list[list[int]]]) -> TorchRunner:
        """One target for all drafters, which take turns in its cache."""
        longest = max(len(prompt) for texts in prompts.values() for prompt in texts)
        of_prompts = max(sum(1 + len(prompt) // BLOCK_SIZE for prompt in texts) for texts in prompts.values())
        of_answers = 2 + math.ceil((self._grid.max_tokens + LONGEST_DRAFT) / BLOCK_SIZE)
        num_ways = 2 + len(self._grid.lengths)
        num_blocks = of_prompts + num_ways * max(self._grid.batches) * of_answers
        return TorchRunner.load(
            folder,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_context_tokens=longest + self._grid.max_tokens,
            num_draft_layers=max((plan.num_layers for plan in plans), default=0),
        )

    def _contest(self, plan: DrafterPlan, target: TorchRunner, sampling: SamplingParams) -> Contest:
        config = target.config
        routing = Routing.of(config)
        policy = DraftPolicy(LONGEST_DRAFT, None if routing is None else ExpertCoverage(routing))
        runner = SpeculativeRunner(target, plan.make(target, Method.BLOCK), Method.BLOCK)
        outlooks = SaidOutlooks(runner.outlook)
        adaptive = AdaptiveDrafts(policy, LONGEST_DRAFT, self.max_context, outlooks)
        return Contest(target, runner, adaptive, outlooks, self._grid.lengths, self.max_context, sampling)

    def _effort(self, num_cells_left: int) -> Effort:
        if self._ends_at is None:
            return self._grid.effort
        seconds = max(0.0, self._ends_at - time.perf_counter()) / num_cells_left
        return replace(self._grid.effort, seconds=seconds)

    def _tell(self, cell: Cell, seconds: float) -> None:
        figures = cell.figures
        best = max(figures.fixed, key=lambda count: figures.fixed[count])
        text = f"best K={best} {figures.fixed[best]:.2f}x, adaptive {figures.adaptive:.2f}x ({seconds:.0f} s)"
        self._say(f"  {cell.name}: {text}")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False)


def report(cells: Sequence[Cell], folders: Mapping[str, Path], lengths: Sequence[int], console: Console) -> None:
    bandwidth = memory_bandwidth()
    for model in dict.fromkeys(cell.model for cell in cells):
        of_model = [cell for cell in cells if cell.model == model]
        config = ModelConfig.from_folder(folders[model])
        console.print(f"\n{model}", style="bold")
        console.print(speed_table(of_model, lengths))
        console.print(acceptance_table(of_model, lengths))
        routing = Routing.of(config)
        if routing is not None:
            console.print(expert_table(of_model, lengths, routing))
        weights = WeightBytes.of(folders[model])
        console.print(roofline_line(weights, bandwidth, of_model), highlight=False)
    console.print(target_table(cells))


def main() -> None:
    started = time.perf_counter()
    arguments = _arguments()
    console, progress = Console(width=140), Console(stderr=True)
    quick: bool = arguments.quick
    try:
        sets = read_sets(arguments.prompts, arguments.sets)
        heads = {HeadCard.read(folder).kind: folder for folder in arguments.head}
    except ValueError as error:
        raise SystemExit(f"bench.speculation: {error}") from None
    effort = Effort(arguments.seconds)
    if quick:
        effort = Effort(0.0, least_rounds=2, warm_up_tokens=64)
    grid = Grid(
        batches=arguments.batches,
        sets=sets,
        drafters=arguments.drafters,
        lengths=arguments.lengths,
        max_tokens=arguments.max_tokens,
        effort=effort,
        heads=heads,
        shape=DraftShape(arguments.draft_shape),
    )
    ends_at = started + QUICK_SECONDS - LEAVING_SECONDS if quick else None
    bench = Bench(grid, progress, ends_at)
    folders = {Path(name).name: _folder(name) for name in arguments.models}
    cells: list[Cell] = []
    try:
        for index, (model, folder) in enumerate(folders.items()):
            for cell in bench.cells(model, folder, len(folders) - index):
                cells.append(cell)
    except KeyboardInterrupt:
        progress.print("interrupted: what follows is what was measured until now")
    except (PromptsUnusable, CacheDoesNotFit) as error:
        raise SystemExit(f"bench.speculation: {error}") from None
    report(cells, folders, arguments.lengths, console)
    if quick:
        console.print("So few steps are measured with --quick that figures vary by a tenth or more from run to run.")
    print(json.dumps(summary(cells)))


def _folder(model: str) -> Path:
    return build(MODELS[model], default_cache()) if model in MODELS else Path(model)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"a few cells of the dense model, in {QUICK_SECONDS:.0f} s")
    add("--prompts", type=Path, default=OWN, metavar="DIR", help="a folder of sets, NAME.jsonl (default: our own)")
    add("--sets", type=_names, help=f"default: {','.join(SETS)}")
    add("--models", type=_names, help="of dense and moe, or folders (default: both)")
    add("--batches", type=_numbers, help="default: 1,4,16,32")
    add("--drafters", type=_names, help=f"of none (always measured), {', '.join(DRAFTERS)} (default: all there are)")
    add("--lengths", type=_numbers, help=f"K, 1 to {LONGEST_DRAFT} (default: all of them); adaptive comes with them")
    add("--head", type=Path, action="append", default=[], metavar="DIR", help="a draft head instead of the shipped one")
    add("--draft-shape", choices=[*map(str, DraftShape)], default="tree", help="of an EAGLE head")
    add("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    add("--seconds", type=float, default=FULL_CELL_SECONDS, help="of a cell, about (default: %(default)s)")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.sets = arguments.sets or (("mt_bench", "humaneval") if quick else SETS)
    arguments.models = arguments.models or (("dense",) if quick else tuple(MODELS))
    arguments.batches = arguments.batches or ((1,) if quick else (1, 4, 16, 32))
    arguments.lengths = arguments.lengths or ((1, 3, 5) if quick else tuple(range(1, LONGEST_DRAFT + 1)))
    chosen = arguments.drafters or (("eagle+ngram",) if quick else DRAFTERS)
    arguments.drafters = [kind for kind in chosen if kind != "none"]
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    unknown = set(arguments.drafters) - set(DRAFTERS)
    if unknown or not arguments.drafters:
        parser.error(f"--drafters must name some of {', '.join(DRAFTERS)} beside none")
    if not all(1 <= count <= LONGEST_DRAFT for count in arguments.lengths):
        parser.error(f"--lengths must be 1 to {LONGEST_DRAFT}")
    if not all(1 <= batch <= 64 for batch in arguments.batches):
        parser.error("--batches must be 1 to 64")
    if arguments.max_tokens < 2 or arguments.seconds < 0:
        parser.error("--max-tokens must be at least 2, --seconds at least 0")
    missing = [name for name in arguments.models if name not in MODELS and not Path(name).is_dir()]
    if missing:
        parser.error(f"--models: {missing[0]} is neither dense nor moe nor a folder")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in _names(text)}))


if __name__ == "__main__":
    main()
