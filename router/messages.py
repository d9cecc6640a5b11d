"""Messages of the wire to the router's own values and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from model.block_pool import BlockHash
from model.kv_layout import KVLayout
from protos import decode_pb2, inference_pb2, prefill_pb2, workers_pb2
from protos.errors import InvalidArgument
from router.cache_changes import CacheChanges
from router.candidate import Candidate, Role, WorkerId
from router.card import ModelCard
from router.profile import WorkerProfile
from router.request import Request
from router.shared_records import Decision
from router.step_messages import steps_from_message
from router.worker import DumpCache, Routers, Worker, WorkerLoad, WorkerState

_STATES = {
    WorkerState.READY: workers_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: workers_pb2.WORKER_STATE_DRAINING,
    WorkerState.LOST: workers_pb2.WORKER_STATE_LOST,
    WorkerState.SILENT: workers_pb2.WORKER_STATE_SILENT,
}
_REPORTED = {_STATES[state]: state for state in (WorkerState.READY, WorkerState.DRAINING)}
_ROLES = {
    Role.PREFILL: workers_pb2.ROLE_PREFILL,
    Role.DECODE: workers_pb2.ROLE_DECODE,
    Role.BOTH: workers_pb2.ROLE_BOTH,
}
_ROLES_BY_VALUE: dict[int, Role] = {value: role for role, value in _ROLES.items()}
_LOAD_NUMBERS = (
    "queued_prefill_tokens",
    "num_waiting",
    "num_running",
    "num_free_blocks",
    "num_used_blocks",
    "num_quarantined_blocks",
    "prefill_tokens_per_s",
    "decode_step_s",
    "decode_batch",
    "tokens_per_step",
    "prefill_age_s",
    "decode_age_s",
    "transfer_bytes",
    "transfer_s",
)
_HASH_BYTES = 16


def command_message(command: Role | DumpCache | Routers) -> workers_pb2.RouterCommand:
    if isinstance(command, DumpCache):
        return workers_pb2.RouterCommand(dump_cache=True)
    if isinstance(command, Routers):
        return workers_pb2.RouterCommand(routers=command.addresses)
    return workers_pb2.RouterCommand(set_role=_ROLES[command])


def role_value(role: Role) -> workers_pb2.Role.ValueType:
    return _ROLES[role]


def role_from_value(value: int, field: str) -> Role:
    role = _ROLES_BY_VALUE.get(value)
    if role is None:
        raise InvalidArgument(f"{field} is {value}; it must be ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH", field=field)
    return role


def profile_from_hello(hello: workers_pb2.WorkerHello) -> WorkerProfile:
    """Raises InvalidArgument for a layout, a context or steps that cannot be, or a role that is none."""
    try:
        layout = KVLayout(**{field.name: getattr(hello.layout, field.name) for field in fields(KVLayout)})
    except ValueError as error:
        raise InvalidArgument(f"hello.layout: {error}", field="hello.layout") from None
    if hello.max_context_tokens < 0:
        raise InvalidArgument(
            f"hello.max_context_tokens is {hello.max_context_tokens}; it must be at least 1, or 0 for the model's own",
            field="hello.max_context_tokens",
        )
    return WorkerProfile(
        id=WorkerId(hello.worker_id, hello.epoch),
        address=hello.address,
        role=role_from_value(hello.role, "hello.role"),
        flippable=hello.flippable,
        model_name=hello.model_name,
        tokenizer_digest=hello.tokenizer_digest,
        layout=layout,
        num_blocks=hello.num_blocks,
        runner=hello.runner,
        kernels=hello.kernels,
        drafter=hello.drafter,
        metrics_address=hello.metrics_address,
        max_context_tokens=hello.max_context_tokens or None,
        max_running=max(0, hello.max_running),
        max_step_tokens=max(0, hello.max_step_tokens),
        hardware=hello.hardware,
        calibration=tuple(steps_from_message(hello.calibration, "hello.calibration")),
    )


def load_from_message(load: workers_pb2.WorkerLoad) -> WorkerLoad:
    """A worker that does not say it is ready is taken to be draining. Raises InvalidArgument for what is no number."""
    state = _REPORTED.get(load.state, WorkerState.DRAINING)
    numbers = {name: getattr(load, name) for name in _LOAD_NUMBERS}
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise InvalidArgument(f"load.{name} is {number}; it must be a number from 0 on", field=f"load.{name}")
    return WorkerLoad(state, **numbers)


def changes_from_message(changes: workers_pb2.CacheChanges) -> CacheChanges:
    """Raises InvalidArgument where it is not made of whole hashes."""
    return CacheChanges(
        number=changes.number,
        stored=_hashes(changes.stored, "cache.stored"),
        removed=_hashes(changes.removed, "cache.removed"),
        begins_dump=changes.begins_dump,
        ends_dump=changes.ends_dump,
    )


def _hashes(joined: bytes, field: str) -> list[BlockHash]:
    if len(joined) % _HASH_BYTES:
        raise InvalidArgument(f"{field} has {len(joined)} bytes; a hash has {_HASH_BYTES}", field=field)
    return [joined[start : start + _HASH_BYTES] for start in range(0, len(joined), _HASH_BYTES)]


def status_of(
    worker: Worker, state: WorkerState, age_s: float, num_known_blocks: int | None = None
) -> workers_pb2.WorkerStatus:
    """`num_known_blocks`: of its prefix cache; None while that is not known."""
    profile, load = worker.profile, worker.load
    return workers_pb2.WorkerStatus(
        hello=workers_pb2.WorkerHello(
            worker_id=profile.id.name,
            epoch=profile.id.epoch,
            address=profile.address,
            role=_ROLES[profile.role],
            flippable=profile.flippable,
            model_name=profile.model_name,
            tokenizer_digest=profile.tokenizer_digest,
            layout=decode_pb2.KVLayout(**asdict(profile.layout)),
            num_blocks=profile.num_blocks,
            runner=profile.runner,
            kernels=profile.kernels,
            drafter=profile.drafter,
            metrics_address=profile.metrics_address,
            max_context_tokens=profile.max_context_tokens or 0,
            max_running=profile.max_running,
            max_step_tokens=profile.max_step_tokens,
            hardware=profile.hardware,
        ),
        load=workers_pb2.WorkerLoad(state=_STATES[state], **{name: getattr(load, name) for name in _LOAD_NUMBERS}),
        role=_ROLES[worker.role],
        reported_ago_s=age_s,
        num_requests=worker.dispatches.num_in_hand,
        num_known_blocks=num_known_blocks,
    )


def model_message(card: ModelCard, layout: KVLayout | None, max_context_tokens: int) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=card.name,
        architecture=card.architecture,
        max_context_tokens=max_context_tokens,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        layout_fingerprint="" if layout is None else layout.fingerprint,
        kv_bytes_per_token=0 if layout is None else layout.token_bytes,
    )


def target_message(worker: Candidate) -> decode_pb2.DecodeTarget:
    return decode_pb2.DecodeTarget(worker_id=worker.id.name, address=worker.address, epoch=worker.id.epoch)


def prefill_request(
    request: Request, attempt_id: str, token_ids: Sequence[int], decode: Candidate | None
) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request_id=request.request_id,
        attempt_id=attempt_id,
        token_ids=token_ids,
        num_prompt_tokens=len(request.token_ids),
        sampling=_sampling_message(request, token_ids),
        decode=None if decode is None else target_message(decode),
    )


def decode_request(
    request: Request, attempt_id: str, token_ids: Sequence[int], *, prefill_here: bool
) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(
        request_id=request.request_id,
        attempt_id=attempt_id,
        token_ids=token_ids,
        num_prompt_tokens=len(request.token_ids),
        sampling=_sampling_message(request, token_ids),
        prefill_here=prefill_here,
    )


def emitted_tokens(raw_messages: Iterable[bytes], num_emitted: int) -> list[int]:
    """The tokens in what was relayed, after the first `num_emitted`. Raises ValueError for a gap or a repeat."""
    token_ids: list[int] = []
    for raw in raw_messages:
        message = inference_pb2.GenerateResponse.FromString(raw)
        expected = num_emitted + len(token_ids)
        if message.token_ids and message.output_index != expected:
            raise ValueError(f"output_index is {message.output_index} where {expected} was due")
        token_ids.extend(message.token_ids)
    return token_ids


def decision_message(decision: Decision) -> workers_pb2.Decision:
    at = Timestamp()
    at.FromMicroseconds(round(decision.at * 1e6))
    return workers_pb2.Decision(
        at=at,
        what=decision.what,
        worker_id=decision.worker,
        role=decision.role,
        key=decision.by,
        router=decision.router,
        reason=decision.reason,
        gain=decision.gain,
        num_prefill=decision.num_prefill,
        num_decode=decision.num_decode,
        took_s=decision.took_s,
        num_moved=decision.num_moved,
    )


def _sampling_message(request: Request, token_ids: Sequence[int]) -> inference_pb2.SamplingParams:
    """Resolved: nothing is left for a worker to choose. The prompt's logprobs came with the first token."""
    sampling = request.sampling
    is_resumed = len(token_ids) > len(request.token_ids)
    grammar = sampling.grammar
    of_kind: dict[str, Any] = {} if grammar is None else {grammar.kind.value: grammar.text}
    return inference_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=True,  # the model's end tokens are among stop_token_ids, if they are to stop
        logprobs=sampling.num_logprobs,
        max_draft_tokens=sampling.max_draft_tokens,
        stop=sampling.stop,
        logit_bias=dict(sampling.logit_bias),
        prompt_logprobs=None if is_resumed else sampling.num_prompt_logprobs,
        **of_kind,
    )
