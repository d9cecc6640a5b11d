"""One process start of a decode worker, as a sender sees it: its calls, its Attach stream, and whether it is lost.

Any doubt about the peer or the transport loses the whole peer: every ticket on it fails, the stream ends (which tells
the other side), the agent disconnects. The next reservation connects anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from kvtransfer import metrics
from kvtransfer.agent import TransferAgent
from kvtransfer.decode_client import DecodeClient
from kvtransfer.errors import LeaseExpired, TicketEnded, TransferFailed
from kvtransfer.geometry import CacheSpan
from kvtransfer.ticket import (
    HandoverRecord,
    Heartbeat,
    PeerDescription,
    Renewal,
    Reservation,
    SenderIdentity,
    Ticket,
)
from kvtransfer.transfer_thread import TransferThread
from protos.errors import ServiceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """`heartbeat_s` is shortened to a third of the shortest lease granted; a peer silent for `silence_s` is lost.

    A heartbeat comes before its time, `least_pause_s` after the last one at the earliest, when `told_bytes`, of KV as
    it is in the cache, have been written under a ticket since: the peer can start to check them.
    """

    heartbeat_s: float = 1.0
    silence_s: float = 10.0
    call_timeout_s: float = 5.0
    release_backoff_s: float = 0.05
    max_release_backoff_s: float = 2.0
    told_bytes: int = 32 << 20
    least_pause_s: float = 0.003


@dataclass(slots=True, eq=False)
class _Writing:
    """A ticket that is written under. `lease_ends_at` is no later than the peer has it: it counts from the sending."""

    failed: Callable[[Exception], None]
    lease_s: float
    added_at: float
    lease_ends_at: float
    num_written: int = 0  # blocks, from the first on
    num_told: int = 0


class Peer:
    """Event loop only, but for `check_lease` and `written`. `close` must be called, also on one that is lost."""

    def __init__(
        self,
        client: DecodeClient,
        description: PeerDescription,
        *,
        identity: SenderIdentity,
        thread: TransferThread,
        agent: TransferAgent,
        options: PeerOptions,
        lost: Callable[[Peer], None],
    ) -> None:
        self._client = client
        self._description = description
        self._identity = identity
        self._thread = thread
        self._agent = agent
        self._options = options
        self._heartbeat_s = options.heartbeat_s
        self._is_early = asyncio.Event()  # the next heartbeat
        self._loop = asyncio.get_running_loop()
        self._span = CacheSpan(description.layout, description.base_address, description.num_blocks)
        self._clock = self._loop.time
        self._asked_at: dict[str, float] = {}  # by the id of a ticket that is about to be added
        self._writing: dict[str, _Writing] = {}  # by ticket id
        self._releases: dict[str, asyncio.Task[None]] = {}  # by ticket id: given back, not yet acknowledged
        self._lost: Exception | None = None
        self._tell_lost: Callable[[Peer], None] | None = lost
        self._disconnected: asyncio.Future[None] | None = None
        self._attached: asyncio.Future[None] = self._loop.create_future()
        self._attachment: asyncio.Task[None] | None = asyncio.create_task(self._keep_attached())
        metrics.PEERS.inc()

    @property
    def epoch(self) -> str:
        return self._description.epoch

    @property
    def agent_name(self) -> str:
        return self._description.agent_name

    @property
    def span(self) -> CacheSpan:
        return self._span

    @property
    def codings(self) -> tuple[str, ...]:
        """That it takes KV in, besides as it is."""
        return self._description.codings

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def attached(self) -> None:
        """Returns once the peer has answered the first heartbeat: from then on it would learn of our end."""
        await asyncio.shield(self._attached)

    async def reserve(self, reservation: Reservation, timeout_s: float) -> Ticket:
        """Raises DecodePoolFull, or another ServiceError. A ticket that came too late is given back."""
        asked_at = self._clock()
        ticket = await self._client.reserve(reservation, timeout_s)
        took_s = self._clock() - asked_at
        if took_s > ticket.lease_s / 2:
            self.release(ticket, "the ticket came too late")
            raise TransferFailed(f"the ticket took {took_s:.1f} s of a lease of {ticket.lease_s} s")
        self._asked_at[ticket.ticket_id] = asked_at
        return ticket

    async def commit(self, record: HandoverRecord) -> None:
        await self._client.commit(record, self._options.call_timeout_s)

    def add(self, ticket: Ticket, failed: Callable[[Exception], None]) -> None:
        """Names this ticket in every heartbeat from now on; `failed` is called if it ends or the peer is lost."""
        if ticket.lease_s / 3 < self._heartbeat_s:
            self._heartbeat_s = ticket.lease_s / 3
            self._is_early.set()  # or the first heartbeat that names it might come after its lease
        added_at = self._clock()
        ends_at = self._asked_at.pop(ticket.ticket_id, added_at) + ticket.lease_s
        self._writing[ticket.ticket_id] = _Writing(failed, ticket.lease_s, added_at, ends_at)
        if self._lost is not None:
            failed(self._lost)

    def check_lease(self, ticket_id: str) -> None:
        """Raises LeaseExpired unless the peer still keeps these blocks for us. Any thread may ask, before each write.

        After a pause nobody here knows yet that the peer has given us up, and the blocks may be somebody else's.
        """
        writing = self._writing.get(ticket_id)
        if writing is None or self._clock() >= writing.lease_ends_at:
            raise LeaseExpired(f"the lease of ticket {ticket_id} has not been renewed in time, as far as is known here")

    def written(self, ticket_id: str, num_blocks: int) -> None:
        """So many of the ticket's blocks, from the first on, stay as they are now. Called on the transfer thread."""
        writing = self._writing.get(ticket_id)
        if writing is not None:
            writing.num_written = num_blocks
            if (num_blocks - writing.num_told) * self._span.layout.block_bytes >= self._options.told_bytes:
                self._loop.call_soon_threadsafe(self._is_early.set)

    def remove(self, ticket_id: str) -> None:
        self._writing.pop(ticket_id, None)

    def release(self, ticket: Ticket, reason: str) -> None:
        """Tells the peer, until it acknowledges or is lost, that nothing more will be written under this ticket."""
        ticket_id = ticket.ticket_id
        self._writing.pop(ticket_id, None)
        self._asked_at.pop(ticket_id, None)
        if self._lost is None:
            task = asyncio.create_task(self._release(ticket, reason))
            self._releases[ticket_id] = task
            task.add_done_callback(lambda _: self._releases.pop(ticket_id, None))

    def lose(self, error: Exception) -> None:
        """Gives the peer up. Its writes end FAILED as the agent disconnects."""
        if self._lost is not None:
            return
        self._lost = error
        metrics.PEERS.dec()
        logger.info("decode worker %s is lost: %s", self.agent_name, error)
        if self._attachment is not None:
            self._attachment.cancel()
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()  # seen, should nobody be waiting
        for task in self._releases.values():
            task.cancel()
        for writing in list(self._writing.values()):
            writing.failed(error)
        self._disconnected = self._thread.run(lambda: self._agent.disconnect(self.agent_name))
        if self._tell_lost is not None:
            self._tell_lost(self)

    async def close(self) -> None:
        """Waits for releases that are under way, for one call's time, then ends the stream and closes the channel."""
        self._tell_lost = None
        if self._releases:
            await asyncio.wait(list(self._releases.values()), timeout=self._options.call_timeout_s)
        self.lose(TransferFailed("the prefill worker has closed"))
        if self._attachment is not None:
            await asyncio.gather(self._attachment, return_exceptions=True)
            self._attachment = None  # its traceback leads back to us and to the call, which keeps the connection open
        await asyncio.gather(*self._releases.values(), return_exceptions=True)
        if self._disconnected is not None:
            await self._disconnected
        await self._client.close()

    async def _keep_attached(self) -> None:
        """Renews leases for as long as the peer answers."""
        answers = self._client.attach(self._identity, self._heartbeats(), self._options.silence_s)
        try:
            async with aclosing(answers):
                async for renewal in answers:
                    if not self._attached.done():
                        self._attached.set_result(None)
                    self._renewed(renewal)
        except ServiceError as error:
            self.lose(TransferFailed(f"the Attach stream to {self.agent_name} broke: {error}"))

    async def _heartbeats(self) -> AsyncIterator[Heartbeat]:
        while True:
            yield Heartbeat([*self._writing, *self._releases], self._news())
            await asyncio.sleep(self._options.least_pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._is_early.wait()
            self._is_early.clear()

    def _news(self) -> dict[str, int]:
        """What has been written since the last heartbeat, as `written` has it."""
        news = dict[str, int]()
        for ticket_id, writing in self._writing.items():
            if (num_written := writing.num_written) > writing.num_told:
                news[ticket_id] = writing.num_told = num_written
        return news

    def _renewed(self, renewal: Renewal) -> None:
        ended = set(renewal.ended_ticket_ids)
        for ticket_id, writing in list(self._writing.items()):
            if ticket_id in ended:
                writing.failed(TicketEnded("the decode worker has ended this ticket"))
            elif writing.added_at <= renewal.sent_at:  # it was named
                writing.lease_ends_at = renewal.sent_at + writing.lease_s

    async def _release(self, ticket: Ticket, reason: str) -> None:
        backoff_s = self._options.release_backoff_s
        while True:
            try:
                await self._client.release(ticket, self._identity, reason, self._options.call_timeout_s)
                return
            except ServiceError as error:
                logger.info("releasing ticket %s at %s failed: %s", ticket.ticket_id, self.agent_name, error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._options.max_release_backoff_s)
