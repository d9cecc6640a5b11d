"""All figures of a plan, by what they are about: what `pdserve plan --explain` and `--json` show."""

from __future__ import annotations

from collections.abc import Mapping

from router.deployment_plan import DeploymentPlan
from router.drafting_gain import DraftGain, draft_gain
from router.expert_parallel import (
    all_to_all_s,
    tokens_for_efficiency,
    tokens_per_expert,
    touched_experts,
)
from router.figure import Figure, figure
from router.worker_kind import WorkerKind

GAIN_BATCHES = (1, 4, 16, 64, 256)


def plan_figures(plan: DeploymentPlan) -> Mapping[str, tuple[Figure, ...]]:
    shape, holding = plan.question.shape, plan.question.holdings[0]
    prefill, decode = plan.prefill, plan.decode
    sections = {
        "model": (
            shape.total_weights,
            shape.active_weights,
            shape.weight_bytes(holding.weights),
            shape.kv_token_bytes(holding.bytes_per_kv_value),
        ),
        "memory of a prefill worker": prefill.kind.memory.figures,
        "memory of a decode worker": (*decode.kind.memory.figures, decode.kind.context, decode.kind.sequence),
        "a prompt": (*_prompt(prefill.kind), _work_ratio(plan)),
        "prefill pool": (*prefill.service.figures, *prefill.wait.figures, prefill.ttft, prefill.ttft_late),
        "a decode step": decode.kind.roofline.decode(decode.batch.value, decode.kind.context.value).figures,
        "decode pool": (
            decode.slots,
            *decode.service.figures,
            *decode.wait.figures,
            decode.batch,
            decode.batch_late,
            decode.tpot,
            decode.tpot_late,
        ),
        "KV on the links": plan.traffic.figures,
        "experts": expert_figures(plan),
        "guessing ahead, at the decode pool's batch": _own_gain(plan),
        "guessing ahead": tuple(each for gain in gains(plan) for each in _of_gain(gain)),
        "one pool instead": _colocated(plan),
        "cost": plan.cost,
    }
    return {title: figures for title, figures in sections.items() if figures}


def _prompt(kind: WorkerKind) -> tuple[Figure, ...]:
    forecast = kind.forecast
    cached = figure(
        "cached tokens of a prompt",
        "",
        "prompt * hit_rate",
        prompt=forecast.prompt.mean,
        hit_rate=forecast.cache_hit_rate,
    )
    return (cached, *kind.roofline.prefill(forecast.prompt.mean - cached.value, cached.value).figures)


def _work_ratio(plan: DeploymentPlan) -> Figure:
    """Arithmetic of a request's prompt, over that of its answer."""
    kind, forecast = plan.prefill.kind, plan.question.forecast
    cached = forecast.prompt.mean * forecast.cache_hit_rate
    prefill = kind.roofline.prefill(forecast.prompt.mean - cached, cached).figures
    decode = kind.roofline.decode(1, kind.context.value).figures
    return figure(
        "work of a prompt over that of an answer",
        "",
        "(weights + attention) / prompts / (answer * (token_weights + token_attention))",
        weights=prefill[0],
        attention=prefill[1],
        prompts=kind.layout.num_lanes,
        answer=forecast.answer.mean,
        token_weights=decode[0],
        token_attention=decode[1],
    )


def expert_figures(plan: DeploymentPlan) -> tuple[Figure, ...]:
    """Of a decode worker: at the batch that it has on average, and what it would take to keep experts busy."""
    experts, kind = plan.question.shape.experts, plan.decode.kind
    if experts is None:
        return ()
    batch = max(1.0, plan.decode.batch.value)
    placed = figure(
        "experts per GPU and layer",
        "",
        "ceil(experts / gpus)",
        experts=experts.num_experts,
        gpus=kind.layout.num_gpus,
    )
    spare = figure(
        "places for second copies",
        "",
        "slots * gpus - experts",
        slots=placed,
        gpus=kind.layout.num_gpus,
        experts=experts.num_experts,
    )
    figures = (
        placed,
        spare,
        touched_experts(experts, batch),
        tokens_per_expert(experts, batch),
        tokens_for_efficiency(experts),
    )
    if kind.layout.num_gpus == 1:
        return figures
    return (*figures, *all_to_all_s(plan.question.shape, kind.layout, plan.question.hardware, batch))


def gains(plan: DeploymentPlan) -> tuple[DraftGain, ...]:
    """By batch, up to what a decode worker holds. None without drafts."""
    kind = plan.decode.kind
    if kind.drafting is None:
        return ()
    batches = [batch for batch in GAIN_BATCHES if batch <= plan.decode.slots.value]
    return tuple(draft_gain(kind.roofline, kind.drafting, batch, kind.context.value) for batch in batches)


def _own_gain(plan: DeploymentPlan) -> tuple[Figure, ...]:
    kind, batch = plan.decode.kind, max(1.0, plan.decode.batch.value)
    if kind.drafting is None:
        return ()
    return _of_gain(draft_gain(kind.roofline, kind.drafting, batch, kind.context.value))


def _of_gain(gain: DraftGain) -> tuple[Figure, ...]:
    return (gain.emitted, gain.iteration, gain.token, gain.speedup, gain.textbook)


def _colocated(plan: DeploymentPlan) -> tuple[Figure, ...]:
    pool = plan.colocated
    if pool is None:
        return ()
    decode, prefill = pool.decode, pool.prefill
    return (
        pool.slowdown,
        pool.gap,
        decode.slots,
        decode.batch,
        decode.tpot,
        decode.tpot_late,
        *prefill.service.figures,
        *prefill.wait.figures,
        prefill.ttft,
        prefill.ttft_late,
    )
