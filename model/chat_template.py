"""Conversations to text with the model's Jinja template, in the environment Hugging Face templates are written for.

Templates come with model files, which anybody can publish, so they run in Jinja's sandbox. It knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class NoChatTemplate(Exception):
    """The model cannot take a conversation, only a prompt."""


class ChatRejected(ValueError):
    """The template does not accept these messages; the message is the template's own."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template, such as bos_token. Raises ValueError for bad Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        try:
            return self._template.render(
                messages=[asdict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: whatever it raises says that it cannot render these
            raise ChatRejected(f"the chat template rejects the messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
