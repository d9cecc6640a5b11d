"""The router process put together: card, worker table, relay, services, health."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import prometheus_client

from model.cache_folder import default_cache
from model.checkpoint import tokenizer_digest
from model.config import ModelConfig
from model.grammar import Grammars
from model.model_source import resolve_model
from model.tokenizer import Tokenizer
from protos import insights_pb2_grpc, kserve_pb2_grpc, plans_pb2_grpc, workers_pb2_grpc
from protos.caller import Authenticator
from protos.guard import Guard
from protos.serve import GrpcServer, drain_on_signal, serve_metrics
from protos.tls import server_context
from router.admission import Gate
from router.card import ModelCard
from router.config import RouterConfig, SloPolicy
from router.decisions import Decisions
from router.flips import Flips
from router.history import History
from router.insights_service import InsightsService
from router.keys import KeyFile
from router.kserve_service import KServeService
from router.links import Links
from router.metrics import QueueCollector, StepModelsCollector, WorkersCollector
from router.observations import Observations
from router.observing import Observing
from router.outcomes import Slo
from router.placement import can_serve
from router.plan_sharing import PlanSharing
from router.planner import Planner as PoolPlanner
from router.planner import PlanPolicy
from router.plans_service import PlansService
from router.pool_scaler import FlipScaler
from router.pools_service import PoolsService, WorkersService
from router.rate_limits import RateLimits
from router.relay import Relay
from router.service import SERVICE, InferenceService
from router.shared_table import SharedWorkers
from router.sharing import Sharing
from router.slo_classes import check_classes
from router.steering import Planner, Steering, initial_state
from router.step_costs import Experts
from router.store import MemoryStore, Store
from router.traffic import Traffic
from router.traffic_sharing import TrafficSharing
from router.workers import WorkerTable

if TYPE_CHECKING:
    from router.http_server import HttpServer

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # a worker that has fallen silent changes nothing by itself


def load_card(name: str, folder: Path) -> ModelCard:
    """Reads no weights. Raises what reading the model's files raises, naming the file."""
    config, tokenizer = ModelConfig.from_folder(folder), Tokenizer.load(folder)
    return ModelCard(
        name=name,
        architecture=config.architecture,
        max_context_tokens=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *tokenizer.eos_token_ids))),
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(folder),
        grammars=Grammars(tokenizer),
        experts=Experts(config.num_experts, config.num_experts_per_token) if config.num_experts else None,
    )


