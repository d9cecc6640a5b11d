"""The workers at one moment, in such an order that the least loaded are at hand: nobody looks at all of them.

A line holds workers that are taken to be equally fast, the least loaded first; so the best of a line is found at its
head, however long it is. Kept up to date worker by worker by whoever knows them; `router.placement` only reads it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from router.candidate import Candidate, Role, WorkerId
from router.prediction import DOUBTED_TRANSFER_S, EXPECTED_OUTPUT_TOKENS, FRESH_S, Pace, Speed

_BEHIND_ALL_NAMES = "\U0010ffff"

Key: TypeAlias = tuple[Any, str]  # load, and name: no two are equal


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate with how fast it is taken to be: beside others in steps, of what was typical then."""

    worker: Candidate
    measured: Pace
    aged: Pace
    speed: Speed
    pace: Pace  # of this speed
    typical: Pace


class Lines:
    """Workers in lines by `speed`, and in each by `load`."""

    def __init__(self, speed: Callable[[Entry], Any], load: Callable[[Entry], Any]) -> None:
        self._speed = speed
        self._load = load
        self._lines: dict[Any, tuple[list[Key], dict[str, Entry]]] = {}
        self._places: dict[str, tuple[Any, Key]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, entry: Entry) -> None:
        speed, key = self._speed(entry), (self._load(entry), entry.worker.id.name)
        keys, entries = self._lines.setdefault(speed, ([], {}))
        insort(keys, key)
        entries[entry.worker.id.name] = entry
        self._places[entry.worker.id.name] = speed, key

    def remove(self, name: str) -> None:
        speed, key = self._places.pop(name)
        keys, entries = self._lines[speed]
        del keys[bisect_left(keys, key)], entries[name]
        if not keys:
            del self._lines[speed]

    def walks(self, rng: random.Random) -> Iterator[Iterator[Entry]]:
        """Each line from its head on."""
        for keys, entries in self._lines.values():
            yield _walk(keys, entries, rng)


def _walk(keys: list[Key], entries: dict[str, Entry], rng: random.Random) -> Iterator[Entry]:
    """Of those that are equally loaded any may come first, and the others follow it."""
    start = 0
    while start < len(keys):
        stop = bisect_left(keys, (keys[start][0], _BEHIND_ALL_NAMES), start)
        first = start + int(rng.random() * (stop - start))
        for index in (*range(first, stop), *range(start, first)):
            yield entries[keys[index][1]]
        start = stop


def _queued(entry: Entry) -> int:
    return entry.worker.num_queued_tokens


def _decoding(entry: Entry) -> tuple[int, int]:
    return entry.worker.num_active, -entry.worker.num_free_blocks


def _all_work(entry: Entry) -> float:
    """In seconds, if they are known, and else in tokens to prefill."""
    worker, pace = entry.worker, entry.pace
    if pace.token_s is None or pace.sequence_s is None:
        return worker.num_queued_tokens + EXPECTED_OUTPUT_TOKENS * worker.num_active
    return pace.token_s * worker.num_queued_tokens + EXPECTED_OUTPUT_TOKENS * pace.sequence_s * worker.num_active


class Pools:
    """Workers with one KV layout that are ready: those that prefill only, that decode only, and that do both."""

    def __init__(self) -> None:
        self.prefill = Lines(lambda entry: (entry.speed.token, entry.speed.link), _queued)
        self.decode = Lines(lambda entry: entry.speed.sequence, _decoding)
        self.both = Lines(lambda entry: (entry.speed.token, entry.speed.sequence), _all_work)
        self.both_as_decode = Lines(lambda entry: entry.speed.sequence, _decoding)
        self.entries: dict[str, Entry] = {}

    def lines_of(self, role: Role) -> tuple[Lines, ...]:
        if role is Role.BOTH:
            return (self.both, self.both_as_decode)
        return (self.prefill,) if role is Role.PREFILL else (self.decode,)


