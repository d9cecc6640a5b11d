"""Messages as JSON has them: enumerations as words, times as seconds since 1970, what is not finite as null.

protobuf's own JSON writes 64-bit integers as strings and infinity as a word, which a page would have to undo.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

# Descriptors are Any below: the types know two kinds of them, of which a program has one.
Plain: TypeAlias = dict[str, Any]

_TIMESTAMP = "google.protobuf.Timestamp"


def plain(message: Message) -> Plain:
    """Every field by its name in the .proto; null for one that is not set, if the message can tell. No bytes."""
    return {
        field.name: _value(message, field)
        for field in message.DESCRIPTOR.fields
        if field.type != FieldDescriptor.TYPE_BYTES
    }


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_single(field, each) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        return _word(field.enum_type, value)
    if field.message_type is None:
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if field.message_type.full_name == _TIMESTAMP:
        return float(value.seconds) + value.nanos / 1e9
    return plain(value)


def _word(kind: Any, number: int) -> str:
    """ROLE_PREFILL of Role as prefill. Empty for what is unspecified, or newer than this program."""
    value = kind.values_by_number.get(number)
    if value is None or number == 0:
        return ""
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(value.name).removeprefix(prefix).lower()
