"""What comes to routers that do not plan, told through the store to the one that does: it plans for all of it."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from router.observation import Answered, Arrival
from router.observing import Observing
from router.store import Store

logger = logging.getLogger(__name__)

_TELL_S = 2.0
_READ_S = 0.5
_TTL_S = 10.0
_KIND = "traffic"
_MOST_ROWS = 2000  # of each in a record; where there are more, these stand for all
_UNREADABLE = (KeyError, TypeError, AttributeError, OverflowError, RecursionError, ValueError)

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class TrafficRecord:
    """Since the record before, of one router. Arrivals are told with their age at `at`, in seconds since 1970."""

    number: int
    at: float
    num_waiting: int
    arrived: Sequence[Arrival]  # `at_s` is that age
    answered: Sequence[Answered]

    def to_bytes(self) -> bytes:
        arrived, answered = _thinned(self.arrived), _thinned(self.answered)
        record = {
            "number": self.number,
            "at": self.at,
            "num_waiting": self.num_waiting,
            "num_arrived": len(self.arrived),
            "arrived": [[round(each.at_s, 4), each.num_prompt_tokens, each.max_tokens] for each in arrived],
            "num_answered": len(self.answered),
            "answered": [
                [each.num_prompt_tokens, each.num_cached_tokens, each.num_output_tokens, each.ttft_s, each.tpot_s]
                for each in answered
            ],
        }
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> TrafficRecord:
        """Raises ValueError."""
        try:
            record: dict[str, Any] = json.loads(raw)
            arrived = [Arrival(float(age_s), int(prompt), int(most)) for age_s, prompt, most in record["arrived"]]
            answered = [
                Answered(
                    int(prompt), int(cached), int(output), float(ttft_s), None if tpot_s is None else float(tpot_s)
                )
                for prompt, cached, output, ttft_s, tpot_s in record["answered"]
            ]
            return cls(
                int(record["number"]),
                float(record["at"]),
                int(record["num_waiting"]),
                _repeated(arrived, int(record["num_arrived"])),
                _repeated(answered, int(record["num_answered"])),
            )
        except _UNREADABLE as error:
            raise ValueError(f"not the traffic of a router: {error}") from error


class TrafficSharing:
    """`exchange` it with the store again and again. `plans_here` says on which side this router is."""

    def __init__(
        self,
        store: Store,
        observing: Observing,
        num_waiting: Callable[[], int],
        plans_here: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._observing = observing
        self._num_waiting = num_waiting
        self._plans_here = plans_here
        self._clock = clock
        self._now = now
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._looked_at: float | None = None
        self._read: dict[str, int] = {}  # the number of the last record, by router
        self.num_waiting_elsewhere = 0

    async def exchange(self) -> None:
        """Raises StoreAway."""
        plans_here, now = self._plans_here(), self._clock()
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
        now = self._clock()
        self._number += 1
        aged = [Arrival(now - each.at_s, each.num_prompt_tokens, each.max_tokens) for each in arrived]
        record = TrafficRecord(self._number, self._now(), self._num_waiting(), aged, answered)
        await self._store.put(_KIND, self._writer, record.to_bytes(), _TTL_S)

    async def _read_others(self) -> None:
        raw_records = await self._store.records(_KIND)
        self._read = {writer: number for writer, number in self._read.items() if writer in raw_records}
        num_waiting = 0
        for writer, raw in raw_records.items():
            if writer == self._writer:
                continue
            try:
                record = TrafficRecord.from_bytes(raw)
            except ValueError as error:  # of another version of this program
                logger.debug("the traffic of router %s in the store is left alone: %s", writer, error)
                continue
            num_waiting += record.num_waiting
            if record.number != self._read.get(writer):
                self._read[writer] = record.number
                self._merge(record)
        self.num_waiting_elsewhere = num_waiting

    def _merge(self, record: TrafficRecord) -> None:
        told_at = self._clock() - max(0.0, self._now() - record.at)
        arrived = [Arrival(told_at - each.at_s, each.num_prompt_tokens, each.max_tokens) for each in record.arrived]
        self._observing.merge(arrived, record.answered)


def _thinned(rows: Sequence[Row]) -> Sequence[Row]:
    return rows if len(rows) <= _MOST_ROWS else _repeated(rows, _MOST_ROWS)


def _repeated(rows: Sequence[Row], number: int) -> list[Row]:
    """As many as `number`, evenly out of `rows`. Raises ValueError."""
    if not 0 <= number <= 10_000_000 or (number and not rows):
        raise ValueError(f"{len(rows)} do not stand for {number}")
    return [rows[index * len(rows) // number] for index in range(number)]
