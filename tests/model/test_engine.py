from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import torch

from model.engine import Engine, ScheduledChunk
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, NoDrafting, NonFiniteLogits, Outcome, SampledToken, StepOutput
from model.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


class EchoRunner(NoDrafting):
    """Samples the last token of a chunk plus one; three layers. Fails for token 13, and has no logits after 17."""

    layout = KVLayout("x", "float32", 3, 1, 4)
    num_blocks = 1
    kernels = "echo"
    cache_address = 0
    cache_device_id = -1
    cache_memory = torch.zeros((1, 1, 1))

    def __init__(self) -> None:
        self.batches: list[list[Sequence[int]]] = []
        self.hooked: list[bool] = []
        self.threads: set[int] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.running = threading.Event()

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        self.batches.append([chunk.token_ids for chunk in chunks])
        self.hooked.append(layer_done is not None)
        self.threads.add(threading.get_ident())
        self.running.set()
        assert self.may_go_on.wait(10)
        for layer in range(3):
            if layer_done is not None:
                layer_done(layer)
        if any(13 in chunk.token_ids for chunk in chunks):
            raise RuntimeError("thirteen")
        time.sleep(0.002)
        return StepOutput(
            tuple(self._outcome(chunk) for chunk in chunks),
            compute_s=99.0,
            expert_load=((1, 2),),
        )

    def _outcome(self, chunk: Chunk) -> Outcome:
        if chunk.sampling is None:
            return None
        if chunk.token_ids[-1] == 17:
            return NonFiniteLogits("seventeen")
        return SampledToken(chunk.token_ids[-1] + 1)


class Queue:
    """Gives out its chunks in order, as many as the budget takes."""

    def __init__(self, *chunks: ScheduledChunk) -> None:
        self.waiting = list(chunks)
        self.budgets: list[int] = []
        self.sampled: list[list[int | str | None]] = []  # a step's token ids, or why there is none
        self.failures: list[Exception] = []

    def schedule(self, num_tokens: int) -> Sequence[ScheduledChunk]:
        self.budgets.append(num_tokens)
        part = []
        while self.waiting and len(self.waiting[0].chunk.token_ids) <= num_tokens:
            num_tokens -= len(self.waiting[0].chunk.token_ids)
            part.append(self.waiting.pop(0))
        return part

    def complete(self, sampled: Sequence[Outcome], output: StepOutput) -> None:
        self.sampled.append(
            [None if one is None else one.token_id if isinstance(one, SampledToken) else str(one) for one in sampled]
        )

    def fail(self, error: Exception) -> None:
        self.failures.append(error)


