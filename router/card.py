"""What the router knows of the model it serves: facts and the tokenizer, never a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model.chat_template import ChatMessage
from model.grammar import Grammars
from model.tokenizer import Spelling
from router.step_costs import Experts


class TextTokenizer(Spelling, Protocol):
    """`model.tokenizer.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]: ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """`tokenizer_digest`, if known, is what workers must have too. `grammars` compile those that answers must match."""

    name: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TextTokenizer
    tokenizer_digest: str = ""
    grammars: Grammars | None = None
    experts: Experts | None = None  # of a layer; None: the model is dense
