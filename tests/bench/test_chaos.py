"""The judge of bench.chaos condemns what it should: a storm that nothing is found in has to mean something."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from bench import chaos_load
from bench.chaos import Outcome
from bench.chaos_load import Load, Question, Tally
from bench.chaos_storm import MESSAGE_FAULTS, SILENT_FAULTS
from kvtransfer.faults import FaultPlan
from protos import inference_pb2
from protos.errors import AttemptsExhausted, DeadlineExceeded, Internal
from protos.values import Chunk, Summary

ANSWER = (5, 6, 7, 8)
Part = Chunk | Summary | Exception | float  # a float: so long is waited
USAGE = inference_pb2.Usage(num_resumes=2)
END = Summary.from_message(inference_pb2.GenerateResponse(request_id="r", usage=USAGE))


def chunk(*token_ids: int) -> Chunk:
    return Chunk(0, token_ids, "", (), None)


class Client:
    """Answers with these parts; stops the load with the first request."""

    def __init__(self, stop: Callable[[], None], parts: Sequence[Part]) -> None:
        self._stop = stop
        self._parts = parts

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass

    async def generate(self, prompt: Sequence[int], **_: Any) -> AsyncIterator[Chunk | Summary]:
        self._stop()
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                yield part


async def tally_of(monkeypatch: pytest.MonkeyPatch, *parts: Part, leaving_share: float = 0.0) -> Tally:
    settings = {"ANSWER_LENGTHS": (4,), "LEAVING_SHARE": leaving_share, "LEAVING_RATE": 50.0}
    for name, value in {**settings, "DEADLINE_S": 0.1, "SLACK_S": 0.2}.items():
        monkeypatch.setattr(chaos_load, name, value)
    load = Load("", [Question((1, 2), ANSWER)], random.Random(0), at_once=1)
    monkeypatch.setattr(chaos_load, "PdserveClient", lambda address, direct=False: Client(load.stop, parts))
    await load.run()
    return load.tally


def verdict(tally: Tally) -> tuple[int, int, int, int, int]:
    assert tally.num_requests == 1
    return tally.num_completed, tally.failed.total(), tally.num_wrong, tally.num_lost, tally.num_hung


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((chunk(5), chunk(6, 7, 8), END), (1, 0, 0, 0, 0)),
        ((chunk(5), chunk(6, 9, 8), END), (1, 0, 1, 0, 0)),
        ((chunk(5), chunk(6, 7), END), (1, 0, 1, 0, 0)),  # too short
        ((chunk(5), AttemptsExhausted("4 attempts failed")), (0, 1, 0, 0, 0)),
        ((chunk(9), AttemptsExhausted("4 attempts failed")), (0, 1, 1, 0, 0)),
        ((chunk(5), Internal("the answer ended without its summary")), (0, 0, 0, 1, 0)),
        ((chunk(5), DeadlineExceeded("too late")), (0, 0, 0, 0, 1)),
        ((chunk(5), 60.0), (0, 0, 0, 0, 1)),
    ],
)
async def test_verdicts(
    monkeypatch: pytest.MonkeyPatch, parts: Sequence[Part], expected: tuple[int, int, int, int, int]
) -> None:
    tally = await tally_of(monkeypatch, *parts)
    assert verdict(tally) == expected
    assert bool(tally.remarks) == (expected != (1, 0, 0, 0, 0))


async def test_gaps_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = await tally_of(monkeypatch, 0.05, chunk(5), chunk(6), 0.1, chunk(7, 8), END)
    assert 0.05 <= tally.worst_ttft_s < 0.1 <= tally.worst_gap_s < 0.2
    assert (tally.num_resumes, tally.num_retries) == (2, 0)


async def test_who_leaves_early_is_judged_by_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = await tally_of(monkeypatch, chunk(5), 60.0, leaving_share=1.0)
    assert (*verdict(tally), tally.num_left) == (0, 0, 0, 0, 0, 1)
    tally = await tally_of(monkeypatch, chunk(9), 60.0, leaving_share=1.0)
    assert (*verdict(tally), tally.num_left) == (0, 0, 1, 0, 0, 1)


def test_only_a_clean_run_is_good() -> None:
    def outcome(leaked: int = 0, **counts: Any) -> Outcome:
        return Outcome(Tally(**counts), Counter(), {"decode-0": leaked} if leaked else {}, [], 1.0)

    assert outcome(num_requests=9, num_completed=9).is_good
    for bad in (outcome(leaked=1), outcome(num_wrong=1), outcome(num_lost=1), outcome(num_hung=1)):
        assert not bad.is_good


@pytest.mark.parametrize("text", [*MESSAGE_FAULTS, *SILENT_FAULTS])
def test_every_fault_of_the_storm_can_be_read(text: str) -> None:
    assert len(FaultPlan.parse(text).rules) == 1
