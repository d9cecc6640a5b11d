"""What Prometheus sees of the HTTP door: requests by route and status, and how long they took, through a real one."""

from __future__ import annotations

import asyncio
from collections import Counter

import openai
import pytest
from prometheus_client import REGISTRY

from tests.router.fakes import running_fleet
from tests.router.scripted_service import ScriptedService, served, summary, text
from tests.router.test_http_server import asking, connected, status_and_error, until_open
from tests.router.test_openai_door import client_of

CHAT, COMPLETIONS, MODEL = "/v1/chat/completions", "/v1/completions", "/v1/models/{model}"


def counted() -> Counter[tuple[str, str]]:
    """Requests so far by route and status: these counters are of the whole process."""
    return Counter(
        {
            (sample.labels["route"], sample.labels["status"]): int(sample.value)
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == "pdserve_http_requests_total"
        }
    )


def timed(route: str, at_most: str = "+Inf") -> float:
    labels = {"route": route, "le": at_most}
    return REGISTRY.get_sample_value("pdserve_http_request_seconds_bucket", labels) or 0.0


async def until_counted(before: Counter[tuple[str, str]], expected: dict[tuple[str, str], int]) -> None:
    """A client has its answer before the call has ended here."""
    async with asyncio.timeout(10):
        while counted() - before != expected:
            await asyncio.sleep(0.005)


async def test_requests_are_counted_by_route_and_status() -> None:
    before, chats = counted(), timed(CHAT)
    async with running_fleet(num_both=1, http_port=0) as fleet, client_of(fleet) as client:
        message = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="tiny", messages=[message], max_tokens=2)  # type: ignore[list-item]
        stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=2, stream=True)
        assert [chunk async for chunk in stream]
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="tiny", messages=[])
        await client.models.retrieve("tiny")
        for name in ("huge", "a/b", "x" * 500):
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve(name)
        for path in ("/", "/v1/embeddings", "/v1/chat/completions/", *(f"/{number}" for number in range(20))):
            with pytest.raises(openai.NotFoundError):
                await client.get(f"http://{fleet.router.http_address}{path}", cast_to=object)
        with pytest.raises(openai.APIStatusError, match="does not take GET"):
            await client.get("/completions", cast_to=object)
        await client.get(f"http://{fleet.router.http_address}/ready", cast_to=object)
        expected = {
            (CHAT, "200"): 1,
            (CHAT, "400"): 1,
            (COMPLETIONS, "200"): 1,
            (MODEL, "200"): 1,
            (MODEL, "404"): 3,
            ("unknown", "404"): 23,
            (COMPLETIONS, "405"): 1,
            ("/ready", "200"): 1,
        }
        await until_counted(before, expected)
    assert timed(CHAT) - chats == 2


async def test_the_time_is_that_to_the_end_of_the_answer() -> None:
    before, quick, all_of_them = counted(), timed(COMPLETIONS, "0.25"), timed(COMPLETIONS)
    service = ScriptedService(lambda message: [text("a", end="stop"), summary()])
    async with served(service) as server, connected(server) as (reader, writer):
        service.may_end.clear()
        writer.write(asking())
        await reader.readuntil(b'"text":"a"')
        await asyncio.sleep(0.4)
        assert counted() == before
        service.may_end.set()
        await reader.readuntil(b"[DONE]")
        await until_counted(before, {(COMPLETIONS, "200"): 1})
    assert (timed(COMPLETIONS) - all_of_them, timed(COMPLETIONS, "0.25") - quick) == (1, 0)


async def test_clients_that_leave_before_the_first_word_and_those_that_speak_no_http_are_counted_too() -> None:
    before = counted()
    service = ScriptedService(lambda message: [summary()])
    async with served(service) as server:
        service.may_end.clear()
        async with connected(server) as (_, writer):
            writer.write(asking(b'{"prompt": "hi"}'))
            await until_open(service, 1)
        await until_counted(before, {(COMPLETIONS, "499"): 1})
        async with connected(server) as (reader, writer):
            writer.write(b"what is this\r\n\r\n")
            assert (await status_and_error(reader))[0] == 400
        await until_counted(before, {(COMPLETIONS, "499"): 1, ("unknown", "400"): 1})
