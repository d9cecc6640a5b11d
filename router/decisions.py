"""What was decided when, by whom and why: the newest in the store, where all routers append theirs and read all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from protos.errors import Unavailable
from router.shared_records import Decision
from router.store import Store, StoreAway

logger = logging.getLogger(__name__)

MAX_DECISIONS = 1000
_MAX_PENDING = 100  # while the store is away
_READ_S = 3.0
_LOG = "decisions"


class Decisions:
    """`address` is this router's, once it has one."""

    def __init__(self, store: Store, address: Callable[[], str], now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._address = address
        self._now = now
        self._pending: deque[Decision] = deque(maxlen=_MAX_PENDING)
        self._writing = asyncio.Lock()

    def add(self, what: str, worker: str = "", role: str = "", by: str = "", **more: Any) -> None:
        """It gets into the store with the next `write` that succeeds. `more`: the other fields of a `Decision`."""
        self._pending.append(Decision(self._now(), self._address(), what, worker, role, by, **more))

    async def write(self) -> None:
        """Raises StoreAway; what was not written then is next time. One at a time, so that they keep their order."""
        async with self._writing:
            while self._pending:
                decision = self._pending[0]
                await self._store.append(_LOG, decision.to_bytes(), MAX_DECISIONS)
                if self._pending and self._pending[0] is decision:  # else it made room for another one meanwhile
                    self._pending.popleft()

    async def newest(self, num_decisions: int) -> list[Decision]:
        """Newest first, those of this router that wait to be written among them. Raises Unavailable."""
        try:
            async with asyncio.timeout(_READ_S):
                await self.write()
                raw_entries = await self._store.tail(_LOG, num_decisions)
        except StoreAway as error:
            raise Unavailable(f"decisions are in the store that routers share, which is away: {error}") from error
        except TimeoutError:
            told = f"decisions are in the store that routers share, which did not answer within {_READ_S:g} s"
            raise Unavailable(told) from None
        known = [decision for raw in reversed(raw_entries) if (decision := _readable(raw)) is not None]
        return list(dict.fromkeys(known))  # one whose writing was cut off may have been written twice


def _readable(raw: bytes) -> Decision | None:
    """Another version of this program may share the store."""
    try:
        return Decision.from_bytes(raw)
    except ValueError as error:
        logger.warning("an entry among the decisions in the store is left out: %s", error)
        return None
