"""Stop texts against a brute force that looks at every character of the whole text in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from itertools import pairwise, product
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.answer_text import AnswerText, num_begun
from model.sampling_params import SamplingParams
from model.sequence import FinishReason, Sequence
from model.tokenizer import Detokenizer, Tokenizer
from tests.model.test_tokenizer import KINDS, TEXTS, write


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("tokenizer"), KINDS[request.param]()))


def brute_force(pieces: Items[str], stops: Items[str], min_tokens: int = 0) -> tuple[str, int | None]:
    """The text before the stop text that ends first, and the number of tokens up to where that is."""
    text = ""
    for num_tokens, piece in enumerate(pieces, start=1):
        for character in piece:
            text += character
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and num_tokens >= min_tokens:
                return text[: len(text) - max(map(len, ended))], num_tokens
    return text, None


def held_back(text: str, stops: Items[str]) -> str:
    """The longest end that a stop text begins with."""
    ends = [text[begin:] for begin in range(len(text) + 1)]
    return next(end for end in ends if any(stop.startswith(end) and stop != end for stop in stops))


def begun(tokenizer: Tokenizer, prompt: list[int], answer: list[int], sampling: SamplingParams) -> Sequence:
    """A sequence that was resumed with so much of its answer given out."""
    sequence = Sequence("s", [*prompt, *answer], len(prompt), sampling, block_size=4)
    sequence.text = AnswerText(tokenizer, sequence.token_ids, len(prompt), sampling)
    return sequence


def taken(sequence: Sequence) -> str:
    assert sequence.text is not None
    return sequence.text.take()


def drawn_stops(rng: random.Random, text: str) -> tuple[str, ...]:
    """Pieces of the text, some of them with one wrong character behind, and something of no text."""
    stops = [str(rng.choice(("ab", "🦊", "aaab", "\n\n")))]
    for _ in range(rng.randrange(4) if text else 0):
        begin = rng.randrange(len(text))
        stops.append(text[begin : begin + rng.choice((1, 2, 3, 5, 12))] + rng.choice(("", "", "", "e")))
    return tuple(stops)


@settings(deadline=None)
@given(text=TEXTS, seed=st.integers(0, 9999), min_tokens=st.integers(0, 12))
def test_answer_ends_before_the_first_stop_text(tokenizer: Tokenizer, text: str, seed: int, min_tokens: int) -> None:
    """Tokens of a text and some that are none; and a resume at any place goes on as if nothing had been."""
    rng = random.Random(seed)
    prompt = tokenizer.encode("The fox. ")
    ids = tokenizer.encode(text) + rng.choices(range(tokenizer.vocab_size), k=rng.choice((0, 5)))
    if not ids:
        return
    min_tokens = min(min_tokens, len(ids))
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    flushed = detokenizer.flush()
    stops = drawn_stops(rng, "".join(pieces))
    expected, num_tokens = brute_force(pieces, stops, min_tokens)
    if num_tokens is None:
        expected, _ = brute_force([*pieces, flushed], stops, min_tokens)
    sampling = SamplingParams(max_tokens=len(ids), min_tokens=min_tokens, stop=stops)
    sequence, given_out = begun(tokenizer, prompt, [], sampling), ""
    resume_at = rng.randrange(len(ids))
    for number, token_id in enumerate(ids, start=1):
        sequence.append(token_id)
        given_out += taken(sequence)
        if sequence.finish_reason is not None:
            break
        so_far = "".join(pieces[:number])
        assert so_far == given_out + held_back(so_far, stops)
        if number == resume_at:
            sequence = begun(tokenizer, prompt, ids[:number], sampling)
            assert taken(sequence) == ""
    assert given_out == expected
    assert sequence.num_output_tokens == (num_tokens or len(ids))
    assert sequence.finish_reason is (FinishReason.LENGTH if num_tokens is None else FinishReason.STOP)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ["bcd", "c"], "ab"),  # c has ended when bcd has not
        ("abcd", ["c", "bc"], "a"),  # both end at once: the longer
        ("xaabaac", ["aac"], "xaab"),  # what was held back begins anew inside itself
        ("ababac", ["abac"], "ab"),
        ("abab", ["abc"], "abab"),  # at the end it is known that nothing comes of it
        ("ab🦊c", ["🦊"], "ab"),
    ],
)
def test_text_does_not_depend_on_token_borders(text: str, stops: list[str], expected: str) -> None:
    """In every way to cut its bytes into tokens."""
    data = text.encode()
    for borders in product((False, True), repeat=len(data) - 1):
        spelt = Spelt(data, borders)
        answer = AnswerText(spelt, [0], 1, SamplingParams(max_tokens=99, stop=tuple(stops)))
        given_out = ""
        for token_id in range(1, len(spelt.tokens)):
            is_stopped = answer.push(token_id, may_stop=True)
            given_out += answer.take()
            if is_stopped:
                break
        answer.end()
        assert given_out + answer.take() == expected


class Spelt:
    """The tokenizer of one text: token 0 is the prompt."""

    num_leading_spaces = 0

    def __init__(self, data: bytes, borders: Items[bool]) -> None:
        cuts = [place for place, is_border in enumerate(borders, start=1) if is_border]
        self.tokens = [b"prompt", *(data[i:j] for i, j in pairwise((0, *cuts, len(data))))]

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def test_stop_token_has_no_text_and_lets_what_was_held_back_out(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(character)[-1] for character in "ae")
    sampling = SamplingParams(max_tokens=9, stop=("ae" * 5,), stop_token_ids=(b,))
    sequence = begun(tokenizer, tokenizer.encode("x"), [], sampling)
    sequence.append(a)
    assert taken(sequence) == ""
    sequence.append(b)
    assert (sequence.finish_reason, taken(sequence)) == (FinishReason.STOP, "a")


def test_of_a_stop_text_only_places_of_the_last_character_are_looked_at() -> None:
    class Watched(str):
        looked_at = 0

        def __getitem__(self, key: SupportsIndex | slice) -> str:
            Watched.looked_at += 1
            return super().__getitem__(key)

    assert num_begun("zzzz", Watched("a" * 255)) == 0
    assert Watched.looked_at == 0
    assert num_begun("zzaz", Watched("ayzaz" + "a" * 255)) == 0
    assert Watched.looked_at == 1
