"""What `protos.client` takes and gives: frozen values, and how they are read from messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos import inference_pb2 as pb

FINISH_REASONS = {pb.FINISH_REASON_UNSPECIFIED: None, pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None leaves it to the service. Limits and defaults are in inference.proto."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    max_draft_tokens: int | None = None
    stop: Sequence[str] = ()  # texts
    logit_bias: Mapping[int, float] | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None  # at most one of these: what the answer has to match
    regex: str | None = None
    lark: str | None = None

    def to_message(self) -> pb.SamplingParams:
        """Raises ValueError or TypeError for what a field cannot hold."""
        if isinstance(self.stop, str):  # whose characters would be taken for texts
            raise TypeError("stop is a text; it must be a sequence of texts")
        if sum(grammar is not None for grammar in (self.json_schema, self.regex, self.lark)) > 1:
            raise ValueError("json_schema, regex and lark exclude each other: give one of them")
        return pb.SamplingParams(**{name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str  # system, user, assistant
    content: str

    def to_message(self) -> pb.ChatMessage:
        return pb.ChatMessage(role=self.role, content=self.content)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first

    @staticmethod
    def from_message(message: pb.TokenLogprobs) -> TokenLogprobs:
        top = tuple((each.token_id, each.logprob) for each in message.top)
        return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A part of the prompt: its tokens and their text if they were to be echoed, logprobs if these were asked for.

    The prompt's first token has None.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    @staticmethod
    def from_message(message: pb.PromptChunk) -> PromptChunk:
        logprobs = (TokenLogprobs.from_message(item) if item.HasField("chosen") else None for item in message.logprobs)
        return PromptChunk(tuple(message.token_ids), message.text, tuple(logprobs))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive tokens of an answer. `finish_reason`, stop or length, comes with the last ones.

    `choice`: which of the answers, if several were asked for. With `prompt` it has no tokens, and is before them all.
    """

    output_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    choice: int = 0
    prompt: PromptChunk | None = None

    @staticmethod
    def from_message(message: pb.GenerateResponse) -> Chunk:
        logprobs = tuple(map(TokenLogprobs.from_message, message.logprobs))
        reason = FINISH_REASONS[message.finish_reason]
        return Chunk(
            message.output_index,
            tuple(message.token_ids),
            message.text,
            logprobs,
            reason,
            message.choice,
            PromptChunk.from_message(message.prompt) if message.HasField("prompt") else None,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by where their KV came from: `prefill_*` on the prefill worker, `decode_*` on the decode worker.

    Of several answers together; but of their one prompt `prompt_tokens` counts once.
    """

    prompt_tokens: int
    output_tokens: int
    prefill_computed_tokens: int
    prefill_cached_tokens: int
    decode_received_tokens: int
    decode_cached_tokens: int
    decode_computed_tokens: int
    decode_recomputed_tokens: int
    drafted_tokens: int  # guessed ahead by the decode worker
    accepted_tokens: int  # those of them that stand in the answer
    num_preemptions: int
    num_steps: int
    num_resumes: int
    num_retries: int
    num_moves: int  # from one decode worker to another, while it ran
    disaggregated: bool

    @staticmethod
    def from_message(message: pb.Usage) -> Usage:
        return Usage(
            prompt_tokens=message.prompt_tokens,
            output_tokens=message.output_tokens,
            prefill_computed_tokens=message.prefill.computed,
            prefill_cached_tokens=message.prefill.cached,
            decode_received_tokens=message.decode.received_tokens,
            decode_cached_tokens=message.decode.cached_tokens,
            decode_computed_tokens=message.decode.computed_tokens,
            decode_recomputed_tokens=message.decode.recomputed_tokens,
            drafted_tokens=message.decode.drafted_tokens,
            accepted_tokens=message.decode.accepted_tokens,
            num_preemptions=message.decode.num_preemptions,
            num_steps=message.decode.num_steps,
            num_resumes=message.num_resumes,
            num_retries=message.num_retries,
            num_moves=message.num_moves,
            disaggregated=message.disaggregated,
        )


@dataclass(frozen=True, slots=True)
class Stage:
    name: str  # tokenize, wait, queue, prefill, handover, decode
    worker_id: str  # empty: the router
    start_s: float  # since the router received the request
    duration_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    stages: tuple[Stage, ...]
    ttft_s: float
    tpot_s: float  # mean over the tokens after the first
    total_s: float

    @staticmethod
    def from_message(message: pb.Timeline) -> Timeline:
        stages = tuple(Stage(each.name, each.worker_id, each.start_s, each.duration_s) for each in message.stages)
        return Timeline(stages, message.ttft_s, message.tpot_s, message.total_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of an answer: what it took."""

    request_id: str
    usage: Usage
    timeline: Timeline

    @staticmethod
    def from_message(message: pb.GenerateResponse) -> Summary:
        return Summary(message.request_id, Usage.from_message(message.usage), Timeline.from_message(message.timeline))


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layout_fingerprint: str  # empty until a worker has registered
    kv_bytes_per_token: int

    @staticmethod
    def from_message(message: pb.Model) -> Model:
        return Model(
            name=message.name,
            architecture=message.architecture,
            max_context_tokens=message.max_context_tokens,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            layout_fingerprint=message.layout_fingerprint,
            kv_bytes_per_token=message.kv_bytes_per_token,
        )
