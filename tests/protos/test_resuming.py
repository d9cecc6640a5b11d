"""An answer whose stream breaks off goes on in the next one, at whichever router, and nothing is missing or twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos import inference_pb2 as pb
from protos import resuming
from protos.client import PdserveClient
from protos.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Internal,
    Interrupted,
    NoWorker,
    ServiceError,
    Unavailable,
)
from protos.resuming import MAX_REFUSALS, MAX_RESUMES, Resuming
from protos.routers import Routers
from protos.values import Sampling, Summary
from tests.protos.test_client import SUMMARY, Scripted, tokens
from tests.protos.test_client import talking_to as serving

LAST = tokens(3, 9, finish_reason=pb.FINISH_REASON_LENGTH)
LOST = Unavailable("gone")


class Script:
    """What each stream says in turn, and how it ends; `asked` has what it was asked for, and of whom."""

    def __init__(self, *streams: Sequence[pb.GenerateResponse | Exception]) -> None:
        self.streams = list(streams)
        self.asked: list[tuple[str, list[int]]] = []
        self.emitted: list[list[list[int]]] = []
        self.timeouts_s: list[float | None] = []

    async def ask(self, router: Any, request: Any, timeout_s: float | None) -> AsyncIterator[pb.GenerateResponse]:
        self.asked.append((router, [token for each in request.emitted for token in each.ids]))
        self.emitted.append([list(each.ids) for each in request.emitted])
        self.timeouts_s.append(timeout_s)
        for event in self.streams.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event


class Names:
    """Stands for routers that are told apart by a letter."""

    def __init__(self, names: str) -> None:
        self.names = names
        self.leave = Routers.leave.__get__(cast("Any", self))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def current(self) -> str:
        return self.names[self._current]

    _routers = property(lambda self: self.names)
    _current = 0


async def resumed(
    script: Script, routers: str = "ab", deadline_s: float | None = None, **fields: Any
) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(**fields)
    messages = Resuming(cast("Routers", Names(routers)), cast("Any", script.ask), request, deadline_s).messages()
    return [message async for message in messages]


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "_DELAY_S", 0.0)


async def test_goes_on_behind_what_came_at_the_next_router() -> None:
    script = Script([tokens(0, 5), tokens(1, 6, 7), LOST], [LAST, SUMMARY])
    assert await resumed(script) == [tokens(0, 5), tokens(1, 6, 7), LAST, SUMMARY]
    assert script.asked == [("a", []), ("b", [5, 6, 7])]


async def test_what_the_caller_has_already_counts() -> None:
    script = Script([tokens(2, 7), LOST], [LAST, SUMMARY])
    assert await resumed(script, emitted=[pb.TokenIds(ids=[5, 6])]) == [tokens(2, 7), LAST, SUMMARY]
    assert script.asked == [("a", [5, 6]), ("b", [5, 6, 7])]


async def test_summary_that_was_lost_is_asked_for_and_no_token_is_told_twice() -> None:
    script = Script([tokens(0, 5, 6), tokens(2, 7), LAST, LOST], [LAST, SUMMARY])
    assert await resumed(script) == [tokens(0, 5, 6), tokens(2, 7), LAST, SUMMARY]
    assert script.asked == [("a", []), ("b", [5, 6, 7])]


async def test_interrupted_answer_goes_on_at_the_same_router() -> None:
    script = Script([Interrupted("x")], [tokens(0, 5, 6, 7), Interrupted("x")], [LAST, SUMMARY])
    assert (await resumed(script))[-1] == SUMMARY
    assert script.asked == [("a", []), ("a", []), ("a", [5, 6, 7])]


async def test_request_that_is_in_flight_still_is_waited_for() -> None:
    refusals = [cast("Any", [AlreadyExists("r1 is in flight")])] * (MAX_REFUSALS + 1)
    script = Script([tokens(0, 5, 6, 7), LOST], *refusals[1:], [LAST, SUMMARY])
    assert (await resumed(script, routers="a"))[-1] == SUMMARY
    with pytest.raises(AlreadyExists):
        await resumed(Script([tokens(0, 5), LOST], *refusals), routers="a")
    with pytest.raises(AlreadyExists):
        await resumed(Script([AlreadyExists("r1 is in flight")]))


@pytest.mark.parametrize("routers", ["a", "ab", "abc"])
async def test_nobody_there_is_told_after_each_was_asked_once(routers: str) -> None:
    script = Script(*[cast("Any", [LOST])] * 9)
    with pytest.raises(Unavailable, match="gone"):
        await resumed(script, routers)
    assert script.asked == [(letter, []) for letter in routers]


@pytest.mark.parametrize("routers", ["a", "ab"])
async def test_gives_up_in_the_end_and_says_after_how_many_tokens(routers: str) -> None:
    script = Script([tokens(0, 5, 6), LOST], *[cast("Any", [LOST])] * 9)
    with pytest.raises(Unavailable, match="the answer broke off after 2 tokens: gone"):
        await resumed(script, routers)
    assert len(script.asked) == MAX_RESUMES + len(routers)


async def test_each_token_gives_it_new_patience() -> None:
    script = Script(*(cast("Any", [tokens(index, index), LOST]) for index in range(20)), [tokens(20, 20), SUMMARY])
    assert len(await resumed(script)) == 22


@pytest.mark.parametrize("error", [NoWorker("none"), Internal("defect"), DeadlineExceeded("late")])
async def test_what_a_router_says_is_final(error: ServiceError) -> None:
    script = Script([tokens(0, 5), error])
    with pytest.raises(type(error)) as caught:
        await resumed(script)
    assert caught.value is error


async def test_each_of_several_answers_goes_on_behind_what_came_of_it() -> None:
    def of(choice: int, message: pb.GenerateResponse) -> pb.GenerateResponse:
        message.choice = choice
        return message

    end = pb.FINISH_REASON_STOP
    first = [of(2, tokens(0, 7)), of(0, tokens(0, 5)), of(0, tokens(1, 6, finish_reason=end)), of(2, tokens(1, 8))]
    again = [of(0, tokens(1, 6, finish_reason=end)), of(1, tokens(0, 9, finish_reason=end))]
    rest = [of(2, tokens(2, 8, finish_reason=end)), SUMMARY]
    script = Script([*first, LOST], [*again, *rest])
    assert await resumed(script, n=3) == [*first, again[1], *rest]
    assert script.emitted == [[], [[5], [], [7, 8]]]


async def test_prompt_is_not_told_twice() -> None:
    prompt = pb.GenerateResponse(prompt=pb.PromptChunk(text="once"))
    with pytest.raises(Unavailable):
        await resumed(Script([prompt, LOST]), echo=True)
    script = Script([prompt, tokens(0, 5, 6, 7), LOST], [LAST, SUMMARY])
    assert await resumed(script, echo=True) == [prompt, tokens(0, 5, 6, 7), LAST, SUMMARY]


async def test_gap_after_a_resume_is_seen() -> None:
    with pytest.raises(Internal, match="the answer has 1 tokens and goes on at output_index 2"):
        await resumed(Script([tokens(0, 5), LOST], [tokens(2, 7), SUMMARY]))


async def test_deadline_is_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("protos.resuming.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Script):
        async def ask(self, router: Any, request: Any, timeout_s: float | None) -> AsyncIterator[pb.GenerateResponse]:
            now[0] += 4.0
            async for message in super().ask(router, request, timeout_s):
                yield message

    script = Slow([tokens(0, 5), LOST], [tokens(1, 6), LOST], [tokens(2, 7), LOST])
    with pytest.raises(DeadlineExceeded, match="the deadline passed after 3 tokens; gone"):
        await resumed(script, deadline_s=10.0)
    assert script.timeouts_s == [10.0, 6.0, 2.0]


async def test_client_of_two_routers_names_and_seeds_its_request() -> None:
    first = Scripted([tokens(0, 5, 6, 7)], ends_with=LOST)
    second = Scripted([LAST, SUMMARY])
    async with serving(first) as one, serving(second) as other:
        addresses = f"{_address(one)}, {_address(other)}"
        async with PdserveClient(addresses) as client:
            parts = [part async for part in client.generate("x", sampling=Sampling(max_tokens=4))]
            assert (await client.get_model()).name == "tiny"
    assert isinstance(parts[-1], Summary) and len(parts) == 3
    before, after = first.requests[0], second.requests[0]
    assert (before.request_id, before.sampling) == (after.request_id, after.sampling)
    assert before.request_id and before.sampling.HasField("seed")
    assert [list(each.ids) for each in after.emitted] == [[5, 6, 7]]


async def test_other_calls_go_to_the_next_router_too() -> None:
    async with serving(Scripted([])) as other, PdserveClient(f"127.0.0.1:1,{_address(other)}") as client:
        assert (await client.get_model()).name == "tiny"
        assert len(await client.tokenize("ab")) == 2


@pytest.mark.parametrize("address", ["", "a:1,", ",a:1"])
def test_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="an address of a router is empty"):
        PdserveClient(address)


def _address(client: PdserveClient) -> str:
    return client._routers.current.address
