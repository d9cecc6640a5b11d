"""What a KServe request asks for, as the service is asked, and what is told of the model. Names are Triton's.

Sampling may come as inputs, as the TensorRT-LLM backend takes it, or as parameters of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from protos import inference_pb2 as pb
from protos import kserve_pb2 as kserve
from protos.errors import InvalidArgument, NotFound, ServiceError
from router.card import ModelCard
from router.kserve_tensors import Value, inputs_of
from router.validation import check_model

VERSION = "1"
MAX_NAMED = 64  # inputs, parameters and outputs of one request, each: more than there are
_FLOATS = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}
_INTEGERS = {"max_tokens", "min_tokens", "top_k", "seed", "max_draft_tokens"}
_ALIASES = {"min_length": "min_tokens", "random_seed": "seed", "stop_words": "stop", "end_id": "stop_token_ids"}
_TYPES = {  # of inputs, as metadata tells them; those of numbers are taken from any type of numbers
    "text_input": "BYTES",
    "stream": "BOOL",
    "stop": "BYTES",
    "stop_token_ids": "INT64",
    "ignore_eos": "BOOL",
    **dict.fromkeys(sorted(_INTEGERS), "INT64"),
    **dict.fromkeys(sorted(_FLOATS), "FP32"),
}
OUTPUTS = {"text_output": "BYTES", "finish_reason": "BYTES", "num_input_tokens": "INT64", "num_output_tokens": "INT64"}
_OF_CLIENTS = {"sequence_start", "sequence_end", "triton_enable_empty_final_response"}  # about the exchange


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, read."""

    message: pb.GenerateRequest
    outputs: tuple[str, ...]  # those wanted
    timeout_s: float | None
    wants_empty_end: bool


def read_request(request: kserve.ModelInferRequest, card: ModelCard) -> Ask:
    """Raises ServiceError, naming the input or parameter."""
    check_version(request.model_name, request.model_version, card)
    for field in ("inputs", "parameters", "outputs"):
        if (count := len(getattr(request, field))) > MAX_NAMED:
            raise InvalidArgument(f"there are {count} {field}; at most {MAX_NAMED} are taken", field=field)
    given: dict[str, list[Value]] = {}
    for name, values in [*inputs_of(request), *_parameters(request.parameters)]:
        known = _ALIASES.get(name, name)
        if known in given:
            raise InvalidArgument(f"{known} is given twice", field=known)
        given[known] = values
    outputs = tuple(output.name for output in request.outputs) or tuple(OUTPUTS)
    if unknown := set(outputs) - OUTPUTS.keys():
        told = f"output {min(unknown)[:40]!r} is not known; there are {', '.join(OUTPUTS)}"
        raise InvalidArgument(told, field="outputs")
    timeout = _integer("timeout", given.pop("timeout", [0]))
    wants_empty_end = bool(_flag("triton_enable_empty_final_response", given))
    session = given.pop("sequence_id", None)
    message = pb.GenerateRequest(
        request_id=request.id or None,
        model=request.model_name,
        text=_text("text_input", given.pop("text_input", [])),
        session_id=None if session is None else str(_one("sequence_id", session))[:128],
        sampling=_sampling({name: values for name, values in given.items() if name not in (*_OF_CLIENTS, "stream")}),
    )
    return Ask(message, outputs, timeout / 1e6 if timeout > 0 else None, wants_empty_end)


def check_version(name: str, version: str, card: ModelCard) -> None:
    """Raises NotFound."""
    check_model(name, card)
    if version not in ("", VERSION):
        raise NotFound(f"model {name!r} has the version {VERSION} only, not {version[:40]!r}", field="model_version")


def put_in_kserve_words(error: ServiceError) -> None:
    """Its field as it is called here."""
    if error.field:
        name = {"text": "text_input"}.get(error.field, error.field.removeprefix("sampling."))
        if error.message.startswith(error.field):
            error.message = name + error.message[len(error.field) :]
        error.field = name


def metadata(card: ModelCard) -> kserve.ModelMetadataResponse:
    def tensors(types: Mapping[str, str]) -> Iterable[kserve.ModelMetadataResponse.TensorMetadata]:
        several = ("stop", "stop_token_ids")
        for name, datatype in types.items():
            shape = [-1 if name in several else 1]
            yield kserve.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=shape)

    return kserve.ModelMetadataResponse(
        name=card.name, versions=[VERSION], platform="pdserve", inputs=tensors(_TYPES), outputs=tensors(OUTPUTS)
    )


def _parameters(parameters: Mapping[str, kserve.InferParameter]) -> Iterable[tuple[str, list[Value]]]:
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgument(f"parameter {name[:40]!r} has no value", field=name[:40])
        yield name, [getattr(parameter, kind)]


def _sampling(given: Mapping[str, list[Value]]) -> pb.SamplingParams:
    told: dict[str, Any] = {}
    for name, values in given.items():
        if name in _FLOATS:
            told[name] = _number(name, values)
        elif name in _INTEGERS:
            told[name] = _integer(name, values)
        elif name == "ignore_eos":
            told[name] = bool(_integer(name, values))
        elif name == "stop":
            told[name] = [_decoded(name, value) for value in values]
        elif name == "stop_token_ids":
            told[name] = [_integer(name, [value]) for value in values]
        else:
            known = ", ".join((*_TYPES, "timeout", "sequence_id"))
            raise InvalidArgument(f"input or parameter {name[:40]!r} is not known; there are {known}", field=name[:40])
    if told.get("seed", 0) < 0:
        raise InvalidArgument(f"seed is {told['seed']}; it must be at least 0", field="seed")
    return pb.SamplingParams(**told)


def _flag(name: str, given: dict[str, list[Value]]) -> int:
    return _integer(name, given.pop(name, [0]))


def _one(name: str, values: list[Value]) -> Value:
    if len(values) != 1:
        raise InvalidArgument(f"{name} has {len(values)} elements; it must have 1", field=name)
    return values[0]


def _text(name: str, values: list[Value]) -> str:
    return _decoded(name, _one(name, values))


def _decoded(name: str, value: Value) -> str:
    try:
        if isinstance(value, bytes):
            return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{name} is not UTF-8", field=name) from None
    if isinstance(value, str):
        return value
    raise InvalidArgument(f"{name} is {value!r}; it must be text, of type BYTES", field=name)


def _number(name: str, values: list[Value]) -> float:
    value = _one(name, values)
    if isinstance(value, bytes | str):
        raise InvalidArgument(f"{name} is {value[:40]!r}; it must be a number", field=name)
    return float(value)


def _integer(name: str, values: list[Value]) -> int:
    value = _one(name, values)
    limit = 2**64 if name == "seed" else 2**63
    if not isinstance(value, int) or not -(2**63) <= value < limit:
        raise InvalidArgument(f"{name} is {str(value)[:40]}; it must be an integer of 64 bits", field=name)
    return int(value)
