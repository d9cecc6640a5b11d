"""What comes to routers that do not plan, told through the store to the one that does: it plans for all of it."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol, TypeVar

from router.observation import Answered, Arrival, Running
from router.observing import Observing
from router.store import Store

logger = logging.getLogger(__name__)

_TELL_S = 2.0
_READ_S = 0.5
_TTL_S = 10.0
_KIND = "traffic"
_ROWS = ("arrived", "answered", "running")
_MOST_NAME = 64  # characters of a class
_MOST_ROWS = 2000  # of each in a record; where there are more, these stand for all
_UNREADABLE = (KeyError, TypeError, AttributeError, OverflowError, RecursionError, ValueError)

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class TrafficRecord:
    """Since the record before, of one router; and what runs. All moments are told as seconds before `at`, which is in
    seconds since 1970."""

    number: int
    at: float
    num_waiting: int
    arrived: Sequence[Arrival]
    answered: Sequence[Answered]
    running: Sequence[Running]

    def to_bytes(self) -> bytes:
        rows = {name: [_row(each) for each in _thinned(getattr(self, name))] for name in _ROWS}
        counts = {f"num_{name}": len(getattr(self, name)) for name in _ROWS}
        record = {"number": self.number, "at": self.at, "num_waiting": self.num_waiting, **counts, **rows}
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> TrafficRecord:
        """Raises ValueError."""
        try:
            record: dict[str, Any] = json.loads(raw)
            arrived = [
                Arrival(float(at_s), int(prompt), int(most), _class(named))
                for at_s, prompt, most, *named in record["arrived"]
            ]
            answered = [
                Answered(
                    *(float(at_s), float(end_s), int(prompt), int(cached), int(output)),
                    *(float(ttft_s), _time(tpot_s), _class(named)),
                )
                for at_s, end_s, prompt, cached, output, ttft_s, tpot_s, *named in record["answered"]
            ]
            running = [
                Running(float(at_s), int(prompt), int(output), _class(named))
                for at_s, prompt, output, *named in record["running"]
            ]
            return cls(
                int(record["number"]),
                float(record["at"]),
                int(record["num_waiting"]),
                _repeated(arrived, int(record["num_arrived"])),
                _repeated(answered, int(record["num_answered"])),
                _repeated(running, int(record["num_running"])),
            )
        except _UNREADABLE as error:
            raise ValueError(f"not the traffic of a router: {error}") from error

    def on_clock(self, told_at: float) -> TrafficRecord:
        """With moments on a clock that was at `told_at` then; and the other way round."""
        return replace(
            self,
            arrived=[replace(each, at_s=told_at - each.at_s) for each in self.arrived],
            answered=[
                replace(each, arrived_at_s=told_at - each.arrived_at_s, ended_at_s=told_at - each.ended_at_s)
                for each in self.answered
            ],
            running=[replace(each, arrived_at_s=told_at - each.arrived_at_s) for each in self.running],
        )


class Waiting(Protocol):
    """`router.admission.Gate`."""

    @property
    def num_waiting(self) -> int: ...


class HasRunning(Protocol):
    """`router.history.History`."""

    def running(self) -> Sequence[Running]: ...


class Planned(Protocol):
    """`router.plan_sharing.PlanSharing`."""

    @property
    def plans_here(self) -> bool: ...


class TrafficSharing:
    """`exchange` it with the store again and again. `plan` says on which side this router is."""

    def __init__(
        self,
        store: Store,
        observing: Observing,
        gate: Waiting,
        history: HasRunning,
        plan: Planned,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._observing = observing
        self._gate = gate
        self._history = history
        self._plan = plan
        self._clock = clock
        self._now = now
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._looked_at: float | None = None
        self._read: dict[str, int] = {}  # the number of the last record, by router
        self.num_waiting_elsewhere = 0
        self.running_elsewhere: Sequence[Running] = ()

    async def exchange(self) -> None:
        """Raises StoreAway."""
        plans_here, now = self._plan.plans_here, self._clock()
        if self._looked_at is not None and now - self._looked_at < (_READ_S if plans_here else _TELL_S):
            return
        self._looked_at = now
        if plans_here:
            await self._read_others()
        else:
            await self._tell()

    async def leave(self) -> None:
        """Raises StoreAway."""
        await self._store.remove(_KIND, self._writer)

    async def _tell(self) -> None:
        arrived, answered = self._observing.take()
        self._number += 1
        record = TrafficRecord(
            self._number, self._now(), self._gate.num_waiting, arrived, answered, self._history.running()
        ).on_clock(self._clock())
        await self._store.put(_KIND, self._writer, record.to_bytes(), _TTL_S)

    async def _read_others(self) -> None:
        raw_records = await self._store.records(_KIND)
        self._read = {writer: number for writer, number in self._read.items() if writer in raw_records}
        num_waiting, all_running = 0, list[Running]()
        for writer, raw in raw_records.items():
            if writer == self._writer:
                continue
            try:
                told = TrafficRecord.from_bytes(raw)
            except ValueError as error:  # of another version of this program
                logger.debug("the traffic of router %s in the store is left alone: %s", writer, error)
                continue
            record = told.on_clock(self._clock() - max(0.0, self._now() - told.at))
            num_waiting += record.num_waiting
            all_running += record.running
            if record.number != self._read.get(writer):
                self._read[writer] = record.number
                self._observing.merge(record.arrived, record.answered)
        self.num_waiting_elsewhere, self.running_elsewhere = num_waiting, all_running


def _row(each: Arrival | Answered | Running) -> tuple[object, ...]:
    """Without the class where that is the default one: routers of versions before there were classes read it."""
    row = astuple(each)
    return row if each.slo_class else row[:-1]


def _class(named: Sequence[object]) -> str:
    """Of what a row ends with. Raises ValueError."""
    (name,) = named or ("",)
    if not isinstance(name, str) or len(name) > _MOST_NAME:
        raise ValueError(f"{str(name)[:80]!r} is no class")
    return sys.intern(name)


def _time(value: object) -> float | None:
    return None if value is None else float(str(value))


def _thinned(rows: Sequence[Row]) -> Sequence[Row]:
    return rows if len(rows) <= _MOST_ROWS else _repeated(rows, _MOST_ROWS)


def _repeated(rows: Sequence[Row], number: int) -> list[Row]:
    """As many as `number`, evenly out of `rows`. Raises ValueError."""
    if not 0 <= number <= 10_000_000 or (number and not rows):
        raise ValueError(f"{len(rows)} do not stand for {number}")
    return [rows[index * len(rows) // number] for index in range(number)]
