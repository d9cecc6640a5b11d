"""What people see of a request, and what is learnt from its answer: numbers and names, and nothing of what it says."""

from __future__ import annotations

from collections.abc import Callable

from protos import inference_pb2 as pb
from protos import insights_pb2
from router.followed import Followed
from router.observation import Answered
from router.placement import Placement
from router.progress import Progress
from router.timeline import timeline_so_far


def answered_of(followed: Followed) -> Answered | None:
    """None if it does not have its whole answer. Tokens that the client had before are no part of it."""
    summary = _summary(followed)
    if summary is None:
        return None
    assert followed.account is not None
    made, timeline = followed.account.num_output_tokens, summary.timeline
    return Answered(
        arrived_at_s=followed.clock.received_at,
        ended_at_s=followed.clock.now(),
        num_prompt_tokens=summary.usage.prompt_tokens,
        num_cached_tokens=_num_cached_tokens(followed),
        num_output_tokens=sum(made),
        ttft_s=timeline.ttft_s,
        tpot_s=timeline.tpot_s if max(made, default=0) > 1 else None,
        slo_class=followed.slo_class,
    )


def summary_of(followed: Followed, ended: str = "", reason: str = "") -> tuple[float, bytes]:
    """Its total time, and a serialized RequestSummary. `ended`: how; empty for one that runs. Of several answers
    workers and stages are the first one's, and numbers those of all."""
    answers, summary = followed.answers, _summary(followed)
    first = answers[0] if answers else None
    placement = None if first is None or not (first.is_under_way or ended) else first.placement
    message = insights_pb2.RequestSummary(
        request_id=followed.request_id,
        state=ended or _state(followed),
        error=reason,
        prefill_worker=_prefill_worker(placement),
        decode_worker="" if placement is None or placement.decode is None else placement.decode.id.name,
        num_prompt_tokens=followed.num_prompt_tokens,
        num_cached_tokens=_num_cached_tokens(followed),
        num_output_tokens=_sum(answers, lambda each: each.num_relayed),
        timeline=_timeline_so_far(followed, placement) if summary is None else summary.timeline,
        num_retries=_sum(answers, lambda each: each.num_retries),
        num_resumes=_sum(answers, lambda each: each.num_resumes + bool(each.known)),
        num_moves=_sum(answers, lambda each: each.num_moves),
        tenant=followed.tenant,
        slo_class=followed.slo_class,
    )
    message.received_at.FromMicroseconds(round(followed.received_at * 1e6))
    return message.timeline.total_s, message.SerializeToString()


def _summary(followed: Followed) -> pb.GenerateResponse | None:
    """The message that ends an answer, if it has come."""
    message = pb.GenerateResponse.FromString(followed.last_message)
    return message if message.HasField("usage") else None


def _state(followed: Followed) -> str:
    """Where it is now; of several answers, where the one is that has come furthest."""
    placed = [each for each in followed.answers if each.is_under_way]
    if any(each.clock.has_attempt_token and each.placement and each.placement.decode for each in placed):
        return "decode"
    return "prefill" if placed else "queued"


def _timeline_so_far(followed: Followed, placement: Placement | None) -> pb.Timeline:
    first = followed.answers[0] if followed.answers else None
    if first is None:
        return timeline_so_far(followed.clock, None, None, 0)
    stats = None if first.attempt is None else first.attempt.prefill_stats
    return timeline_so_far(first.clock, placement, stats, first.num_relayed - len(first.known))


def _prefill_worker(placement: Placement | None) -> str:
    """A decode worker may do that as well."""
    worker = None if placement is None else placement.prefill or placement.decode
    return "" if worker is None else worker.id.name


def _num_cached_tokens(followed: Followed) -> int:
    """Of the prompt: what a resumed answer is prefilled from has more."""
    return min(followed.answers[0].num_cached_tokens, followed.num_prompt_tokens) if followed.answers else 0


def _sum(answers: list[Progress], count: Callable[[Progress], int]) -> int:
    return sum(map(count, answers))
