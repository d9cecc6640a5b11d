"""Which tokens may come next where an answer has to match a grammar; compiled and followed by llguidance. No torch.

What may follow depends on the tokens before it alone: a sequence that is handed over, resumed or computed again is
followed from its tokens, and the positions of a draft are asked for one after the other.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from llguidance import LLMatcher, LLTokenizer

from model.sampling_params import Grammar, GrammarKind
from model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_COMPILED = 64  # kept for those who come with the same one
_MAX_MESSAGE = 300  # characters of what the compiler says

Allowed: TypeAlias = "npt.NDArray[np.bool_]"  # by token id


class GrammarRejected(ValueError):
    """It is not well formed, not supported, too complex, or nothing can match it."""


class Grammars:
    """For one tokenizer. Threads may share it: compiling takes a while, the first time half a second."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """For one sequence. Raises GrammarRejected."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None) or _compile(self._vocabulary, grammar)
            self._compiled[grammar] = compiled  # as the one used last
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), frozenset(self._tokenizer.eos_token_ids))

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.to_json(), eos_token=list(self._tokenizer.eos_token_ids))


class Matcher:
    """Follows one sequence's output. `problem` says why it could not, once it could not: the answer ends there."""

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._followed: list[int] = []
        self.problem = ""

    def allowed(self, output: Sequence[int], num_certain: int, vocab_size: int) -> Allowed | None:
        """Which of `vocab_size` tokens may follow `output`, whose first `num_certain` stand; the rest is a draft.

        None where the draft is not of the grammar: what comes behind does not matter.
        """
        num_followed = self.num_followed(output)
        if num_certain <= num_followed < len(output):
            return None
        if num_followed < num_certain:
            self.problem = self.problem or f"token {num_followed} of the answer, {output[num_followed]}, breaks it"
        bits = b"" if self.problem else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.problem = self.problem or self._matcher.get_error()[:_MAX_MESSAGE]
        return self._only_ends(vocab_size) if self.problem else _unpacked(bits, vocab_size)

    def num_followed(self, output: Sequence[int]) -> int:
        """How many tokens of `output` are of the grammar. End tokens are not: nothing is asked behind them, and the
        library cannot take them back."""
        num_common = _num_common(self._followed, output)
        if num_common < len(self._followed):
            self._matcher.rollback(len(self._followed) - num_common)
            del self._followed[num_common:]
        for token_id in output[num_common:]:
            if token_id in self._end_token_ids or self._matcher.try_consume_tokens([token_id]) == 0:
                break
            self._followed.append(token_id)
        return len(self._followed)

    def _only_ends(self, vocab_size: int) -> Allowed:
        import numpy as np

        allowed = np.zeros(vocab_size, dtype=np.bool_)
        allowed[[token_id for token_id in self._end_token_ids if token_id < vocab_size]] = True
        return allowed


def _unpacked(bits: bytes, vocab_size: int) -> Allowed:
    """A model may have logits for more tokens than the tokenizer knows: none of those is allowed."""
    import numpy as np  # the router compiles grammars, and does without

    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def _compile(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                json.loads(grammar.text)  # its error tells where in the schema, the compiler's where in its own text
                source = LLMatcher.grammar_from_json_schema(grammar.text)
            case GrammarKind.REGEX:
                source = LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.LARK:
                source = LLMatcher.grammar_from_lark(grammar.text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise GrammarRejected(f"this is not JSON: {error}") from None
    except ValueError as error:
        raise GrammarRejected(str(error)[:_MAX_MESSAGE]) from None
    matcher = LLMatcher(vocabulary, source, log_level=0)
    if matcher.is_error():
        raise GrammarRejected(matcher.get_error()[:_MAX_MESSAGE])
    return matcher


def _num_common(followed: Sequence[int], output: Sequence[int]) -> int:
    if followed == output[: len(followed)]:  # as it mostly is
        return len(followed)
    pairs = enumerate(zip(followed, output, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(followed), len(output)))
