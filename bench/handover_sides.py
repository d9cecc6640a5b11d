"""The two sides of `bench.handover`: a prefill worker that has one prompt at a time, a decode side, and NIXL alone."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import REGISTRY

from kvtransfer.agent import Pieces, Region, WriteState
from kvtransfer.decode_client import DecodeClient
from kvtransfer.errors import DecodePoolFull
from kvtransfer.geometry import CacheSpan
from kvtransfer.messages import layout_to_message
from kvtransfer.nixl_agent import NixlAgent, NixlWrite
from kvtransfer.outgoing import Outgoing
from kvtransfer.sender import Sender
from kvtransfer.ticket import HandoverRecord, HandoverTarget, SenderIdentity
from model.block_pool import BlockPool, hash_blocks
from model.block_sums import BlockSums
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, ModelRunner, NonFiniteLogits, SampledToken
from model.sampling_params import SamplingParams
from protos import decode_pb2, decode_pb2_grpc
from protos.channel import open_channel

CHUNK_TOKENS = 512
RAW_DESCRIPTOR_BYTES = 1 << 20
_ROOM_S = 0.2
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Handover:
    """`ttft_s` is from asking for the ticket to the first token, `exposed_s` from there to the record accepted."""

    ttft_s: float
    computing_s: float  # of it, since the ticket was there
    exposed_s: float
    posting_s: float  # the transfer thread's time, of which
    writing_s: float  # the agent's own
    record_s: float  # the call that ends it: within `exposed_s`, once all is written
    sent_bytes: int

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.ttft_s


class TimedAgent(NixlAgent):
    """Counts the time that its writes take to be posted: over shared memory, to be done."""

    writing_s = 0.0

    def write(self, peer_name: str, what: Sequence[Region] | Pieces) -> NixlWrite:
        started = time.perf_counter()
        try:
            return super().write(peer_name, what)
        finally:
            self.writing_s += time.perf_counter() - started


class TimedClient(DecodeClient):
    """Knows how long its last record took to be accepted."""

    record_s = 0.0

    async def commit(self, record: HandoverRecord, timeout_s: float) -> None:
        started = time.perf_counter()
        await super().commit(record, timeout_s)
        self.record_s = time.perf_counter() - started


class PrefillSide:
    """A prefill worker reduced to one sequence at a time."""

    def __init__(self, runner: ModelRunner, agent: TimedAgent, target: HandoverTarget) -> None:
        self._runner = runner
        self._agent = agent
        self._target = target
        self._pool = BlockPool(runner.num_blocks)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._num_attempts = 0
        self._sender = Sender(
            agent,
            self._pool,
            CacheSpan(runner.layout, runner.cache_address, runner.num_blocks),
            SenderIdentity(agent.name, agent.name),
            sums=BlockSums(runner.cache_memory),
            open_client=self._open_client,
        )

    async def hand_over(
        self, token_ids: list[int], *, layer_by_layer: bool, computed: Callable[[int], None] = lambda _: None
    ) -> Handover:
        """Prefills a prompt that neither side has seen, and sends it while computing or when it is computed.

        `computed` is told, after each chunk, how many of its tokens are."""
        num_tokens, num_blocks = len(token_ids), self._runner.layout.num_blocks(len(token_ids))
        block_hashes = hash_blocks(token_ids, self._runner.layout.block_size)  # in the product the router's work
        posted_before, written_before = posting_s(), self._agent.writing_s
        while True:
            started = time.perf_counter()
            try:
                outgoing = await self._reserve(num_tokens, block_hashes)
                break
            except DecodePoolFull:  # of what nobody claims there: a decode side that decodes would have room
                await asyncio.sleep(_ROOM_S)
        blocks = self._pool.allocate(num_blocks)
        outgoing.hold(blocks)
        granted_at, first_token_id = time.perf_counter(), 0
        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            hook = self._hook(outgoing, blocks, start, end, num_tokens) if layer_by_layer else None
            first_token_id = await self._run(token_ids, start, end, blocks, hook)
            computed(end)
        computed_at = time.perf_counter()
        if not layer_by_layer:
            outgoing.write_all_layers(0, blocks)
        stats = await outgoing.commit(first_token_id, num_tokens)
        committed_at = time.perf_counter()
        self._pool.release(blocks)
        posted_s, written_s = posting_s() - posted_before, self._agent.writing_s - written_before
        exposed_s, record_s = committed_at - computed_at, self._client.record_s
        return Handover(
            computed_at - started, computed_at - granted_at, exposed_s, posted_s, written_s, record_s, stats.sent_bytes
        )

    async def round_trip_s(self, layout: KVLayout) -> float:
        """Of a call of the decode side, which is how it would learn that there is something to pull."""
        async with open_channel(self._target.address) as channel:
            stub = decode_pb2_grpc.DecodeStub(channel)
            request = decode_pb2.DescribeRequest(layout=layout_to_message(layout))
            await stub.Describe(request, timeout=10)  # connects
            started = time.perf_counter()
            await stub.Describe(request, timeout=10)
            return time.perf_counter() - started

    async def close(self) -> None:
        await self._sender.close()
        self._compute.shutdown()

    def _open_client(self, address: str) -> TimedClient:
        self._client = TimedClient(open_channel(address))
        return self._client

    async def _reserve(self, num_tokens: int, block_hashes: Sequence[bytes]) -> Outgoing:
        self._num_attempts += 1
        return await self._sender.reserve(
            self._target,
            attempt_id=f"{self._agent.name}-{self._num_attempts}",
            request_id="bench",
            num_tokens=num_tokens,
            block_hashes=block_hashes,
            timeout_s=30.0,
        )

    async def _run(self, token_ids: list[int], start: int, end: int, blocks: list[int], hook: LayerDone | None) -> int:
        if end < len(token_ids):
            chunk = Chunk(token_ids[start:end], start, blocks)
        else:
            chunk = Chunk(token_ids[start:end], start, blocks, GREEDY, token_ids, len(token_ids))
        execute = self._runner.execute
        output = await asyncio.get_running_loop().run_in_executor(self._compute, lambda: execute([chunk], hook))
        token = output.sampled[0]
        if isinstance(token, NonFiniteLogits):
            raise token
        return token.token_id if isinstance(token, SampledToken) else 0

    def _hook(self, outgoing: Outgoing, blocks: list[int], start: int, end: int, num_tokens: int) -> LayerDone:
        block_size = self._runner.layout.block_size
        first, stop = start // block_size, -(-end // block_size) if end == num_tokens else end // block_size
        return lambda layer: outgoing.write(layer, first, blocks[first:stop])


def median(handovers: list[Handover]) -> Handover:
    return Handover(
        statistics.median(one.ttft_s for one in handovers),
        statistics.median(one.computing_s for one in handovers),
        statistics.median(one.exposed_s for one in handovers),
        statistics.median(one.posting_s for one in handovers),
        statistics.median(one.writing_s for one in handovers),
        statistics.median(one.record_s for one in handovers),
        handovers[0].sent_bytes,
    )


def posting_s() -> float:
    return REGISTRY.get_sample_value("pdserve_kvtransfer_write_seconds_total") or 0.0


class RawWrites:
    """NIXL alone: the same bytes in 1 MB descriptors, each time from and to memory that was not touched just before."""

    def __init__(self, agent: NixlAgent, peer_name: str, local_address: int, remote_address: int, size: int) -> None:
        self._agent, self._peer_name = agent, peer_name
        self._local_address, self._remote_address, self._size = local_address, remote_address, size
        self._at = 0

    def write_s(self, num_bytes: int) -> float:
        regions = self._regions(num_bytes)
        started = time.perf_counter()
        write = self._agent.write(self._peer_name, regions)
        while write.poll() is WriteState.MOVING:
            time.sleep(0)
        if write.poll() is WriteState.FAILED:
            raise RuntimeError("a raw NIXL write failed")
        return time.perf_counter() - started

    def read_s(self, num_bytes: int) -> float:
        """The other way round: as the decode side would pull. Ours reads, since it has the agent at hand."""
        regions = self._regions(num_bytes)
        started = time.perf_counter()
        read(self._agent, self._peer_name, regions)
        return time.perf_counter() - started

    def _regions(self, num_bytes: int) -> list[Region]:
        if self._at + num_bytes > self._size:
            self._at = 0
        stop = self._at + num_bytes
        regions = [
            Region(self._local_address + at, self._remote_address + at, min(RAW_DESCRIPTOR_BYTES, stop - at))
            for at in range(self._at, stop, RAW_DESCRIPTOR_BYTES)
        ]
        self._at = stop
        return regions


def read(agent: NixlAgent, peer_name: str, regions: Sequence[Region]) -> None:
    """A NIXL read, which the product has no use for: through the agent's own parts."""
    nixl, handle_of = agent._nixl, agent._agent.createXferReq
    rows = np.array([(r.local_address, r.remote_address, r.num_bytes) for r in regions], np.uint64)
    here = agent._descriptors(rows[:, 0], rows[:, 2], -1)
    there = agent._descriptors(rows[:, 1], rows[:, 2], -1)
    handle = handle_of(nixl.bindings.NIXL_READ, here, there, peer_name, "", agent._backends)
    status = agent._agent.postXferReq(handle)
    while status == nixl.bindings.NIXL_IN_PROG:
        time.sleep(0)
        status = agent._agent.getXferStatus(handle)
    agent._agent.releaseXferReq(handle)
    if status != nixl.bindings.NIXL_SUCCESS:
        raise RuntimeError("a raw NIXL read failed")


class DecodeSide:
    """A process of its own. `checked_share` of the blocks that arrive there is checked."""

    def __init__(self, process: Process, hello: dict[str, Any]) -> None:
        self._process = process
        self.address: str = hello["address"]
        self.base_address: int = hello["base_address"]
        self.checked_share: float = hello["checked_share"]
        self.target = HandoverTarget("decode", self.address, hello["epoch"])

    async def checking_s(self) -> float:
        """What it has spent on that so far."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return float(await self._process.stdout.readline())


@asynccontextmanager
async def decode_side(folder: Path, layout: KVLayout, num_blocks: int, verify_kv: str) -> AsyncIterator[DecodeSide]:
    arguments = str(folder), json.dumps(asdict(layout)), str(num_blocks), verify_kv
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.handover_decode", *arguments, stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield DecodeSide(process, json.loads(await process.stdout.readline()))
    finally:
        process.stdin.close()
        await process.wait()
