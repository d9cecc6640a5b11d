"""What a grammar allows, against another engine's partial matching, token by token, whatever was asked before."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import regex
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from model.grammar import GrammarRejected, Grammars, Matcher
from model.sampling import Row, processed_scores, sample
from model.sampling_params import Grammar, GrammarKind, InvalidSampling, SamplingParams
from model.tokenizer import Tokenizer

PIECES = ["ab", "abc", "bc", "12", "x1", "é", "{}", '":', "a\n", "yes", "no"]  # beside all single bytes
PATTERNS = [
    "[abc]{2,5}(x|yes|no)?",
    "(ab)*|x1[0-9]*",
    "a+b+c+",
    "(é){1,3}",
    "\\{\\}",
    "(yes|no)(, (yes|no)){0,2}",
    "abc",
]
PADDED_VOCAB = 400  # a model's vocabulary is often larger than its tokenizer's


@cache
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for piece in PIECES:
        spelled = pre.pre_tokenize_str(piece)[0][0] if piece != "a\n" else "aĊ"
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                vocab[spelled[:end]] = len(vocab)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    with TemporaryDirectory() as folder:
        backend.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        return Tokenizer.load(Path(folder))


END = tokenizer().eos_token_ids[0]
GRAMMARS = Grammars(tokenizer())


def text_of(token_ids: list[int]) -> bytes:
    return b"".join(tokenizer().token_bytes(token_id) for token_id in token_ids)


def may_follow(pattern: str, output: list[int]) -> set[int]:
    """By brute force: tokens behind which the whole text can still become a match; the end where it is one."""
    as_bytes = regex.compile(pattern.encode())
    before = text_of(output)
    found = {
        token_id
        for token_id in range(tokenizer().vocab_size)
        if token_id != END and as_bytes.fullmatch(before + tokenizer().token_bytes(token_id), partial=True)
    }
    return found | ({END} if as_bytes.fullmatch(before) else set())


def assert_allowed(found: set[int], expected: set[int]) -> None:
    """Where only one text can follow, the compiler allows the tokens that a tokenizer would spell it with only."""
    texts = sorted((text_of([token_id]) for token_id in expected), key=len)
    is_forced = END not in expected and all(texts[-1].startswith(text) for text in texts)
    assert found == expected or (is_forced and found and found < expected)


def allowed_ids(matcher: Matcher, output: list[int], num_certain: int | None = None) -> set[int]:
    allowed = matcher.allowed(output, len(output) if num_certain is None else num_certain, PADDED_VOCAB)
    assert allowed is not None
    return set(np.flatnonzero(allowed).tolist())


@given(st.sampled_from(PATTERNS), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_it_allows_what_can_still_match(pattern: str, seed: int) -> None:
    """With drafts that are taken back in between, of the grammar or not."""
    rng = random.Random(seed)
    matcher = GRAMMARS.matcher(Grammar(GrammarKind.REGEX, pattern))
    output: list[int] = []
    while END not in output and len(output) < 12:
        draft: list[int] = []
        for _ in range(rng.randrange(4)):
            draft.append(rng.choice([*may_follow(pattern, output + draft), rng.randrange(tokenizer().vocab_size)]))
            path = output + draft
            is_of_it = all(path[index] in may_follow(pattern, path[:index]) for index in range(len(path)))
            if is_of_it and END not in path:
                assert_allowed(allowed_ids(matcher, path, len(output)), may_follow(pattern, path))
            else:
                assert matcher.allowed(path, len(output), PADDED_VOCAB) is None
                break
        found = allowed_ids(matcher, output)
        assert_allowed(found, may_follow(pattern, output))
        output.append(rng.choice(sorted(found)))
    assert matcher.problem == ""


def test_two_of_one_grammar_do_not_disturb_each_other() -> None:
    grammar = Grammar(GrammarKind.REGEX, "abc")
    first, second = GRAMMARS.matcher(grammar), GRAMMARS.matcher(grammar)
    a, b = tokenizer().encode("a")[0], tokenizer().encode("bc")[0]
    assert allowed_ids(first, [a, b]) == {END}
    assert allowed_ids(second, []) < may_follow("abc", [])


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (GrammarKind.REGEX, "[a", "unclosed character class"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.JSON_SCHEMA, "{", "is not JSON"),
        (GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}', "Invalid type: nonsense"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 5, "maxLength": 3}', "Unsatisfiable"),
        (GrammarKind.LARK, "start: nothing", "unknown name"),
    ],
)
def test_what_cannot_be_followed_is_refused(kind: GrammarKind, text: str, says: str) -> None:
    with pytest.raises(GrammarRejected, match=says):
        GRAMMARS.matcher(Grammar(kind, text))


def test_an_answer_that_is_not_of_it_ends_and_says_why() -> None:
    """As after a resume with another grammar: nothing else may follow, and nobody takes it for a match."""
    matcher = GRAMMARS.matcher(Grammar(GrammarKind.REGEX, "abc"))
    x = tokenizer().encode("x")[0]
    assert allowed_ids(matcher, [x, x]) == {END}
    assert matcher.problem == f"token 0 of the answer, {x}, breaks it"


def test_sampled_text_matches_its_schema_and_neighbours_are_as_without() -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "a": {"enum": [1, 12, "yes"]},
                "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    )
    kinds = [
        SamplingParams(40, temperature=0, stop_token_ids=(END,)),
        SamplingParams(40, seed=5, stop_token_ids=(END,)),
    ]
    for plain in kinds:
        params = SamplingParams(
            40,
            temperature=plain.temperature,
            seed=7,
            stop_token_ids=(END,),
            grammar=Grammar(GrammarKind.JSON_SCHEMA, schema),
        )
        matcher, output, free = GRAMMARS.matcher(params.grammar), [], []  # type: ignore[arg-type,var-annotated]
        generator = torch.Generator().manual_seed(3)
        while END not in output and len(output) < 200:
            logits = torch.randn(2, PADDED_VOCAB, generator=generator) * 3
            logits[0, [*range(256)]] += 2.0
            together = sample(logits, [Row([9, *output], 1, params, matcher=matcher), Row([9, *free], 1, plain)])
            (alone,) = sample(logits[1:], [Row([9, *free], 1, plain)])
            assert together[1] == alone
            output.append(together[0].token_id)  # type: ignore[union-attr]
            free.append(alone.token_id)  # type: ignore[union-attr]
        answer = json.loads(text_of(output))
        assert answer["a"] in (1, 12, "yes") and answer.keys() == {"a", "b"}
        assert len(answer["b"]) <= 2 and all(isinstance(each, bool) for each in answer["b"])


def test_the_law_is_the_model_s_own_among_what_is_allowed() -> None:
    params = SamplingParams(9, stop_token_ids=(END,), grammar=Grammar(GrammarKind.REGEX, "abc|ab"))
    logits = torch.randn(1, PADDED_VOCAB, generator=torch.Generator().manual_seed(1))
    matcher = GRAMMARS.matcher(params.grammar)  # type: ignore[arg-type]
    law = processed_scores(logits, [Row([9], 1, params, matcher=matcher)]).softmax(-1)[0]
    allowed = sorted(may_follow("abc|ab", []))
    expected = torch.zeros(PADDED_VOCAB)
    expected[allowed] = logits[0, allowed].softmax(-1)
    assert torch.allclose(law, expected)


@pytest.mark.parametrize("text", ["", "x" * 65537])
def test_its_length_has_limits(text: str) -> None:
    with pytest.raises(InvalidSampling, match=f"json_schema has {len(text)} bytes; it must have 1 to 65536"):
        SamplingParams(1, grammar=Grammar(GrammarKind.JSON_SCHEMA, text))


def test_it_cannot_be_with_min_tokens() -> None:
    with pytest.raises(InvalidSampling, match="min_tokens is 2; with regex it must be 0"):
        SamplingParams(4, min_tokens=2, grammar=Grammar(GrammarKind.REGEX, "a"))
