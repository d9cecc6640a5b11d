"""Requests that fit the door's own OpenAPI document, and those that do not: never a 5xx, and errors in one shape."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.openai_document import document
from router.openai_requests import ChatBody, CompletionBody
from tests.router.fakes import ready_load, running_fleet

SCHEMA = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a router with one fake worker, in a loop and a thread of its own: schemathesis is synchronous."""
    told: list[str] = []
    ready, ending, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with running_fleet(num_both=1, http_port=0) as fleet:
            told.append(fleet.router.http_address)
            ready.set()
            while not ending.is_set():
                fleet.workers["w0"].report(ready_load())  # one that says nothing gets nothing
                with suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), 1)
            await fleet.settled()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield told[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()


quick = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
PATHS = ("/v1/chat/completions", "/v1/completions")
ERROR = {"message", "type", "param", "code"}


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_what_the_document_allows_and_what_not(address: str, mode: schemathesis.GenerationMode) -> None:
    operations = [SCHEMA[path]["POST"] for path in PATHS]
    seen: set[int] = set()

    @settings(quick, max_examples=40)  # each takes its time to be made
    @given(st.one_of([operation.as_strategy(generation_mode=mode) for operation in operations]))
    def ask(case: schemathesis.Case[Any]) -> None:
        response = case.call(base_url=f"http://{address}", timeout=10)
        seen.add(response.status_code)
        assert response.status_code < 500 or response.status_code == 504, response.text  # their own deadline
        if response.status_code >= 400:
            assert set(response.json()["error"]) == ERROR

    ask()
    assert 400 in seen


NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 1.5, -0.0, 2**31, -(2**63), 2**63, 2**64, 10**400, 1e308, -1e-320]),
    st.floats(),  # NaN and infinities too
    st.integers(),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "response_format", "user", "x"})
FITTING: dict[str, Any] = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}


@quick
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), VALUES | NUMBERS, max_size=2))
def test_fields_with_any_value(address: str, path: str, fields: dict[str, Any]) -> None:
    prompt = "prompt" if path == "/v1/completions" else "messages"
    ask(address, path, json.dumps({prompt: FITTING[prompt], "max_tokens": 2, **fields}).encode())


@quick
@given(st.sampled_from(PATHS), st.one_of(st.binary(max_size=40), VALUES.map(lambda value: json.dumps(value).encode())))
def test_bodies_that_are_anything(address: str, path: str, body: bytes) -> None:
    assert ask(address, path, body) == 400


@quick
@given(st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=200))
def test_headers_with_any_value(address: str, value: str) -> None:
    value = value.strip()
    headers = {"x-request-id": value, "authorization": value, "accept": value, "x-request-timeout-s": value}
    assert ask(address, "/v1/completions", b'{"prompt": "hi", "max_tokens": 1}', headers) in (200, 400, 504)


def ask(address: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> int:
    """The status. Anything but an answer is in OpenAI's shape."""
    given_headers = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"http://{address}{path}", body, given_headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as refusal:
        with refusal:
            told = refusal.read()
        assert refusal.code < 500 or refusal.code == 504, (body, told)
        assert set(json.loads(told)["error"]) == ERROR
        return refusal.code
