"""Text to tokens and back, with the model's own files: tokenizer.json, chat template, end tokens. No torch.

Text is made of bytes, and tokens are pieces of bytes that may end inside a character; `Detokenizer` never does.
It knows nothing of weights, requests or sampling.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tokenizers

from model.chat_template import ChatMessage, ChatTemplate, NoChatTemplate
from model.token_bytes import TokenBytes, UnsupportedDecoder

_LONGEST_INCOMPLETE = 3  # bytes: a UTF-8 character has at most 4


class TokenizerUnusable(Exception):
    """A model folder's tokenizer files are missing, unreadable or of a kind that is not supported."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """`eos_token_ids` end a turn: those of generation_config.json and the tokenizer's own."""

    folder: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    _backend: tokenizers.Tokenizer
    _bytes: TokenBytes
    _chat_template: ChatTemplate | None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises TokenizerUnusable, naming the file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerUnusable(f"{path} does not exist; a model needs a tokenizer in this format")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerUnusable(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        try:
            token_bytes = TokenBytes(backend, _read_json(path).get("decoder"))
        except UnsupportedDecoder as error:
            raise TokenizerUnusable(f"{path}: {error}") from error
        eos = _eos_token_ids(folder, backend, config)
        return cls(
            folder,
            backend.get_vocab_size(with_added_tokens=True),
            eos,
            backend,
            token_bytes,
            _chat_template(folder, config),
        )

    def to_json(self) -> str:
        """As tokenizer.json has it, without what it does to the length of a text."""
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str) -> list[int]:
        """With what the tokenizer itself puts around a text (such as a begin token)."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=True).ids
        return ids

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as the model was trained to see it, up to where its answer begins.

        Raises:
            NoChatTemplate: the model has none.
            ChatRejected: the template does not accept these messages.
        """
        if self._chat_template is None:
            raise NoChatTemplate(f"the model in {self.folder} has no chat template: send it a prompt instead")
        return self._chat_template.render(messages)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Raises as `render_chat` does."""
        return self.encode_rendered(self.render_chat(messages))

    def encode_rendered(self, conversation: str) -> list[int]:
        """What `render_chat` gave, or its beginning. The template writes special tokens itself: none are added."""
        ids: list[int] = self._backend.encode(conversation, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; ids outside the vocabulary are nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_strings(self, token_ids: Iterable[int]) -> list[str]:
        """Tokens as the vocabulary spells them, special ones included."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def entries(self) -> list[tuple[str, bool]]:
        """By token id: how the vocabulary spells it, and whether it is special. ("", False) for ids it leaves out."""
        entries = [("", False)] * self.vocab_size
        for text, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id < self.vocab_size:
                entries[token_id] = (text, False)
        for token_id, token in self._backend.get_added_tokens_decoder().items():
            if token_id < self.vocab_size:
                entries[token_id] = (token.content, token.special)
        return entries

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, in UTF-8: empty for special tokens, perhaps not whole characters."""
        return self._bytes[token_id]

    @property
    def num_leading_spaces(self) -> int:
        """Spaces that the decoder takes off the first token of a text."""
        return self._bytes.num_leading_spaces


class Spelling(Protocol):
    """What text is put together from; `Tokenizer` has it."""

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def num_leading_spaces(self) -> int: ...


class Detokenizer:
    """The text of a growing sequence, piece by piece. Each token costs the same, however long the sequence is.

    What `push` returns follows from the tokens alone: one that starts from the tokens of another goes on exactly.
    """

    def __init__(self, tokenizer: Spelling, token_ids: Sequence[int], stop_token_ids: Collection[int] = ()) -> None:
        """`token_ids` are what was there before: the prompt, and whatever of the answer was already given out.

        Tokens that stop an answer are no part of its text.
        """
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(token_ids):
            tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _LONGEST_INCOMPLETE:
                break
        self._num_leading_spaces = 0 if tail else tokenizer.num_leading_spaces
        self._utf8.decode(tail[-_LONGEST_INCOMPLETE:])  # given out before, up to a character that is not complete

    def push(self, token_id: int) -> str:
        """The whole characters that this token completes."""
        data = b"" if token_id in self._stop_token_ids else self._tokenizer.token_bytes(token_id)
        if data and self._num_leading_spaces:
            num_spaces = len(data) - len(data.lstrip(b" "))
            data = data[min(num_spaces, self._num_leading_spaces) :]
            self._num_leading_spaces = 0
        return self._utf8.decode(data)

    def flush(self) -> str:
        """At the end: an incomplete character, as a replacement character."""
        return self._utf8.decode(b"", final=True)


def _read_json(path: Path) -> dict[str, object]:
    """The object in a file; empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerUnusable(f"{path} does not hold a JSON object")
    return content


def _special_token(config: dict[str, object], name: str) -> str | None:
    """Written as a string, or as an object with its content."""
    value = config.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object]) -> tuple[int, ...]:
    eos: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        eos += [value] if isinstance(value, int) else value if isinstance(value, list) else []
        if eos:
            break  # config.json speaks where there is no generation_config.json
    token = _special_token(config, "eos_token")
    own = backend.token_to_id(token) if token is not None else None
    return tuple(dict.fromkeys(eos if own is None else [*eos, own]))


def _chat_template(folder: Path, config: dict[str, object]) -> ChatTemplate | None:
    """chat_template.jinja, or what tokenizer_config.json has: one template, or several of which 'default' is ours."""
    path = folder / "chat_template.jinja"
    source: object = config.get("chat_template")
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    elif isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    names = [name for name in config if name.endswith("_token")]
    special_tokens = {name: token for name in names if (token := _special_token(config, name)) is not None}
    try:
        return ChatTemplate(source, special_tokens)
    except ValueError as error:
        raise TokenizerUnusable(f"the chat template of {folder} is not valid: {error}") from error
