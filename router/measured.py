"""An HTTP application whose calls are counted and timed, by the route that took them."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import metrics

_LEFT = 499  # as others count clients that left before they were told anything: it is never sent


class Measured:
    """`app` notes the route in the call's scope, as Starlette does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began_at = _LEFT, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path_format", metrics.UNKNOWN_ROUTE)
            metrics.observe_http(route, status, time.monotonic() - began_at)
