"""Channels to workers live as long as the worker or its last user, whichever is longer."""

from __future__ import annotations

import grpc

from router.links import Links
from router.placement import Candidate, Role, WorkerId

CLOSED = grpc.ChannelConnectivity.SHUTDOWN


def worker(epoch: str) -> Candidate:
    return Candidate(WorkerId("d", epoch), "127.0.0.1:1", Role.DECODE, True, "a", 0, 0, 0)


async def test_one_channel_for_one_process() -> None:
    links = Links()
    async with links.to(worker("e1")) as first, links.to(worker("e1")) as same, links.to(worker("e2")) as other:
        assert first is same and first is not other
    async with links.to(worker("e1")) as later:
        assert later is first
    await links.close()
    assert [channel.get_state() for channel in (first, other)] == [CLOSED, CLOSED]


async def test_retired_channel_serves_its_users_to_their_end() -> None:
    links = Links()
    async with links.to(worker("e1")) as channel:
        await links.retire(WorkerId("d", "e1"))
        assert channel.get_state() is not CLOSED
    assert channel.get_state() is CLOSED
    async with links.to(worker("e1")) as new:
        assert new is not channel
    await links.retire(WorkerId("d", "e1"))
    assert new.get_state() is CLOSED
    await links.retire(WorkerId("never", "seen"))
