"""A whole worker in the test's own process: both gRPC services over a timed runner, joined by the loopback agent.

Put together as `deploy.worker` does it, without router, NIXL and signals. Steps and writes can be held where a test
wants to look or to interfere.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from decode.draft_planner import DraftPlanner
from decode.service import DecodeService
from deploy.fault_seams import Seams
from kvtransfer.geometry import CacheSpan
from kvtransfer.integrity import Verification
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from kvtransfer.peer import PeerOptions
from kvtransfer.sender import Sender
from kvtransfer.ticket import PeerDescription, SenderIdentity
from kvtransfer.transfer_thread import TransferOptions
from model.block_pool import BlockPool
from model.block_sums import BlockSums
from model.engine import Engine
from model.kv_layout import KVLayout
from model.runner import Chunk, LayerDone, StepOutput
from model.timed_runner import StepTiming, TimedRunner
from model.tokenizer import Tokenizer
from prefill.service import PrefillService
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from protos.channel import open_channel
from protos.serve import GrpcServer

VOCAB_SIZE = 256
BLOCK = 4
LAYOUT = KVLayout("timed", "float32", num_layers=3, num_kv_heads=1, head_dim=4, block_size=BLOCK)
LEASE_S = 5.0
FAST_PEER = PeerOptions(heartbeat_s=0.02, silence_s=5.0, call_timeout_s=5.0, release_backoff_s=0.02)


class HeldRunner(TimedRunner):
    """A timed runner whose steps wait while it is held."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks, StepTiming(scale=0.02), vocab_size=VOCAB_SIZE)
        self._permits: threading.Semaphore | None = None
        self.is_waiting = False
        self.num_steps = 0
        self.failure: Exception | None = None  # raised by the next step

    def hold(self, after_steps: int = 0) -> None:
        self._permits = threading.Semaphore(after_steps)

    def let_run(self, num_steps: int) -> None:
        """So many steps more, while it is held."""
        assert self._permits is not None
        self._permits.release(num_steps)

    def go_on(self) -> None:
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.release(1000)

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        permits = self._permits
        if permits is not None and not permits.acquire(blocking=False):
            self.is_waiting = True
            assert permits.acquire(timeout=20), "the test never let the step go on"
            self.is_waiting = False
        self.num_steps += 1
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return super().execute(chunks, layer_done)


class TimedWorker:
    """`start` and `stop` it. `hold_writes` keeps what is written from now on from landing until `land_writes`."""

    def __init__(
        self,
        network: LoopbackNetwork,
        name: str,
        *,
        num_blocks: int = 16,
        max_running: int = 8,
        max_step_tokens: int = 8,
        layout: KVLayout = LAYOUT,
        planner: DraftPlanner | None = None,
        seams: Seams | None = None,
        verified_share: float = 1.0,
        corrupting_writes: Collection[int] = (),
    ) -> None:
        seams = seams or Seams()
        self.name, self.epoch, self.layout = name, secrets.token_hex(4), layout
        self._write_time = float("inf")
        self.runner = HeldRunner(layout, num_blocks)
        self.pool = BlockPool(num_blocks)
        span = CacheSpan(layout, self.runner.cache_address, num_blocks)
        agent = LoopbackAgent(
            network,
            f"{name}-{self.epoch}",
            span.base_address,
            span.num_bytes,
            completion_delay_s=1.0,
            corrupting_writes=corrupting_writes,
            clock=lambda: self._write_time,
        )
        self.agent = seams.around_agent(agent, span)
        identity = SenderIdentity(name, self.epoch)
        sums = BlockSums(self.runner.cache_memory)
        self.sender = Sender(
            self.agent,
            self.pool,
            span,
            identity,
            sums=sums,
            peer_options=FAST_PEER,
            transfer_options=TransferOptions(max_batch_bytes=0),  # a write for each layer: tests count them
            open_client=seams.open_client,
        )
        self.prefill = PrefillService(
            pool=self.pool,
            layout=layout,
            sender=self.sender,
            tokenizer=byte_tokenizer(),
            vocab_size=VOCAB_SIZE,
            states=self.runner,
            wake=lambda: self.engine.wake(),
        )
        self.decode = DecodeService(
            pool=self.pool,
            description=self._description(),
            sender=self.sender,
            tokenizer=byte_tokenizer(),
            vocab_size=VOCAB_SIZE,
            states=self.runner,
            max_running=max_running,
            lease_s=LEASE_S,
            wake=lambda: self.engine.wake(),
            planner=planner,
            prompts_wait=lambda: self.prefill.scheduler.can_run,
            verification=Verification(sums, verified_share) if verified_share else None,
        )
        self.engine = Engine(
            self.runner, [self.decode.scheduler, self.prefill.scheduler], max_step_tokens=max_step_tokens
        )
        self.pool.on_release = self.engine.wake
        self._server = GrpcServer("127.0.0.1", 0)
        seams.serve(self._server, self.prefill, self.decode)

    async def start(self) -> None:
        await self._server.start()
        self._tasks = [asyncio.create_task(self.engine.run()), asyncio.create_task(self.decode.receiver.run())]
        self.channel = open_channel(self._server.address)
        self.prefill_stub = prefill_pb2_grpc.PrefillStub(self.channel)
        self.decode_stub = decode_pb2_grpc.DecodeStub(self.channel)

    async def stop(self) -> None:
        self.runner.go_on()
        self.land_writes()
        await self.channel.close()
        await self._server.stop()
        await self.prefill.close()
        self.decode.close()
        await self.sender.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self.agent.close()

    @property
    def target(self) -> decode_pb2.DecodeTarget:
        return decode_pb2.DecodeTarget(worker_id=self.name, address=self._server.address, epoch=self.epoch)

    @property
    def is_at_rest(self) -> bool:
        schedulers = (self.prefill.scheduler, self.decode.scheduler)
        num_sequences = sum(scheduler.num_waiting + scheduler.num_running for scheduler in schedulers)
        receiver = self.decode.receiver
        return self.pool.num_used + num_sequences + receiver.num_reserved_blocks + receiver.num_quarantined_blocks == 0

    def hold_writes(self) -> None:
        self._write_time = 0.0

    def land_writes(self) -> None:
        self._write_time = float("inf")

    def _description(self) -> PeerDescription:
        return PeerDescription(
            epoch=self.epoch,
            agent_name=self.agent.name,
            agent_metadata=self.agent.metadata(),
            layout=self.layout,
            num_blocks=self.pool.num_blocks,
            base_address=self.runner.cache_address,
            device_id=-1,
        )


@asynccontextmanager
async def running(*workers: TimedWorker) -> AsyncIterator[None]:
    """Runs workers. At the end of a test that passed they must be at rest, with every block free."""
    for worker in workers:
        await worker.start()
    try:
        yield
        # Blocks of a sender that gave its peer up are in quarantine for seven seconds.
        await eventually(lambda: all(worker.is_at_rest for worker in workers), within_s=12)
        for worker in workers:
            worker.pool.check_integrity()
    finally:
        for worker in workers:
            await worker.stop()


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


@cache
def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and nothing else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    with TemporaryDirectory() as folder:
        backend.save(str(Path(folder) / "tokenizer.json"))
        return Tokenizer.load(Path(folder))