class _Median:
    """Of values that come and go: of workers whose role it is, and of these the fresh ones, if there are any."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._all: list[float] = []
        self._fresh: list[float] = []
        self._others: list[float] = []

    def add(self, value: float | None, is_fresh: bool, role: Role) -> None:
        if value is not None:
            for values in self._places(is_fresh, role):
                insort(values, value)

    def remove(self, value: float | None, is_fresh: bool, role: Role) -> None:
        if value is not None:
            for values in self._places(is_fresh, role):
                del values[bisect_left(values, value)]

    @property
    def value(self) -> float | None:
        """Between two in the middle, as many times more than the one as it is less than the other."""
        values = self._fresh or self._all or self._others
        if not values:
            return None
        return math.sqrt(values[(len(values) - 1) // 2] * values[len(values) // 2])

    def _places(self, is_fresh: bool, role: Role) -> tuple[list[float], ...]:
        if self._role not in role:
            return (self._others,)
        return (self._all, self._fresh) if is_fresh else (self._all,)


class Fleet:
    """`now` is the moment that the candidates' times are to be compared with. `typical` is what one is taken for that
    has not measured itself (lately): the median of those whose role it is."""

    def __init__(self, candidates: Iterable[Candidate] = (), now: float = 0.0) -> None:
        self.now = now
        self.pools: dict[str, Pools] = {}  # by layout
        self._candidates: dict[str, Candidate] = {}
        self._token_s, self._sequence_s = _Median(Role.PREFILL), _Median(Role.DECODE)
        self._byte_s = _Median(Role.PREFILL)
        self.typical = Pace(None, None)
        for candidate in candidates:
            self.put(candidate)
        for candidate in list(self):  # once more, now that it is known what is typical
            self.remove(candidate.id.name)
            self.put(candidate)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates.values())

    def __len__(self) -> int:
        return len(self._candidates)

    def worker(self, worker_id: WorkerId) -> Candidate | None:
        """Whether or not it is ready; None if another process has its name."""
        candidate = self._candidates.get(worker_id.name)
        return candidate if candidate is not None and candidate.id == worker_id else None

    def put(self, candidate: Candidate) -> None:
        """In place of what was known of a worker of this name."""
        name = candidate.id.name
        before = self._take_out(name)
        self._candidates[name] = candidate
        if candidate.is_ready:
            entry = self._entry(candidate, before)
            pools = self.pools.get(candidate.fingerprint)
            if pools is None:
                pools = self.pools[candidate.fingerprint] = Pools()
            pools.entries[name] = entry
            for lines in pools.lines_of(candidate.role):
                lines.add(entry)
        elif before is not None:
            self._uncount(before)

    def remove(self, name: str) -> None:
        if (entry := self._take_out(name)) is not None:
            self._uncount(entry)

    def _take_out(self, name: str) -> Entry | None:
        candidate = self._candidates.pop(name, None)
        if candidate is None or not candidate.is_ready:
            return None
        pools = self.pools[candidate.fingerprint]
        for lines in pools.lines_of(candidate.role):
            lines.remove(name)
        entry = pools.entries.pop(name)
        if not pools.entries:
            del self.pools[candidate.fingerprint]
        return entry

    def _entry(self, candidate: Candidate, before: Entry | None) -> Entry:
        is_as_before = before is not None and _as_measured(before.worker) == _as_measured(candidate)
        if before is not None and is_as_before:  # loads change much more often
            if before.typical == self.typical:
                return Entry(candidate, before.measured, before.aged, before.speed, before.pace, self.typical)
            measured = before.measured
        else:
            if before is not None:
                self._uncount(before)
            measured = Pace.of(candidate)
            self._count(measured, candidate)
        aged = measured.aged(candidate, self.typical)
        speed = Speed.of(aged, self.typical)
        return Entry(candidate, measured, aged, speed, speed.pace(self.typical), self.typical)

    def _count(self, measured: Pace, worker: Candidate) -> None:
        for median, value, is_fresh in self._values(measured, worker):
            median.add(value, is_fresh, worker.role)
        self._find_typical()

    def _uncount(self, entry: Entry) -> None:
        for median, value, is_fresh in self._values(entry.measured, entry.worker):
            median.remove(value, is_fresh, entry.worker.role)
        self._find_typical()

    def _values(self, measured: Pace, worker: Candidate) -> Iterator[tuple[_Median, float | None, bool]]:
        yield self._token_s, measured.token_s, worker.prefill_age_s <= FRESH_S
        yield self._sequence_s, measured.sequence_s, worker.decode_age_s <= FRESH_S
        is_sure = worker.transfer_s >= DOUBTED_TRANSFER_S
        yield self._byte_s, measured.byte_s if is_sure else None, True

    def _find_typical(self) -> None:
        self.typical = Pace(self._token_s.value, self._sequence_s.value, self._byte_s.value)


def _as_measured(worker: Candidate) -> tuple[object, ...]:
    speeds = worker.prefill_tokens_per_s, worker.decode_step_s, worker.decode_batch, worker.tokens_per_step
    ages = worker.prefill_age_s, worker.decode_age_s, worker.transfer_bytes, worker.transfer_s
    return (*speeds, *ages, worker.role, worker.fingerprint)
