"""A plan for people: what it takes and does in a few lines, and every figure's formula behind them; and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.quantity import told
from router.alternatives import Alternative
from router.deployment_plan import DeploymentPlan
from router.drafting_gain import DraftGain
from router.expert_parallel import placement
from router.figure import Figure
from router.memory_plan import MemoryPlan
from router.plan_figures import expert_figures, gains, plan_figures


def print_plan(plan: DeploymentPlan, alternatives: Sequence[Alternative], out: Console) -> None:
    _lines(out, _question_lines(plan))
    _lines(out, _advice_lines(plan, alternatives))
    out.print(_pools(plan))
    out.print()
    out.print(_figures(plan))
    if expert_figures(plan):
        out.print()
        out.print(_experts(plan))
    if gained := gains(plan):
        out.print()
        out.print(_gains(gained))
    out.print()
    out.print(_alternatives(alternatives))
    _lines(out, _impossible(alternatives))


def print_explanation(plan: DeploymentPlan, out: Console) -> None:
    """Every figure: its formula, and the same with the numbers put in. Names stand for what they say."""
    for title, figures in plan_figures(plan).items():
        out.print()
        out.print(Text(title, style="bold"))
        for each in figures:
            _lines(out, (f"  {each.name} = {told(each.value, each.unit)}",))
            if each.given:
                _lines(out, (f"      {_readable(each.formula)}", f"      {_readable(each.worked)}"), style="dim")


def plan_document(plan: DeploymentPlan, alternatives: Sequence[Alternative]) -> dict[str, Any]:
    """Values are in plain units: bytes, seconds, FLOP."""
    colocated = plan.colocated
    return {
        "model": plan.question.shape.name,
        "hardware": asdict(plan.question.hardware),
        "disaggregate": plan.advice.disaggregate,
        "reasons": list(plan.advice.reasons),
        "num_prefill": plan.prefill.num_workers,
        "num_decode": plan.decode.num_workers,
        "gpus_per_prefill_worker": plan.prefill.kind.layout.num_gpus,
        "gpus_per_decode_worker": plan.decode.kind.layout.num_gpus,
        "num_gpus": plan.num_gpus,
        "num_colocated": None if colocated is None else colocated.num_workers,
        "gpus_per_colocated_worker": None if colocated is None else colocated.decode.kind.layout.num_gpus,
        "within_budget": plan.is_within_budget,
        "kv_hides": plan.traffic.hides,
        "draft_tokens_by_batch": {f"{gain.num_sequences:.0f}": gain.num_draft_tokens for gain in gains(plan)},
        "figures": {
            title: [_figure_document(each) for each in figures] for title, figures in plan_figures(plan).items()
        },
        "alternatives": [_alternative_document(each) for each in alternatives],
    }


def _figure_document(each: Figure) -> dict[str, Any]:
    return {
        "name": each.name,
        "value": each.value,
        "unit": each.unit,
        "formula": each.formula,
        "given": dict(each.given),
        "worked": each.worked,
    }


def _alternative_document(each: Alternative) -> dict[str, Any]:
    sizes = None if each.plan is None else each.plan
    return {
        "weights": each.weights,
        "kv": each.kv,
        "num_gpus": None if sizes is None else sizes.num_gpus,
        "num_prefill": None if sizes is None else sizes.prefill.num_workers,
        "num_decode": None if sizes is None else sizes.decode.num_workers,
        "reason": each.reason,
    }


def _question_lines(plan: DeploymentPlan) -> tuple[str, ...]:
    question, shape = plan.question, plan.question.shape
    forecast, targets = question.forecast, question.targets
    total, active = shape.total_weights.value / 1e9, shape.active_weights.value / 1e9
    return (
        f"{shape.name}, {total:.1f} billion weights in {question.weight_format}, {active:.1f} for a token; "
        f"KV in {question.kv}; {question.hardware.name} of {told(question.hardware.memory_bytes, 'B')}",
        f"{forecast.requests_per_s * 60:,.0f} requests/min, {forecast.prompt.mean:,.0f} tokens in and "
        f"{forecast.answer.mean:,.0f} out, {forecast.cache_hit_rate:.0%} cached; {_percent(plan)} of requests "
        f"within {told(targets.ttft_s, 's')} TTFT and {told(targets.tpot_s, 's')} TPOT",
        "",
    )


def _percent(plan: DeploymentPlan) -> str:
    return f"{plan.question.targets.percentile * 100:.4g}%"


def _advice_lines(plan: DeploymentPlan, alternatives: Sequence[Alternative]) -> tuple[str, ...]:
    if plan.advice.disaggregate:
        first = f"Separate pools: {plan.prefill.num_workers} prefill, {plan.decode.num_workers} decode."
    else:
        assert plan.colocated is not None
        first = f"One pool, of workers that do both: {plan.colocated.num_workers}."
    lines = [first, *(f"  {reason}" for reason in plan.advice.reasons)]
    if not plan.is_within_budget:
        needed = f"There are {plan.question.num_gpus} GPUs, and {plan.num_chosen_gpus} are needed"
        lines.append(f"  {needed}. {_fitting(alternatives)}")
    return (*lines, "")


def _fitting(alternatives: Sequence[Alternative]) -> str:
    for each in alternatives:
        if each.plan is not None and each.plan.is_within_budget:
            return f"Weights in {each.weights} and KV in {each.kv} take {each.plan.num_chosen_gpus}."
    return "Eight bits do not make it fit either; allow more time, or less traffic."


def _pools(plan: DeploymentPlan) -> Table:
    table = _table("pool", "workers", "GPUs each", "GPUs", "busy", "weights", "draft", "KV room")
    rows = [
        ("prefill", plan.prefill.num_workers, plan.prefill.num_gpus, plan.prefill.wait, plan.prefill.kind),
        ("decode", plan.decode.num_workers, plan.decode.num_gpus, plan.decode.wait, plan.decode.kind),
    ]
    if (both := plan.colocated) is not None:
        busier = max(both.prefill.wait, both.decode.wait, key=lambda wait: wait.utilisation.value)
        rows.append(("both in one", both.num_workers, both.num_gpus, busier, both.decode.kind))
    for name, num_workers, num_gpus, wait, kind in rows:
        table.add_row(
            name,
            f"{num_workers}",
            f"{kind.layout.num_gpus}",
            f"{num_gpus}",
            f"{wait.utilisation.value:.0%}",
            *_held(kind.memory),
        )
    return table


def _held(memory: MemoryPlan) -> tuple[str, str, str]:
    draft = "-" if memory.draft is None else told(memory.draft.value, "B")
    return told(memory.weights.value, "B"), draft, told(memory.kv.value, "B")


def _figures(plan: DeploymentPlan) -> Table:
    """With the two pools; beside it, with one."""
    table = _table("", "separate", "one pool")
    one, late = plan.colocated, _percent(plan)

    def row(name: str, apart: str, together: str | None = None) -> None:
        table.add_row(name, apart, together or ("" if one else "-"))

    row("TTFT, mean", _s(plan.prefill.ttft), _s(one.prefill.ttft if one else None))
    row(f"TTFT, {late} of requests", _s(plan.prefill.ttft_late), _s(one.prefill.ttft_late if one else None))
    row("TPOT, mean", _s(plan.decode.tpot), _s(one.decode.tpot if one else None))
    row(f"TPOT, {late} of requests", _s(plan.decode.tpot_late), _s(one.decode.tpot_late if one else None))
    row("gap while a prompt is computed", _s(plan.decode.tpot), _s(one.gap if one else None))
    row(
        "batch of a decode worker",
        f"{plan.decode.batch.value:.0f} of {plan.decode.slots.value:.0f}",
        f"{one.decode.batch.value:.0f} of {one.decode.slots.value:.0f}" if one else None,
    )
    traffic = plan.traffic
    row("KV of a request", told(traffic.request.value, "B"))
    row("KV sent", told(traffic.per_s.value, "B/s"))
    row("links of prefill workers, busy", f"{traffic.utilisation.value:.0%}")
    hidden = "hidden but for" if traffic.hides else "slower than prefill; at least"
    row(f"hand-over, {hidden}", told(traffic.exposed.value, "s"))
    for cost in plan.cost:
        name = cost.name if plan.advice.disaggregate else f"{cost.name}, one pool"
        row(name, f"${cost.value:.3g}")
    return table


def _s(each: Figure | None) -> str:
    return "" if each is None else told(each.value, "s")


def _experts(plan: DeploymentPlan) -> Table:
    table = _table("experts of a decode worker", "")
    for each in expert_figures(plan):
        table.add_row(each.name, told(each.value, each.unit))
    experts, kind = plan.question.shape.experts, plan.decode.kind
    assert experts is not None
    for number, gpus, held in placement(experts, kind.layout, plan.question.hardware):
        table.add_row(f"domain {number}: GPUs {_span(gpus)}", f"experts {_span(held)}")
    return table


def _span(numbers: range) -> str:
    return f"{numbers.start}" if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"


def _gains(gained: Sequence[DraftGain]) -> Table:
    table = _table("guessing ahead, at batch", "guesses", "tokens per step", "per token", "speed-up", "textbook's")
    for gain in gained:
        table.add_row(
            f"{gain.num_sequences:.0f}",
            f"{gain.num_draft_tokens}",
            f"{gain.emitted.value:.2f}",
            told(gain.token.value, "s"),
            f"{gain.speedup.value:.2f} x",
            f"{gain.textbook.value:.2f} x",
        )
    return table


def _alternatives(alternatives: Sequence[Alternative]) -> Table:
    table = _table("weights", "KV", "prefill", "decode", "GPUs", "in one pool")
    for each in alternatives:
        if (made := each.plan) is None:
            table.add_row(each.weights, each.kv, "-", "-", "none", "-")
            continue
        table.add_row(
            each.weights,
            each.kv,
            f"{made.prefill.num_workers} x {made.prefill.kind.layout.num_gpus}",
            f"{made.decode.num_workers} x {made.decode.kind.layout.num_gpus}",
            f"{made.num_gpus}",
            "-" if made.colocated is None else f"{made.colocated.num_gpus}",
        )
    return table


def _impossible(alternatives: Sequence[Alternative]) -> tuple[str, ...]:
    return tuple(f"{each.weights}, KV in {each.kv}: {each.reason}" for each in alternatives if each.plan is None)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _lines(out: Console, lines: Sequence[str], style: str = "") -> None:
    for line in lines:
        out.print(Text(line, style=style), soft_wrap=True)


def _readable(formula: str) -> str:
    return formula.replace(" ** ", "^")
