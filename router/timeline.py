"""Where the time and the tokens of one answer went: the router's own clock, and what the workers measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos import inference_pb2 as pb
from protos import prefill_pb2
from router.candidate import Candidate
from router.placement import Placement

_DONE = (
    "computed_tokens",
    "recomputed_tokens",
    "num_preemptions",
    "wait_s",
    "decode_s",
    "num_steps",
    "drafted_tokens",
    "accepted_tokens",
)


@dataclass(slots=True)
class RequestClock:
    """Moments of one request, on the router's monotonic clock. Placement is the last attempt's."""

    now: Callable[[], float] = time.monotonic
    received_at: float = field(init=False)
    tokenize_s: float = 0.0
    wait_s: float = 0.0  # until the first placement, from when it was asked for
    placed_at: float = field(init=False)
    attempt_token_at: float = field(init=False)  # first token of the last attempt
    first_token_at: float | None = None
    last_token_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.received_at = self.placed_at = self.attempt_token_at = self.last_token_at = self.now()

    def tokenized(self) -> None:
        self.tokenize_s = self.now() - self.received_at

    def waited(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def placed(self) -> None:
        self.placed_at = self.now()

    def attempt_token(self) -> None:
        self.attempt_token_at = self.now()
        if self.first_token_at is None:
            self.first_token_at = self.attempt_token_at

    def last_token(self) -> None:
        self.last_token_at = self.now()

    @property
    def has_attempt_token(self) -> bool:
        """Whether the last attempt has come to a token."""
        return self.first_token_at is not None and self.attempt_token_at >= self.placed_at

    @property
    def ttft_s(self) -> float:
        return (self.first_token_at or self.received_at) - self.received_at

    def tpot_s(self, num_output_tokens: int) -> float:
        """Mean over the tokens after the first; 0 if there are none."""
        if self.first_token_at is None or num_output_tokens < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) / (num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Served:
    """How an answer came about. The statistics are the last attempt's; None where the worker could not give them."""

    placement: Placement
    num_prompt_tokens: int
    num_output_tokens: int
    prefill: prefill_pb2.PrefillStats | None
    decode: pb.DecodeStats | None
    num_retries: int
    num_resumes: int
    num_moves: int
    num_known_tokens: int = 0  # of the output, that the client had before

    @property
    def is_disaggregated(self) -> bool:
        return self.placement.prefill is not None and self.decode is not None


def usage(served: Served) -> pb.Usage:
    """On a worker that does both, the prompt's tokens are told as prefill's too."""
    prompt_tokens = None
    if served.prefill is not None:
        prompt_tokens = served.prefill.prompt_tokens
    elif served.placement.prefill is None and served.decode is not None:
        prompt_tokens = pb.PromptTokens(computed=served.decode.computed_tokens, cached=served.decode.cached_tokens)
    return pb.Usage(
        prompt_tokens=served.num_prompt_tokens,
        output_tokens=served.num_output_tokens,
        prefill=prompt_tokens,
        decode=served.decode,
        num_resumes=served.num_resumes,
        num_retries=served.num_retries,
        num_moves=served.num_moves,
        disaggregated=served.is_disaggregated,
    )


def joined(first: pb.DecodeStats | None, then: pb.DecodeStats) -> pb.DecodeStats:
    """Of a sequence that was moved: what the first worker started from, and what all of them did."""
    if first is None:
        return then
    return pb.DecodeStats(
        received_tokens=first.received_tokens,
        cached_tokens=first.cached_tokens,
        **{name: getattr(first, name) + getattr(then, name) for name in _DONE},
    )


def timeline(served: Served, clock: RequestClock) -> pb.Timeline:
    return pb.Timeline(
        stages=_stages(served, clock),
        ttft_s=clock.ttft_s,
        tpot_s=clock.tpot_s(served.num_output_tokens - served.num_known_tokens),
        total_s=clock.now() - clock.received_at,
    )


def _stages(served: Served, clock: RequestClock) -> list[pb.Stage]:
    """In order of time. Prefill's are laid out from the placement on, decode's back from the last token."""
    stages = [pb.Stage(name="tokenize", start_s=0.0, duration_s=clock.tokenize_s)]
    if clock.wait_s:
        stages.append(pb.Stage(name="wait", start_s=clock.tokenize_s, duration_s=clock.wait_s))
    placed_s = clock.placed_at - clock.received_at
    token_s = clock.attempt_token_at - clock.received_at
    if (prefill := served.placement.prefill) is not None and (stats := served.prefill) is not None:
        stages += _prefill_stages(prefill, stats, placed_s, is_handed_over=served.is_disaggregated)
    if (decode := served.placement.decode) is not None and (done := served.decode) is not None:
        name, end_s = decode.id.name, clock.last_token_at - clock.received_at
        if served.placement.prefill is None:
            stages.append(pb.Stage(name="prefill", worker_id=name, start_s=placed_s, duration_s=token_s - placed_s))
        start_s = max(token_s, end_s - done.decode_s)
        stages.append(pb.Stage(name="decode", worker_id=name, start_s=start_s, duration_s=end_s - start_s))
    return stages


def _prefill_stages(
    worker: Candidate, stats: prefill_pb2.PrefillStats, placed_s: float, *, is_handed_over: bool
) -> list[pb.Stage]:
    name, prefill_s = worker.id.name, placed_s + stats.queue_s
    stages = [
        pb.Stage(name="queue", worker_id=name, start_s=placed_s, duration_s=stats.queue_s),
        pb.Stage(name="prefill", worker_id=name, start_s=prefill_s, duration_s=stats.compute_s),
    ]
    if is_handed_over:
        handover_s = prefill_s + stats.compute_s
        stages.append(pb.Stage(name="handover", worker_id=name, start_s=handover_s, duration_s=stats.handover_s))
    return stages


def timeline_so_far(
    clock: RequestClock, placement: Placement | None, prefill: prefill_pb2.PrefillStats | None, num_output_tokens: int
) -> pb.Timeline:
    """Of one that has not ended, on the workers of `placement`; None while it waits for one. The last stage is the one
    it is in. Until the worker has told its times (`prefill`) its queue there is a part of prefill."""
    now_s = clock.now() - clock.received_at
    stages = [pb.Stage(name="tokenize", start_s=0.0, duration_s=clock.tokenize_s or now_s)]
    placed_s, token_s = clock.placed_at - clock.received_at, clock.attempt_token_at - clock.received_at
    was_placed, has_token = placed_s > 0.0, clock.has_attempt_token
    wait_s = clock.wait_s if was_placed else now_s - clock.tokenize_s
    if clock.tokenize_s and wait_s:
        stages.append(pb.Stage(name="wait", start_s=clock.tokenize_s, duration_s=wait_s))
    if placement is not None and (worker := placement.prefill or placement.decode) is not None:
        if placement.prefill is not None and prefill is not None:
            stages += _prefill_stages(worker, prefill, placed_s, is_handed_over=placement.decode is not None)
        else:
            duration_s = (token_s if has_token else now_s) - placed_s
            stages.append(pb.Stage(name="prefill", worker_id=worker.id.name, start_s=placed_s, duration_s=duration_s))
        if has_token and placement.decode is not None:
            name = placement.decode.id.name
            stages.append(pb.Stage(name="decode", worker_id=name, start_s=token_s, duration_s=now_s - token_s))
    tpot_s = 0.0
    if clock.first_token_at is not None and num_output_tokens > 1:
        tpot_s = (clock.now() - clock.first_token_at) / (num_output_tokens - 1)
    return pb.Timeline(stages=stages, ttft_s=clock.ttft_s, tpot_s=tpot_s, total_s=now_s)
