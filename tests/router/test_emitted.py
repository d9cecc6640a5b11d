"""A client that has a part of the answer already, from a router that is gone, gets the rest and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

from model.sampling_params import SamplingParams
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.errors import InvalidArgument
from router.emitted import check_emitted
from tests.router.asking import PROMPT, all_workers
from tests.router.fakes import FakeFleet, plain_loop

NUM_TOKENS = 8
WHOLE = plain_loop(PROMPT, NUM_TOKENS)


async def answer_to(fleet: FakeFleet, **fields: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), **fields)
    async with open_channel(fleet.router.address) as channel:
        with service_errors():
            return [message async for message in inference_pb2_grpc.InferenceStub(channel).Generate(request)]


@pytest.mark.parametrize("num_emitted", range(NUM_TOKENS))
async def test_goes_on_behind_what_was_emitted(fleet: FakeFleet, num_emitted: int) -> None:
    emitted = WHOLE[:num_emitted]
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=1)
    *messages, last = await answer_to(
        fleet, sampling=sampling, emitted=[pb.TokenIds(ids=emitted)], echo=num_emitted > 0
    )
    assert [token for message in messages for token in message.token_ids] == WHOLE[num_emitted:]
    assert "".join(message.text for message in messages) == "".join(f"<{token}>" for token in WHOLE[num_emitted:])
    assert messages[0].output_index == num_emitted  # and no prompt is told: that was said before
    assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
    usage = last.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT), NUM_TOKENS)
    assert usage.num_resumes == (num_emitted > 0)
    (prefill,) = [request for worker in all_workers(fleet, "p") for request in worker.prefills]
    assert (list(prefill.token_ids), prefill.num_prompt_tokens) == ([*PROMPT, *emitted], len(PROMPT))
    assert prefill.HasField("decode") == (num_emitted < NUM_TOKENS - 1)  # which the last token alone does not need


async def test_each_of_several_answers_goes_on_by_itself(fleet: FakeFleet) -> None:
    emitted = [WHOLE[:2], [], WHOLE[:7]]
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=1, prompt_logprobs=0)
    asked = [pb.TokenIds(ids=ids) for ids in emitted]
    *messages, last = await answer_to(fleet, sampling=sampling, emitted=asked, n=4, echo=True)
    assert not any(message.HasField("prompt") for message in messages)
    for choice, known in enumerate([*emitted, []]):
        rest = [token for message in messages if message.choice == choice for token in message.token_ids]
        assert rest == WHOLE[len(known) :]
    assert (last.usage.output_tokens, last.usage.num_resumes) == (4 * NUM_TOKENS, 2)


async def test_keys_pay_for_what_is_made_now(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr("router.rate_limits.Allowance.take_tokens", lambda self, *numbers: taken.append(numbers))
    used: list[int] = []
    monkeypatch.setattr("router.rate_limits.Allowance.used", lambda self, number: used.append(number))
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=1)
    await answer_to(fleet, sampling=sampling, emitted=[pb.TokenIds(ids=WHOLE[:3])])
    await fleet.settled()
    assert taken == [(len(PROMPT) + 3, NUM_TOKENS - 3)]
    assert used == [len(PROMPT) + NUM_TOKENS]


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        (
            {"emitted": [WHOLE]},
            "emitted[0].ids",
            "emitted[0] has 8 tokens; it must have fewer than sampling.max_tokens, 8",
        ),
        ({"emitted": [[], [*WHOLE, 20]], "n": 2}, "emitted[1].ids", "emitted[1] has 9 tokens"),
        ({"emitted": [[5, 10**6]]}, "emitted[0].ids", "emitted[0].ids[1] is 1000000; 'tiny' has token ids 0 to "),
        ({"emitted": [[-1]]}, "emitted[0].ids", "emitted[0].ids[0] is -1"),
        ({"emitted": [[20]] * 3, "n": 2}, "emitted", "emitted has 3 answers; it must have at most n, 2"),
        ({"emitted": [[20]], "seed": None}, "sampling.seed", "sampling.seed is not set"),
        (
            {"emitted": [[20, 21, 22]], "stop_token_ids": [21]},
            "emitted[0].ids",
            "emitted[0].ids[1] is 21, which ends the answer",
        ),
    ],
)
async def test_what_cannot_be_gone_on_with(fleet: FakeFleet, fields: dict[str, Any], field: str, says: str) -> None:
    sampling = pb.SamplingParams(
        max_tokens=NUM_TOKENS, seed=fields.get("seed", 1), stop_token_ids=fields.get("stop_token_ids", ())
    )
    with pytest.raises(InvalidArgument) as caught:
        await answer_to(
            fleet, sampling=sampling, emitted=[pb.TokenIds(ids=ids) for ids in fields["emitted"]], n=fields.get("n")
        )
    assert caught.value.field == field
    assert str(caught.value).startswith(says)
    assert fleet.num_open == 0 and not any(worker.prefills for worker in fleet.workers.values())


def test_without_temperature_no_seed_is_needed_and_end_tokens_before_min_tokens_end_nothing() -> None:
    check_emitted([[5]], SamplingParams(max_tokens=4, temperature=0.0), num_choices=1, has_seed=False)
    sampling = SamplingParams(max_tokens=4, min_tokens=3, stop_token_ids=(5,))
    check_emitted([[5, 5]], sampling, num_choices=1, has_seed=True)
    with pytest.raises(InvalidArgument, match=r"emitted\[0\].ids\[2\] is 5, which ends the answer"):
        check_emitted([[5, 6, 5]], sampling, num_choices=1, has_seed=True)
