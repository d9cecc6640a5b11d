"""What routers that share a store know together of the plan: who decides, what was decided, what the planner has said
last, and which of them plans. That one holds a lease in the store, which it renews: there is never a second one.

Of two states the later version holds, and of equal versions the one of the greater writer, as of assignments.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from router.plan_state import PlanState, Proposed, VersionedState
from router.store import Store

logger = logging.getLogger(__name__)

LEASE_S = 10.0
_RENEW_S = 2.0
_MARGIN_S = 1.0  # of the lease: clocks do not all run equally fast
_STATE_TTL_S = 86400.0
_PROPOSED_TTL_S = 600.0
_KIND = "plan"
_STATE, _PROPOSED, _LEASE = "state", "proposed", "lease"

Record = TypeVar("Record")


class PlanSharing:
    """`exchange` it with the store again and again. `address` is this router's, once it has one."""

    def __init__(
        self, store: Store, state: PlanState, address: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._address = address
        self._clock = clock
        self._writer = secrets.token_hex(8)
        self._known = VersionedState(state)
        self._untold: Proposed | None = None  # of this router, and not yet in the store
        self._claimed_at: float | None = None
        self._asked_at: float | None = None
        self._strange: set[bytes] = set()  # records that could not be read: said once
        self.proposed: Proposed | None = None
        self.planned_by = ""  # the address of the router that plans; empty while that is not known

    @property
    def state(self) -> PlanState:
        return self._known.state

    def set(self, state: PlanState) -> None:
        """At once here, and with the next exchange at all routers."""
        if state != self._known.state:
            self._known = VersionedState(state, self._known.version + 1, self._writer)

    def propose(self, proposed: Proposed) -> None:
        self.proposed = self._untold = proposed

    @property
    def plans_here(self) -> bool:
        """Whether this router is the one that plans. Not for long after the store was heard of last."""
        return self._claimed_at is not None and self._clock() - self._claimed_at < LEASE_S - _MARGIN_S

    async def exchange(self) -> None:
        """Raises StoreAway."""
        await self._claim()
        records = await self._store.records(_KIND)
        there = self._read(records, _STATE, VersionedState.from_bytes)
        if there is not None and there.rank > self._known.rank:
            self._known = there
        elif self._known.rank > (VersionedState(self._known.state) if there is None else there).rank:
            await self._store.put(_KIND, _STATE, self._known.to_bytes(), _STATE_TTL_S)
        if (untold := self._untold) is not None:
            await self._store.put(_KIND, _PROPOSED, untold.to_bytes(), _PROPOSED_TTL_S)
            if self._untold is untold:  # else there was another one meanwhile
                self._untold = None
        elif not self.plans_here:
            self.proposed = self._read(records, _PROPOSED, Proposed.from_bytes)

    async def leave(self) -> None:
        """At an orderly end: another router plans at once. Raises StoreAway."""
        if self.plans_here:
            self._claimed_at = None
            await self._store.remove(_KIND, _LEASE)

    async def _claim(self) -> None:
        now = self._clock()
        if self._asked_at is not None and now - self._asked_at < _RENEW_S:
            return
        own = json.dumps({"writer": self._writer, "address": self._address()}).encode()
        held = await self._store.claim(_KIND, _LEASE, own, LEASE_S)
        self._asked_at = now
        if held == own:
            if not self.plans_here:
                logger.info("this router plans the pools, if they are planned")
            self._claimed_at = now  # when it was asked for: in the store it begins later, and so ends later
        else:
            self._claimed_at = None
        self.planned_by = _address_in(held)

    def _read(self, records: Mapping[str, bytes], name: str, read: Callable[[bytes], Record]) -> Record | None:
        """Another version of this program may share the store."""
        raw = records.get(name)
        if raw is None:
            return None
        try:
            return read(raw)
        except ValueError as error:
            if raw not in self._strange:
                logger.warning("the %s of the plan in the store is left alone: %s", name, error)
                self._strange = {raw}
            return None


def _address_in(lease: bytes) -> str:
    try:
        return str(json.loads(lease)["address"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
