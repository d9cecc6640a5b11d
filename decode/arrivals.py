"""Where the two halves of a hand-over meet: the router's stream for an attempt, and the KV a prefill worker committed.

Either may come first. KV that nobody claims is given back after a while; a failure waits for its stream as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.ticket import ReceivedSequence
from protos.errors import AlreadyExists


@dataclass(slots=True)
class _Arrival:
    result: asyncio.Future[ReceivedSequence]
    expiry: asyncio.TimerHandle | None = None
    claimed: bool = False


class Arrivals:
    """Event loop only. `drop` gives the blocks of unclaimed KV back."""

    def __init__(self, *, unclaimed_s: float, drop: Callable[[ReceivedSequence], None]) -> None:
        self._unclaimed_s = unclaimed_s
        self._drop = drop
        self._arrivals: dict[str, _Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._arrivals

    def committed(self, attempt_id: str, received: ReceivedSequence) -> None:
        self._arrival(attempt_id).result.set_result(received)

    def failed(self, attempt_id: str, error: Exception) -> None:
        arrival = self._arrival(attempt_id)
        if not arrival.result.done():
            arrival.result.set_exception(error)
            arrival.result.exception()  # seen: the stream it is for may never come

    async def claim(self, attempt_id: str) -> ReceivedSequence:
        """Waits for the KV; the caller owns its blocks from then on. Raises the hand-over's failure.

        Cancelled or failed, nothing of this attempt is kept here.
        """
        arrival = self._arrivals.get(attempt_id)
        if arrival is not None and arrival.claimed:
            raise AlreadyExists(f"attempt_id {attempt_id!r} has a stream already", field="attempt_id")
        arrival = self._arrival(attempt_id)
        arrival.claimed = True
        if arrival.expiry is not None:
            arrival.expiry.cancel()
        try:
            return await asyncio.shield(arrival.result)  # or KV that comes before we wake up would find it cancelled
        except asyncio.CancelledError:
            self._give_back(arrival)  # it may have come in the very moment the stream went
            raise
        finally:
            del self._arrivals[attempt_id]

    def close(self) -> None:
        for attempt_id in [key for key, arrival in self._arrivals.items() if not arrival.claimed]:
            self._expire(attempt_id)

    def _arrival(self, attempt_id: str) -> _Arrival:
        arrival = self._arrivals.get(attempt_id)
        if arrival is None:
            loop = asyncio.get_running_loop()
            arrival = self._arrivals[attempt_id] = _Arrival(loop.create_future())
            arrival.expiry = loop.call_later(self._unclaimed_s, self._expire, attempt_id)
        return arrival

    def _expire(self, attempt_id: str) -> None:
        arrival = self._arrivals.pop(attempt_id)
        if arrival.expiry is not None:
            arrival.expiry.cancel()
        self._give_back(arrival)

    def _give_back(self, arrival: _Arrival) -> None:
        result = arrival.result
        if result.done() and not result.cancelled() and result.exception() is None:
            self._drop(result.result())
