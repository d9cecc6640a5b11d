"""What a worker does before anybody can reach it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import deploy.worker
from deploy.worker import serve_worker
from deploy.worker_config import WorkerConfig
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, StepOutput
from model.timed_runner import StepTiming, TimedRunner
from protos.security import Security
from router.measured_steps import Steps


class Recorder(TimedRunner):
    def __init__(self) -> None:
        layout = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=16)
        super().__init__(layout, 100, StepTiming(scale=0.0), vocab_size=100)
        self.ran: list[tuple[int, int]] = []  # start and number of tokens of each chunk

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        self.ran += [(chunk.start, len(chunk.token_ids)) for chunk in chunks]
        return super().execute(chunks, layer_done)


async def test_it_is_warm_before_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or the first request would pay for reading the weights in."""
    runner, ran_before_serving = Recorder(), []

    class Worker:
        def __init__(self, config: WorkerConfig, folder: Path, served: Recorder, calibrated: Sequence[Steps]) -> None:
            assert (folder, served, calibrated) == (tmp_path, runner, ())

        async def serve(self) -> None:
            ran_before_serving.extend(runner.ran)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(deploy.worker, "load_runner", lambda config, folder: runner)
    monkeypatch.setattr(deploy.worker, "Worker", Worker)
    config = SimpleNamespace(model=str(tmp_path), security=Security(), calibrate="off")
    await serve_worker(cast(WorkerConfig, config))
    assert ran_before_serving == [(0, 256), (256, 1), (256, 1)]  # a prompt, a decode step, and one with drafts
