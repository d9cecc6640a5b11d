"""What a worker says of itself when it registers, and whether it fits the others: they exchange KV and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.kv_layout import KVLayout
from protos.errors import FailedPrecondition, InvalidArgument
from router.candidate import Role, WorkerId
from router.measured_steps import Steps


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
    max_step_tokens: int = 0  # computed in one step; 0: not known
    hardware: str = ""
    calibration: tuple[Steps, ...] = ()  # measured before it registered


@dataclass(frozen=True, slots=True)
class Common:
    """Of all workers. `max_context_tokens`: the least that one was told to take, so that all can serve what is taken.
    `max_sequence_tokens`: what the largest cache that can decode holds. None if there is none."""

    layout: KVLayout | None
    max_context_tokens: int | None
    max_sequence_tokens: int | None


def common_of(workers: Sequence[tuple[WorkerProfile, Role]]) -> Common:
    told = [profile.max_context_tokens for profile, _ in workers if profile.max_context_tokens is not None]
    sizes = [profile.num_blocks * profile.layout.block_size for profile, role in workers if Role.DECODE in role]
    layout = workers[0][0].layout if workers else None
    return Common(layout, min(told, default=None), max(sizes, default=None))


def refuse_misfit(profile: WorkerProfile, other: WorkerProfile | None, tokenizer_digest: str) -> None:
    """`other`: any of those registered, which fit each other. `tokenizer_digest` is the router's; empty if it does not
    mind.

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
    if other is None:
        return
    here, there = "at those registered", f"at {profile.id.name}"
    difference = other.layout.difference(profile.layout, here=here, there=there)
    if difference is not None:
        drafter = (
            "; they must have the same --drafter ('' is ngram or none)" if difference.startswith("drafter is ") else ""
        )
        raise FailedPrecondition(
            f"a worker of model {profile.model_name!r} does not fit those of model {other.model_name!r}: "
            f"{difference}{drafter}",
            field="hello.layout",
        )
    if profile.tokenizer_digest != other.tokenizer_digest:
        raise FailedPrecondition(
            f"tokenizer_digest is {profile.tokenizer_digest!r} at the worker and "
            f"{other.tokenizer_digest!r} at those registered",
            field="hello.tokenizer_digest",
        )
