"""Channels to workers live as long as the worker or its last user, whichever is longer."""

from __future__ import annotations

from typing import Any, cast

import grpc
import grpc.aio

from router.candidate import Candidate, Role, WorkerId
from router.links import Links

CLOSED = grpc.ChannelConnectivity.SHUTDOWN


def worker(epoch: str) -> Candidate:
    return Candidate(WorkerId("d", epoch), "127.0.0.1:1", Role.DECODE, True, "a", 1, 0, 0, 0)


async def test_one_channel_for_one_process() -> None:
    links = Links()
    async with links.to(worker("e1")) as first, links.to(worker("e1")) as same, links.to(worker("e2")) as other:
        assert first is same and first is not other
    async with links.to(worker("e1")) as later:
        assert later is first
    await links.close()
    assert [link.channel.get_state() for link in (first, other)] == [CLOSED, CLOSED]


async def test_retired_channel_serves_its_users_to_their_end() -> None:
    links = Links()
    async with links.to(worker("e1")) as link:
        await links.retire(WorkerId("d", "e1"))
        assert link.channel.get_state() is not CLOSED
    assert link.channel.get_state() is CLOSED
    async with links.to(worker("e1")) as new:
        assert new is not link
    await links.retire(WorkerId("d", "e1"))
    assert new.channel.get_state() is CLOSED
    await links.retire(WorkerId("never", "seen"))


class Call:
    """Stands where a call of grpc stands."""

    is_cancelled = False

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True


async def test_silent_worker_is_given_up_with_its_calls_and_may_come_back() -> None:
    links, call, other = Links(), Call(), Call()
    async with links.to(worker("e1")) as link, links.to(worker("e2")) as other_link:
        with link.follow(cast(grpc.aio.UnaryStreamCall[Any, Any], call)):
            with other_link.follow(cast(grpc.aio.UnaryStreamCall[Any, Any], other)):
                await links.give_up(WorkerId("d", "e1"))
                assert call.is_cancelled and not other.is_cancelled
            assert link.is_given_up and not other_link.is_given_up
        async with links.to(worker("e1")) as new:
            assert new is not link and not new.is_given_up
    assert link.channel.get_state() is CLOSED
    await links.close()
