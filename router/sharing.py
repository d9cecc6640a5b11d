"""What one router tells the others and learns of them, through a store, beside the requests.

Each puts what it has sent to which worker and what its keys have used, so that all place by the load of all and count
limits together. And they agree on roles and drains, whichever was asked to change them: of two assignments of one
worker the later version holds, and of equal versions the one of the greater writer, so that all come to the same, in
whatever order they read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from router import metrics
from router.candidate import WorkerId
from router.decisions import Decisions
from router.shared_records import Assignment, KeyUses, RouterRecord, SentLoad, VersionedAssignment
from router.store import Store, StoreAway

logger = logging.getLogger(__name__)

_EVERY_S = 0.1
_ALONE_EVERY_S = 1.0  # while no other router is known
_BEAT_S = 1.0  # an unchanged record is put again, which says that its router lives
_GONE_S = 5.0  # without a beat
_ASSIGNMENT_TTL_S = 86400.0

Record = TypeVar("Record")


class SharedTable(Protocol):
    """What `router.workers` gives and takes."""

    def sent_loads(self) -> Mapping[WorkerId, SentLoad]: ...
    def set_sent_elsewhere(self, loads: Mapping[WorkerId, SentLoad]) -> None: ...
    def started_as(self, worker_id: WorkerId) -> Assignment: ...
    def assignments(self) -> Mapping[WorkerId, Assignment]: ...
    def assign(self, worker_id: WorkerId, assignment: Assignment) -> None: ...
    def tell_routers(self, addresses: Sequence[str]) -> None: ...


class SharedLimits(Protocol):
    """What `router.rate_limits` gives and takes. What is used elsewhere is told again and again, in running totals."""

    @property
    def num_changes(self) -> int: ...
    def used_here(self) -> KeyUses: ...
    def used_elsewhere(self, router_id: str, uses: KeyUses) -> None: ...
    def router_left(self, router_id: str) -> None: ...


class Exchanged(Protocol):
    """Whatever else routers tell each other through the store. Raises StoreAway."""

    async def exchange(self) -> None: ...
    async def leave(self) -> None: ...


@dataclass(slots=True)
class _Peer:
    record: RouterRecord
    raw: bytes  # its beat makes each one another
    heard_at: float


class Sharing:
    """`router_id` is this process's own; `others` are exchanged along with what is here. `run` it beside the server: a
    store that is away does not end it."""

    def __init__(
        self,
        store: Store,
        router_id: str,
        address: str,
        table: SharedTable,
        limits: SharedLimits,
        decisions: Decisions,
        clock: Callable[[], float] = time.monotonic,
        others: Sequence[Exchanged] = (),
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._address = address
        self._table = table
        self._limits = limits
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._known: dict[WorkerId, VersionedAssignment] = {}
        self._decisions = decisions
        self._others = others
        self._own = RouterRecord(address, 0)
        self._put_at: float | None = None
        self._is_away = False
        self._told = [address]
        self._strange: set[str] = set()  # records that could not be read: said once

    async def run(self) -> None:
        while True:
            await self.exchange()
            await asyncio.sleep(_EVERY_S if self._peers else _ALONE_EVERY_S)

    async def exchange(self) -> None:
        """Once. While the store is away, the others' loads are known for some seconds more, and then are none."""
        self._forget_silent()  # if this process stood still: what they have used meanwhile is not to be paid for now
        try:
            await self._put_own()
            await self._read_routers()
            await self._agree()
            for other in self._others:
                await other.exchange()
            await self._decisions.write()
            self._store_answered()
        except StoreAway as error:
            self._store_missed(error)
        self._forget_silent()
        self._table.set_sent_elsewhere(_summed(peer.record.loads for peer in self._peers.values()))
        if self.addresses != self._told:
            self._told = self.addresses
            self._table.tell_routers(self._told)

    async def leave(self) -> None:
        """At an orderly end: the others need not wait until this router is gone by the clock."""
        try:
            for other in self._others:
                await other.leave()
            await self._store.remove("routers", self._router_id)
        except StoreAway as error:
            logger.info("the other routers will see by themselves that this one has left: %s", error)

    @property
    def addresses(self) -> list[str]:
        """Of the routers that live, this one first."""
        return [self._address, *sorted(peer.record.address for peer in self._peers.values())]

    async def _put_own(self) -> None:
        loads, num_changes, now = self._table.sent_loads(), self._limits.num_changes, self._clock()
        is_told = self._own.loads == loads and self._own.uses.number == num_changes
        if self._put_at is not None and is_told and now - self._put_at < _BEAT_S:
            return
        self._put_at = None  # until it has been put, which may fail
        self._own = RouterRecord(self._address, self._own.beat + 1, dict(loads), self._limits.used_here())
        await self._store.put("routers", self._router_id, self._own.to_bytes(), _GONE_S)
        self._put_at = now

    async def _read_routers(self) -> None:
        there = dict(await self._store.records("routers"))
        there.pop(self._router_id, None)
        as_before = {router_id for router_id, peer in self._peers.items() if there.get(router_id) == peer.raw}
        news = {router_id: raw for router_id, raw in there.items() if router_id not in as_before}
        records = self._readable(news, RouterRecord.from_bytes)
        for router_id, record in records.items():
            if router_id not in self._peers:
                logger.info("router %s is there too, at %s", router_id, record.address)
            self._peers[router_id] = _Peer(record, news[router_id], self._clock())
            self._limits.used_elsewhere(router_id, record.uses)
        self._forget(self._peers.keys() - as_before - records.keys())

    async def _agree(self) -> None:
        """Takes what others have assigned, and puts what was assigned here, or has got lost in the store."""
        here = self._table.assignments()
        self._known = {worker: self._known_of(worker, assignment) for worker, assignment in here.items()}
        records = self._readable(await self._store.records("assignments"), VersionedAssignment.from_bytes)
        for worker, known in list(self._known.items()):
            name = f"{worker.name}@{worker.epoch}"
            there = records.get(name, VersionedAssignment(known.assignment))
            if there.rank > known.rank:
                self._known[worker] = there
                if self._table.assignments().get(worker) == here[worker]:  # else it was changed here meanwhile
                    self._table.assign(worker, there.assignment)
            elif known.rank > there.rank:
                await self._store.put("assignments", name, known.to_bytes(), _ASSIGNMENT_TTL_S)

    def _known_of(self, worker: WorkerId, assignment: Assignment) -> VersionedAssignment:
        known = self._known.get(worker) or VersionedAssignment(self._table.started_as(worker))
        if known.assignment == assignment:
            return known
        return VersionedAssignment(assignment, known.version + 1, self._router_id)

    def _readable(self, raw_records: Mapping[str, bytes], read: Callable[[bytes], Record]) -> dict[str, Record]:
        """Another version of this program may share the store."""
        records: dict[str, Record] = {}
        for name, raw in raw_records.items():
            try:
                records[name] = read(raw)
            except ValueError as error:
                if name not in self._strange:
                    logger.warning("the record of %s in the store is left alone: %s", name, error)
                self._strange.add(name)
        return records

    def _forget_silent(self) -> None:
        now = self._clock()
        self._forget([name for name, peer in self._peers.items() if now - peer.heard_at > _GONE_S])

    def _forget(self, router_ids: Iterable[str]) -> None:
        for router_id in list(router_ids):
            del self._peers[router_id]
            self._limits.router_left(router_id)
            logger.info("router %s has left", router_id)

    def _store_answered(self) -> None:
        if self._is_away:
            logger.info("the store is back")
        self._is_away = False
        metrics.STORE_AWAY.set(0)

    def _store_missed(self, error: StoreAway) -> None:
        if not self._is_away:
            logger.warning("the store is away; this router goes by what it sees itself: %s", error)
        self._is_away = True
        metrics.STORE_AWAY.set(1)


def _summed(loads_of_all: Iterable[Mapping[WorkerId, SentLoad]]) -> dict[WorkerId, SentLoad]:
    summed: dict[WorkerId, SentLoad] = {}
    for loads in loads_of_all:
        for worker, load in loads.items():
            summed[worker] = summed.get(worker, SentLoad()) + load
    return summed
