"""The same trace through a real router with timed workers, and through the simulator with the same step times."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

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
_NUM_ALONE = 6
_NUM_TOGETHER = 6  # on each decode worker
_SHORT = TracedRequest(0.0, 16, 30)


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
    """What real processes take beside the timing: of each message, of each step and of each sequence in it."""

    times: Sequence[Times]
    message_s: float
    step_s: float
    sequence_s: float


def costs(timing: StepTiming, step_s: float = 0.0, sequence_s: float = 0.0) -> StepCosts:
    """As the simulator says it, with more in each step and for each sequence that decodes."""
    assert timing.scale == 1.0
    return StepCosts(
        prefill_base_s=timing.prefill_base_s + step_s,
        prefill_token_s=timing.prefill_token_s,
        prefill_pair_s=timing.prefill_pair_s,
        decode_base_s=timing.decode_base_s + step_s,
        decode_sequence_s=timing.decode_sequence_s + sequence_s,
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
        message_s, step_s = await _alone(client, rng)
        sequence_s = await _together(client, rng, setting.num_decode, step_s)
        began_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_flip(client, setting, began_at))
            asking = []
            for request in setting.trace:
                await asyncio.sleep(max(0.0, began_at + request.at_s - time.monotonic()))
                asking.append(tasks.create_task(_ask(client, request, rng, began_at)))
        return Measured([task.result() for task in asking], message_s, step_s, sequence_s)


def play(setting: Setting, measured: Measured, seed: int) -> list[Times]:
    roles = {
        **{f"prefill-{i}": Role.PREFILL for i in range(setting.num_prefill)},
        **{f"decode-{i}": Role.DECODE for i in range(setting.num_decode)},
    }
    step_costs = costs(TIMING, measured.step_s, measured.sequence_s)
    workers = [WorkerSpec(name, role, step_costs, NUM_BLOCKS, STEP_TOKENS, MAX_RUNNING) for name, role in roles.items()]
    flip = RoleChange(setting.flip_at_s, setting.flipped, Role.PREFILL, hands_over=False)
    delays = Delays(message_s=measured.message_s, hand_over_s=2 * measured.message_s)
    outcomes: list[Outcome] = []
    simulate(Scenario(workers, LAYOUT, delays, role_changes=[flip], seed=seed), setting.trace, outcomes.append)
    outcomes.sort(key=lambda outcome: outcome.at_s)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    assert not failed, failed
    return [Times(each.at_s, each.ttft_s or 0.0, each.tpot_s or 0.0) for each in outcomes]


def settled(times: Sequence[Times]) -> list[Times]:
    return [each for each in times if each.at_s >= _WARM_S]


async def _flip(client: PdserveClient, setting: Setting, began_at: float) -> None:
    await asyncio.sleep(max(0.0, began_at + setting.flip_at_s - time.monotonic()))
    await client.set_role(setting.flipped, "prefill")


async def _alone(client: PdserveClient, rng: random.Random) -> tuple[float, float]:
    """From one request after another, each alone: a step more than it should take is a step's, the rest messages'."""
    step_costs, messages, steps = costs(TIMING), [], []
    for _ in range(_NUM_ALONE):
        request = TracedRequest(0.0, 100, 20)
        times = await _ask(client, request, rng, time.monotonic())
        ideal_tpot_s = sum(step_costs.decode_s(1, 101 + i) for i in range(19)) / 19
        steps.append(max(0.0, times.tpot_s - ideal_tpot_s))
        messages.append(max(0.0, times.ttft_s - step_costs.prefill_s([(100, 100)]) - steps[-1]) / 4)
    return statistics.median(messages), statistics.median(steps)


async def _together(client: PdserveClient, rng: random.Random, num_decode: int, step_s: float) -> float:
    """What each further sequence of a step takes more than it should: messages of its tokens."""
    began_at = time.monotonic()
    number = _NUM_TOGETHER * num_decode
    times = await asyncio.gather(*(_ask(client, _SHORT, rng, began_at) for _ in range(number)))
    context = _NUM_TOGETHER * (_SHORT.num_prompt_tokens + _SHORT.num_output_tokens // 2)
    ideal_s = costs(TIMING).decode_s(_NUM_TOGETHER, context) + step_s
    more_s = statistics.median(each.tpot_s for each in times) - ideal_s
    return max(0.0, more_s / (_NUM_TOGETHER - 1))


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
