"""The course of bench.goodput: what sides take unloaded, the search for each one's highest rate, and all at one rate.
Sides take turns throughout, and the turns change their order, so that a noisy machine is as noisy to each.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from bench.goodput_figures import Answer, Played, RateSearch, Slo, arrivals, joined
from bench.goodput_requests import MEAN_OUTPUT, SHORTEST_OUTPUT, Requests
from bench.goodput_sides import Side, play

_DEADLINE_S = 60.0  # of a request that is alone
TTFT_FACTOR, TPOT_FACTOR = 3.0, 2.5  # of what is unloaded


class NothingMeasured(Exception):
    """Requests fail even one by one; the message says how."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds` requests come for in each run. `search_s`: but for the first, the search begins no round that would not
    end by then."""

    seconds: float
    num_unloaded: int  # requests to each side
    num_compared: int  # runs of each side at the common rate
    tolerance: float
    search_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Medians over both sides. `ttft_s` of the longest prompts."""

    ttft_s: float
    tpot_s: float

    def slo(self, ttft_s: float | None, tpot_s: float | None) -> Slo:
        """Unless something else is asked for."""
        return Slo(ttft_s or TTFT_FACTOR * self.ttft_s, tpot_s or TPOT_FACTOR * self.tpot_s)

    def first_rate(self, mean_length: float, longest: int) -> float:
        """Half of what two workers could do one by one: the search begins there."""
        return 1.0 / (self.ttft_s * mean_length / longest + MEAN_OUTPUT * self.tpot_s)


class Contest:
    """`began_at`: from when on `plan.search_s` is counted."""

    def __init__(self, plan: Plan, requests: Requests, seed: int, began_at: float, console: Console) -> None:
        self._plan, self._requests, self._seed = plan, requests, seed
        self._began_at = began_at
        self._console = console
        self._num_runs = 0
        self._num_turns = 0

    async def unloaded(self, sides: Sequence[Side]) -> Unloaded:
        """Raises NothingMeasured."""
        ttfts_s, tpots_s = list[float](), list[float]()
        for number in range(self._plan.num_unloaded + 1):
            for side in self._in_turn(sides):
                answer = await self._alone(side, number)
                if number:  # the first connects, and finds cold caches
                    ttfts_s.append(answer.ttft_s)
                    tpots_s.append(answer.tpot_s)
        return Unloaded(statistics.median(ttfts_s), statistics.median(tpots_s))

    async def search(self, sides: Sequence[Side], slo: Slo, first_per_s: float) -> dict[str, float]:
        """The highest rate of each side by name; 0 where none was kept."""
        searches = {side.name: RateSearch(first_per_s, self._plan.tolerance) for side in sides}
        round_s = 0.0
        while going_on := [side for side in sides if not searches[side.name].is_done]:
            round_began_at = time.monotonic()
            if round_s and round_began_at + round_s > self._began_at + self._plan.search_s:
                self._tell("the time is over before the search is")
                break
            for side in self._in_turn(going_on):
                search = searches[side.name]
                played = await self._play(side, search.next_per_s, slo, self._seed, to_the_end=False)
                search.tell(played.per_s, is_kept=played.is_kept(slo))
            round_s = time.monotonic() - round_began_at
        return {name: search.highest for name, search in searches.items()}

    async def compare(self, sides: Sequence[Side], slo: Slo, per_s: float) -> dict[str, Played]:
        """Every side at one rate, to the end, with requests and arrivals that the search did not have."""
        runs: Mapping[str, list[Played]] = {side.name: [] for side in sides}
        for number in range(self._plan.num_compared):
            for side in self._in_turn(sides):
                seed = self._seed + 1 + number
                runs[side.name].append(await self._play(side, per_s, slo, seed, to_the_end=True))
        return {name: joined(of_side) for name, of_side in runs.items()}

    async def _alone(self, side: Side, number: int) -> Answer:
        self._num_runs += 1
        request = self._requests.make(self._num_runs, number, self._requests.longest)
        await side.get_ready()
        answer = await side.ask(replace(request, num_output_tokens=SHORTEST_OUTPUT), _DEADLINE_S)
        await side.leave()
        if answer.failure:
            raise NothingMeasured(f"{side.name}: a request that was alone failed: {answer.failure}")
        return answer

    async def _play(self, side: Side, per_s: float, slo: Slo, seed: int, *, to_the_end: bool) -> Played:
        self._num_runs += 1  # of both sides: they share the workers, and so the prefix caches
        moments = arrivals(seed, per_s, self._plan.seconds)
        requests = self._requests.of_run(self._num_runs, len(moments))
        played = await play(side, requests, moments, per_s, slo, to_the_end=to_the_end)
        verdict = "kept" if played.is_kept(slo) else "not kept"
        if len(played.answers) < played.num_requests:
            verdict += f" after {len(played.answers)} answers"
        self._tell(f"{side.name:<16}{per_s:7.3f}/s  {played.num_kept(slo)} of {played.num_requests} in time: {verdict}")
        return played

    def _in_turn(self, sides: Sequence[Side]) -> list[Side]:
        self._num_turns += 1
        return list(sides) if self._num_turns % 2 else list(reversed(sides))

    def _tell(self, what: str) -> None:
        self._console.print(f"  {time.monotonic() - self._began_at:4.0f} s  {what}", style="dim", highlight=False)


def common_rate(highest: Sequence[float], first_per_s: float) -> float:
    """The lowest of the highest rates, of those sides that have one; where none has, the one that was tried first."""
    return min(filter(None, highest), default=first_per_s)
