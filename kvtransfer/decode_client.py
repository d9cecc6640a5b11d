"""The hand-over's calls to a decode worker, in our own values. Failures come out as the errors the worker raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

import grpc.aio

from kvtransfer import messages
from kvtransfer.errors import TransferFailed
from kvtransfer.ticket import HandoverRecord, Heartbeat, PeerDescription, Renewal, Reservation, SenderIdentity, Ticket
from model.kv_layout import KVLayout
from protos import decode_pb2, decode_pb2_grpc
from protos.channel import service_errors


class DecodeClient:
    """Every call has a deadline. Owns the channel: `close` it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = decode_pb2_grpc.DecodeStub(channel)

    async def describe(self, layout: KVLayout, timeout_s: float) -> PeerDescription:
        request = decode_pb2.DescribeRequest(layout=messages.layout_to_message(layout))
        with service_errors():
            return messages.description_from_message(await self._stub.Describe(request, timeout=timeout_s))

    async def reserve(self, reservation: Reservation, timeout_s: float) -> Ticket:
        request = messages.reservation_to_message(reservation)
        with service_errors(), _closed_is_an_error():
            return messages.ticket_from_message(await self._stub.Reserve(request, timeout=timeout_s))

    async def commit(self, record: HandoverRecord, timeout_s: float) -> None:
        with service_errors(), _closed_is_an_error():
            await self._stub.Commit(messages.record_to_message(record), timeout=timeout_s)

    async def release(self, ticket: Ticket, sender: SenderIdentity, reason: str, timeout_s: float) -> None:
        request = decode_pb2.ReleaseRequest(
            ticket_id=ticket.ticket_id, sender_epoch=sender.epoch, reason=reason, mac=ticket.mac
        )
        with service_errors():
            await self._stub.Release(request, timeout=timeout_s)

    async def attach(
        self, sender: SenderIdentity, heartbeats: AsyncIterator[Heartbeat], silence_s: float
    ) -> AsyncGenerator[Renewal, None]:
        """Sends heartbeats, yields what is answered. It ends only by an error.

        Raises TransferFailed if the worker ends the stream or does not answer for `silence_s`.
        """
        heard_at = 0.0
        sent_at: dict[int, float] = {}  # by the number of each heartbeat that is not answered

        async def numbered() -> AsyncIterator[decode_pb2.Heartbeat]:
            number = 0
            async for heartbeat in heartbeats:
                number += 1
                sent_at[number] = asyncio.get_running_loop().time()
                yield messages.heartbeat_to_message(sender, heartbeat, number, heard_at)

        call = self._stub.Attach(numbered())
        try:
            while True:
                async with asyncio.timeout(silence_s):  # not wait_for: it may take an answer for its cancellation
                    with service_errors():
                        response = await call.read()
                if not isinstance(response, decode_pb2.HeartbeatResponse):  # it is grpc.aio.EOF
                    raise TransferFailed("the decode worker ended the Attach stream")
                heard_at = response.now
                at = sent_at.get(response.number)
                for number in [number for number in sent_at if number <= response.number]:
                    del sent_at[number]
                if at is not None:  # else it answers nothing that was asked, or a second time
                    yield Renewal(tuple(response.ended_ticket_ids), at)
        except TimeoutError:
            raise TransferFailed(f"the decode worker did not answer a heartbeat for {silence_s} s") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


@contextmanager
def _closed_is_an_error() -> Iterator[None]:
    """A channel that is closed cancels its calls. To the caller that looks as if its own task had been cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise TransferFailed("the connection to the decode worker was given up") from None
    except grpc.aio.UsageError as error:
        raise TransferFailed(f"the connection to the decode worker was given up: {error}") from None
