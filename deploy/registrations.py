"""Keeps a worker registered with every router: those it was given, and those that these tell of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from deploy.reporter import Reporter
from protos.errors import ServiceError

logger = logging.getLogger(__name__)

Told: TypeAlias = Callable[[Sequence[str]], None]


class Registrations:
    """`make` makes the reporter to one address, which calls what it is given with the routers that live, as often as it
    is told. A router that was told of is reported to for as long as it is there, or another one tells of it."""

    def __init__(self, addresses: Sequence[str], make: Callable[[str, Told], Reporter]) -> None:
        self._given = list(addresses)
        self._make = make
        self._told: dict[str, frozenset[str]] = {}  # by whom
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Lasts as long as the worker. Raises the refusal of a router that the worker was given."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for address in self._wanted():
                    if address not in running:
                        running[address] = asyncio.create_task(self._make(address, self._hears(address)).run())
                for address in running.keys() - self._wanted():
                    running[address].cancel()
                await self._wait(running)
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    def _wanted(self) -> list[str]:
        """A router that is away no longer tells of anybody, itself included."""
        return list(dict.fromkeys([*self._given, *sorted(set[str]().union(*self._told.values()))]))

    def _hears(self, by: str) -> Told:
        def told(addresses: Sequence[str]) -> None:
            self._told[by] = frozenset(addresses)
            self._changed.set()

        return told

    async def _wait(self, running: dict[str, asyncio.Task[None]]) -> None:
        """Until something is to be done. Takes out what has ended."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait([changed, *running.values()], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()
        for address in [address for address, task in running.items() if task.done()]:
            self._ended(address, running.pop(address))

    def _ended(self, address: str, task: asyncio.Task[None]) -> None:
        self._told.pop(address, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if address in self._given or not isinstance(error, ServiceError):
            raise error
        for by, addresses in self._told.items():  # as if nobody had told of it
            self._told[by] = addresses - {address}
        logger.error("router %s, of which another one told, refuses this worker: %s", address, error)
