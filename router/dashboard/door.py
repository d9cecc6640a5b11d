"""The page's HTTP: its files, what it asks once, what it asks again and again, and the one thing it changes."""

from __future__ import annotations

import logging
import mimetypes
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from protos.credentials import KEY_SCHEME
from protos.errors import Internal, InvalidArgument, ServiceError
from router.dashboard.failures import as_failure, http_status
from router.dashboard.plan_change import PlanChange
from router.dashboard.same_site import SameSite
from router.dashboard.spelling import Plain
from router.dashboard.visitors import Visitor, Visitors

logger = logging.getLogger(__name__)

_STATIC = Path(__file__).resolve().parent / "static"
_MAX_BODY_BYTES = 16 * 2**10
_MAX_DECISIONS, _MAX_REQUESTS = 1000, 500
_FRESH = {"cache-control": "no-store"}

Answer: TypeAlias = Callable[[Visitor, Request], Awaitable[Plain]]

mimetypes.add_type("text/javascript", ".js")  # a system's own list may say otherwise, and browsers insist
mimetypes.add_type("text/javascript", ".mjs")


def application(visitors: Visitors, names: Iterable[str] = ()) -> ASGIApp:
    """`names`: hosts by which people reach the page, beside localhost and every address."""

    routes = [
        Route("/", _page, methods=["GET"]),
        Route("/api/stream", partial(_stream, visitors), methods=["GET"]),
        *(
            Route(f"/api/{name}", partial(_seen, visitors, answer), methods=["GET"])
            for name, answer in (("decisions", _decisions), ("requests", _requests), ("insights", _insights))
        ),
        Route("/api/plan", partial(_changed, visitors, _set_plan), methods=["POST"]),
        Mount("/static", _Files(directory=_STATIC)),
    ]
    return SameSite(GZipMiddleware(Starlette(routes=routes), minimum_size=1000, compresslevel=5), names)


async def _page(request: Request) -> Response:
    return FileResponse(_STATIC / "index.html", headers={"cache-control": "no-cache"})


class _Files(StaticFiles):
    """Asked for again whether they have changed: an update of the program is one of its page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


async def _decisions(visitor: Visitor, request: Request) -> Plain:
    return await visitor.asking.decisions(_number(request, "limit", 100, _MAX_DECISIONS))


async def _requests(visitor: Visitor, request: Request) -> Plain:
    order, running = request.query_params.get("order", "slowest"), request.query_params.get("running", "0")
    return await visitor.asking.requests(_number(request, "limit", 50, _MAX_REQUESTS), order, running == "1")


async def _insights(visitor: Visitor, request: Request) -> Plain:
    return await visitor.asking.insights(request.query_params.getlist("worker"))


async def _set_plan(visitor: Visitor, request: Request) -> Plain:
    """JSON by its type: another page may send that only where it has asked first, and is not answered."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidArgument("the content type must be application/json", field="content-type")
    return await visitor.asking.set_plan(PlanChange.parse(await _body(request)))


async def _stream(visitors: Visitors, request: Request) -> Response:
    try:
        visitor = await visitors.of(_api_key(request))
    except ServiceError as error:
        return _failed(error)
    headers = {**_FRESH, "x-accel-buffering": "no"}
    events = visitor.feed.events()
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        events = _compressed(events)
    return _Stream(events, headers)


class _Stream(StreamingResponse):
    """Ends what it tells of when the reader is gone."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _compressed(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Each part can be read when it has come: what is said twice a second is mostly what was said before."""
    gzip = zlib.compressobj(level=1, wbits=31)
    async with aclosing(parts):
        async for part in parts:
            yield gzip.compress(part) + gzip.flush(zlib.Z_SYNC_FLUSH)


async def _seen(visitors: Visitors, answer: Answer, request: Request) -> Response:
    """What the page asks again and again: as in the stream, either what there is or why there is nothing, and always
    200. Browsers write every other status to their console, where one would look for what is wrong with the page."""
    try:
        told = {"data": await _answered(visitors, answer, request), "error": None}
    except ServiceError as error:
        told = {"data": None, "error": as_failure(error)}
    return JSONResponse(told, headers=_FRESH)


async def _changed(visitors: Visitors, answer: Answer, request: Request) -> Response:
    try:
        return JSONResponse(await _answered(visitors, answer, request), headers=_FRESH)
    except ServiceError as error:
        return _failed(error)


async def _answered(visitors: Visitors, answer: Answer, request: Request) -> Plain:
    """Raises ServiceError."""
    visitor = await visitors.of(_api_key(request))
    visitor.num_calls += 1
    try:
        return await answer(visitor, request)
    except (ServiceError, ClientDisconnect):
        raise
    except Exception as error:
        logger.exception("%s failed", request.url.path)
        raise Internal("the dashboard failed on this; its log says why") from error
    finally:
        visitor.num_calls -= 1


def _failed(error: ServiceError) -> Response:
    return JSONResponse({"error": as_failure(error)}, http_status(error), _FRESH)


def _api_key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.casefold() == KEY_SCHEME.casefold() else ""


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidArgument(f"{name} is {text[:50]!r}; it must be 1 to {most}", field=name)
    return int(text)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidArgument(f"the body has more than {_MAX_BODY_BYTES} bytes", field="body")
    return bytes(body)
