"""The client of a router: typed, async, in values of its own. Failures are `protos.errors.ServiceError`s."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Self, TypeAlias

from protos import inference_pb2, insights_pb2, plans_pb2, workers_pb2
from protos.credentials import Credentials
from protos.direct import Direct
from protos.errors import InvalidArgument
from protos.insight_values import RequestSummary, Traffic, WorkerInsights
from protos.plan_values import MODES, Plan
from protos.resuming import Asked, Resuming, generated
from protos.routers import Routers
from protos.secret import ClusterSecret
from protos.status_values import ROLES, Decision, Status
from protos.tls import TlsFiles
from protos.values import ChatMessage, Chunk, Model, Sampling, Summary

Answer: TypeAlias = AsyncGenerator[Chunk | Summary, None]
"""Chunks as they come, then one Summary. Leaving it early (or `aclose`) cancels the request."""


class PdserveClient:
    """Connects at the first call, and anew after a loss. Use it as an async context manager, or `close` it.

    If a router goes away while it answers, the answer goes on at the next of them, or at the same one once it is back.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: TlsFiles | None = None,
        secret: ClusterSecret | None = None,
        insecure: bool = False,
        direct: bool = False,
    ) -> None:
        """`address`: of a router, or of several that share their workers, with commas between.

        `secret` instead of a key is for processes of the cluster. `insecure`: send either of them unencrypted.
        `direct`: read answers at the workers that make them, which have to be within reach; routers need --direct.

        Raises OSError or ValueError for files that cannot be used, FailedPrecondition if `insecure` would be needed.
        """
        is_anonymous = not (api_key or tls or secret)
        credentials = None if is_anonymous else Credentials(tls, secret, api_key, insecure=insecure)
        self._direct = Direct(None if tls is None else Credentials(tls)) if direct else None
        self._routers = Routers([each.strip() for each in address.split(",")], credentials)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._routers.close()
        if self._direct is not None:
            await self._direct.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        model: str | None = None,
        request_id: str | None = None,
        n: int | None = None,
        echo: bool | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        emitted: Sequence[Sequence[int]] = (),
        deadline_s: float | None = None,
    ) -> Answer:
        """Continues a text, or token ids, `n` times; with `echo` chunks of the prompt come first.

        `priority`: 0 to 9, higher goes first while requests wait. Requests of one `session_id` go where the last one's
        KV is, unless that is busy. `emitted`: tokens of each answer that are known, behind which it goes on; then the
        sampling needs the seed that it had.
        """
        with _readable():
            request = inference_pb2.GenerateRequest(
                request_id=request_id,
                model=model,
                sampling=_sampling_message(sampling),
                n=n,
                echo=echo,
                priority=priority,
                session_id=session_id,
                emitted=[inference_pb2.TokenIds(ids=token_ids) for token_ids in emitted],
            )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
        return self._answer(request, deadline_s)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        sampling: Sampling | None = None,
        model: str | None = None,
        request_id: str | None = None,
        n: int | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        emitted: Sequence[Sequence[int]] = (),
        deadline_s: float | None = None,
    ) -> Answer:
        """Answers a conversation. `n`, `priority`, `session_id` and `emitted` as for `generate`."""
        with _readable():
            request = inference_pb2.ChatRequest(
                request_id=request_id,
                model=model,
                messages=[message.to_message() for message in messages],
                sampling=_sampling_message(sampling),
                n=n,
                priority=priority,
                session_id=session_id,
                emitted=[inference_pb2.TokenIds(ids=token_ids) for token_ids in emitted],
            )
        return self._answer(request, deadline_s)

    async def tokenize(
        self, text: str | Sequence[ChatMessage], *, deadline_s: float | None = None
    ) -> list[tuple[int, str]]:
        """The tokens of a text, or of a conversation with its template: ids and how they read."""
        if isinstance(text, str):
            request = inference_pb2.TokenizeRequest(text=text)
        else:
            conversation = inference_pb2.ChatConversation(messages=[message.to_message() for message in text])
            request = inference_pb2.TokenizeRequest(chat=conversation)
        response = await self._routers.ask(lambda router: router.inference.Tokenize(request, timeout=deadline_s))
        return list(zip(response.token_ids, response.tokens, strict=True))

    async def get_model(self, model: str | None = None, *, deadline_s: float | None = None) -> Model:
        request = inference_pb2.GetModelRequest(model=model)
        return Model.from_message(
            await self._routers.ask(lambda router: router.inference.GetModel(request, timeout=deadline_s))
        )

    async def get_status(self, *, deadline_s: float | None = None) -> Status:
        request = workers_pb2.GetStatusRequest()
        return Status.from_message(
            await self._routers.ask(lambda router: router.pools.GetStatus(request, timeout=deadline_s))
        )

    async def set_role(self, worker_id: str, role: str, *, deadline_s: float | None = None) -> None:
        """Uses a worker for prefill, decode or both, from the next request on. If the pools were planned automatically,
        they no longer are: `set_plan("auto")` hands them back."""
        if role not in ROLES:
            raise InvalidArgument(f"role is {role!r}; it must be one of {', '.join(ROLES)}", field="role")
        request = workers_pb2.SetRoleRequest(worker_id=worker_id, role=ROLES[role])
        await self._routers.ask(lambda router: router.pools.SetRole(request, timeout=deadline_s))

    async def set_draining(self, worker_id: str, draining: bool, *, deadline_s: float | None = None) -> None:
        """Takes a worker's requests away from it, while they run, and gives it no new ones; or takes that back."""
        request = workers_pb2.SetDrainingRequest(worker_id=worker_id, draining=draining)
        await self._routers.ask(lambda router: router.pools.SetDraining(request, timeout=deadline_s))

    async def _answer(self, request: Asked, deadline_s: float | None) -> Answer:
        """Named and seeded here, so that any router goes on with it as the first one would have."""
        if not request.HasField("request_id"):
            request.request_id = secrets.token_hex(8)
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)
        ask = generated if self._direct is None or _needs_router(request) else self._direct.answer
        resuming = Resuming(self._routers, ask, request, deadline_s)
        async with aclosing(resuming.messages()) as messages:
            async for message in messages:
                yield Summary.from_message(message) if message.HasField("usage") else Chunk.from_message(message)

    async def list_decisions(self, limit: int | None = None, *, deadline_s: float | None = None) -> list[Decision]:
        """What was set and planned, and how roles changed, newest first. `limit`: 1 to 1,000, 100 by default."""
        with _readable("limit: ", "limit"):
            request = workers_pb2.ListDecisionsRequest(limit=limit)
        response = await self._routers.ask(lambda router: router.pools.ListDecisions(request, timeout=deadline_s))
        return [Decision.from_message(message) for message in response.decisions]

    async def get_plan(self, *, deadline_s: float | None = None) -> Plan:
        """Who sizes the pools, what the planner says, and how changes of roles went lately."""
        request = plans_pb2.GetPlanRequest()
        return Plan.from_message(
            await self._routers.ask(lambda router: router.plans.GetPlan(request, timeout=deadline_s))
        )

    async def set_plan(
        self,
        mode: str,
        *,
        num_prefill: int = 0,
        num_decode: int = 0,
        for_s: float | None = None,
        dry_run: bool | None = None,
        preview: bool = False,
        reason: str = "",
        deadline_s: float | None = None,
    ) -> Plan:
        """`mode`: auto, manual (with sizes, `for_s` seconds long, an hour by default) or frozen. A `preview` changes
        nothing, and tells which workers would change their role."""
        if mode not in MODES:
            raise InvalidArgument(f"mode is {mode!r}; it must be one of {', '.join(MODES)}", field="mode")
        with _readable():
            request = plans_pb2.SetPlanRequest(
                mode=MODES[mode],
                num_prefill=num_prefill,
                num_decode=num_decode,
                for_s=for_s,
                dry_run=dry_run,
                preview=preview,
                reason=reason,
            )
        return Plan.from_message(
            await self._routers.ask(lambda router: router.plans.SetPlan(request, timeout=deadline_s))
        )

    async def get_traffic(self, window_s: float | None = None, *, deadline_s: float | None = None) -> Traffic:
        """How requests have fared at this router lately. `window_s`: 10 to 3,600, 60 by default."""
        with _readable("window_s: ", "window_s"):
            request = insights_pb2.GetTrafficRequest(window_s=window_s)
        return Traffic.from_message(
            await self._routers.ask(lambda router: router.insights.GetTraffic(request, timeout=deadline_s))
        )

    async def list_requests(
        self,
        limit: int | None = None,
        *,
        slowest: bool = False,
        running_only: bool = False,
        deadline_s: float | None = None,
    ) -> list[RequestSummary]:
        """Those that this router serves or has answered lately, newest or slowest first. `limit`: 1 to 500, 50 by
        default."""
        order = insights_pb2.REQUEST_ORDER_SLOWEST if slowest else insights_pb2.REQUEST_ORDER_NEWEST
        with _readable("limit: ", "limit"):
            request = insights_pb2.ListRequestsRequest(limit=limit, order=order, running_only=running_only)
        response = await self._routers.ask(lambda router: router.insights.ListRequests(request, timeout=deadline_s))
        return list(map(RequestSummary.from_message, response.requests))

    async def get_worker_insights(self, worker_id: str, *, deadline_s: float | None = None) -> WorkerInsights:
        request = insights_pb2.GetWorkerInsightsRequest(worker_id=worker_id)
        return WorkerInsights.from_message(
            await self._routers.ask(lambda router: router.insights.GetWorkerInsights(request, timeout=deadline_s))
        )


def _sampling_message(sampling: Sampling | None) -> inference_pb2.SamplingParams | None:
    with _readable("sampling: ", "sampling"):
        return None if sampling is None else sampling.to_message()


@contextmanager
def _readable(before: str = "", field: str = "") -> Iterator[None]:
    """A value that its field cannot hold, as InvalidArgument."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{before}{error}", field=field) from error


def _needs_router(request: Asked) -> bool:
    """What of an answer only the router tells."""
    tells_prompt = request.sampling.HasField("prompt_logprobs") or getattr(request, "echo", False)
    return request.n > 1 or tells_prompt
