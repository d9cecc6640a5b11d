"""That a call comes from this page and not from another that a visitor's browser has open; and what this page may do.

A page elsewhere can send calls here, and by a name that it points at this machine read the answers too (DNS rebinding).
Names that are not ours are refused; addresses are not names, and nobody can point them anywhere.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CONTENT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _CONTENT,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_SAFE = {"GET", "HEAD"}


class SameSite:
    """Around an application. `names`: hosts by which people reach it, beside localhost and every address."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        if refusal := self._refusal(Headers(scope=scope), scope["method"]):
            await _refuse(refusal, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)

    def _refusal(self, headers: Headers, method: str) -> str:
        """Why the call is not answered; empty if it is."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            return (
                f"the host {host[:100]!r} is not a name of this dashboard: open it by its address, or start it with "
                "--name for each name that it is reached by"
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return f"the call comes from {origin[:100]!r}, which is another page"
        site = headers.get("sec-fetch-site", "none")
        if method not in _SAFE and site not in ("same-origin", "none"):
            return "the call comes from another page"
        return ""

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


async def _refuse(why: str, send: Send) -> None:
    body = json.dumps({"error": {"code": "PERMISSION_DENIED", "reason": "OTHER_SITE", "message": why, "field": ""}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body.encode())).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
