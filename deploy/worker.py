"""The worker process put together: one runner, block pool, transfer agent and engine loop, and both gRPC services."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import socket
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from decode.draft_planner import DraftPlanner
from decode.service import DecodeService
from deploy import worker_metrics
from deploy.cache_feed import CacheFeed
from deploy.calibration import calibration
from deploy.drafting import draft_planner
from deploy.expert_shares import ExpertShares
from deploy.fault_seams import FaultySeams, Seams
from deploy.hardware_name import hardware_name
from deploy.inside import InsideService
from deploy.registrations import Registrations, Told
from deploy.reporter import Reporter
from deploy.runners import load_runner, max_context_tokens, warm_up
from deploy.step_feed import StepFeed
from deploy.step_meter import StepMeter
from deploy.verification import verification
from deploy.wire import packing_for, unpacking_for
from deploy.worker_config import LIMITS, WorkerConfig
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.geometry import CacheSpan
from kvtransfer.messages import layout_to_message
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.sender import Sender
from kvtransfer.ticket import PeerDescription, SenderIdentity
from model.block_pool import BlockPool
from model.block_sums import BlockSums
from model.cache_folder import default_cache
from model.checkpoint import tokenizer_digest
from model.config import ModelConfig
from model.engine import Engine, Scheduler
from model.grammar import Grammars
from model.model_source import resolve_model
from model.runner import Chunk, ModelRunner, StepOutput
from model.tokenizer import Tokenizer
from prefill.service import PrefillService
from protos import insights_pb2_grpc, workers_pb2
from protos.errors import ServiceError
from protos.guard import Guard
from protos.serve import GrpcServer, drain_on_signal, serve_metrics
from protos.status_values import ROLES
from router.measured_steps import Steps
from router.step_messages import steps_message

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 256


async def serve_worker(config: WorkerConfig) -> None:
    """Runs a worker until SIGTERM or SIGINT, then drains it. A second signal ends it at once.

    Raises what made it end otherwise: a model that cannot be read, a port in use, the router's refusal.
    """
    config.security.check_files()
    folder = await asyncio.to_thread(resolve_model, config.model, default_cache())
    logger.info("loading %s", config.model)
    runner = await asyncio.to_thread(load_runner, config, folder)
    logger.info("warming up")
    await asyncio.to_thread(warm_up, runner, _WARM_UP_TOKENS)
    worker = Worker(config, folder, runner, await asyncio.to_thread(calibration, config, folder, runner))
    gc.collect()  # what loading left behind; what is here now stays, and the collector need not look at it again:
    gc.freeze()  # it would stop every stream for a tenth of a second, to find nothing
    try:
        await worker.serve()
    except* (ServiceError, OSError) as errors:
        raise errors.exceptions[0] from None


class Worker:
    """Made on the event loop. Owns every task and thread of the process."""

    def __init__(self, config: WorkerConfig, folder: Path, runner: ModelRunner, calibrated: Sequence[Steps]) -> None:
        self._config = config
        self._calibrated = calibrated
        self._runner = runner
        self._epoch = secrets.token_hex(8)
        self._worker_id = config.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self._is_draining = False
        self._meter, self._experts = StepMeter(), ExpertShares()
        self._pool = BlockPool(runner.num_blocks)
        secret = config.security.secret()
        self._credentials = config.security.credentials(secret)
        faults = None if config.faults is None else FaultInjector(config.faults)
        seams = Seams(self._credentials) if faults is None else FaultySeams(faults, self._credentials)
        span = CacheSpan(runner.layout, runner.cache_address, runner.num_blocks)
        name = f"{self._worker_id}-{self._epoch}"
        agent = NixlAgent(name, span.base_address, span.num_bytes, runner.cache_device_id)
        self._agent = seams.around_agent(agent, span)
        sums = BlockSums(runner.cache_memory)
        self._unpacking = unpacking_for(runner)
        self._sender = self._sender_of(span, sums, seams)
        tokenizer, model = Tokenizer.load(folder), ModelConfig.from_folder(folder)
        vocab_size = model.vocab_size
        self._max_context_tokens = max_context_tokens(config, folder)
        grammars = Grammars(tokenizer)
        self._prefill = PrefillService(
            pool=self._pool,
            layout=runner.layout,
            sender=self._sender,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            states=runner,
            wake=self._wake,
            grammars=grammars,
        )
        planner = draft_planner(config, runner, model, self._max_context_tokens)
        self._decode = DecodeService(
            pool=self._pool,
            description=self._description(),
            sender=self._sender,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            states=runner,
            max_running=config.max_running,
            lease_s=config.lease_s,
            wake=self._wake,
            planner=planner,
            prompts_wait=lambda: self._prefill.scheduler.can_run,
            verification=verification(config.verify_kv, sums, runner.layout, runner.num_blocks),
            unpacking=self._unpacking,
            grammars=grammars,
        )
        schedulers: list[Scheduler] = [self._decode.scheduler, self._prefill.scheduler]
        self._engine = Engine(runner, schedulers, max_step_tokens=config.max_step_tokens, observe=self._observe)
        self._pool.on_release = self._wake
        self._server = self._server_with(Guard(secret), seams, planner)
        self._tokenizer_digest = tokenizer_digest(folder)

    def _server_with(self, guard: Guard, seams: Seams, planner: DraftPlanner) -> GrpcServer:
        config = self._config
        server = GrpcServer(config.host, config.port, tls=config.security.tls, guard=guard, limits=LIMITS)
        seams.serve(server, self._prefill, self._decode)
        inside = InsideService(self._worker_id, planner, self._experts, self._sender, self._decode.receiver)
        server.add(insights_pb2_grpc.add_InsideServicer_to_server, inside)
        return server

    def _sender_of(self, span: CacheSpan, sums: BlockSums, seams: Seams) -> Sender:
        return Sender(
            self._agent,
            self._pool,
            span,
            SenderIdentity(self._worker_id, self._epoch),
            sums=sums,
            packing=packing_for(self._config.wire_kv, self._runner, self._agent),
            open_client=seams.open_client,
        )

    async def serve(self) -> None:
        """Returns when it has been told to stop and has drained. What its tasks raise comes as an exception group."""
        async with AsyncExitStack() as stack:
            metrics_address = self._watch(stack)
            await self._server.start()
            stack.push_async_callback(self._close)
            hello = self._hello(metrics_address)

            def reporter(address: str, told: Told) -> Reporter:
                cache, steps = CacheFeed(self._pool), StepFeed(self._meter)
                return Reporter(address, hello, self._load, cache, steps, self._credentials, told)

            registrations = Registrations(self._config.router_address.split(","), reporter)
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(_without_end(self._engine.run(), "the engine")),
                    tasks.create_task(self._decode.receiver.run()),
                    tasks.create_task(registrations.run()),
                ]
                logger.info("worker %s serves at %s", self._worker_id, self._server.address)
                await drain_on_signal(self._drain)
                for task in running:
                    task.cancel()

    async def _drain(self) -> None:
        self._is_draining = True
        logger.info("draining: %d requests are in flight", self._server.num_requests)
        await self._server.stop(self._config.drain_s)

    async def _close(self) -> None:
        await self._server.stop()
        await self._prefill.close()
        self._decode.close()
        await self._sender.close()
        self._agent.close()

    def _wake(self) -> None:
        self._engine.wake()

    def _observe(self, chunks: Sequence[Chunk], output: StepOutput) -> None:
        self._meter.observe(chunks, output)
        worker_metrics.observe_step(chunks, output)
        self._experts.add(output.expert_load)

    def _watch(self, stack: AsyncExitStack) -> str:
        """Exports metrics and serves them; returns where."""
        prefill, decode = self._prefill.scheduler, self._decode.scheduler
        worker_metrics.watch_blocks(self._pool, self._decode.receiver)
        worker_metrics.watch_queue(
            lambda: self._load().queued_prefill_tokens,
            {
                ("prefill", "waiting"): lambda: prefill.num_waiting,
                ("prefill", "running"): lambda: prefill.num_running,
                ("decode", "waiting"): lambda: decode.num_waiting,
                ("decode", "running"): lambda: decode.num_running,
            },
        )
        host = self._config.security.metrics_host_for(self._config.host)
        server = serve_metrics(host, self._config.metrics_port)
        stack.callback(server.close)
        return server.address

    def _description(self) -> PeerDescription:
        return PeerDescription(
            epoch=self._epoch,
            agent_name=self._agent.name,
            agent_metadata=self._agent.metadata(),
            layout=self._runner.layout,
            num_blocks=self._runner.num_blocks,
            base_address=self._runner.cache_address,
            device_id=self._runner.cache_device_id,
            codings=() if self._unpacking is None else self._unpacking.codings,
        )

    def _hello(self, metrics_address: str) -> workers_pb2.WorkerHello:
        return workers_pb2.WorkerHello(
            worker_id=self._worker_id,
            epoch=self._epoch,
            address=self._server.address,
            role=ROLES[self._config.role],
            flippable=True,
            model_name=self._config.model,
            tokenizer_digest=self._tokenizer_digest,
            layout=layout_to_message(self._runner.layout),
            num_blocks=self._runner.num_blocks,
            runner=self._config.runner,
            kernels=self._runner.kernels,
            drafter=self._runner.drafter,
            metrics_address=metrics_address,
            max_context_tokens=self._max_context_tokens,
            max_running=self._config.max_running,
            max_step_tokens=self._config.max_step_tokens,
            hardware=hardware_name(self._runner),
            calibration=steps_message(self._calibrated),
        )

    def _load(self) -> workers_pb2.WorkerLoad:
        prefill, decode, transferred = self._prefill.scheduler, self._decode.scheduler, self._sender.transferred
        return workers_pb2.WorkerLoad(
            state=workers_pb2.WORKER_STATE_DRAINING if self._is_draining else workers_pb2.WORKER_STATE_READY,
            queued_prefill_tokens=prefill.num_queued_tokens + decode.num_queued_prefill_tokens,
            num_waiting=prefill.num_waiting + decode.num_waiting,
            num_running=prefill.num_running + decode.num_running,
            num_free_blocks=self._pool.num_free,
            num_used_blocks=self._pool.num_used,
            num_quarantined_blocks=self._decode.receiver.num_quarantined_blocks,
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_step_s=self._meter.decode_step_s,
            decode_batch=self._meter.decode_batch,
            tokens_per_step=self._meter.tokens_per_step,
            prefill_age_s=self._meter.prefill_age_s,
            decode_age_s=self._meter.decode_age_s,
            transfer_bytes=transferred.num_bytes,
            transfer_s=transferred.seconds,
        )


async def _without_end(work: Coroutine[Any, Any, None], name: str) -> None:
    """A CancelledError that comes from within must not end it unnoticed: a TaskGroup would take it for one of ours."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{name} was cancelled from within") from None
