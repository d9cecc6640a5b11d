"""Warming up: a prompt and a decode step run before anybody asks, in the blocks that are there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from deploy import security_options
from deploy.cli import cli
from deploy.runners import load_runner, max_context_tokens, warm_up
from deploy.worker_config import WorkerConfig
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, StepOutput
from model.timed_runner import StepTiming, TimedRunner
from model.torch_runner import TorchRunner
from tests.cluster.tiny_model import MAX_CONTEXT


class Recorder(TimedRunner):
    def __init__(self, num_blocks: int) -> None:
        layout = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
        super().__init__(layout, num_blocks, StepTiming(scale=0.0), vocab_size=100)
        self.ran: list[tuple[int, int]] = []  # start and number of tokens of each chunk

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        self.ran += [(chunk.start, len(chunk.token_ids)) for chunk in chunks]
        return super().execute(chunks, layer_done)


@pytest.mark.parametrize(("num_blocks", "num_tokens", "num_decode_steps"), [(50, 32, 2), (3, 11, 1), (1, 3, 1)])
def test_a_prompt_and_a_decode_step_are_run(num_blocks: int, num_tokens: int, num_decode_steps: int) -> None:
    """And one that may draft, where there is room behind."""
    runner = Recorder(num_blocks)
    warm_up(runner, 32)
    assert runner.ran == [(0, num_tokens), *[(num_tokens, 1)] * num_decode_steps]


def config(folder: Path, **settings: Any) -> WorkerConfig:
    """What `pdserve worker` is given with these options."""
    command = cli.commands["worker"]
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    context = command.make_context("worker", ["--model", str(folder), *arguments])
    security = security_options.taken_from(context.params, is_worker=True)
    of_worker = {name: value for name, value in context.params.items() if not name.startswith("log_")}
    return WorkerConfig(**of_worker, security=security)


@pytest.mark.parametrize("runner", ["torch", "timed"])
def test_context_may_be_capped_but_not_raised(tiny_model: Path, runner: str) -> None:
    assert max_context_tokens(config(tiny_model), tiny_model) == MAX_CONTEXT
    assert max_context_tokens(config(tiny_model, max_context=MAX_CONTEXT), tiny_model) == MAX_CONTEXT
    assert max_context_tokens(config(tiny_model, max_context=2), tiny_model) == 2
    too_much = config(tiny_model, max_context=MAX_CONTEXT + 1, num_blocks=100, runner=runner)
    with pytest.raises(ValueError, match=r"--max-context is 1025; it must be at most 1024, the model's own context"):
        load_runner(too_much, tiny_model)


def test_cache_need_only_hold_the_capped_context(tiny_model: Path) -> None:
    capped = {"num_blocks": 8, "block_size": 16}  # 128 tokens
    with pytest.raises(ValueError, match=r"cannot hold one sequence of 1024 tokens.* cap sequences with --max-context"):
        load_runner(config(tiny_model, **capped), tiny_model)
    with pytest.raises(ValueError, match="cannot hold one sequence of 129 tokens"):
        load_runner(config(tiny_model, **capped, max_context=129), tiny_model)
    runner = load_runner(config(tiny_model, **capped, max_context=128), tiny_model)
    assert runner.num_blocks == 8
    warm_up(runner, 256)


@pytest.mark.parametrize(
    ("num_gpus", "device", "used"),
    [(0, "auto", "cpu"), (2, "auto", "cuda"), (2, "cpu", "cpu"), (1, "cuda", "cuda"), (2, "cuda:1", "cuda:1")],
)
def test_device_is_the_one_asked_for_and_its_memory_the_measure(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: str, used: str
) -> None:
    loaded: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(TorchRunner, "load", lambda folder, **settings: loaded.append(settings))
    load_runner(config(tiny_model, device=device), tiny_model)
    load_runner(config(tiny_model, device=device, num_blocks=7), tiny_model)
    load_runner(config(tiny_model, device=device, kv_cache_gb=2), tiny_model)
    assert {settings["device"] for settings in loaded} == {used}
    sizes = [
        {name: settings.get(name) for name in ("num_blocks", "kv_cache_bytes", "kv_cache_share")} for settings in loaded
    ]
    assert [{name for name, size in each.items() if size is not None} for each in sizes] == [
        {"kv_cache_bytes" if used == "cpu" else "kv_cache_share"},
        {"num_blocks"},
        {"kv_cache_bytes"},
    ]
    assert (sizes[1]["num_blocks"], sizes[2]["kv_cache_bytes"]) == (7, 2 << 30)


@pytest.mark.parametrize(
    ("num_gpus", "device", "seen"), [(0, "cuda", "no CUDA devices"), (1, "cuda:1", "1 CUDA device$")]
)
def test_device_that_is_not_there_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: str, seen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=f"--device is {device}, but torch sees {seen}"):
        load_runner(config(tiny_model, device=device), tiny_model)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "", "mps"])
def test_device_that_does_not_exist_is_wrong_usage(tiny_model: Path, device: str) -> None:
    with pytest.raises(click.BadParameter, match="is none of auto, cpu, cuda and cuda:N"):
        config(tiny_model, device=device)


def test_smallest_cache_there_can_be_is_warmed_up(tiny_model: Path) -> None:
    runner = load_runner(config(tiny_model, runner="timed", num_blocks=2, block_size=1), tiny_model)
    warm_up(runner, 256)
    runner = load_runner(config(tiny_model, runner="timed", kv_cache_gb=1e-9, block_size=1), tiny_model)
    assert runner.num_blocks == 2
    warm_up(runner, 256)
