"""The same trace through a real router with timed workers, and through the simulator with the same step times."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bench.tiny_moe import EOS, VOCAB_SIZE, build_tiny_moe
from deploy.local import ClusterConfig, LocalCluster
from model.kv_layout import KVLayout
from model.timed_runner import StepTiming
from protos.client import PdserveClient
from protos.values import Sampling, Summary
from router.candidate import Role
from router.outcomes import Outcome
from router.scenario import Delays, RoleChange, Scenario, WorkerSpec
from router.simulator import simulate
from router.step_costs import StepCosts
from router.synthetic_trace import Lengths, Phase, synthetic_trace
from router.traced_request import TracedRequest

LAYOUT = KVLayout("", "float32", num_layers=3, num_kv_heads=2, head_dim=16)  # of the tiny model
TIMING = StepTiming(
    prefill_base_s=0.04,
    prefill_token_s=0.0008,
    prefill_pair_s=2e-7,
    decode_base_s=0.05,
    decode_sequence_s=0.002,
    decode_context_token_s=2e-6,
)
NUM_BLOCKS, STEP_TOKENS, MAX_RUNNING = 2000, 256, 64
PROMPT = Lengths(220, 0.7, least=16, most=700)
OUTPUT = Lengths(40, 0.6, least=4, most=120)
_WARM_S = 4.0  # of the trace: workers have not measured themselves yet
_DEADLINE_S = 120.0
_NUM_FITS = 8


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in the order of the trace."""

    at_s: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    num_prefill: int
    num_decode: int
    per_s: float
    seconds: float
    seed: int

    @property
    def trace(self) -> list[TracedRequest]:
        return list(synthetic_trace([Phase(self.seconds, self.per_s, PROMPT, OUTPUT)], self.seed))

    @property
    def flip_at_s(self) -> float:
        """From then on the last decode worker prefills."""
        return self.seconds / 2

    @property
    def flipped(self) -> str:
        return f"decode-{self.num_decode - 1}"


@dataclass(frozen=True, slots=True)
class Measured:
    """`message_s` and `step_s`: what real processes take beside the timing, found with another trace before."""

    times: Sequence[Times]
    message_s: float
    step_s: float


def costs(timing: StepTiming, step_s: float) -> StepCosts:
    """As the simulator says it, with so much more in each step."""
    assert timing.scale == 1.0
    return StepCosts(
        prefill_base_s=timing.prefill_base_s + step_s,
        prefill_token_s=timing.prefill_token_s,
        prefill_pair_s=timing.prefill_pair_s,
        decode_base_s=timing.decode_base_s + step_s,
        decode_sequence_s=timing.decode_sequence_s,
        decode_context_token_s=timing.decode_context_token_s,
    )


async def measure(setting: Setting, folder: Path) -> Measured:
    model, timing = folder / "model", folder / "timing.json"
    build_tiny_moe(model)
    timing.write_text(json.dumps(asdict(TIMING)))
    options = ("--runner", "timed", "--timing", str(timing), "--num-blocks", str(NUM_BLOCKS))
    config = ClusterConfig(
        model=str(model),
        num_prefill=setting.num_prefill,
        num_decode=setting.num_decode,
        num_threads=1,
        worker_arguments=(*options, "--max-step-tokens", str(STEP_TOKENS), "--max-running", str(MAX_RUNNING)),
    )
    async with LocalCluster(config) as cluster, PdserveClient(cluster.router_address) as client:
        rng = random.Random(setting.seed)
        await _ask(client, TracedRequest(0.0, 100, 10), rng, time.monotonic())  # connections are made
        rehearsal = replace(setting, seconds=setting.seconds / 2, seed=setting.seed + 1)
        message_s, step_s = _overheads(rehearsal, await _play_real(client, rehearsal.trace, rng))
        flip = asyncio.create_task(_flip(client, setting))
        try:
            return Measured(await _play_real(client, setting.trace, rng), message_s, step_s)
        finally:
            await flip


def play(setting: Setting, measured: Measured, seed: int, *, flips: bool = True) -> list[Times]:
    """In the simulator."""
    roles = {
        **{f"prefill-{i}": Role.PREFILL for i in range(setting.num_prefill)},
        **{f"decode-{i}": Role.DECODE for i in range(setting.num_decode)},
    }
    step_costs = costs(TIMING, measured.step_s)
    workers = [WorkerSpec(name, role, step_costs, NUM_BLOCKS, STEP_TOKENS, MAX_RUNNING) for name, role in roles.items()]
    changes = [RoleChange(setting.flip_at_s, setting.flipped, Role.PREFILL)] if flips else []
    delays = Delays(message_s=measured.message_s, hand_over_s=2 * measured.message_s)
    outcomes: list[Outcome] = []
    simulate(Scenario(workers, LAYOUT, delays, role_changes=changes, seed=seed), setting.trace, outcomes.append)
    outcomes.sort(key=lambda outcome: outcome.at_s)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    assert not failed, failed
    return [Times(each.at_s, each.ttft_s or 0.0, each.tpot_s or 0.0) for each in outcomes]


def settled(times: Sequence[Times]) -> list[Times]:
    return [each for each in times if each.at_s >= _WARM_S]


async def _flip(client: PdserveClient, setting: Setting) -> None:
    await asyncio.sleep(setting.flip_at_s)
    await client.set_role(setting.flipped, "prefill")


async def _play_real(client: PdserveClient, trace: Sequence[TracedRequest], rng: random.Random) -> list[Times]:
    began_at, asking = time.monotonic(), []
    async with asyncio.TaskGroup() as tasks:
        for request in trace:
            await asyncio.sleep(max(0.0, began_at + request.at_s - time.monotonic()))
            asking.append(tasks.create_task(_ask(client, request, rng, began_at)))
    return [task.result() for task in asking]


def _overheads(setting: Setting, times: Sequence[Times]) -> tuple[float, float]:
    """Of a message and of a step, with which the simulator has the mean times that were measured."""
    message_s = step_s = 0.0
    for _ in range(_NUM_FITS):
        played = play(setting, Measured(times, message_s, step_s), 0, flips=False)
        step_s = max(0.0, step_s + _mean(times, "tpot_s") - _mean(played, "tpot_s"))
        message_s = max(0.0, message_s + (_mean(times, "ttft_s") - _mean(played, "ttft_s")) / 8)
    return message_s, step_s


def _mean(times: Sequence[Times], name: Literal["ttft_s", "tpot_s"]) -> float:
    return statistics.mean(each.ttft_s if name == "ttft_s" else each.tpot_s for each in settled(times))


async def _ask(client: PdserveClient, request: TracedRequest, rng: random.Random, began_at: float) -> Times:
    prompt = [rng.randrange(EOS + 1, VOCAB_SIZE) for _ in range(request.num_prompt_tokens)]
    sampling = Sampling(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
    asked_at, first_at, last_at, num_tokens = time.monotonic(), 0.0, 0.0, 0
    async with aclosing(client.generate(prompt, sampling=sampling, deadline_s=_DEADLINE_S)) as parts:
        async for part in parts:
            if not isinstance(part, Summary):
                last_at = time.monotonic()
                first_at = first_at or last_at
                num_tokens += len(part.token_ids)
    assert num_tokens == request.num_output_tokens
    return Times(asked_at - began_at, first_at - asked_at, (last_at - first_at) / max(1, num_tokens - 1))
