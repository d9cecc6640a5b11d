"""What a worker tells of its hand-overs, beside a receiver to which things happen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from decode.draft_planner import NoDrafts
from deploy.expert_shares import ExpertShares
from deploy.inside import InsideService
from kvtransfer import metrics
from kvtransfer.errors import RecordMismatch
from kvtransfer.sender import Sender
from kvtransfer.transfer_meter import Transferred
from protos import insights_pb2 as pb
from protos.calls import Context
from tests.kvtransfer.committing import commit
from tests.kvtransfer.test_receiver import BLOCK, Desk, record

SENDER = cast(Sender, SimpleNamespace(transferred=Transferred(num_bytes=3000.0, seconds=0.5)))


async def told(desk: Desk) -> pb.WorkerInsights:
    service = InsideService("w", NoDrafts(), ExpertShares(), SENDER, desk.receiver)
    return await service.GetInsights(pb.GetInsightsRequest(), cast(Context, None))


async def test_leases_quarantine_and_what_went_wrong() -> None:
    desk = Desk()
    before = (await told(desk)).transfers
    desk.reserve("a")
    ticket = desk.reserve("b", first=500)
    with pytest.raises(RecordMismatch):
        commit(desk.receiver, record(ticket, "b", num_tokens=BLOCK))
    now = (await told(desk)).transfers
    assert (now.num_leases, now.num_quarantined_blocks, now.oldest_quarantine_s) == (2, 0, 0.0)
    assert (now.num_rejected - before.num_rejected, now.num_expired_leases - before.num_expired_leases) == (1, 0)
    desk.advance(9.5)  # nobody renews
    desk.advance(3.0)
    later = (await told(desk)).transfers
    assert (later.num_leases, later.num_quarantined_blocks, later.oldest_quarantine_s) == (0, 4, 3.0)
    assert later.num_expired_leases - before.num_expired_leases == 2


async def test_hand_overs_and_how_much_of_them_was_exposed() -> None:
    desk = Desk()
    before = (await told(desk)).transfers
    metrics.HANDOVERS.labels("ok").inc(3)
    metrics.HANDOVERS.labels("aborted").inc(5)
    metrics.FAILED_WRITES.inc(2)
    for _ in range(500):  # of which nothing older is left
        metrics.observe_exposed(0.125)
    for _ in range(60):
        metrics.observe_exposed(0.5)
    told_now = await told(desk)
    now = told_now.transfers
    assert (now.num_handovers - before.num_handovers, now.num_failed_writes - before.num_failed_writes) == (3, 2)
    assert (now.exposed_p50_s, now.exposed_p90_s) == (0.125, 0.5)
    assert now.sent_bytes_per_s == pytest.approx(3000.0 * 0.693147 / 30.0, rel=1e-4)
    assert (told_now.worker_id, told_now.draft_reason, len(told_now.drafts), len(told_now.experts)) == ("w", "", 0, 0)
