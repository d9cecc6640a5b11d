"""Those who look at the page, by the key that they show: each has connections of their own, which carry it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos.credentials import Credentials
from protos.errors import Overloaded, PermissionDenied, Unauthenticated, Unavailable
from protos.routers import Routers
from protos.tls import TlsFiles
from router.dashboard.asking import Asking
from router.dashboard.feed import Feed, Topic

MAX_VISITORS = 64  # keys at once
_TRAFFIC_S = 300.0  # that the chart shows
_OPEN_S = 10.0  # how long it holds good that the router asks for keys


@dataclass(frozen=True, slots=True)
class RouterAccess:
    """How the routers are reached. `is_exposed`: people on other machines reach the page, and nobody has said that
    they all may: then a router that asks for no keys is shown to none of them."""

    addresses: tuple[str, ...]
    tls: TlsFiles | None = None
    insecure: bool = False
    is_exposed: bool = False

    def routers(self, api_key: str) -> Routers:
        """Raises Unauthenticated for what cannot be a key, FailedPrecondition if it would go out unencrypted."""
        try:
            is_anonymous = not api_key and self.tls is None
            credentials = None if is_anonymous else Credentials(self.tls, None, api_key, insecure=self.insecure)
        except ValueError as error:
            raise Unauthenticated(str(error)) from error
        return Routers(self.addresses, credentials)


class Visitor:
    """Of one key, empty where none is shown."""

    def __init__(self, routers: Routers) -> None:
        self.asking = Asking(routers)
        self.feed = Feed(
            {
                topic.name: topic
                for topic in (
                    Topic("access", self.asking.access, every_s=15.0),
                    Topic("pools", self.asking.status, every_s=0.5),
                    Topic("plan", self.asking.plan, every_s=0.5),
                    Topic("traffic", lambda: self.asking.traffic(_TRAFFIC_S), every_s=1.0),
                )
            }
        )
        self.num_calls = 0
        self.last_seen_at = 0.0

    @property
    def is_here(self) -> bool:
        return self.num_calls > 0 or self.feed.is_heard

    async def close(self) -> None:
        await self.feed.end()
        await self.asking.close()


class Visitors:
    def __init__(self, access: RouterAccess, clock: Callable[[], float] = time.monotonic) -> None:
        self._access = access
        self._clock = clock
        self._by_key: dict[str, Visitor] = {}
        self._guarded_until = 0.0
        self._has_ended = False

    async def of(self, api_key: str) -> Visitor:
        """Raises ServiceError: PermissionDenied where the page is exposed and the router would let in anybody."""
        if self._has_ended:
            raise Unavailable("the dashboard is about to stop")
        if self._access.is_exposed:
            await self._check_that_keys_are_asked_for()
        visitor = self._by_key.get(api_key)
        if visitor is None:
            left = self._make_room()
            visitor = self._by_key.setdefault(api_key, Visitor(self._access.routers(api_key)))
            if left is not None:
                await left.close()
        visitor.last_seen_at = self._clock()
        return visitor

    async def end(self) -> None:
        """What they listen to ends, and nobody new is let in."""
        self._has_ended = True
        for visitor in self._by_key.values():
            await visitor.feed.end()

    async def close(self) -> None:
        for visitor in self._by_key.values():
            await visitor.close()
        self._by_key.clear()

    def _make_room(self) -> Visitor | None:
        """The one who is away and was seen longest ago makes room."""
        if len(self._by_key) < MAX_VISITORS:
            return None
        away = [key for key, visitor in self._by_key.items() if not visitor.is_here]
        if not away:
            raise Overloaded(f"{MAX_VISITORS} keys are in use on this dashboard; no more are taken at once")
        return self._by_key.pop(min(away, key=lambda key: self._by_key[key].last_seen_at))

    async def _check_that_keys_are_asked_for(self) -> None:
        if self._clock() < self._guarded_until:
            return
        nobody = Asking(self._access.routers(""))
        try:
            await nobody.status()
        except Unauthenticated:
            self._guarded_until = self._clock() + _OPEN_S
            return
        finally:
            await nobody.close()
        raise PermissionDenied(
            "this page can be reached from other machines, and the router asks for no keys, so that anybody could "
            "change its pools: give the router --keys-file, let the dashboard listen at 127.0.0.1, or say --insecure"
        )