async def serve_router(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests finish for up to `drain_s`; a second signal ends that.

    Raises what made it end otherwise: a model that cannot be read, a port in use.
    """
    config.security.check_files()
    folder = await asyncio.to_thread(resolve_model, config.model, default_cache())
    card = await asyncio.to_thread(load_card, config.model, folder)
    async with Router(config, card, planner=planner_for(config)) as router:
        gc.collect()
        gc.freeze()  # what is here now stays: to look at it again and again would stop every stream each time
        scheme = "http" if config.security.tls is None else "https"
        http = f" and {scheme}://{router.http_address}" if router.http_address else ""
        logger.info("serving %s at %s%s", card.name, router.address, http)
        await drain_on_signal(router.drain)


class Router:
    """`async with Router(config, card) as router:` serves at `router.address` inside, and has closed all behind."""

    def __init__(
        self,
        config: RouterConfig,
        card: ModelCard,
        rng: random.Random | None = None,
        authenticator: Authenticator | None = None,
        planner: Planner | None = None,
    ) -> None:
        """`authenticator` knows the keys of users, if it is not the file that the configuration names. Without planner
        the pools are as large as operators say."""
        check_classes(config.slo_classes)
        self._config = config
        secret = config.security.secret()
        self._links = Links(config.security.credentials(secret))
        keys = KeyFile(config.keys_file, slo_classes=config.slo_classes) if config.keys_file else authenticator
        self.guard = Guard(secret, keys)
        self.table = WorkerTable(card.tokenizer_digest, experts=card.experts)
        self._gate = Gate(config.admission, config.relay.wait_for_worker_s, rng)
        self.table.on_eased, self.table.on_changed = self._gate.look_soon, self._gate.workers_changed
        self._relay = Relay(self.table, self._links, self._gate, config.relay, rng, config.placement)
        self._limits = RateLimits()
        traffic, observing = Traffic(config.slo, classes=config.slo_classes), Observing()
        history = History([traffic, observing])
        self.inference = InferenceService(
            card,
            self.table,
            self._relay,
            self._gate,
            self._limits,
            config.max_prompt_bytes,
            offers_direct=config.direct,
            history=history,
        )
        tls = config.security.tls
        self._server = GrpcServer(config.host, config.port, tls=tls, guard=self.guard, limits=config.limits)
        self._server.add_handlers(SERVICE, self.inference.handlers())
        registrations = WorkersService(self.table, self._links, self._routers)
        self._server.add(workers_pb2_grpc.add_WorkersServicer_to_server, registrations)
        self._store = _store_of(config)
        self._decisions = Decisions(self._store, lambda: self.address)
        self._flips = Flips(self.table, self._decisions, config.steering.flip_deadline_s)
        self._plan = PlanSharing(self._store, initial_state(config.steering), lambda: self.address)
        self._traffic = TrafficSharing(self._store, observing, self._gate, history, self._plan)
        observations = Observations(self.table, self._gate, history, observing, self._traffic)
        scaler = FlipScaler(self.table, self._flips)
        self._steering = Steering(config.steering, self._plan, scaler, self._decisions, observations.take, planner)
        self._pools = PoolsService(self.table, card.name, self.inference, self._decisions, self._flips, self._steering)
        self._server.add(workers_pb2_grpc.add_PoolsServicer_to_server, self._pools)
        pools = self.table, self._flips, scaler, self._plan, self._steering
        plans = PlansService(config.slo, *pools, slo_classes=config.slo_classes)
        self._server.add(plans_pb2_grpc.add_PlansServicer_to_server, plans)
        insights = InsightsService(history, traffic, self.table, self._links)
        self._server.add(insights_pb2_grpc.add_InsightsServicer_to_server, insights)
        self._kserve = KServeService(self.inference, card, self._is_ready)
        if config.kserve:
            self._server.add(kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, self._kserve)
        self._http = None if config.http_port is None else self._http_server(config.http_port, card, keys)
        self._sharing: Sharing | None = None
        self._stack = AsyncExitStack()

    def _http_server(self, port: int, card: ModelCard, keys: Authenticator | None) -> HttpServer:
        from router.http_server import HttpServer  # with all below it takes a third of a second to import
        from router.openai_server import OpenAIDoor

        door, tls = OpenAIDoor(self.inference, card, self._is_ready, keys), self._config.security.tls
        return HttpServer(door.app, self._config.host, port, None if tls is None else server_context(tls))

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def metrics_address(self) -> str:
        """Empty if metrics are not served."""
        return self._pools.metrics_address

    @property
    def http_address(self) -> str:
        """Empty if HTTP is not served."""
        return "" if self._http is None else self._http.address

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._links.close)
            stack.callback(self._gate.close)
            self._watch(stack)
            await self._server.start()
            stack.push_async_callback(self._server.stop)
            if self._http is not None:
                await self._http.start()
                stack.push_async_callback(self._http.stop)
            for work in (self._look_after(), self._flips.run()):
                stack.push_async_callback(_ended, asyncio.create_task(work))
            self._share(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def drain(self) -> None:
        """Refuses new requests and lets those in flight finish, for up to `drain_s`. Workers stay registered."""
        self.inference.is_draining = True
        logger.info("draining: %d requests are in flight", self.inference.num_in_flight)
        async with asyncio.TaskGroup() as stopping:
            stopping.create_task(self._stop_grpc(self._config.drain_s))
            if self._http is not None:
                stopping.create_task(self._http.stop(self._config.drain_s))

    async def _stop_grpc(self, grace_s: float) -> None:
        """The requests in KServe's streams are no calls of their own, which the server would wait for."""
        end_at = time.monotonic() + grace_s
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._kserve.drained()
        await self._server.stop(max(0.0, end_at - time.monotonic()))

    def _watch(self, stack: AsyncExitStack) -> None:
        workers, models = (
            WorkersCollector(self.table, self._relay.breakers),
            StepModelsCollector(self.table.models.kinds),
        )
        for collector in (workers, models, QueueCollector(self._gate.counts)):
            prometheus_client.REGISTRY.register(collector)
            stack.callback(prometheus_client.REGISTRY.unregister, collector)
        if self._config.metrics_port is not None:
            host = self._config.security.metrics_host_for(self._config.host)
            server = serve_metrics(host, self._config.metrics_port)
            stack.callback(server.close)
            self._pools.metrics_address = server.address

    def _share(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._store.close)
        router_id, table = f"{self.address}-{secrets.token_hex(4)}", SharedWorkers(self.table, self._flips)
        others = (self._plan, self._traffic)
        self._sharing = Sharing(
            self._store, router_id, self.address, table, self._limits, self._decisions, others=others
        )
        stack.push_async_callback(self._sharing.leave)
        for work in (self._sharing.run(), self._steering.run()):
            stack.push_async_callback(_ended, asyncio.create_task(work))

    def _routers(self) -> Sequence[str]:
        return [] if self._sharing is None else self._sharing.addresses

    def _is_ready(self) -> bool:
        return can_serve(self.table.snapshot())

    async def _look_after(self) -> None:
        """Inference is SERVING while a request could be placed; requests on workers that fell silent go elsewhere."""
        while True:
            await self._server.set_serving(SERVICE, self._is_ready())
            for worker_id in self.table.silent():
                await self._links.give_up(worker_id)
            await self.table.wait_changed(_LOOK_S)


def _store_of(config: RouterConfig) -> Store:
    """Raises ValueError for a URL that is none."""
    if not config.store:
        return MemoryStore()
    from router.redis_store import RedisStore  # a fifth of a second, and most routers are alone

    return RedisStore(config.store, config.store_namespace)


def planner_for(config: RouterConfig) -> Planner:
    """Who would wait longer than a request may is refused, in what it plays as well."""
    classes = {name: _slo(each) for name, each in config.slo_classes.items()}
    most_wait_s = config.admission.max_queue_s + config.placement.limits.max_backlog_s
    return PoolPlanner(PlanPolicy(_slo(config.slo), most_wait_s=most_wait_s, classes=classes))


def _slo(policy: SloPolicy) -> Slo:
    return Slo(policy.ttft_s, policy.tpot_s, policy.percentile)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
