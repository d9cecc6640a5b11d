"""Fields of OpenAI's requests that may be written in several ways: read into one, and how each looks in the schema."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import Field, PlainValidator, WithJsonSchema

_INT64 = 2**63

Integer: TypeAlias = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
"""What the service's messages hold. Its own limits are narrower, and told by it."""


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _texts(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ()
        case str():
            return (value,)
        case list() if all(isinstance(each, str) for each in value):
            return tuple(value)
    raise ValueError("it must be a string or a list of strings")


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    match value:
        case str():
            return (value,)
        case [] | [*_, []]:
            raise ValueError("it is empty, or one of it is; a prompt needs at least one token")
        case list() if all(isinstance(each, str) for each in value):
            return tuple(value)
        case list() if all(map(_is_integer, value)):
            return (tuple(value),)
        case list() if all(isinstance(each, list) and all(map(_is_integer, each)) for each in value):
            return tuple(tuple(each) for each in value)
    raise ValueError("it must be a string, a list of strings, a list of token ids, or a list of such lists")


def _content(value: object) -> str:
    """The parts of a text follow each other with nothing in between."""
    match value:
        case None:
            return ""
        case str():
            return value
        case list():
            return "".join(map(_part, value))
    raise ValueError("it must be a string or a list of text parts")


def _response_format(value: object) -> str | None:
    """The JSON schema that the answer has to match; None if any text will do."""
    match value:
        case None:
            return None
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return json.dumps({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **about}, **rest} if not rest:
            if about.keys() <= {"name", "description", "strict"}:  # an answer always matches here: it is always strict
                return json.dumps(schema)
    known = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
    raise ValueError(f"it must be {known}")


def _part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text), **rest} if not rest:
            return text
        case {"type": str(kind)} if kind != "text":
            raise ValueError(f"a part has the type {kind[:40]!r}; only text is served")
    raise ValueError('a part must be like {"type": "text", "text": "..."}')


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("it must be an object of token ids and numbers")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 19):
            raise ValueError(f"the key {key[:40]!r} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -1e300 < bias < 1e300:
            raise ValueError(f"the bias of token {key} is {str(bias)[:40]}; it must be a number")
        biases[int(key)] = float(bias)
    return biases


_STRING, _STRINGS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer"}}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["type", "text"],
    "additionalProperties": False,
}


def _any_of(*schemas: Any) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


Texts: TypeAlias = Annotated[tuple[str, ...], PlainValidator(_texts), _any_of(_STRING, _STRINGS, {"type": "null"})]
Prompts: TypeAlias = Annotated[
    tuple[str | tuple[int, ...], ...],
    PlainValidator(_prompts),
    _any_of(_STRING, _STRINGS, _IDS, {"type": "array", "items": _IDS}),
]
Content: TypeAlias = Annotated[
    str, PlainValidator(_content), _any_of(_STRING, {"type": "array", "items": _PART}, {"type": "null"})
]
Biases: TypeAlias = Annotated[
    dict[int, float],
    PlainValidator(_biases),
    _any_of({"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}),
]

ResponseFormat: TypeAlias = Annotated[
    str | None,
    PlainValidator(_response_format),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"type": {"enum": ["text", "json_object"]}},
                    "required": ["type"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string"},
                                "description": {"type": "string"},
                                "strict": {"type": "boolean"},
                                "schema": {"type": "object"},
                            },
                            "required": ["schema"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["type", "json_schema"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]
"""Read as the JSON schema that the answer has to match."""
