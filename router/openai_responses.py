"""What the service answers, in the shapes of OpenAI: whole objects, and the chunks of a stream."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Protocol

from protos import inference_pb2 as pb
from protos.values import FINISH_REASONS
from router.card import TextTokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive tokens of one choice, or all of them."""

    index: int
    text: str
    logprobs: tuple[tuple[int, pb.TokenLogprobs], ...]  # by token id
    finish_reason: str | None = None

    @staticmethod
    def joined(pieces: Sequence[Piece]) -> Piece:
        """Of one choice, in order."""
        logprobs = tuple(chain.from_iterable(each.logprobs for each in pieces))
        return Piece(pieces[0].index, "".join(each.text for each in pieces), logprobs, pieces[-1].finish_reason)


class Form(Protocol):
    """How one kind of answer looks."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk of a choice before its first text."""

    def chunk(self, piece: Piece) -> dict[str, Any]: ...

    def whole(self, piece: Piece) -> dict[str, Any]: ...


class Spelling:
    """Tokens by themselves, as text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def unique(self, token_id: int) -> str:
        """Pieces of characters by their bytes, as completions have always had them: here tokens are keys."""
        data = self._data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def entry(self, token: pb.TokenLogprob) -> dict[str, Any]:
        data = self._data(token.token_id)
        return {"token": data.decode(errors="replace"), "logprob": token.logprob, "bytes": list(data)}

    def _data(self, token_id: int) -> bytes:
        """A special token adds nothing to the text: it is told as the vocabulary spells it."""
        return self._tokenizer.token_bytes(token_id) or self._tokenizer.token_strings([token_id])[0].encode()


class ChatForm:
    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, spelling: Spelling, *, has_logprobs: bool) -> None:
        self._spelling = spelling
        self._has_logprobs = has_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._choice(piece, "delta", delta)

    def whole(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, "message", {"role": "assistant", "content": piece.text, "refusal": None})

    def _choice(self, piece: Piece, name: str, said: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._has_logprobs and piece.logprobs:
            logprobs = {"content": [self._token(each) for _, each in piece.logprobs], "refusal": None}
        return {"index": piece.index, name: said, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _token(self, logprobs: pb.TokenLogprobs) -> dict[str, Any]:
        top = [self._spelling.entry(each) for each in logprobs.top]
        return {**self._spelling.entry(logprobs.chosen), "top_logprobs": top}


class CompletionForm:
    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, spelling: Spelling, *, has_logprobs: bool) -> None:
        self._spelling = spelling
        self._has_logprobs = has_logprobs
        self._offsets: defaultdict[int, int] = defaultdict(int)  # of the next token, in characters, by choice

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece) if self._has_logprobs and piece.logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def whole(self, piece: Piece) -> dict[str, Any]:
        return self.chunk(piece)

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """The first token of a prompt has no probability: nothing comes before it."""
        tokens, of_tokens, tops, offsets = [], [], [], []
        for token_id, each in piece.logprobs:
            is_told = each.HasField("chosen")
            token = self._spelling.unique(token_id)
            tokens.append(token)
            of_tokens.append(each.chosen.logprob if is_told else None)
            tops.append({self._spelling.unique(top.token_id): top.logprob for top in each.top} if is_told else None)
            offsets.append(self._offsets[piece.index])
            self._offsets[piece.index] += len(token)
        return {"tokens": tokens, "token_logprobs": of_tokens, "top_logprobs": tops, "text_offset": offsets}


@dataclass(slots=True)
class Answer:
    """One HTTP answer as it comes: to one prompt or several, with `num_choices` each."""

    form: Form
    spelling: Spelling
    request_id: str
    model: str
    num_choices: int
    wants_usage: bool  # in a chunk of its own; all others then say that theirs is not there
    created: int = field(default_factory=lambda: int(time.time()))
    _usage: list[pb.Usage] = field(default_factory=list)
    _opened: set[int] = field(default_factory=set)
    _pieces: defaultdict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    _prompt_logprobs: defaultdict[int, list[dict[int, Any] | None]] = field(default_factory=lambda: defaultdict(list))

    def read(self, prompt: int, raw: bytes) -> list[Piece]:
        """The pieces in a message about one of the prompts."""
        message = pb.GenerateResponse.FromString(raw)
        if message.HasField("usage"):
            self._usage.append(message.usage)
        first = prompt * self.num_choices
        if message.HasField("prompt"):
            return self._of_prompt(prompt, message.prompt) if message.choice == 0 else []
        if not message.token_ids and not message.text and not message.finish_reason:
            return []
        reason = FINISH_REASONS[message.finish_reason]
        logprobs = tuple(zip(message.token_ids, message.logprobs, strict=False))  # none at all, if not asked for
        return [Piece(first + message.choice, message.text, logprobs, reason)]

    def chunks(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """To be sent now: nothing while a character is not complete."""
        chunks = []
        for piece in pieces:
            opening = None if piece.index in self._opened else self.form.opening(piece.index)
            self._opened.add(piece.index)
            if opening is not None:
                chunks.append(self._chunk([opening]))
            if piece.text or piece.logprobs or piece.finish_reason:
                chunks.append(self._chunk([self.form.chunk(piece)]))
        return chunks

    def add(self, pieces: Iterable[Piece]) -> None:
        """To be told by `whole`."""
        for piece in pieces:
            self._pieces[piece.index].append(piece)

    def whole(self) -> dict[str, Any]:
        choices = [self.form.whole(Piece.joined(self._pieces[index])) for index in sorted(self._pieces)]
        content = {**self._object(self.form.whole_object, choices), "usage": self.usage()}
        if self._prompt_logprobs and isinstance(self.form, ChatForm):
            content["prompt_logprobs"] = self._prompt_logprobs[0]
        elif self._prompt_logprobs:
            for choice in choices:
                choice["prompt_logprobs"] = self._prompt_logprobs[choice["index"] // self.num_choices]
        return content

    def usage_chunk(self) -> dict[str, Any]:
        """The last one, if asked for."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        prompt, output = (
            sum(getattr(each, name) for each in self._usage) for name in ("prompt_tokens", "output_tokens")
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(each.prefill.cached for each in self._usage)},
        }

    def _of_prompt(self, prompt: int, chunk: pb.PromptChunk) -> list[Piece]:
        """Told once for all choices, each of which begins with it."""
        self._prompt_logprobs[prompt] += [self._by_token(each) for each in chunk.logprobs]
        if not chunk.text and not chunk.token_ids:
            return []
        logprobs = tuple(zip(chunk.token_ids, chunk.logprobs, strict=False))
        first = prompt * self.num_choices
        return [Piece(first + choice, chunk.text, logprobs) for choice in range(self.num_choices)]

    def _by_token(self, logprobs: pb.TokenLogprobs) -> dict[int, Any] | None:
        """As vLLM tells it, the rank among those told."""
        if not logprobs.HasField("chosen"):
            return None
        told: dict[int, Any] = {}
        for rank, token in [*enumerate(logprobs.top, 1), (None, logprobs.chosen)]:
            text = self.spelling.unique(token.token_id)
            told.setdefault(token.token_id, {"logprob": token.logprob, "rank": rank, "decoded_token": text})
        return told

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._object(self.form.chunk_object, choices)
        return {**chunk, "usage": None} if self.wants_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        own_id = self.form.id_prefix + self.request_id
        return {"id": own_id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
