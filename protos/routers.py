"""The routers that a client may ask. It stays with one until that is away, and goes on to the next then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from protos import inference_pb2_grpc, insights_pb2_grpc, plans_pb2_grpc, workers_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.credentials import Credentials
from protos.errors import is_connection_failure

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Router:
    address: str
    channel: grpc.aio.Channel
    inference: inference_pb2_grpc.InferenceStub
    pools: workers_pb2_grpc.PoolsStub
    plans: plans_pb2_grpc.PlansStub
    insights: insights_pb2_grpc.InsightsStub

    @property
    def nobody_there(self) -> str:
        """What is said when it does not answer."""
        return f"no router answers at {self.address}: start one with `pdserve up`, or give its address"


class Routers:
    """At least one."""

    def __init__(self, addresses: Sequence[str], credentials: Credentials | None) -> None:
        """Raises ValueError if there is no address, FailedPrecondition if a secret would go out unencrypted."""
        if not all(addresses) or not addresses:
            raise ValueError("an address of a router is empty: give host:port, or several of them with commas between")
        self._routers = [_opened(address, credentials) for address in addresses]
        self._current = 0

    def __len__(self) -> int:
        return len(self._routers)

    @property
    def current(self) -> Router:
        return self._routers[self._current]

    def leave(self, router: Router) -> None:
        """It is away. Nothing happens if it has been left already, by another call."""
        if router is self.current:
            self._current = (self._current + 1) % len(self._routers)

    async def ask(self, call: Callable[[Router], Awaitable[Answer]]) -> Answer:
        """Of the current one, and if it is away of the next, once each. Raises ServiceError."""
        for _ in self._routers[1:]:
            router = self.current
            try:
                return await call(router)
            except grpc.aio.AioRpcError as error:
                if not is_connection_failure(error):
                    with service_errors():
                        raise
                self.leave(router)
        router = self.current
        with service_errors(router.nobody_there):
            return await call(router)

    async def close(self) -> None:
        await asyncio.gather(*(router.channel.close() for router in self._routers))


def _opened(address: str, credentials: Credentials | None) -> Router:
    channel = open_channel(address, credentials)
    return Router(
        address,
        channel,
        inference_pb2_grpc.InferenceStub(channel),
        workers_pb2_grpc.PoolsStub(channel),
        plans_pb2_grpc.PlansStub(channel),
        insights_pb2_grpc.InsightsStub(channel),
    )
