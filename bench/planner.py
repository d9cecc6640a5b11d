"""How much more the planner gets out of the same workers than others would: under loads whose needs change, simulated.

`python -m bench.planner [--quick] [--traces DIR]`. Goodput is requests that met both SLOs, by worker and second: of our
planner, of every fixed ratio, of the best changing ratio that one who knows the trace finds, of colocated workers and
of the rules of two others. Prints a table for people and one line of JSON last. All have the same placement.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.planner_rules import FlipRule, ThroughputPlanner
from bench.planner_traces import Load, recorded_loads, synthetic_loads
from model.kv_layout import KVLayout
from router.candidate import Role
from router.config import AdmissionPolicy, LimitPolicy, PlacementPolicy, SloPolicy
from router.observation import Observation
from router.outcomes import Outcome
from router.planner import Planner, PlanPolicy
from router.scenario import Delays, RoleChange, Scenario, WorkerSpec
from router.scenario import Planner as Asked
from router.simulator import simulate
from router.step_costs import StepCosts

# A worker prefills about five times as many tokens a second as it decodes within 50 ms a token: as DeepSeek's prefill
# and decode nodes do (73,700 and 14,800), at a twentieth of their speed.
COSTS = StepCosts(0.015, 2.6e-4, 8e-10, 0.022, 6.5e-4, 1.2e-7)
LAYOUT = KVLayout("", "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128)
STEP_TOKENS, RUNNING, BLOCKS = 1024, 128, 16_000
MAX_TOKENS = 2000  # that requests ask for: how long answers become is not known before
PLAN_EVERY_S, RULE_EVERY_S, THROUGHPUT_EVERY_S = 4.0, 0.25, 30.0
LEAD_S = 3.0  # one who knows what comes changes roles a little earlier
_TABLE_WIDTH = 116
FLIP_COST = 12.0  # requests: what one who knows what comes takes a change to cost


@dataclass(frozen=True, slots=True)
class Fleet:
    num_workers: int
    phase_s: float
    window_s: float  # of the best changing ratio
    traces: Path | None
    seed: int = 1

    def loads(self) -> list[Load]:
        scale = self.num_workers / 8
        if self.traces is not None:
            return recorded_loads(self.traces, self.phase_s, scale)
        return synthetic_loads(self.phase_s, scale)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: of this load, from this number of prefill workers (0: all do both), under `rule`."""

    load: int
    num_prefill: int
    rule: str = "fixed"  # planner, throughput, flips
    changes: tuple[RoleChange, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """`good`: the arrivals of requests that met both SLOs. `num_flips` by the rule."""

    run: Run
    goodput: float
    attainment: float
    num_flips: int
    duration_s: float
    good: Sequence[float] = field(repr=False)


def play(fleet: Fleet, run: Run) -> Result:
    load = fleet.loads()[run.load]
    slo, num_flips, asked = load.slo, 0, _rule(run.rule, load)

    def counted(observation: Observation) -> dict[str, Role]:
        nonlocal num_flips
        assert asked is not None
        roles = dict(asked[0](observation))
        num_flips += len(roles) if observation.arrived else 0  # behind the end of a trace nothing is to be planned for
        return roles

    good: list[float] = []

    def ended(outcome: Outcome) -> None:
        is_whole = not outcome.error and outcome.ttft_s is not None
        if is_whole and (outcome.ttft_s or 0.0) <= slo.ttft_s and (outcome.tpot_s or 0.0) <= slo.tpot_s:
            good.append(outcome.at_s)

    scenario = Scenario(
        [_worker(index, run.num_prefill) for index in range(fleet.num_workers)],
        LAYOUT,
        Delays(message_s=0.0005, hand_over_s=0.002, report_s=0.5),
        role_changes=run.changes,
        admission=AdmissionPolicy(max_queue_s=2 * slo.ttft_s),
        placement=PlacementPolicy(LimitPolicy(max_backlog_s=slo.ttft_s), slo=SloPolicy(slo.ttft_s, slo.tpot_s)),
        planner=None if asked is None else counted,
        plan_every_s=1.0 if asked is None else asked[1],
        max_tokens=MAX_TOKENS,
        seed=fleet.seed,
    )
    totals = simulate(scenario, load.requests(fleet.seed), ended)
    return Result(run, totals.goodput(slo), totals.attainment(slo), num_flips, totals.duration_s, good)


def _worker(index: int, num_prefill: int) -> WorkerSpec:
    role = Role.BOTH if not num_prefill else Role.PREFILL if index < num_prefill else Role.DECODE
    return WorkerSpec(f"w{index}", role, COSTS, BLOCKS, STEP_TOKENS, RUNNING, link_bytes_per_s=12e9)


def _rule(name: str, load: Load) -> tuple[Asked, float] | None:
    match name:
        case "planner":
            policy = PlanPolicy(load.slo, most_wait_s=2 * load.slo.ttft_s)
            planner = Planner(policy)
            return lambda observation: planner.propose(observation).roles, PLAN_EVERY_S
        case "throughput":
            return ThroughputPlanner(COSTS, load.slo, STEP_TOKENS, 16 * BLOCKS, RUNNING), THROUGHPUT_EVERY_S
        case "flips":
            return FlipRule(COSTS, load.slo, STEP_TOKENS), RULE_EVERY_S
    return None


def best_changes(fixed: Sequence[Result], window_s: float, flip_cost: float) -> Run:
    """The ratio of each window with which most of its requests were good, less what changing costs: the best path
    through the windows (Viterbi), played as role changes."""
    num_windows = int(max(result.duration_s for result in fixed) / window_s) + 1
    ratios = [result.run.num_prefill for result in fixed]
    counts = [_by_window(result.good, window_s, num_windows) for result in fixed]
    worth, came_from = [float(count[0]) for count in counts], []
    for window in range(1, num_windows):
        before = [
            max(range(len(ratios)), key=lambda j: worth[j] - flip_cost * abs(ratios[j] - ratio)) for ratio in ratios
        ]
        came_from.append(before)
        worth = [worth[j] - flip_cost * abs(ratios[j] - ratios[i]) + counts[i][window] for i, j in enumerate(before)]
    path = [max(range(len(ratios)), key=worth.__getitem__)]
    for before in reversed(came_from):
        path.append(before[path[-1]])
    path.reverse()
    return _as_changes(fixed[0].run.load, [ratios[index] for index in path], window_s)


def _as_changes(load: int, ratios: Sequence[int], window_s: float) -> Run:
    changes: list[RoleChange] = []
    for window, (before, after) in enumerate(pairwise(ratios), start=1):
        role = Role.PREFILL if after > before else Role.DECODE
        names = range(min(before, after), max(before, after))
        changes += [RoleChange(max(0.0, window * window_s - LEAD_S), f"w{index}", role) for index in names]
    return Run(load, ratios[0], "clairvoyant", tuple(changes))


def _by_window(arrivals: Sequence[float], window_s: float, num_windows: int) -> list[int]:
    counts = [0] * num_windows
    for at_s in arrivals:
        counts[min(num_windows - 1, int(at_s / window_s))] += 1
    return counts


@dataclass(frozen=True, slots=True)
class Row:
    """Of one load: goodput of each, requests by worker and second."""

    load: str
    planner: float
    best_fixed: float
    best_ratio: str
    clairvoyant: float
    colocated: float
    throughput_planner: float
    flip_rule: float
    attainment: float
    num_flips: int
    minutes: float


def compare(fleet: Fleet, tell: Callable[[], None]) -> list[Row]:
    loads = range(len(fleet.loads()))
    ratios, half = range(1, fleet.num_workers), fleet.num_workers // 2
    with multiprocessing.get_context("spawn").Pool(min(2, multiprocessing.cpu_count())) as pool:

        def played(runs: Sequence[Run]) -> list[Result]:
            waiting = [pool.apply_async(play, (fleet, run), callback=lambda _: tell()) for run in runs]
            return [each.get() for each in waiting]

        fixed = [Run(load, ratio) for load in loads for ratio in ratios]
        others = [Run(load, 0) for load in loads]
        others += [Run(load, half, rule) for load in loads for rule in ("planner", "throughput", "flips")]
        results = played([*others, *fixed])
        by_load = [[r for r in results if r.run.load == load] for load in loads]
        paths = [
            best_changes([r for r in found if r.run.rule == "fixed" and r.run.num_prefill], window_s, FLIP_COST)
            for found in by_load
            for window_s in (fleet.window_s, 2 * fleet.window_s)
        ]
        clairvoyant = played(paths)
    names = [load.name for load in fleet.loads()]
    return [_row(names[load], by_load[load], [r for r in clairvoyant if r.run.load == load]) for load in loads]


def _row(name: str, found: Sequence[Result], clairvoyant: Sequence[Result]) -> Row:
    by_rule = {result.run.rule: result for result in found}
    colocated = next(result for result in found if result.run.rule == "fixed" and not result.run.num_prefill)
    fixed = [result for result in found if result.run.rule == "fixed" and result.run.num_prefill]
    best = max(fixed, key=lambda result: result.goodput)
    planner = by_rule["planner"]
    return Row(
        load=name,
        planner=planner.goodput,
        best_fixed=best.goodput,
        best_ratio=f"{best.run.num_prefill}:{len(fixed) + 1 - best.run.num_prefill}",
        clairvoyant=max(best.goodput, *(result.goodput for result in clairvoyant)),
        colocated=colocated.goodput,
        throughput_planner=by_rule["throughput"].goodput,
        flip_rule=by_rule["flips"].goodput,
        attainment=planner.attainment,
        num_flips=planner.num_flips,
        minutes=planner.duration_s / 60,
    )


def table_of(rows: Sequence[Row]) -> Table:
    columns = (
        "load",
        "planner",
        "of clairvoyant",
        "best fixed",
        "",
        "colocated",
        "throughput",
        "flip rule",
        "in SLO",
        "flips",
    )
    table = Table(title="requests within both SLOs, by worker and second", box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        figures = (row.best_fixed, row.colocated, row.throughput_planner, row.flip_rule)
        fixed, colocated, throughput, flips = (f"{figure:.3f}" for figure in figures)
        table.add_row(
            *(row.load, f"{row.planner:.3f}", f"{row.planner / row.clairvoyant:.1%}", fixed, row.best_ratio, colocated),
            *(throughput, flips, f"{row.attainment:.1%}", f"{row.num_flips} in {row.minutes:.0f} min"),
        )
    return table


def _ratio(rows: Sequence[Row], other: Callable[[Row], float]) -> float:
    """Of our goodput over all loads to another's."""
    return round(fmean(row.planner for row in rows) / fmean(other(row) for row in rows), 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planner", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="six workers and short phases")
    parser.add_argument("--traces", type=Path, help="a folder with azure/ and mooncake/; synthetic traces if not given")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    console = Console(width=max(Console().width, _TABLE_WIDTH))
    if arguments.quick:
        fleet = Fleet(6, 70.0, 14.0, arguments.traces, arguments.seed)
    else:
        fleet = Fleet(8, 600.0, 30.0, arguments.traces, arguments.seed)
    began_at = time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=len(fleet.loads()) * (fleet.num_workers + 5))
        rows = compare(fleet, lambda: progress.advance(task))
    console.print(table_of(rows))
    constant = next(row for row in rows if row.load == "constant")
    report = {
        "bench": "planner",
        "vs_clairvoyant_mean": round(fmean(row.planner / row.clairvoyant for row in rows), 4),
        "vs_best_fixed_min": round(min(row.planner / row.best_fixed for row in rows), 4),
        "flips_constant_load": round(constant.num_flips / max(constant.minutes / 10, 1.0), 2),
        "vs_throughput_planner": _ratio(rows, lambda row: row.throughput_planner),
        "vs_flip_rule": _ratio(rows, lambda row: row.flip_rule),
        "vs_colocated": _ratio(rows, lambda row: row.colocated),
        "loads": [asdict(row) for row in rows],
        "took_s": round(time.monotonic() - began_at, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
