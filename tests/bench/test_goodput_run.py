"""The course of bench.goodput on sides that answer by a rule, its requests, and what its command line refuses."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence

import pytest
from rich.console import Console

from bench.goodput import MAX_CONTEXT, NUM_BLOCKS, QUICK, arguments_of, cluster_config
from bench.goodput_contest import Contest, NothingMeasured, Plan
from bench.goodput_figures import Answer, Slo
from bench.goodput_requests import LENGTHS, LONGEST_OUTPUT, QUICK_LENGTHS, SHORTEST_OUTPUT, Request, Requests
from bench.goodput_sides import deadline_s, play

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


class Letters:
    """A token is a character."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


class RuledSide:
    """Answers at once; late ones are those whose number is a multiple of `late_every`. Of `hangs`, never."""

    def __init__(self, name: str = "ruled", late_every: int = 0, *, hangs: bool = False, failure: str = "") -> None:
        self.name, self.num_runs, self.prompts = name, 0, list[Sequence[int]]()
        self._late_every, self._hangs, self._failure = late_every, hangs, failure
        self.is_busy = False

    async def get_ready(self) -> None:
        assert not self.is_busy
        self.is_busy = True
        self.num_runs += 1

    async def ask(self, request: Request, deadline_s: float) -> Answer:
        self.prompts.append(request.prompt)
        is_late = self._late_every > 0 and len(self.prompts) % self._late_every == 0
        if self._hangs and not is_late:
            await asyncio.Event().wait()
        return Answer.failed(self._failure) if self._failure else Answer(9.0 if is_late else 0.2, 0.02, 0.03)

    async def leave(self) -> None:
        self.is_busy = False


