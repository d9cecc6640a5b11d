"""A fleet of two prefill and two decode workers, and a client of its router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from protos.client import PdserveClient
from tests.router.fakes import FakeFleet, running_fleet


def _first(messages: Sequence[bytes]) -> tuple[bytes, int]:
    return messages[0], 1


@pytest.fixture(autouse=True)
def one_by_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers pass on one message after another, however busy the machine, so that tests can tell what each says."""
    if request.node.get_closest_marker("gathers") is None:
        monkeypatch.setattr("router.inbox.merged", _first)


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    """Two prefill and two decode workers."""
    async with running_fleet(num_prefill=2, num_decode=2) as fleet:
        yield fleet
        await fleet.settled()


@pytest.fixture
async def client(fleet: FakeFleet) -> AsyncIterator[PdserveClient]:
    async with PdserveClient(fleet.router.address) as client:
        yield client


@pytest.fixture
def told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave: with a single request nothing need be spread."""
    monkeypatch.setattr("router.move._SPREAD_S", 0.0)
