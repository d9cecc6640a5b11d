"""What a worker measures before it registers: enough to tell what a step's time is made of, in a bounded time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.calibration import calibrate, calibration
from deploy.hardware_name import hardware_name
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, StepOutput
from model.timed_runner import StepTiming, TimedRunner
from model.torch_runner import TorchRunner
from router.measured_steps import DecodeSteps, PrefillSteps
from router.step_models import StepModel
from tests.deploy.test_runners import config

LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=16)
TIMING = StepTiming()


def timed(num_blocks: int = 1000, timing: StepTiming = TIMING) -> TimedRunner:
    return TimedRunner(LAYOUT, num_blocks, timing, vocab_size=100)


def test_the_formula_of_a_timed_worker_is_known_exactly_and_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedRunner, "execute", lambda *_: pytest.fail("it has run a step"))
    model = StepModel()
    steps = calibrate(timed(), max_step_tokens=512, max_running=64, max_context_tokens=8192)
    for each in steps:
        model.observe(each)
    costs = model.costs
    for name in ("prefill_base_s", "prefill_token_s", "prefill_pair_s", "decode_base_s", "decode_sequence_s"):
        assert getattr(costs, name) == pytest.approx(getattr(TIMING, name), rel=0.01), name
    assert costs.decode_context_token_s == pytest.approx(TIMING.decode_context_token_s, rel=0.05)


class Measured:
    """A runner of which nothing is known but what its steps take; each first one takes ten times as long."""

    def __init__(self, step_s: float) -> None:
        self.layout, self.num_blocks, self.now = LAYOUT, 1000, 0.0
        self._factor = step_s / TIMING.step_s([Chunk([1], 64, [0])])
        self._seen: set[tuple[int, int, int]] = set()

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        shape = len(chunks), len(chunks[0].token_ids), chunks[0].start
        step_s = self._factor * TIMING.step_s(chunks) * (1 if shape in self._seen else 10)
        self._seen.add(shape)
        for chunk in chunks:
            assert len(chunk.history) == chunk.start + len(chunk.token_ids) <= 16 * len(chunk.block_ids)
        blocks = [block for chunk in chunks for block in chunk.block_ids]
        assert len(set(blocks)) == len(blocks) and max(blocks) < self.num_blocks
        self.now += step_s
        return StepOutput((None,) * len(chunks), step_s)


def test_the_first_of_two_alike_does_not_count() -> None:
    runner = Measured(0.0002)
    options = {"max_step_tokens": 512, "max_running": 64, "max_context_tokens": 8192, "clock": lambda: runner.now}
    steps = calibrate(runner, **options)  # type: ignore[arg-type]
    assert [type(each) for each in steps].count(DecodeSteps) == 3
    assert [type(each) for each in steps].count(PrefillSteps) == 4
    factor = 0.0002 / TIMING.step_s([Chunk([1], 64, [0])])
    for each in steps:
        if isinstance(each, PrefillSteps):
            true_s = TIMING.prefill_base_s + each.num_tokens * TIMING.prefill_token_s
            assert each.step_s == pytest.approx(factor * (true_s + each.num_pairs * TIMING.prefill_pair_s))


@pytest.mark.parametrize("step_s", [0.02, 0.3, 100.0])
def test_it_ends_in_time_on_slow_machines(step_s: float) -> None:
    """After the first step that shows how slow they are at worst."""
    runner = Measured(step_s)
    options = {"max_step_tokens": 512, "max_running": 64, "max_context_tokens": 8192, "clock": lambda: runner.now}
    num_measured = len(calibrate(runner, **options))  # type: ignore[arg-type]
    assert runner.now <= 1.5 + 10 * step_s * 20
    assert num_measured <= 6


@pytest.mark.parametrize(("num_blocks", "max_context"), [(2, 8192), (40, 100), (1000, 8192), (3, 2)])
def test_it_runs_within_the_blocks_and_the_context_that_are_there(num_blocks: int, max_context: int) -> None:
    steps = calibrate(timed(num_blocks), max_step_tokens=512, max_running=64, max_context_tokens=max_context)
    for each in steps:
        if isinstance(each, DecodeSteps):
            assert each.num_context_tokens / each.num_sequences <= max_context
            assert each.num_context_tokens <= 16 * num_blocks
        else:
            assert each.num_tokens <= max_context and each.num_pairs / each.num_tokens <= max_context


def test_a_real_model_is_measured_unless_that_is_switched_off(tiny_model: Path) -> None:
    options = config(tiny_model, num_blocks=80)
    runner = TorchRunner.load(tiny_model, num_blocks=80, block_size=16, num_threads=1)
    assert {type(each) for each in calibration(options, tiny_model, runner)} == {PrefillSteps, DecodeSteps}
    assert calibration(replace(options, calibrate="off"), tiny_model, runner) == ()
    assert ", 1 thread" in hardware_name(runner)


def test_timed_workers_are_alike_if_they_have_the_same_formula() -> None:
    slow = replace(TIMING, scale=1.3)
    assert hardware_name(timed()) == hardware_name(timed(num_blocks=5)) == ""
    assert hardware_name(timed(timing=slow)) == hardware_name(timed(timing=replace(slow))) != ""


def test_the_processor_is_named(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 2.0GHz\nprocessor\t: 1\n")
    runner = TorchRunner.load(tiny_model, num_blocks=80, block_size=16, num_threads=1)
    assert hardware_name(runner, tmp_path / "cpuinfo") == "A CPU @ 2.0GHz, 1 thread"
    assert hardware_name(runner, tmp_path / "none").endswith(", 1 thread")