def requests(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> Requests:
    return Requests(
        [Letters().encode(text) for text in ("one two ", "three ", "four five six ")], Letters(), seed, lengths
    )


def contest(plan: Plan) -> Contest:
    return Contest(plan, requests(), 0, time.monotonic(), Console(file=io.StringIO()))


def test_requests_are_joined_texts_of_the_lengths_asked_for() -> None:
    made = requests().of_run(7, 200)
    assert {len(request.prompt) for request in made} == set(LENGTHS)
    assert all(SHORTEST_OUTPUT <= request.num_output_tokens <= LONGEST_OUTPUT for request in made)
    assert min(made, key=lambda request: request.num_output_tokens).num_output_tokens < 40
    text = "".join(map(chr, made[3].prompt))
    assert text.startswith("Conversation 0007 0003.\n\n")
    assert "four five six" in text


def test_requests_of_two_runs_differ_by_their_heads_alone() -> None:
    """So no prefix cache has them, and they are the same work."""
    one, other, again = requests().of_run(1, 20), requests().of_run(2, 20), requests().of_run(1, 20)
    assert one == again
    head = len("Conversation 0001 0001.\n\n")
    for a, b in zip(one, other, strict=True):
        assert a.prompt[:16] == b.prompt[:16] or a.prompt[:head] != b.prompt[:head]
        assert (a.prompt[head:], a.num_output_tokens) == (b.prompt[head:], b.num_output_tokens)
    assert [len(each.prompt) for each in requests(1).of_run(1, 20)] != [len(each.prompt) for each in one]


def test_play_asks_all_and_tells_who_is_late() -> None:
    side = RuledSide(late_every=5)
    played = asyncio.run(play(side, requests().of_run(1, 20), [0.0] * 20, 3.0, SLO, to_the_end=True))
    assert (played.per_s, played.num_requests, played.num_kept(SLO)) == (3.0, 20, 16)
    assert not played.is_kept(SLO)
    assert not side.is_busy


def test_play_of_a_lost_rate_is_broken_off_unless_it_goes_to_the_end() -> None:
    """Of ten one may be late, and three are: the seven that hang are not waited for."""
    side = RuledSide(late_every=3, hangs=True)
    played = asyncio.run(play(side, requests().of_run(1, 10), [0.0] * 10, 1.0, SLO, to_the_end=False))
    assert 2 <= len(played.answers) <= 3
    assert not played.is_kept(SLO)
    assert not side.is_busy
    whole = asyncio.run(play(RuledSide(late_every=1), requests().of_run(1, 10), [0.0] * 10, 1.0, SLO, to_the_end=True))
    assert len(whole.answers) == 10


def test_contest_gives_both_sides_the_same_work_in_turn() -> None:
    good, bad = RuledSide("good"), RuledSide("bad", late_every=1)
    plan = Plan(seconds=0.02, num_unloaded=1, num_compared=2, tolerance=1.5)
    running = contest(plan)
    highest = asyncio.run(running.search([good, bad], SLO, 100.0))
    assert highest["good"] >= 3200.0
    assert highest["bad"] == 0.0
    compared = asyncio.run(running.compare([good, bad], SLO, 400.0))
    assert compared["good"].num_requests == compared["bad"].num_requests > 4
    assert compared["good"].is_kept(SLO)
    assert compared["bad"].num_kept(SLO) == 0
    heads = [bytes(prompt[:23]) for prompt in (*good.prompts, *bad.prompts)]
    assert len(heads) == len(set(heads)), "a prefix cache that the sides share would know the second one's prompts"


def test_search_ends_with_its_time_but_not_before_the_first_round() -> None:
    side = RuledSide()
    plan = Plan(seconds=0.02, num_unloaded=1, num_compared=1, tolerance=1.1, search_s=0.0)
    assert asyncio.run(contest(plan).search([side], SLO, 50.0)) == {"ruled": 50.0}
    assert side.num_runs == 1


def test_unloaded_is_the_median_without_the_first_and_a_failure_ends_it() -> None:
    plan = Plan(seconds=1.0, num_unloaded=3, num_compared=1, tolerance=1.1)
    side = RuledSide()
    unloaded = asyncio.run(contest(plan).unloaded([side]))
    assert (unloaded.ttft_s, unloaded.tpot_s, side.num_runs) == (0.2, 0.02, 4)
    with pytest.raises(NothingMeasured, match=r"broken: .*UNAVAILABLE"):
        asyncio.run(contest(plan).unloaded([RuledSide("broken", failure="UNAVAILABLE")]))


def test_deadline_is_far_behind_the_slos() -> None:
    assert deadline_s(Request([1], 50), SLO) == pytest.approx(4 * (1.0 + 5.0))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["--seconds", "inf"], "--seconds is inf"),
        (["--slo-ttft", "-1"], "--slo-ttft is -1"),
        (["--slo-tpot", "nan"], "--slo-tpot is nan"),
        (["--tolerance", "1"], "--tolerance is 1"),
        (["--step-tokens", "8"], "--step-tokens is 8"),
        (["--vllm", "/no/such/python"], "cannot import vllm"),
    ],
)
def test_command_line_refuses(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        arguments_of(words)
    assert refused.value.code == 2
    assert problem in capsys.readouterr().err


def test_quick_has_room_for_its_requests_and_its_time() -> None:
    """The search leaves the comparison its time within 50 s: a run of both sides, and what is asked last."""
    quick, full = arguments_of(["--quick"]), arguments_of(["--seconds", "30", "--tolerance", "1.2"])
    assert quick.plan is QUICK
    assert QUICK.search_s + 2 * QUICK.num_compared * QUICK.seconds < 45
    assert (full.plan.seconds, full.plan.tolerance, full.lengths) == (30.0, 1.2, LENGTHS)
    for lengths in (LENGTHS, QUICK_LENGTHS):
        assert max(lengths) + LONGEST_OUTPUT <= MAX_CONTEXT
    assert -(-MAX_CONTEXT // 16) * 20 <= NUM_BLOCKS, "twenty of the longest requests fit a worker"


def test_cluster_has_two_workers_of_a_thread_each() -> None:
    config = cluster_config(arguments_of(["--quick", "--drafter", "none", "--step-tokens", "256"]))
    assert (config.num_workers, config.threads_per_worker) == (2, 1)
    arguments = list(config.worker_arguments)
    assert arguments[arguments.index("--max-step-tokens") + 1] == "256"
    assert arguments[arguments.index("--drafter") + 1] == "none"
