"""The sums that are kept of what was sent to each worker, against a recount of a log, after any sequence of events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.candidate import Candidate, Role
from router.dispatch import Dispatch
from router.fleet import Entry, Fleet, Lines
from router.placement import Placement
from router.worker import Worker, WorkerLoad, WorkerState
from router.workers import WorkerTable
from tests.router.test_workers import Clock, candidate, profile

SETTLE_S = 0.1  # as long as a report may have been under way
NAMES = ("p0", "p1", "d0", "d1", "b0")
REPORTED = WorkerLoad(WorkerState.READY, queued_prefill_tokens=7, num_running=1, num_free_blocks=1000)

names = st.sampled_from(NAMES)
picks = st.integers(0, 10**6)


@dataclass
class Logged:
    """One dispatch as the test remembers it: to which process of which worker, and what became of it."""

    dispatch: Dispatch
    at: float
    num_tokens: int
    num_blocks: int
    prefill: tuple[str, int] | None
    decode: tuple[str, int] | None
    is_prefilled: bool = False
    has_ended: bool = False


class Events(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = WorkerTable("t1", self.clock)
        self.log: list[Logged] = []
        self.process = dict.fromkeys(NAMES, 0)
        self.heard_at: dict[str, float] = {}
        self.workers: dict[str, Worker] = {}
        for name in NAMES:
            self._register(name)

    def _register(self, name: str) -> None:
        role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
        self.workers[name] = self.table.register(profile(name, role, f"e{self.process[name]}"), REPORTED)
        self.heard_at[name] = self.clock.now

    def _process_of(self, name: str | None) -> tuple[str, int] | None:
        return None if name is None else (name, self.process[name])

    @rule(prefill=st.none() | names, decode=st.none() | names, num_tokens=st.integers(0, 99), blocks=st.integers(0, 9))
    def dispatch(self, prefill: str | None, decode: str | None, num_tokens: int, blocks: int) -> None:
        if prefill == decode:
            return
        first, then = [None if name is None else candidate(self.table, name) for name in (prefill, decode)]
        placement = Placement(first, then, ttft_s=1.0, tpot_s=0.25 * num_tokens)
        dispatch = self.table.dispatch(placement, num_tokens, blocks, at_most=(5, blocks + 2))
        on = self._process_of(prefill), self._process_of(decode)
        self.log.append(Logged(dispatch, self.clock.now, num_tokens, blocks, prefill=on[0], decode=on[1]))

    @precondition(lambda self: self.log)
    @rule(pick=picks)
    def prefilled(self, pick: int) -> None:
        logged = self.log[pick % len(self.log)]
        logged.dispatch.prefilled()
        logged.is_prefilled = True

    @precondition(lambda self: self.log)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        logged = self.log[pick % len(self.log)]
        logged.dispatch.end()
        logged.has_ended = True

    @rule(elapsed_s=st.sampled_from([0.03, 0.1, 0.5, 6.0]))
    def wait(self, elapsed_s: float) -> None:
        self.clock.now += elapsed_s

    @rule(name=names, rate=st.sampled_from([0.0, 500.0, 900.0]), step_s=st.sampled_from([0.0, 0.02]))
    def report(self, name: str, rate: float, step_s: float) -> None:
        self.table.report(self.workers[name], replace(REPORTED, prefill_tokens_per_s=rate, decode_step_s=step_s))
        if self.workers[name].load.state is not WorkerState.LOST:
            self.heard_at[name] = self.clock.now

    @rule(name=names)
    def lost(self, name: str) -> None:
        self.table.lost(self.workers[name])
        self.heard_at[name] = self.clock.now

    @rule(name=names, role=st.sampled_from(Role))
    def set_role(self, name: str, role: Role) -> None:
        if self.workers[name].load.state is not WorkerState.LOST:
            self.table.set_role(name, role)

    @rule(name=names)
    def unreachable(self, name: str) -> None:
        self.table.unreachable(self.workers[name].profile.id)

    @rule(name=names, is_same_process=st.booleans())
    def register(self, name: str, is_same_process: bool) -> None:
        self.process[name] += not is_same_process
        self._register(name)

    @invariant()
    def fleet_is_as_if_made_anew(self) -> None:
        """It is kept up to date worker by worker, and only where something changed. How fast one is beside the others
        is as of its last report."""
        fleet = self.table.snapshot()
        anew = Fleet([each.candidate(self.table._is_ready(each), self.clock.now) for each in self.table.workers()])
        assert _as_of_no_time(fleet) == _as_of_no_time(anew)
        assert fleet.typical == anew.typical
        for layout, pools in fleet.pools.items():
            for entry in pools.entries.values():
                found = anew.pools[layout].entries[entry.worker.id.name]
                assert (entry.worker.id, entry.measured) == (found.worker.id, found.measured)
        assert _lines(fleet) == _expected_lines(fleet)

    @invariant()
    def sums_are_a_recount(self) -> None:
        for name in NAMES:
            here = (name, self.process[name])
            open_ = [each for each in self.log if not each.has_ended]
            coming = [each for each in open_ if not each.is_prefilled]
            unreported = [
                each.num_tokens
                for each in coming
                if here == (each.prefill or each.decode) and each.at > self.heard_at[name] - SETTLE_S
            ]
            load, found = self.workers[name].load, candidate(self.table, name)
            assert len(self.workers[name].dispatches) == sum(here in (each.prefill, each.decode) for each in open_)
            in_hand = sum(each.decode == here or (each.prefill == here and not each.is_prefilled) for each in open_)
            assert self.workers[name].dispatches.num_in_hand == in_hand
            assert found.num_queued_tokens == load.queued_prefill_tokens + sum(unreported)
            assert found.num_active == max(load.num_running, sum(each.decode == here for each in open_))
            prompts = [each for each in coming if here == (each.prefill or each.decode)]
            assert found.prompts == tuple(
                sorted((500.0 * each.at + each.num_tokens, each.num_tokens) for each in prompts)
            )
            assert found.num_coming == sum(each.decode == here for each in coming)
            ends = sorted(
                (each.at + 1.0 + each.num_tokens, each.num_blocks + 2) for each in open_ if each.decode == here
            )
            assert self.workers[name].dispatches.releases(0.0) == tuple(ends[:8])
            later = [end for end in ends if end[0] >= self.clock.now]
            assert self.workers[name].dispatches.releases(self.clock.now) == tuple(later[:8])
            taken = sum(each.num_blocks for each in coming if each.decode == here)
            assert found.num_free_blocks == load.num_free_blocks - taken


def _as_of_no_time(fleet: Fleet) -> dict[str, Candidate]:
    """What is over by now need not have been taken out."""
    return {each.id.name: replace(each, releases=()) for each in fleet}


def _expected_lines(fleet: Fleet) -> dict[str, list[dict[Any, list[Any]]]]:
    """Sorted from nothing, of each role by its speeds."""
    return {
        layout: [
            _sorted_lines([each for each in pools.entries.values() if lines in pools.lines_of(each.worker.role)], lines)
            for lines in (pools.prefill, pools.decode, pools.both, pools.both_as_decode)
        ]
        for layout, pools in fleet.pools.items()
    }


def _sorted_lines(entries: list[Entry], lines: Lines) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for entry in entries:
        found.setdefault(lines._speed(entry), []).append((lines._load(entry), entry.worker.id.name))
    return {speed: sorted(keys) for speed, keys in found.items()}


def _lines(fleet: Fleet) -> dict[str, list[dict[Any, list[Any]]]]:
    """The names of each line in order, and what they are in order by."""
    return {
        layout: [
            {speed: keys for speed, (keys, _) in lines._lines.items()}
            for lines in (pools.prefill, pools.decode, pools.both, pools.both_as_decode)
        ]
        for layout, pools in fleet.pools.items()
    }


Events.TestCase.settings = settings(max_examples=60, deadline=None)
test_sums_are_a_recount = Events.TestCase
