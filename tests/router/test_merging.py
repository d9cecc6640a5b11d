"""Messages that were put together say what they said one by one."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from router.merging import merged

IDS = st.integers(0, 2**31)
LOGPROBS = st.floats(-50, 0, width=32)
ALTERNATIVES = st.lists(st.tuples(IDS, LOGPROBS), max_size=3)


@dataclass(frozen=True)
class Token:
    token_id: int
    text: str
    logprob: float
    alternatives: list[tuple[int, float]]


TOKENS = st.builds(Token, IDS, st.text(max_size=3), LOGPROBS, ALTERNATIVES)


def message(output_index: int, tokens: list[Token], *, with_logprobs: bool, is_last: bool) -> pb.GenerateResponse:
    """What a worker would say of these tokens at once."""
    whole = pb.GenerateResponse(
        output_index=output_index,
        token_ids=[token.token_id for token in tokens],
        text="".join(token.text for token in tokens),
    )
    for token in tokens if with_logprobs else []:
        chosen = pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob)
        top = [pb.TokenLogprob(token_id=one, logprob=logprob) for one, logprob in token.alternatives]
        whole.logprobs.append(pb.TokenLogprobs(chosen=chosen, top=top))
    if is_last:
        whole.finish_reason = pb.FINISH_REASON_STOP
        whole.decode_stats.CopyFrom(pb.DecodeStats(received_tokens=3, num_steps=7, decode_s=0.5))
    return whole


@given(
    st.lists(st.lists(TOKENS, max_size=3), min_size=1, max_size=6), st.integers(0, 1000), st.booleans(), st.booleans()
)
def test_whole_equals_what_a_worker_would_have_said_at_once(
    parts: list[list[Token]], first_index: int, with_logprobs: bool, has_ended: bool
) -> None:
    raw, index = [], first_index
    for number, tokens in enumerate(parts):
        is_last = has_ended and number == len(parts) - 1
        raw.append(message(index, tokens, with_logprobs=with_logprobs, is_last=is_last).SerializeToString())
        index += len(tokens)
    whole, num_merged = merged(raw)
    assert num_merged == len(parts)
    everything = [token for tokens in parts for token in tokens]
    expected = message(first_index, everything, with_logprobs=with_logprobs, is_last=has_ended)
    assert pb.GenerateResponse.FromString(whole) == expected


def test_one_message_stays_as_it_came() -> None:
    """To the byte, with what this version of the messages does not know."""
    raw = pb.GenerateResponse(output_index=1, token_ids=[5]).SerializeToString() + b"\xfa\x3f\x01x"
    assert merged([raw]) == (raw, 1)


def test_parts_of_the_prompt_stay_alone() -> None:
    prompt = pb.GenerateResponse(prompt=pb.PromptChunk(token_ids=[1], text="a")).SerializeToString()
    tokens = [pb.GenerateResponse(output_index=n, token_ids=[n], text="b").SerializeToString() for n in range(2)]
    assert merged([prompt, prompt, *tokens]) == (prompt, 1)
    assert merged([tokens[0], prompt]) == (tokens[0], 1)


def test_choice_is_kept() -> None:
    raw = [pb.GenerateResponse(output_index=n, token_ids=[n], choice=3).SerializeToString() for n in range(2)]
    whole, _ = merged(raw)
    assert pb.GenerateResponse.FromString(whole) == pb.GenerateResponse(token_ids=[0, 1], choice=3)
