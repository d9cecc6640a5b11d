"""The prefill side of a hand-over: asks decode workers for room and gives out what to write and commit with.

Event loop only. It owns the transfer thread, one `Peer` for each decode worker, and every task that ends a hand-over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvtransfer import metrics
from kvtransfer.agent import TransferAgent
from kvtransfer.checks import fits
from kvtransfer.connecting import connect_peer
from kvtransfer.decode_client import DecodeClient
from kvtransfer.errors import TransferFailed
from kvtransfer.geometry import CacheSpan
from kvtransfer.outgoing import Outgoing
from kvtransfer.packing import Packing
from kvtransfer.peer import Peer, PeerOptions
from kvtransfer.ticket import AS_IS, HandoverTarget, Reservation, SenderIdentity
from kvtransfer.transfer_meter import Transferred
from kvtransfer.transfer_thread import TransferOptions, TransferThread
from model.block_pool import BlockPool
from model.block_sums import BlockSums
from protos.channel import open_channel

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Sender:
    """Made on a running event loop. `span` is our own cache, whose blocks `pool` has; `agent` has it registered.

    Without `sums` of that cache it can only send to decode workers that check nothing. With a `packing` of it, from
    memory that `agent` has registered as well, KV goes in that coding to the decode workers that take it.
    """

    def __init__(
        self,
        agent: TransferAgent,
        pool: BlockPool,
        span: CacheSpan,
        identity: SenderIdentity,
        *,
        sums: BlockSums | None = None,
        packing: Packing | None = None,
        peer_options: PeerOptions | None = None,
        transfer_options: TransferOptions | None = None,
        open_client: Callable[[str], DecodeClient] = lambda address: DecodeClient(open_channel(address)),
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._span = span
        self._identity = identity
        self._sums = sums
        self._packing = packing
        self._peer_options = peer_options or PeerOptions()
        self._open_client = open_client
        self._thread = TransferThread(agent, options=transfer_options)
        self._peers: dict[str, Peer] = {}  # by worker id
        self._connecting: dict[tuple[str, str], asyncio.Task[Peer]] = {}  # by worker id and epoch
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outgoings: set[Outgoing] = set()
        self._closed = False

    @property
    def transferred(self) -> Transferred:
        """Lately."""
        return self._thread.meter.transferred

    async def reserve(
        self,
        target: HandoverTarget,
        *,
        attempt_id: str,
        request_id: str,
        num_tokens: int,
        block_hashes: Sequence[bytes],
        timeout_s: float,
    ) -> Outgoing:
        """Gets a ticket for a sequence; connects to the decode worker first if need be.

        Cancelling it leaves nothing behind: a ticket that is granted nevertheless is given back.

        Raises:
            DecodePoolFull: ask again later. LayoutMismatch, StalePeer, TransferFailed and other ServiceErrors: give up.
        """
        task = self._owned(
            self._reserve(target, attempt_id, request_id, num_tokens, tuple(block_hashes), timeout_s),
        )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._give_back)
            raise

    async def connect(self, target: HandoverTarget) -> None:
        """So that a reservation there takes no longer than it must. Raises what `reserve` does."""
        await self._peer(target)

    def expect_writes_while(self, is_written_to: Callable[[], bool]) -> None:
        """Others write into our cache while that is so: the agent, which has to take part, is looked after more often.

        Asked on the transfer thread."""
        self._thread.is_written_to = is_written_to

    async def close(self) -> None:
        """Aborts what is open, waits until nothing moves, says good-bye to the peers, ends the thread."""
        self._closed = True
        outgoings = [outgoing.abort("the prefill worker is closing") for outgoing in list(self._outgoings)]
        await asyncio.gather(*outgoings, *self._tasks, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._peers.clear()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._thread.close()

    async def _reserve(
        self,
        target: HandoverTarget,
        attempt_id: str,
        request_id: str,
        num_tokens: int,
        block_hashes: tuple[bytes, ...],
        timeout_s: float,
    ) -> Outgoing:
        if self._closed:
            raise TransferFailed("the prefill worker is closing")
        peer = await self._peer(target)
        packing = self._packing_for(peer)
        coding = AS_IS if packing is None else packing.coding
        reservation = Reservation(
            attempt_id, request_id, self._identity, self._span.layout.fingerprint, num_tokens, block_hashes, coding
        )
        ticket = await peer.reserve(reservation, timeout_s)
        if not fits(ticket, reservation, peer.span, peer.epoch):
            peer.release(ticket, "the ticket does not fit the reservation")
            raise TransferFailed(f"decode worker {peer.agent_name} granted a ticket that does not fit the reservation")
        if ticket.checked and self._sums is None:
            peer.release(ticket, "checksums are not computed here")
            raise TransferFailed(f"decode worker {peer.agent_name} wants checksums, which are not computed here")
        if packing is None and self._packing is not None:
            metrics.UNCODED.inc()
        source = self._sums if packing is None else packing
        outgoing = Outgoing(
            reservation,
            ticket,
            peer=peer,
            pool=self._pool,
            local=self._span,
            thread=self._thread,
            sums=source.start(len(ticket.checked)) if source is not None and ticket.checked else None,
            packing=packing,
            own=self._own,
            ended=self._outgoings.discard,
        )
        self._outgoings.add(outgoing)
        return outgoing

    async def _peer(self, target: HandoverTarget) -> Peer:
        peer = self._peers.get(target.worker_id)
        if peer is not None and not peer.is_lost and peer.epoch == target.epoch:
            return peer
        key = (target.worker_id, target.epoch)
        connecting = self._connecting.get(key)
        if connecting is None:
            connecting = self._connecting[key] = self._owned(self._connect_to(target))
            connecting.add_done_callback(lambda _: self._connecting.pop(key))
        return await asyncio.shield(connecting)

    async def _connect_to(self, target: HandoverTarget) -> Peer:
        client = self._open_client(target.address)
        try:
            peer = await connect_peer(
                client,
                target,
                identity=self._identity,
                layout=self._span.layout,
                thread=self._thread,
                agent=self._agent,
                options=self._peer_options,
                replaces=self._peers.get(target.worker_id),
                lost=self._peer_lost,
            )
        except BaseException:
            await client.close()
            raise
        self._peers[target.worker_id] = peer
        if self._packing is not None and self._packing_for(peer) is None:
            logger.warning("%s takes no %s: KV goes there as it is", target.worker_id, self._packing.coding)
        return peer

    def _packing_for(self, peer: Peer) -> Packing | None:
        return self._packing if self._packing is not None and self._packing.coding in peer.codings else None

    def _peer_lost(self, peer: Peer) -> None:
        self._peers = {worker_id: other for worker_id, other in self._peers.items() if other is not peer}
        self._owned(peer.close())

    def _give_back(self, task: asyncio.Task[Outgoing]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._owned(task.result().abort("the reservation was cancelled"))

    def _owned(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work)
        self._own(task)
        return task

    def _own(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
