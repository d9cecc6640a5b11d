"""The workers at one moment, in such an order that the least loaded are at hand: nobody looks at all of them.

A line holds workers that are equally fast, the least loaded first; so the best of a line is found at its head, however
long it is. Kept up to date worker by worker by whoever knows them; `router.placement` only reads it.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from router.candidate import Candidate, Role
from router.prediction import EXPECTED_OUTPUT_TOKENS, Pace

_BEHIND_ALL_NAMES = "\U0010ffff"

Key: TypeAlias = tuple[Any, str]  # load, and name: no two are equal


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate with how fast it is taken to be."""

    worker: Candidate
    measured: Pace
    pace: Pace  # the same, rounded


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
        self.prefill = Lines(lambda entry: entry.pace.token_s, _queued)
        self.decode = Lines(lambda entry: entry.pace.sequence_s, _decoding)
        self.both = Lines(lambda entry: entry.pace, _all_work)
        self.both_as_decode = Lines(lambda entry: entry.pace.sequence_s, _decoding)
        self.entries: dict[str, Entry] = {}

    def lines_of(self, role: Role) -> tuple[Lines, ...]:
        if role is Role.BOTH:
            return (self.both, self.both_as_decode)
        return (self.prefill,) if role is Role.PREFILL else (self.decode,)


class _Mean:
    """Of values that come and go."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._num = 0

    def count(self, value: float | None, times: int) -> None:
        if value is not None:
            self._num += times
            self._sum = self._sum + times * value if self._num else 0.0

    @property
    def value(self) -> float | None:
        return self._sum / self._num if self._num else None


class Fleet:
    """`now` is the moment that the candidates' times are to be compared with."""

    def __init__(self, candidates: Iterable[Candidate] = (), now: float = 0.0) -> None:
        self.now = now
        self.pools: dict[str, Pools] = {}  # by layout
        self._candidates: dict[str, Candidate] = {}
        self._token_s, self._sequence_s = _Mean(), _Mean()
        for candidate in candidates:
            self.put(candidate)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates.values())

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def typical(self) -> Pace:
        """The mean of those who have measured themselves: what one is taken for that has not."""
        return Pace(self._token_s.value, self._sequence_s.value)

    def put(self, candidate: Candidate) -> None:
        """In place of what was known of a worker of this name."""
        name = candidate.id.name
        before = self.remove(name)
        self._candidates[name] = candidate
        if candidate.is_ready:
            pools = self.pools.setdefault(candidate.fingerprint, Pools())
            entry = pools.entries[name] = _entry(candidate, before)
            for lines in pools.lines_of(candidate.role):
                lines.add(entry)
            self._count(entry.measured, 1)

    def remove(self, name: str) -> Entry | None:
        """Returns what it was, if it was ready."""
        candidate = self._candidates.pop(name, None)
        if candidate is None or not candidate.is_ready:
            return None
        pools = self.pools[candidate.fingerprint]
        for lines in pools.lines_of(candidate.role):
            lines.remove(name)
        entry = pools.entries.pop(name)
        self._count(entry.measured, -1)
        if not pools.entries:
            del self.pools[candidate.fingerprint]
        return entry

    def _count(self, pace: Pace, times: int) -> None:
        self._token_s.count(pace.token_s, times)
        self._sequence_s.count(pace.sequence_s, times)


def _entry(candidate: Candidate, before: Entry | None) -> Entry:
    """Loads change much more often than speeds."""
    if before is not None and _speeds(before.worker) == _speeds(candidate):
        return Entry(candidate, before.measured, before.pace)
    measured = Pace.of(candidate)
    return Entry(candidate, measured, measured.rounded())


def _speeds(worker: Candidate) -> tuple[float, ...]:
    return worker.prefill_tokens_per_s, worker.decode_step_s, worker.decode_batch, worker.tokens_per_step
