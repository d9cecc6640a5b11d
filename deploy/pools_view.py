"""Who sizes the pools, how large they are and why, told to people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

from rich.console import Console
from rich.table import Table

from protos.plan_values import Flip, Plan, Sizes

_SHOWN_FLIPS = 10
_MODES = {
    "auto": "auto: the planner sizes them",
    "manual": "manual: their sizes are set by hand",
    "frozen": "frozen: they stay as they are",
}


def print_plan(plan: Plan, out: Console, zone: tzinfo | None = None) -> None:
    """Times are those of this machine, or of `zone`."""
    out.print(_facts(plan))
    if plan.flips:
        out.print()
        out.print(_flips_table(plan.flips[:_SHOWN_FLIPS], zone))


def print_preview(plan: Plan, out: Console) -> None:
    out.print(_facts(plan))
    if not plan.would_flip:
        out.print("\nNo worker would change its role.")
        return
    out.print("\nWould change their roles:")
    table = _table("worker", "from", "to")
    for flip in plan.would_flip:
        table.add_row(flip.worker_id, flip.before, flip.after)
    out.print(table)


def _facts(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("pools", _mode(plan))
    both = f", {plan.num_both} of them both" if plan.num_both else ""
    table.add_row("now", f"{plan.num_prefill} prefill, {plan.num_decode} decode{both}")
    if plan.in_force is not None:
        table.add_row("plan", _sizes(plan.in_force))
    if plan.proposed is not None:
        table.add_row("proposed", _sizes(plan.proposed, _gain(plan)))
    if plan.planned_by:
        ago = "nothing yet" if plan.planned_ago_s is None else f"{duration(plan.planned_ago_s)} ago"
        table.add_row("planned", f"{ago}, at {plan.planned_by}")
    table.add_row("SLO", _slo(plan.slo_ttft_s, plan.slo_tpot_s, plan.slo_share))
    for each in plan.slo_classes:
        table.add_row("", f"{each.name}: {_slo(each.ttft_s, each.tpot_s, each.share)}")
    return table


def _mode(plan: Plan) -> str:
    told = _MODES.get(plan.mode, plan.mode)
    if plan.manual_for_s is not None:
        told += f", for {duration(plan.manual_for_s)} more"
    return f"{told} (dry run: it changes nothing)" if plan.dry_run else told


def _sizes(sizes: Sizes, gain: str = "") -> str:
    told = f"{sizes.num_prefill} prefill, {sizes.num_decode} decode{gain}"
    return f"{told}: {sizes.reason}" if sizes.reason else told


def _gain(plan: Plan) -> str:
    return f" ({plan.proposed_gain:+.3g} requests/s within the SLO)" if plan.proposed_gain else ""


def _slo(ttft_s: float, tpot_s: float, share: float) -> str:
    times = f"first token within {duration(ttft_s)}, then {duration(tpot_s)} a token"
    return f"{times}, for {100 * share:.4g} % of the requests"


def _flips_table(flips: Sequence[Flip], zone: tzinfo | None) -> Table:
    table = _table("when", "worker", "from", "to", "state", "took", "moved", "why")
    for flip in flips:
        table.add_row(
            f"{flip.at.astimezone(zone):%H:%M:%S}",
            flip.worker_id,
            flip.before,
            flip.after,
            flip.state,
            f"{flip.took_s:.1f} s",
            f"{flip.num_moved}",
            f"{flip.reason}; {flip.problem}" if flip.problem else flip.reason,
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        is_number = heading in ("took", "moved")
        table.add_column(heading, no_wrap=heading != "why", justify="right" if is_number else "left")
    return table


def duration(seconds: float) -> str:
    """As short as people say it."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
