"""Tensors of KServe's messages to plain values and back. Both ways in which their contents may come are read."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from protos import kserve_pb2 as kserve
from protos.errors import InvalidArgument

Value: TypeAlias = bool | int | float | bytes | str

MAX_ELEMENTS = 4096  # of one tensor
MAX_DIMENSIONS = 8  # sizes multiplied grow without end
_NUMBERS = {  # little-endian, and the field of typed contents
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
}
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of one dimension."""

    name: str
    datatype: str  # BYTES, INT32 or INT64
    values: Sequence[Any]


def inputs_of(request: kserve.ModelInferRequest) -> Iterator[tuple[str, list[Value]]]:
    """By name. Raises InvalidArgument for one whose contents are not what its type and shape say."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        told = f"raw_input_contents has {len(raw)} tensors; there are {len(request.inputs)} inputs"
        raise InvalidArgument(told, field="raw_input_contents")
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{tensor.name[:40]!r}]"
        if len(tensor.shape) > MAX_DIMENSIONS:
            told = f"{field} has {len(tensor.shape)} dimensions; at most {MAX_DIMENSIONS} are taken"
            raise InvalidArgument(told, field=field)
        count = math.prod(tensor.shape)
        if any(size < 0 for size in tensor.shape) or count > MAX_ELEMENTS:
            told = f"{field} has the shape {list(tensor.shape)}; at most {MAX_ELEMENTS} elements are taken"
            raise InvalidArgument(told, field=field)
        values = _from_raw(field, tensor.datatype, raw[index]) if raw else _typed(field, tensor)
        if len(values) != count:
            told = f"{field} has {len(values)} elements; its shape is {list(tensor.shape)}"
            raise InvalidArgument(told, field=field)
        yield tensor.name, values


def add_output(response: kserve.ModelInferResponse, output: Output) -> None:
    response.outputs.add(name=output.name, datatype=output.datatype, shape=[len(output.values)])
    if output.datatype == "BYTES":
        raw = b"".join(_LENGTH.pack(len(each)) + each for each in map(str.encode, output.values))
    else:
        raw = struct.pack(f"<{len(output.values)}{_NUMBERS[output.datatype][0]}", *output.values)
    response.raw_output_contents.append(raw)


def _typed(field: str, tensor: kserve.ModelInferRequest.InferInputTensor) -> list[Value]:
    if tensor.datatype == "BYTES":
        return list(tensor.contents.bytes_contents[: MAX_ELEMENTS + 1])
    if tensor.datatype not in _NUMBERS:
        raise _unknown_type(field, tensor.datatype)
    return list(getattr(tensor.contents, _NUMBERS[tensor.datatype][1])[: MAX_ELEMENTS + 1])


def _from_raw(field: str, datatype: str, raw: bytes) -> list[Value]:
    if datatype == "BYTES":
        return list(islice(_byte_strings(field, raw), MAX_ELEMENTS + 1))
    if datatype not in _NUMBERS:
        raise _unknown_type(field, datatype)
    element = struct.Struct(f"<{_NUMBERS[datatype][0]}")
    if len(raw) % element.size or len(raw) > MAX_ELEMENTS * element.size:
        told = f"{field} has {len(raw)} bytes; {datatype} takes {element.size} each, {MAX_ELEMENTS} times at most"
        raise InvalidArgument(told, field=field)
    return [value for (value,) in element.iter_unpack(raw)]


def _byte_strings(field: str, raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(raw, at)[0] if start <= len(raw) else len(raw) + 1
        if end > len(raw):
            raise InvalidArgument(f"{field} ends in the midst of an element", field=field)
        yield raw[start:end]
        at = end


def _unknown_type(field: str, datatype: str) -> InvalidArgument:
    known = ", ".join(("BYTES", *_NUMBERS))
    return InvalidArgument(f"{field} has the type {datatype[:40]!r}; it must be one of {known}", field=field)
