"""How far one request has come, over all its attempts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from model.block_pool import BlockHash
from protos import inference_pb2 as pb
from protos.errors import Internal
from router.account import Account
from router.attempt import Attempt
from router.candidate import WorkerId
from router.dispatch import Dispatch
from router.messages import emitted_tokens
from router.move import Move
from router.placement import Placement
from router.request import Request
from router.timeline import RequestClock

_KEPT_MESSAGES = 64


@dataclass(slots=True, eq=False)
class Progress:
    """`prefers`: where to try first. `is_choice`: one of several answers, whose summary is told together with the
    others', and whose account is theirs too."""

    request: Request
    clock: RequestClock
    deadline_at: float | None
    account: Account
    prefers: Placement | None = None
    is_choice: bool = False
    attempt: Attempt | None = None  # the last one
    is_under_way: bool = False  # and it has not failed
    known: Sequence[int] = ()  # tokens that the client has had before
    emitted: array[int] = field(init=False)  # with those, as of the last reading back
    raw_messages: list[bytes] = field(default_factory=list)  # relayed since then
    last: pb.GenerateResponse | None = None  # the message that ended the answer
    avoid: set[WorkerId] = field(default_factory=set)
    hashes: list[BlockHash] = field(default_factory=list)  # of what is to be prefilled
    num_retries: int = 0
    num_resumes: int = 0
    num_moves: int = 0
    move: Move | None = None  # made, and not yet followed
    dispatch: Dispatch | None = None  # of a placement, until its attempt runs
    done_before: pb.DecodeStats | None = None  # on workers that the sequence was moved away from

    def __post_init__(self) -> None:
        self.emitted = array("q", self.known)

    def begin(self, attempt: Attempt) -> None:
        self.attempt, self.is_under_way = attempt, True

    @property
    def placement(self) -> Placement | None:
        """Of the last attempt."""
        return None if self.attempt is None else self.attempt.placement

    @property
    def num_cached_tokens(self) -> int:
        """Of what was prefilled last: found in the prefix cache there. 0 while that is not known."""
        if self.attempt is None:
            return 0
        if self.attempt.placement.prefill is not None:
            stats = self.attempt.prefill_stats
            return 0 if stats is None else stats.prompt_tokens.cached
        done = self.done_before or (None if self.last is None else self.last.decode_stats)
        return 0 if done is None else done.cached_tokens

    @property
    def remaining_s(self) -> float | None:
        return None if self.deadline_at is None else self.deadline_at - time.monotonic()

    @property
    def token_ids(self) -> list[int]:
        """What is to be prefilled."""
        return [*self.request.token_ids, *self.emitted]

    @property
    def num_relayed(self) -> int:
        """Tokens of the answer so far. Reads the last message only."""
        if not self.raw_messages:
            return len(self.emitted)
        last = pb.GenerateResponse.FromString(self.raw_messages[-1])
        return int(last.output_index) + len(last.token_ids)

    @property
    def wants_decode(self) -> bool:
        """Whether more than the one token that prefill samples is wanted."""
        return self.request.sampling.max_tokens - len(self.emitted) > 1

    def is_complete(self) -> bool:
        """Whether the answer has ended. Reads the last message only."""
        if self.raw_messages:
            self._set_last(self.raw_messages[-1])
        return self.last is not None

    def relayed(self, raw: bytes) -> None:
        """Read many at once, which costs less time; of those read the tokens are kept, which cost less memory."""
        self.raw_messages.append(raw)
        if len(self.raw_messages) >= _KEPT_MESSAGES:
            self.read_back()

    def read_back(self) -> None:
        """Learns what was emitted from what was relayed."""
        try:
            self.emitted.extend(emitted_tokens(self.raw_messages, len(self.emitted)))
        except ValueError as error:
            raise Internal(f"a worker sent tokens out of order: {error}") from error
        if self.raw_messages:
            self._set_last(self.raw_messages[-1])
        self.raw_messages.clear()

    def take_dispatch(self) -> Dispatch | None:
        """Of what was placed or moved and does not run yet. Who takes it has to end it."""
        dispatch, move = self.dispatch, self.move
        self.dispatch = self.move = None
        return dispatch if move is None else move.dispatch

    def _set_last(self, raw: bytes) -> None:
        message = pb.GenerateResponse.FromString(raw)
        self.last = message if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED else None
