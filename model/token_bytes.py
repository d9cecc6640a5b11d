"""Which bytes of text each token stands for, as the decoder in tokenizer.json says. Two families are known.

Byte-level (GPT-2, Llama 3, Qwen, SmolLM) spells each byte as a printable character. SentencePiece (Llama 2, Mixtral)
writes spaces as a mark, spells bytes it has no token for as <0xNN>, and has a space before the first word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(ValueError):
    """Text could not be put together from this tokenizer's tokens one by one."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters are themselves, other bytes are the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TokenBytes:
    """`token_bytes[token_id]`: empty for special tokens and for ids that do not exist. Looked up once per token."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: object) -> None:
        """Raises UnsupportedDecoder."""
        self._backend = backend
        self._known: dict[int, bytes] = {
            token_id: b"" for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self.num_leading_spaces = 0
        for step in _steps(decoder):
            self._take(step)

    def __getitem__(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._decode(self._backend.id_to_token(token_id) or "")
        return data

    def _take(self, step: dict[str, object]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._replacements.append((mark, " "))
                self.num_leading_spaces = 0 if step.get("prepend_scheme") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.num_leading_spaces = start
            case {"type": "Fuse"}:
                pass  # joins, as we do
            case _:
                raise UnsupportedDecoder(f"the decoder {step} is not supported")

    def _decode(self, token: str) -> bytes:
        if self._is_byte_level:
            mapped = [_BYTE_OF.get(char) for char in token]
            whole = [byte for byte in mapped if byte is not None]
            return bytes(whole) if len(whole) == len(token) else token.encode()  # an added token is written as it is
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _steps(decoder: object) -> Iterator[dict[str, object]]:
    """A decoder may be a sequence of decoders."""
    if not isinstance(decoder, dict):
        raise UnsupportedDecoder("it has no decoder")
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)
