"""The calls of a hand-over, whose messages are lost, late, doubled or damaged on their way, by plan.

A message that is lost shows as the caller's own deadline. One that is later than that still arrives, when nobody waits
for its answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc.aio

from kvtransfer.decode_client import DecodeClient
from kvtransfer.errors import TransferFailed
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import Fault, Stage, Target
from kvtransfer.ticket import HandoverRecord, Heartbeat, PeerDescription, Renewal, Reservation, SenderIdentity, Ticket
from model.kv_layout import KVLayout
from protos.errors import DeadlineExceeded

_DAMAGED = "damaged"

_Message = TypeVar("_Message")
_Answer = TypeVar("_Answer")


class FaultyClient(DecodeClient):
    def __init__(self, channel: grpc.aio.Channel, injector: FaultInjector) -> None:
        super().__init__(channel)
        self._injector = injector
        self._deliveries: set[asyncio.Future[Any]] = set()

    async def describe(self, layout: KVLayout, timeout_s: float) -> PeerDescription:
        call = super().describe
        return await self._exchange(
            Target.DESCRIBE,
            layout,
            lambda message: call(message, timeout_s),
            timeout_s,
            damage=lambda message: replace(message, model_digest=_DAMAGED),
            damage_answer=lambda answer: replace(answer, epoch=_DAMAGED),
        )

    async def reserve(self, reservation: Reservation, timeout_s: float) -> Ticket:
        call = super().reserve
        self._injector.at(Stage.RESERVING)
        ticket = await self._exchange(
            Target.RESERVE,
            reservation,
            lambda message: call(message, timeout_s),
            timeout_s,
            damage=lambda message: replace(message, layout_fingerprint=_DAMAGED),
            damage_answer=lambda answer: replace(answer, block_ids=answer.block_ids[1:]),
        )
        self._injector.at(Stage.RESERVED)
        return ticket

    async def commit(self, record: HandoverRecord, timeout_s: float) -> None:
        call = super().commit
        self._injector.at(Stage.COMMITTING)
        await self._exchange(
            Target.COMMIT,
            record,
            lambda message: call(message, timeout_s),
            timeout_s,
            damage=lambda message: replace(message, sent_bytes=message.sent_bytes + 1),
        )
        self._injector.at(Stage.COMMITTED)

    async def release(self, ticket: Ticket, sender: SenderIdentity, reason: str, timeout_s: float) -> None:
        call = super().release
        self._injector.at(Stage.RELEASING)
        await self._exchange(
            Target.RELEASE,
            ticket,
            lambda message: call(message, sender, reason, timeout_s),
            timeout_s,
            damage=lambda message: replace(message, ticket_id=_DAMAGED),
        )

    async def attach(
        self, sender: SenderIdentity, heartbeats: AsyncIterator[Heartbeat], silence_s: float
    ) -> AsyncGenerator[Renewal, None]:
        answers = super().attach(sender, self._heartbeats(heartbeats), silence_s)
        clock = asyncio.get_running_loop().time
        heard_at = clock()
        async with aclosing(answers):
            async for answer in answers:
                hits = self._injector.hits(Target.HEARTBEAT_ANSWER)
                await asyncio.sleep(hits.get(Fault.DELAY, 0.0))
                if clock() - heard_at > silence_s:  # the client around us heard it when it was sent
                    raise TransferFailed(f"the decode worker did not answer a heartbeat for {silence_s} s")
                if Fault.CORRUPT in hits:
                    answer = replace(answer, ended_ticket_ids=(_DAMAGED, *answer.ended_ticket_ids[1:]))
                for _ in range(0 if Fault.DROP in hits else 1 + (Fault.DUPLICATE in hits)):
                    heard_at = clock()
                    yield answer

    async def close(self) -> None:
        for delivery in self._deliveries:
            delivery.cancel()
        await asyncio.gather(*self._deliveries, return_exceptions=True)
        await super().close()

    async def _exchange(
        self,
        target: Target,
        message: _Message,
        call: Callable[[_Message], Awaitable[_Answer]],
        timeout_s: float,
        *,
        damage: Callable[[_Message], _Message],
        damage_answer: Callable[[_Answer], _Answer] = lambda answer: answer,
    ) -> _Answer:
        """One call and its answer. The caller's deadline is kept here, since what is late may arrive after it."""
        delivery = asyncio.create_task(self._deliver(target, message, call, timeout_s, damage, damage_answer))
        self._own(delivery)
        try:
            await asyncio.wait([delivery], timeout=timeout_s)
        except asyncio.CancelledError:
            delivery.cancel()
            raise
        if not delivery.done():
            raise DeadlineExceeded("Deadline Exceeded")  # gRPC's own words
        if delivery.cancelled():
            raise TransferFailed("the connection to the decode worker was given up")
        return delivery.result()

    async def _deliver(
        self,
        target: Target,
        message: _Message,
        call: Callable[[_Message], Awaitable[_Answer]],
        timeout_s: float,
        damage: Callable[[_Message], _Message],
        damage_answer: Callable[[_Answer], _Answer],
    ) -> _Answer:
        hits = self._injector.hits(target)
        if Fault.DROP in hits:
            return await _lost(timeout_s)
        await asyncio.sleep(hits.get(Fault.DELAY, 0.0))
        if Fault.CORRUPT in hits:
            message = damage(message)
        again = asyncio.ensure_future(call(message)) if Fault.DUPLICATE in hits else None
        if again is not None:
            self._own(again)
        answer = await call(message)
        hits = self._injector.hits(Target(f"{target.value} answer"))
        if Fault.DROP in hits:
            return await _lost(timeout_s)
        await asyncio.sleep(hits.get(Fault.DELAY, 0.0))
        return damage_answer(answer) if Fault.CORRUPT in hits else answer

    async def _heartbeats(self, heartbeats: AsyncIterator[Heartbeat]) -> AsyncIterator[Heartbeat]:
        async for heartbeat in heartbeats:
            hits = self._injector.hits(Target.HEARTBEAT)
            await asyncio.sleep(hits.get(Fault.DELAY, 0.0))
            if Fault.CORRUPT in hits:
                heartbeat = replace(heartbeat, ticket_ids=[_DAMAGED, *heartbeat.ticket_ids[1:]])
            for _ in range(0 if Fault.DROP in hits else 1 + (Fault.DUPLICATE in hits)):
                yield heartbeat

    def _own(self, delivery: asyncio.Future[Any]) -> None:
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._ended)

    def _ended(self, delivery: asyncio.Future[Any]) -> None:
        self._deliveries.discard(delivery)
        if not delivery.cancelled():
            delivery.exception()  # seen: whoever waited may have gone


async def _lost(timeout_s: float) -> NoReturn:
    await asyncio.sleep(timeout_s)
    raise DeadlineExceeded("Deadline Exceeded")
