"""The two ends of a hand-over on plain byte arrays, joined by a real gRPC server on loopback."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

from kvtransfer import messages
from kvtransfer.agent import TransferAgent
from kvtransfer.errors import LayoutMismatch
from kvtransfer.geometry import CacheSpan
from kvtransfer.integrity import Verification
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from kvtransfer.packing import Packing
from kvtransfer.peer import PeerOptions
from kvtransfer.receiver import Receiver
from kvtransfer.receiver_options import ReceiverOptions
from kvtransfer.sender import Sender
from kvtransfer.ticket import HandoverTarget, PeerDescription, ReceivedSequence, SenderIdentity
from kvtransfer.transfer_thread import TransferOptions
from kvtransfer.unpacking import Unpacking
from model.block_pool import BlockPool
from model.block_sums import BlockSums
from model.kv_layout import KVLayout
from protos import decode_pb2, decode_pb2_grpc
from protos.errors import NotFound, ServiceError, Unimplemented
from protos.serve import GrpcServer
from tests.kvtransfer.cache import LAYOUT, Cache

FAST_LEASE = ReceiverOptions(lease_s=0.8, quarantine_grace_s=0.05, timer_s=0.01)
FAST_PEER = PeerOptions(heartbeat_s=0.05, silence_s=0.5, call_timeout_s=1.0, release_backoff_s=0.02)


class DecodeSide(decode_pb2_grpc.DecodeServicer):
    """A decode worker without a model: a pool, a cache, a receiver, and the calls of the hand-over."""

    def __init__(
        self,
        agent: TransferAgent,
        cache: Cache,
        *,
        layout: KVLayout = LAYOUT,
        options: ReceiverOptions = FAST_LEASE,
        epoch: str | None = None,
        verification: Verification | None = None,
        unpacking: Unpacking | None = None,
    ) -> None:
        self.agent, self.cache, self.layout = agent, cache, layout
        self.epoch = epoch or secrets.token_hex(4)
        self.pool = BlockPool(cache.array.shape[1])
        self.committed: dict[str, ReceivedSequence] = {}
        self.failed: dict[str, ServiceError] = {}
        self.num_heartbeats = self.num_streams = 0
        self.mute = False  # heartbeats are answered but renew nothing
        self.silent = False  # they are not even answered
        self.answer_delay_s = 0.0  # from a ticket granted to its sending
        self.codings = () if unpacking is None else unpacking.codings
        self.receiver = Receiver(
            self.pool,
            layout,
            self.epoch,
            options=options,
            failed=self.failed.__setitem__,
            verification=verification,
            unpacking=unpacking,
        )

    async def HandOver(self, request: decode_pb2.HandOverRequest, context: Any) -> decode_pb2.HandOverResponse:
        raise NotFound("nothing decodes here", field="attempt_id")

    async def start(self, port: int = 0) -> None:
        self._server = GrpcServer("127.0.0.1", port)
        self._server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self)
        await self._server.start()
        self._timer = asyncio.create_task(self.receiver.run())
        self._progress = asyncio.create_task(self._make_progress())
        self.target = HandoverTarget("decode-0", self._server.address, self.epoch)

    async def stop(self) -> None:
        self._timer.cancel()
        self._progress.cancel()
        await asyncio.wait([self._timer, self._progress])
        await self._server.stop()
        self.agent.close()

    async def _make_progress(self) -> None:
        """As a worker's transfer thread does."""
        while True:
            self.agent.progress()
            await asyncio.sleep(0.002)

    def Decode(self, request: Any, context: Any) -> Any:
        raise Unimplemented("there is no model here")

    async def Describe(self, request: Any, context: Any) -> Any:
        difference = self.layout.difference(messages.layout_from_message(request.layout))
        if difference is not None:
            raise LayoutMismatch(f"the two KV layouts differ: {difference}")
        return messages.description_to_message(
            PeerDescription(
                epoch=self.epoch,
                agent_name=self.agent.name,
                agent_metadata=self.agent.metadata(),
                layout=self.layout,
                num_blocks=self.pool.num_blocks,
                base_address=self.cache.address,
                device_id=-1,
                codings=self.codings,
            )
        )

    async def Reserve(self, request: Any, context: Any) -> Any:
        ticket = self.receiver.reserve(messages.reservation_from_message(request))
        await asyncio.sleep(self.answer_delay_s)
        return messages.ticket_to_message(ticket)

    async def Commit(self, request: Any, context: Any) -> Any:
        self.committed[request.attempt_id] = await self.receiver.receive(messages.record_from_message(request))
        return decode_pb2.CommitResponse()

    async def Release(self, request: Any, context: Any) -> Any:
        self.receiver.release(request.ticket_id, request.sender_epoch, request.reason, mac=request.mac)
        return decode_pb2.ReleaseResponse()

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        sender: SenderIdentity | None = None
        try:
            async for heartbeat in request_iterator:
                self.num_heartbeats += 1
                if sender is None:
                    sender = messages.heartbeat_sender(heartbeat)
                    self.num_streams += 1
                    self.receiver.sender_attached(sender.epoch)
                if self.silent:
                    continue
                ended = [] if self.mute else self.receiver.heartbeat(sender, heartbeat.ticket_ids, heartbeat.heard_at)
                self.receiver.written(sender.epoch, heartbeat.num_written_blocks)
                yield decode_pb2.HeartbeatResponse(
                    ended_ticket_ids=ended, number=heartbeat.number, now=self.receiver.now
                )
        finally:
            if sender is not None:
                self.receiver.sender_gone(sender.epoch)


class PrefillSide:
    """A prefill worker without a model: a pool, a cache full of noise, and a sender."""

    def __init__(
        self,
        agent: LoopbackAgent,
        cache: Cache,
        *,
        layout: KVLayout = LAYOUT,
        stall_s: float = 0.5,
        max_batch_bytes: int = 0,  # a write for each layer: tests count them
        sums: BlockSums | None = None,
        packing: Packing | None = None,
        peer_options: PeerOptions = FAST_PEER,
    ) -> None:
        self.agent, self.cache = agent, cache
        self.pool = BlockPool(cache.array.shape[1])
        self.sender = Sender(
            agent,
            self.pool,
            CacheSpan(layout, cache.address, self.pool.num_blocks),
            SenderIdentity("prefill-0", secrets.token_hex(4)),
            sums=sums,
            packing=packing,
            transfer_options=TransferOptions(stall_s=stall_s, max_batch_bytes=max_batch_bytes),
            peer_options=peer_options,
        )

    async def stop(self) -> None:
        await self.sender.close()
        self.agent.close()


def loopback(network: LoopbackNetwork, name: str, cache: Cache, **options: Any) -> LoopbackAgent:
    return LoopbackAgent(network, name, cache.address, cache.num_bytes, **options)