def chunk(*token_ids: int, sampling: SamplingParams | None = GREEDY, hook: LayerDone | None = None) -> ScheduledChunk:
    return ScheduledChunk(Chunk(token_ids, 0, (0,), sampling, token_ids, len(token_ids)), hook)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(engine.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_drafts_count_against_the_budget() -> None:
    drafting = ScheduledChunk(replace(chunk(4).chunk, num_draft_tokens=3))
    first, second = Queue(drafting), Queue(chunk(20))
    async with running(Engine(EchoRunner(), [first, second], max_step_tokens=6)):
        await until(lambda: bool(second.sampled))
    assert second.budgets[0] == 2


async def test_the_budget_is_shared_in_order_and_results_go_back_to_their_owners() -> None:
    runner = EchoRunner()
    first, second = Queue(chunk(1, 2, 3), chunk(4), chunk(5, 6, 7)), Queue(chunk(10, 11, sampling=None), chunk(20))
    engine = Engine(runner, [first, second], max_step_tokens=6)
    async with running(engine):
        await until(lambda: len(second.sampled) == 2)
    assert runner.batches == [[(1, 2, 3), (4,), (10, 11)], [(5, 6, 7), (20,)]]
    assert first.budgets[:2] == [6, 6]
    assert second.budgets[:2] == [2, 3]
    assert first.sampled == [[4, 5], [8]]
    assert second.sampled == [[None], [21]]


async def test_only_schedulers_with_a_part_are_told() -> None:
    runner, first, second = EchoRunner(), Queue(chunk(1)), Queue()
    async with running(Engine(runner, [first, second], max_step_tokens=4)):
        await until(lambda: first.sampled)
    assert first.sampled == [[2]]
    assert second.sampled == []
    assert second.budgets[0] == 3


async def test_a_failed_step_fails_its_parts_and_the_next_one_runs() -> None:
    runner, first, second, idle = EchoRunner(), Queue(chunk(13)), Queue(chunk(1, 1, 1), chunk(2, 2)), Queue()
    async with running(Engine(runner, [first, second, idle], max_step_tokens=4)):
        await until(lambda: second.sampled)
    assert [str(error) for error in first.failures] == ["thirteen"]
    assert [str(error) for error in second.failures] == ["thirteen"]
    assert idle.failures == []
    assert first.sampled == []
    assert second.sampled == [[3]]


async def test_a_chunk_without_finite_logits_leaves_its_neighbours_their_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner, seen = EchoRunner(), list[StepOutput]()
    first, second = Queue(chunk(4), chunk(16, 17), chunk(5)), Queue(chunk(17, sampling=None), chunk(6))
    engine = Engine(runner, [first, second], max_step_tokens=9, observe=lambda chunks, output: seen.append(output))
    async with running(engine):
        await until(lambda: second.sampled)
    assert first.sampled == [[5, "seventeen", 6]]
    assert second.sampled == [[None, 7]]
    assert first.failures == second.failures == []
    assert len(seen) == 1  # the step itself counts
    assert [record.getMessage() for record in caplog.records] == ["1 of 5 chunks have no token: seventeen"]


async def test_idle_it_neither_spins_nor_misses_a_wake() -> None:
    runner, queue = EchoRunner(), Queue()
    engine = Engine(runner, [queue], max_step_tokens=4)
    async with running(engine):
        await asyncio.sleep(0.02)
        assert len(queue.budgets) == 1
        queue.waiting.append(chunk(1))
        engine.wake()
        await until(lambda: queue.sampled == [[2]])
        await asyncio.sleep(0.02)
        num_asked = len(queue.budgets)
        await asyncio.sleep(0.02)
        assert len(queue.budgets) == num_asked


async def test_a_wake_while_computing_is_seen_after_the_step() -> None:
    runner, queue = EchoRunner(), Queue(chunk(1))
    runner.may_go_on.clear()
    engine = Engine(runner, [queue], max_step_tokens=4)
    async with running(engine):
        await until(runner.running.is_set)
        queue.waiting.append(chunk(5))  # the loop is free while the step is computed
        engine.wake()
        runner.may_go_on.set()
        await until(lambda: queue.sampled == [[2], [6]])


async def test_layers_are_told_on_the_compute_thread_and_only_if_somebody_listens() -> None:
    told: list[tuple[str, int, int]] = []

    def listener(name: str) -> LayerDone:
        return lambda layer: told.append((name, layer, threading.get_ident()))

    runner = EchoRunner()
    queue = Queue(chunk(1, hook=listener("a")), chunk(2), chunk(3, hook=listener("b")))
    engine = Engine(runner, [queue], max_step_tokens=3)
    async with running(engine):
        await until(lambda: queue.sampled)
        queue.waiting.append(chunk(7))
        engine.wake()
        await until(lambda: len(queue.sampled) == 2)
    assert [(name, layer) for name, layer, _ in told] == [(name, layer) for layer in range(3) for name in "ab"]
    assert {thread for _, _, thread in told} == runner.threads
    assert threading.get_ident() not in runner.threads
    assert len(runner.threads) == 1
    assert runner.hooked == [True, False]


async def test_the_observer_sees_measured_time_and_expert_load() -> None:
    seen: list[tuple[list[Sequence[int]], StepOutput]] = []
    queue = Queue(chunk(1, 2), chunk(3))

    def observe(chunks: Sequence[Chunk], output: StepOutput) -> None:
        seen.append(([one.token_ids for one in chunks], output))

    async with running(Engine(EchoRunner(), [queue], max_step_tokens=9, observe=observe)):
        await until(lambda: seen)
    token_ids, output = seen[0]
    assert token_ids == [(1, 2), (3,)]
    assert 0.002 <= output.compute_s < 5.0  # measured here, not the 99 of the runner
    assert output.expert_load == ((1, 2),)


async def test_cancelled_it_waits_for_the_step_and_ends_its_thread() -> None:
    runner, queue = EchoRunner(), Queue(chunk(1))
    runner.may_go_on.clear()
    task = asyncio.create_task(Engine(runner, [queue], max_step_tokens=4).run())
    await until(runner.running.is_set)
    threading.Timer(0.02, runner.may_go_on.set).start()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runner.may_go_on.is_set()
    assert queue.sampled == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compute")]
