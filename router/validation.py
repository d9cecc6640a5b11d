"""What a client may ask, and what it then means: messages in, requests with every choice made out. Pure.

`check_...` needs no tokens, so that nonsense costs nothing; `resolve` needs them. Errors name the field and its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from model.chat_template import ChatMessage
from model.sampling_params import (
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    GrammarKind,
    InvalidSampling,
    SamplingParams,
)
from protos import inference_pb2 as pb
from protos.errors import DeadlineExceeded, InvalidArgument, NotFound
from router.card import ModelCard
from router.emitted import check_emitted
from router.request import DEFAULT_PRIORITY, Request

ROLES = ("system", "user", "assistant")
MAX_REQUEST_ID_CHARACTERS = 128
MAX_SESSION_ID_CHARACTERS = 128
MAX_MESSAGES = 4096
MAX_PRIORITY = 9
MAX_CHOICES = 16
MAX_PROMPT_SCORES = 2**19  # logprobs of one prompt, of its tokens and their alternatives: about 8 MB


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of three; `field` is its name in the message."""

    field: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class UnresolvedRequest:
    """A request that is well formed as far as can be told without its tokens."""

    request_id: str
    prompt: Prompt
    sampling: pb.SamplingParams
    priority: int = DEFAULT_PRIORITY
    session_id: str = ""
    num_choices: int = 1
    echo: bool = False
    emitted: tuple[tuple[int, ...], ...] = ()
    is_direct: bool = False


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Prompt and answer together; `reason` names what sets the limit."""

    num_tokens: int
    reason: str


def check_generate(
    message: pb.GenerateRequest, card: ModelCard, limit: TokenLimit, max_prompt_bytes: int, new_id: str
) -> UnresolvedRequest:
    """`new_id` is taken if the client gave none."""
    check_model(message.model if message.HasField("model") else None, card)
    match message.WhichOneof("prompt"):
        case "text":
            prompt = text_prompt(message.text, max_prompt_bytes)
        case "token_ids":
            prompt = _ids_prompt(message.token_ids.ids, card, limit)
        case _:
            raise InvalidArgument("there is no prompt: set text or token_ids", field="prompt")
    return _unresolved(message, prompt, card, new_id)


def check_chat(message: pb.ChatRequest, card: ModelCard, max_prompt_bytes: int, new_id: str) -> UnresolvedRequest:
    check_model(message.model if message.HasField("model") else None, card)
    return _unresolved(message, chat_prompt(message.messages, max_prompt_bytes), card, new_id)


def resolve(
    unresolved: UnresolvedRequest, token_ids: Iterable[int], card: ModelCard, limit: TokenLimit, drawn_seed: int
) -> Request:
    """`drawn_seed` is taken if the client gave none, so that a retry continues the same text."""
    ids = tuple(token_ids)
    if not ids:
        raise InvalidArgument(
            f"{unresolved.prompt.field} has no tokens; a prompt needs at least one", field=unresolved.prompt.field
        )
    _check_length(unresolved.prompt.field, len(ids), limit)
    room = limit.num_tokens - len(ids)
    sampling = _sampling(unresolved.sampling, card, room, drawn_seed)
    has_seed = unresolved.sampling.HasField("seed")
    check_emitted(unresolved.emitted, sampling, num_choices=unresolved.num_choices, has_seed=has_seed)
    for choice, emitted in enumerate(unresolved.emitted):
        _check_in_vocabulary(f"emitted[{choice}].ids", emitted, card)
    if any(unresolved.emitted):  # the prompt was told before them
        sampling = replace(sampling, num_prompt_logprobs=None)
    if sampling.max_tokens > room:
        raise InvalidArgument(
            f"sampling.max_tokens is {sampling.max_tokens}; it must be at most {room}: "
            f"{limit.reason} holds {limit.num_tokens} tokens, and the prompt has {len(ids)}",
            field="sampling.max_tokens",
        )
    _check_scores(len(ids), sampling)
    return Request(
        request_id=unresolved.request_id,
        token_ids=ids,
        sampling=sampling,
        priority=unresolved.priority,
        session_id=unresolved.session_id,
        num_choices=unresolved.num_choices,
        echo=unresolved.echo and not any(unresolved.emitted),
        emitted=unresolved.emitted,
        is_direct=unresolved.is_direct,
    )


def context_limit(card: ModelCard, of_workers: int | None) -> TokenLimit:
    """`of_workers` is the context they were told to take, if they were."""
    if of_workers is None or of_workers >= card.max_context_tokens:
        return TokenLimit(card.max_context_tokens, "the model's context")
    return TokenLimit(of_workers, "the context that the workers were given with --max-context")


def check_deadline(remaining_s: float | None) -> None:
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline had passed before the request was looked at")


def check_model(name: str | None, card: ModelCard) -> None:
    """None: whatever is served."""
    if name is not None and name != card.name:
        raise NotFound(f"model {name!r} is not served here; {card.name!r} is", field="model")


def text_prompt(text: str, max_bytes: int) -> Prompt:
    if not text:
        raise InvalidArgument("text is empty; a prompt needs at least one character", field="text")
    _check_size("text", len(text.encode()), max_bytes)
    return Prompt("text", text=text)


def chat_prompt(messages: Iterable[pb.ChatMessage], max_bytes: int) -> Prompt:
    turns = tuple(ChatMessage(message.role, message.content) for message in islice(messages, MAX_MESSAGES + 1))
    if not turns:
        raise InvalidArgument("messages is empty; a conversation has at least one", field="messages")
    if len(turns) > MAX_MESSAGES:
        raise InvalidArgument(f"messages has more than {MAX_MESSAGES} messages, the most taken", field="messages")
    for index, turn in enumerate(turns):
        if turn.role not in ROLES:
            field = f"messages[{index}].role"
            raise InvalidArgument(f"{field} is {turn.role!r}; it must be one of {', '.join(ROLES)}", field=field)
        if not turn.content:
            field = f"messages[{index}].content"
            raise InvalidArgument(f"{field} is empty; a message needs at least one character", field=field)
    _check_size("messages", sum(len(turn.content.encode()) for turn in turns), max_bytes)
    return Prompt("messages", messages=turns)


def _ids_prompt(ids: Sequence[int], card: ModelCard, limit: TokenLimit) -> Prompt:
    if not ids:
        raise InvalidArgument("token_ids is empty; a prompt needs at least one token", field="token_ids")
    _check_length("token_ids", len(ids), limit)
    token_ids = tuple(ids)
    _check_in_vocabulary("token_ids", token_ids, card)
    return Prompt("token_ids", token_ids=token_ids)


def _unresolved(
    message: pb.GenerateRequest | pb.ChatRequest, prompt: Prompt, card: ModelCard, new_id: str
) -> UnresolvedRequest:
    has = message.HasField
    return UnresolvedRequest(
        request_id=_name("request_id", message.request_id, MAX_REQUEST_ID_CHARACTERS) if has("request_id") else new_id,
        prompt=prompt,
        sampling=message.sampling,
        priority=_within("priority", message.priority, 0, MAX_PRIORITY) if has("priority") else DEFAULT_PRIORITY,
        session_id=_name("session_id", message.session_id, MAX_SESSION_ID_CHARACTERS) if has("session_id") else "",
        num_choices=_within("n", message.n, 1, MAX_CHOICES) if has("n") else 1,
        echo=isinstance(message, pb.GenerateRequest) and message.echo,
        emitted=tuple(tuple(each.ids[: card.max_context_tokens + 1]) for each in message.emitted[: MAX_CHOICES + 1]),
    )


def _name(field: str, name: str, max_characters: int) -> str:
    if not 1 <= len(name) <= max_characters or not name.isprintable():
        limit = f"1 to {max_characters} printable characters"
        raise InvalidArgument(f"{field} is {name[:200]!r}; it must be {limit}", field=field)
    return name


def _within(field: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise InvalidArgument(f"{field} is {value}; it must be {least} to {most}", field=field)
    return value


def _sampling(message: pb.SamplingParams, card: ModelCard, room: int, drawn_seed: int) -> SamplingParams:
    """Defaults are here and nowhere else."""
    _check_in_vocabulary("sampling.stop_token_ids", message.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1], card)
    _check_biased(message.logit_bias, card)
    eos = () if message.ignore_eos else card.eos_token_ids
    has = message.HasField
    try:
        return SamplingParams(
            max_tokens=message.max_tokens if has("max_tokens") else room,
            min_tokens=message.min_tokens,
            temperature=message.temperature if has("temperature") else 1.0,
            top_k=message.top_k,
            top_p=message.top_p if has("top_p") else 1.0,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty if has("repetition_penalty") else 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            seed=message.seed if has("seed") else drawn_seed,
            stop_token_ids=tuple(dict.fromkeys((*message.stop_token_ids, *eos))),
            num_logprobs=message.logprobs if has("logprobs") else None,
            max_draft_tokens=message.max_draft_tokens if has("max_draft_tokens") else None,
            stop=tuple(message.stop[: MAX_STOP_TEXTS + 1]),
            logit_bias=tuple(sorted(message.logit_bias.items())),
            num_prompt_logprobs=message.prompt_logprobs if has("prompt_logprobs") else None,
            grammar=_grammar(message),
        )
    except InvalidSampling as error:
        raise InvalidArgument(f"sampling.{error}", field=f"sampling.{error.field}") from None


def _check_scores(num_tokens: int, sampling: SamplingParams) -> None:
    if sampling.num_prompt_logprobs is None or num_tokens * (1 + sampling.num_prompt_logprobs) <= MAX_PROMPT_SCORES:
        return
    raise InvalidArgument(
        f"sampling.prompt_logprobs is {sampling.num_prompt_logprobs}, for a prompt of {num_tokens} tokens; at most "
        f"{MAX_PROMPT_SCORES} logprobs of a prompt are told, those of alternatives among them",
        field="sampling.prompt_logprobs",
    )


def _grammar(message: pb.SamplingParams) -> Grammar | None:
    kind = message.WhichOneof("grammar")
    if kind is None:
        return None
    if message.ignore_eos:
        raise InvalidArgument(
            f"sampling.ignore_eos is true; with {kind} it must be false: only an end token ends what is matched",
            field="sampling.ignore_eos",
        )
    return Grammar(GrammarKind(kind), getattr(message, kind))


def _check_in_vocabulary(field: str, token_ids: Iterable[int], card: ModelCard) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < card.vocab_size:
            raise InvalidArgument(
                f"{field}[{index}] is {token_id}; {card.name!r} has token ids 0 to {card.vocab_size - 1}", field=field
            )


def _check_biased(token_ids: Iterable[int], card: ModelCard) -> None:
    field = "sampling.logit_bias"
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            has = f"{card.name!r} has token ids 0 to {card.vocab_size - 1}"
            raise InvalidArgument(f"{field} has token id {token_id}; {has}", field=field)


def _check_length(field: str, num_tokens: int, limit: TokenLimit) -> None:
    if num_tokens >= limit.num_tokens:
        raise InvalidArgument(
            f"{field} has {num_tokens} tokens; {limit.reason} holds {limit.num_tokens}, "
            "of which at least one must be left for the answer",
            field=field,
        )


def _check_size(field: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidArgument(f"{field} has {num_bytes} bytes of text; at most {max_bytes} are taken", field=field)
