"""How tokens are chosen, as one frozen value with every field set. No torch: the router validates with it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES, MAX_LOGIT_BIAS = 1024, 100.0
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 256
MAX_GRAMMAR_BYTES = 64 * 2**10
MAX_DRAFT_TOKENS = 64
# Beyond these a text is noise, and much further on scores leave the range of float32.
MAX_TEMPERATURE = 100.0
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0


class InvalidSampling(ValueError):
    """A field is outside its limits. `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class GrammarKind(enum.Enum):
    """Named as the fields of the message."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to match, from its first token to its last."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Lengths count output tokens. Order: biases, penalties, temperature, top-k, top-p, min-p, draw."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # with the model's own end tokens, unless ignore_eos was asked for
    max_draft_tokens: int | None = None  # guessed ahead per step, at most; 0: speculation is off; None: as is fastest
    num_logprobs: int | None = None  # alternatives beside the token's own; None: no logprobs at all
    num_prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    stop: tuple[str, ...] = ()  # texts that end the answer, and are no part of it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each id once
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check(self, "max_tokens", self.max_tokens >= 1, "at least 1")
        _check(self, "min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens ({self.max_tokens})")
        _check(self, "temperature", 0.0 <= self.temperature <= MAX_TEMPERATURE, f"0 (greedy) to {MAX_TEMPERATURE:g}")
        _check(self, "top_k", self.top_k >= 0, "0 (all) or more")
        _check(self, "top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check(self, "min_p", 0.0 <= self.min_p <= 1.0, "0 to 1")
        least, most = LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY
        _check(self, "repetition_penalty", least <= self.repetition_penalty <= most, f"{least:g} to {most:g}")
        _check(self, "presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2")
        _check(self, "frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2")
        _check(self, "seed", 0 <= self.seed < 2**64, "0 to 2^64 - 1")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidSampling("stop_token_ids", f"has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}")
        if min(self.stop_token_ids, default=0) < 0:
            raise InvalidSampling("stop_token_ids", f"has {min(self.stop_token_ids)}; each must be 0 or more")
        if self.max_draft_tokens is not None and not 0 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidSampling("max_draft_tokens", f"is {self.max_draft_tokens}; it must be 0 to {MAX_DRAFT_TOKENS}")
        for field, count in (("logprobs", self.num_logprobs), ("prompt_logprobs", self.num_prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidSampling(field, f"is {count}; it must be 0 to {MAX_LOGPROBS}")
        self._check_logit_bias()
        if len(self.stop) > MAX_STOP_TEXTS:
            raise InvalidSampling("stop", f"has {len(self.stop)} texts; at most {MAX_STOP_TEXTS}")
        for num_bytes in (len(text.encode()) for text in self.stop):
            if not 1 <= num_bytes <= MAX_STOP_TEXT_BYTES:
                raise InvalidSampling(
                    "stop", f"has a text of {num_bytes} bytes; each must have 1 to {MAX_STOP_TEXT_BYTES}"
                )

        self._check_grammar()

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        field, num_bytes = self.grammar.kind.value, len(self.grammar.text.encode())
        if not 1 <= num_bytes <= MAX_GRAMMAR_BYTES:
            raise InvalidSampling(field, f"has {num_bytes} bytes; it must have 1 to {MAX_GRAMMAR_BYTES}")
        if self.min_tokens:
            raise InvalidSampling(
                "min_tokens", f"is {self.min_tokens}; with {field} it must be 0: what is matched ends"
            )

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidSampling("logit_bias", f"has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIASES}")
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise InvalidSampling("logit_bias", f"has token id {token_id}; each must be 0 or more")
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                limits = f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                raise InvalidSampling("logit_bias", f"is {bias} for token id {token_id}; it must be {limits}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check(params: SamplingParams, field: str, holds: bool, limit: str) -> None:
    if not holds:  # NaN fails every comparison, so it is caught too
        raise InvalidSampling(field, f"is {getattr(params, field)}; it must be {limit}")
