"""Planned pools against simulated ones: step by step, with requests that come at random. Step times are the planner's;
what is checked is what it makes of them."""

from __future__ import annotations

import random
import statistics
from collections import deque

import pytest

from router.colocated_pool import ColocatedPool
from router.decode_pool import DecodePool
from router.deployment_plan import DeploymentPlan, Question, plan
from router.forecast import Forecast, Lengths
from router.hardware import HARDWARE
from router.model_config import model_shape
from router.targets import Targets
from tests.router import model_configs as configs

LLAMA = model_shape(configs.LLAMA_3_70B, "Llama-3-70B")
NUM_ANSWER_TOKENS = 200


@pytest.fixture(scope="module")
def planned() -> DeploymentPlan:
    forecast = Forecast(20, Lengths(1500), Lengths(NUM_ANSWER_TOKENS))
    return plan(Question(LLAMA, HARDWARE["H100"], forecast, Targets(ttft_s=0.5, tpot_s=0.04)))


def arrivals(rng: random.Random, per_s: float, until_s: float) -> deque[float]:
    at, times = 0.0, deque[float]()
    while (at := at + rng.expovariate(per_s)) < until_s:
        times.append(at)
    return times


def decoded(pool: DecodePool) -> tuple[list[float], list[int]]:
    """Times per token of the answers of one worker, and the sizes of its batches."""
    rng = random.Random(5)
    coming = arrivals(rng, pool.kind.forecast.requests_per_s / pool.num_workers, 400)
    now, batch, per_token, sizes = 0.0, list[tuple[float, int]](), list[float](), list[int]()
    while coming or batch:
        while coming and coming[0] <= now and len(batch) < pool.slots.value:
            batch.append((max(now, coming.popleft()), 0))
        if not batch:
            now = coming[0]
            continue
        sizes.append(len(batch))
        now += pool.kind.token_s(len(batch))
        batch = [(start, made + 1) for start, made in batch]
        per_token += [(now - start) / made for start, made in batch if made == NUM_ANSWER_TOKENS]
        batch = [each for each in batch if each[1] < NUM_ANSWER_TOKENS]
    return sorted(per_token), sizes


def test_decode_workers_are_as_full_and_as_fast_as_planned(planned: DeploymentPlan) -> None:
    pool = planned.decode
    per_token, sizes = decoded(pool)
    assert statistics.fmean(per_token) == pytest.approx(pool.tpot.value, rel=0.03)
    assert statistics.fmean(sizes) == pytest.approx(pool.batch.value, rel=0.06)
    assert per_token[int(0.9 * len(per_token))] == pytest.approx(pool.tpot_late.value, rel=0.05)
    assert per_token[int(0.9 * len(per_token))] < 0.04


def served(pool: ColocatedPool) -> tuple[list[float], list[float]]:
    """Times to the first token and times per token at workers that do both; a prompt goes to the one with fewest."""
    rng, kind = random.Random(6), pool.decode.kind
    assert kind.step_tokens.colocated == 512
    coming = arrivals(rng, kind.forecast.requests_per_s, 120)
    clocks = [0.0] * pool.num_workers
    prompts: list[deque[tuple[float, int]]] = [deque() for _ in clocks]
    batches: list[list[tuple[float, int]]] = [[] for _ in clocks]
    firsts, per_token = list[float](), list[float]()
    part_s = kind.roofline.prefill(500, 500).seconds  # 1,500 tokens in three parts, with 500 before them on average
    while coming or any(prompts) or any(batches):
        number = min(range(len(clocks)), key=clocks.__getitem__)
        while coming and coming[0] <= clocks[number]:
            least = min(range(len(clocks)), key=lambda each: (len(prompts[each]), clocks[each], len(batches[each])))
            prompts[least].append((coming.popleft(), 1500))
        prompt, batch = prompts[number], batches[number]
        if not prompt and not batch:
            others = [clock for clock in clocks if clock > clocks[number]]
            clocks[number] = min([*others, coming[0] if coming else 1e9])
            if not coming and not others:
                break
            continue
        clocks[number] += (kind.token_s(len(batch)) if batch else 0.0) + (part_s if prompt else 0.0)
        now = clocks[number]
        batches[number] = batch = [(first, made + 1) for first, made in batch]
        per_token += [(now - first) / made for first, made in batch if made == NUM_ANSWER_TOKENS]
        batches[number] = [each for each in batch if each[1] < NUM_ANSWER_TOKENS]
        if prompt:
            came, left = prompt.popleft()
            if left > 500:
                prompt.appendleft((came, left - 500))
            else:
                firsts.append(now - came)
                batches[number].append((now, 0))
    return sorted(firsts), sorted(per_token)


def test_workers_that_do_both_are_slowed_down_as_planned(planned: DeploymentPlan) -> None:
    pool = planned.colocated
    assert pool is not None
    firsts, per_token = served(pool)
    assert statistics.fmean(per_token) == pytest.approx(pool.decode.tpot.value, rel=0.1)
    assert statistics.fmean(firsts) == pytest.approx(pool.prefill.ttft.value, rel=0.25)
