"""A decode worker behind a network that is slow, loses packets, or is cut: every answer is right, in time, and no block
stays held on either side.

Timed workers, whose tokens depend on every byte of KV that was handed over. The bounds follow from the product's own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kvtransfer.nixl_agent import UNACKNOWLEDGED_S
from kvtransfer.peer import PeerOptions
from protos.channel import KEEPALIVE_S
from protos.client import PdserveClient
from router.workers import _SILENCE_S as ROUTER_SILENCE_S
from tests.cluster.asking import Answered
from tests.cluster.bad_network import Cable, Link, Network, why_not
from tests.cluster.split_cluster import SplitCluster
from tests.cluster.timed_cluster import LAYOUT, TIMING, ask_all, expected, prompts
from tests.cluster.tiny_model import TinyModel

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

LEASE_S = 2.0
LENGTHS = range(300, 700)
NUM_TOKENS = 60
WORK_S = 15.0  # what the work itself may take on a busy machine, and to notice that it is done
ANSWERED_S = ROUTER_SILENCE_S + WORK_S
SENDER_S = max(PeerOptions().silence_s, PeerOptions().call_timeout_s) + UNACKNOWLEDGED_S  # until it has let go
GRACE_S = max(LEASE_S, UNACKNOWLEDGED_S) + 2.0  # until blocks are free of a sender whose stream has ended
RECEIVER_S = 1.5 * KEEPALIVE_S + GRACE_S
BACK_S = 10.0  # until a worker whose link is whole again is registered and used
AT_REST = dict.fromkeys(
    [
        *(f'pdserve_worker_blocks{{state="{state}"}}' for state in ("reserved", "quarantined", "used")),
        *(
            f'pdserve_worker_sequences{{pool="{pool}",state="{state}"}}'
            for pool in ("prefill", "decode")
            for state in ("waiting", "running")
        ),
    ],
    0.0,
)


@dataclass
class Split:
    network: Network
    cluster: SplitCluster
    client: PdserveClient

    async def received_bytes(self) -> float:
        return (await self.cluster.metrics("decode-0"))['pdserve_kvtransfer_received_bytes_total{coding="as-is"}']

    async def at_rest(self, *names: str, within_s: float) -> None:
        """By what they themselves say."""

        async def is_so() -> bool:
            found = [await self.cluster.metrics(name) for name in names]
            return all({name: metrics[name] for name in AT_REST} == AT_REST for metrics in found)

        await until(is_so, within_s)

    async def used_again(self, seed: int) -> None:
        """The worker behind the link comes back by itself, gets requests, and answers them."""

        async def is_ready() -> bool:
            worker = (await self.cluster.workers())["decode-0"]
            return worker.state == "ready" and worker.reported_ago_s < ROUTER_SILENCE_S / 2  # not as it was before

        await until(is_ready, BACK_S)
        received = await self.received_bytes()
        asked = prompts(8, LENGTHS, seed)
        check(asked, await asyncio.gather(*await ask_all(self.client, asked, NUM_TOKENS)))
        assert await self.received_bytes() > received
        await self.at_rest("prefill-0", "decode-0", "decode-1", within_s=WORK_S)


@asynccontextmanager
async def split_cluster(network: Network, model: Path, folder: Path) -> AsyncIterator[Split]:
    timing = folder / "timing.json"
    timing.write_text(json.dumps(TIMING))
    arguments = ("--runner", "timed", "--timing", str(timing), "--num-blocks", "1000", "--max-step-tokens", "128")
    async with (
        SplitCluster(network, model, folder, *arguments, "--lease-s", str(LEASE_S)) as cluster,
        PdserveClient(cluster.router_address) as client,
    ):
        yield Split(network, cluster, client)
        for name in ("router", "prefill-0", "decode-0", "decode-1"):
            assert "Traceback" not in cluster.log(name)


@pytest.fixture(scope="module")
def network() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture
def linked(cluster: tuple[Split, Link]) -> Iterator[tuple[Split, Link]]:
    yield cluster
    cluster[1].restore()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    network: None, tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Split, Link]]:
    with Network() as both:
        link = Link(both.near, both.far, both.addresses, seed=1)
        try:
            async with split_cluster(both, tiny_moe.folder, tmp_path_factory.mktemp("linked")) as split:
                yield split, link
                link.restore()
        finally:
            link.close()


async def until(is_so: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await is_so():
            await asyncio.sleep(0.1)


def check(asked: list[list[int]], answers: list[Answered]) -> None:
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, len(answered.token_ids))
        assert answered.usage.decode_recomputed_tokens == 0


async def sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


async def test_delay_and_loss(linked: tuple[Split, Link]) -> None:
    """Only slower: nothing is tried a second time."""
    split, link = linked
    carried, received = link.out.num_bytes, await split.received_bytes()
    for direction in link.directions:
        direction.delay_s, direction.loss = 0.02, 0.01
    asked = prompts(12, LENGTHS, seed=1)
    answers = await asyncio.gather(*await ask_all(split.client, asked, NUM_TOKENS))
    link.restore()
    check(asked, answers)
    assert sum(answered.usage.num_retries + answered.usage.num_resumes for answered in answers) == 0
    assert all(answered.usage.disaggregated for answered in answers)
    assert min(link.out.num_lost, link.back.num_lost) > 0
    received = await split.received_bytes() - received
    assert link.out.num_bytes - carried > received > 600 * LAYOUT.block_bytes / LAYOUT.block_size
    await split.at_rest("prefill-0", "decode-0", "decode-1", within_s=WORK_S)


async def test_cut_in_one_direction(linked: tuple[Split, Link]) -> None:
    """What the far side says is lost. It hears all, and cannot know that nobody hears it."""
    split, link = linked
    asked, tasks = await being_sent(split, link)
    link.back.is_cut = True
    cut_at = time.monotonic()
    await given_up(split, asked, tasks, cut_at)
    link.restore()
    carried = link.out.num_bytes
    await asyncio.sleep(5)
    assert link.out.num_bytes - carried < 100_000  # what had been queued for the far side is not sent any more
    await split.used_again(seed=3)


async def test_cut_for_half_a_minute(linked: tuple[Split, Link]) -> None:
    """Long enough for both sides to let go of everything by themselves: it might as well be for good."""
    split, link = linked
    decoding = prompts(4, LENGTHS, seed=4)
    long_ones = await ask_all(split.client, decoding, 250)

    async def both_decode() -> bool:
        workers = await split.cluster.workers()
        return all(workers[name].num_running > 0 for name in ("decode-0", "decode-1"))

    await until(both_decode, WORK_S)
    asked, tasks = await being_sent(split, link)
    link.cut()
    cut_at = time.monotonic()
    await given_up(split, decoding + asked, long_ones + tasks, cut_at)
    await sleep_until(cut_at + 30)
    link.restore()
    await split.used_again(seed=6)


async def being_sent(split: Split, link: Link) -> tuple[list[list[int]], list[asyncio.Task[Answered]]]:
    """Requests, and the moment in which KV of some of them is on its way over the link."""
    asked = prompts(12, LENGTHS, seed=link.out.num_bytes)
    start = link.out.num_bytes
    tasks = await ask_all(split.client, asked, NUM_TOKENS)
    async with asyncio.timeout(WORK_S):
        while link.out.num_bytes < start + 800_000:
            await asyncio.sleep(0.002)
    return asked, tasks


async def given_up(split: Split, asked: list[list[int]], tasks: list[asyncio.Task[Answered]], cut_at: float) -> None:
    """While it is cut: answers go on at the near side, and each side frees what it held for the other."""
    async with asyncio.timeout(ANSWERED_S):
        answers = await asyncio.gather(*tasks)
    check(asked, answers)
    assert sum(answered.usage.num_retries + answered.usage.num_resumes for answered in answers) > 0
    await split.at_rest("decode-0", within_s=cut_at + RECEIVER_S + WORK_S - time.monotonic())
    # Its blocks are free: nothing that was meant for them may still be sent, whenever the link is whole again.
    assert split.network.near.unacknowledged_bytes(split.network.far_address) < 10_000
    await split.at_rest("prefill-0", "decode-1", within_s=cut_at + SENDER_S + WORK_S - time.monotonic())


async def test_cable_pulled_out(network: None, tiny_moe: TinyModel, tmp_path: Path) -> None:
    """The system knows at once, and says so to whoever sends next."""
    with Network() as both:
        cable = Cable(both.near, both.far, both.addresses)
        async with split_cluster(both, tiny_moe.folder, tmp_path) as split:
            asked = prompts(12, LENGTHS, seed=7)
            received = await split.received_bytes()
            tasks = await ask_all(split.client, asked, NUM_TOKENS)

            async def some_came() -> bool:
                return await split.received_bytes() > received

            await until(some_came, WORK_S)
            cable.cut()
            await given_up(split, asked, tasks, time.monotonic())
            cable.restore()
            await split.used_again(seed=8)
