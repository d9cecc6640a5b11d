"""What a worker says of itself when it registers, and whether it fits the others: they exchange KV and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.kv_layout import KVLayout
from protos.errors import FailedPrecondition, InvalidArgument
from router.candidate import Role, WorkerId


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """What a worker says once, when it registers."""

    id: WorkerId
    address: str
    role: Role  # where it starts
    flippable: bool
    model_name: str
    tokenizer_digest: str
    layout: KVLayout
    num_blocks: int
    runner: str = ""
    kernels: str = ""
    drafter: str = ""
    metrics_address: str = ""
    max_context_tokens: int | None = None  # None: as many as the model allows
    max_running: int = 0  # sequences that decode at once; 0: not known


def refuse_misfit(profile: WorkerProfile, others: Sequence[WorkerProfile], tokenizer_digest: str) -> None:
    """`tokenizer_digest` is the router's; empty if it does not mind.

    Raises:
        InvalidArgument, FailedPrecondition: the message names the first difference.
    """
    if not profile.id.name or not profile.id.epoch or not profile.address:
        raise InvalidArgument("worker_id, epoch and address must not be empty", field="hello")
    if tokenizer_digest and profile.tokenizer_digest != tokenizer_digest:
        raise FailedPrecondition(
            f"tokenizer_digest is {profile.tokenizer_digest!r} at the worker and {tokenizer_digest!r} "
            "at the router: they must load the same tokenizer",
            field="hello.tokenizer_digest",
        )
    if not others:
        return
    here, there = "at those registered", f"at {profile.id.name}"
    difference = others[0].layout.difference(profile.layout, here=here, there=there)
    if difference is not None:
        drafter = (
            "; they must have the same --drafter ('' is ngram or none)" if difference.startswith("drafter is ") else ""
        )
        raise FailedPrecondition(
            f"a worker of model {profile.model_name!r} does not fit those of model {others[0].model_name!r}: "
            f"{difference}{drafter}",
            field="hello.layout",
        )
    if profile.tokenizer_digest != others[0].tokenizer_digest:
        raise FailedPrecondition(
            f"tokenizer_digest is {profile.tokenizer_digest!r} at the worker and "
            f"{others[0].tokenizer_digest!r} at those registered",
            field="hello.tokenizer_digest",
        )
