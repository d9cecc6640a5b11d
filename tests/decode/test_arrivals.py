"""The two halves of a hand-over meet whichever comes first, and nothing is kept of one that does not."""

from __future__ import annotations

import asyncio

import pytest

from decode.arrivals import Arrivals
from kvtransfer.ticket import ReceivedSequence
from protos.errors import AlreadyExists, Unavailable


def received(attempt_id: str) -> ReceivedSequence:
    return ReceivedSequence(attempt_id, (1, 2), 20, 16, 4, 7)


class Box:
    def __init__(self, unclaimed_s: float = 60.0) -> None:
        self.dropped: list[ReceivedSequence] = []
        self.arrivals = Arrivals(unclaimed_s=unclaimed_s, drop=self.dropped.append)


async def test_kv_first() -> None:
    box = Box()
    box.arrivals.committed("a", received("a"))
    assert await box.arrivals.claim("a") == received("a")
    assert len(box.arrivals) == 0


async def test_stream_first() -> None:
    box = Box()
    claim = asyncio.create_task(box.arrivals.claim("a"))
    await asyncio.sleep(0)
    box.arrivals.committed("a", received("a"))
    assert await claim == received("a")
    assert len(box.arrivals) == 0


async def test_failure_reaches_the_stream() -> None:
    box = Box()
    box.arrivals.failed("a", Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await box.arrivals.claim("a")
    assert len(box.arrivals) == 0


async def test_second_stream_is_refused_and_the_first_goes_on() -> None:
    box = Box()
    claim = asyncio.create_task(box.arrivals.claim("a"))
    await asyncio.sleep(0)
    with pytest.raises(AlreadyExists):
        await box.arrivals.claim("a")
    box.arrivals.committed("a", received("a"))
    assert await claim == received("a")


async def test_unclaimed_kv_is_given_back() -> None:
    box = Box(unclaimed_s=0.01)
    box.arrivals.committed("a", received("a"))
    await asyncio.sleep(0.05)
    assert box.dropped == [received("a")]
    assert len(box.arrivals) == 0


async def test_cancelled_stream_leaves_nothing() -> None:
    box = Box()
    claim = asyncio.create_task(box.arrivals.claim("a"))
    await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert (len(box.arrivals), box.dropped) == (0, [])


@pytest.mark.parametrize("comes_first", [True, False])
async def test_kv_that_comes_in_the_moment_the_stream_goes_is_given_back(comes_first: bool) -> None:
    box = Box()
    claim = asyncio.create_task(box.arrivals.claim("a"))
    await asyncio.sleep(0)
    if comes_first:
        box.arrivals.committed("a", received("a"))
        claim.cancel()
    else:
        claim.cancel()
        box.arrivals.committed("a", received("a"))
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert (len(box.arrivals), box.dropped) == (0, [received("a")])


async def test_close_gives_back_what_nobody_claimed() -> None:
    box = Box()
    box.arrivals.committed("a", received("a"))
    box.arrivals.close()
    assert (len(box.arrivals), box.dropped) == (0, [received("a")])
