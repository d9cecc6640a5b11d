"""`python triton_asker.py ADDRESS`: what tritonclient gets from the KServe door, as JSON for the test that started it.

A process of its own: tritonclient's generated code and ours name the same protobuf package, and one process takes one.
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from typing import Any

import numpy
import tritonclient.grpc as triton
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException


def tensor(name: str, datatype: str, values: list[Any]) -> triton.InferInput:
    kind = numpy.object_ if datatype == "BYTES" else triton.triton_to_np_dtype(datatype)
    made = triton.InferInput(name, [len(values)], datatype)
    made.set_data_from_numpy(numpy.array(values, dtype=kind))
    return made


def prompt(text: str, **others: tuple[str, list[Any]]) -> list[triton.InferInput]:
    named = [tensor(name, datatype, values) for name, (datatype, values) in others.items()]
    return [tensor("text_input", "BYTES", [text.encode()]), *named]


def told(result: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return value.decode() if isinstance(value, bytes) else int(value)

    response = result.get_response()
    outputs = {each.name: [plain(value) for value in result.as_numpy(each.name)] for each in response.outputs}
    final = response.parameters.get("triton_final_response")
    return {"id": response.id, "final": None if final is None else final.bool_param, **outputs}


def error_of(ask: Callable[[], Any]) -> list[str]:
    try:
        ask()
    except InferenceServerException as error:
        return [str(error.status()), error.message()]
    return []


def streamed(client: Any, num_ends: int, *requests: dict[str, Any]) -> list[Any]:
    """Messages and errors in the order in which they come, until so many answers have ended."""
    came: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: came.put(error.message() if error else told(result)))
    for request in requests:
        client.async_stream_infer("tiny", **request)
    messages: list[Any] = []
    while sum(isinstance(each, str) or each["final"] for each in messages) < num_ends:
        messages.append(came.get(timeout=10))
    client.stop_stream()
    return messages


def fields() -> dict[str, list[list[Any]]]:
    """Of every message that tritonclient knows: number, name, type and label of its fields."""
    found: dict[str, list[list[Any]]] = {}

    def note(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        name = f"{prefix}.{message.name}"
        found[name] = [[each.number, each.name, each.type, each.label, each.type_name] for each in message.field]
        for nested in message.nested_type:
            note(name, nested)

    for module in (service_pb2, model_config_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            note("inference", message)
    return found


def main(address: str) -> dict[str, Any]:
    with triton.InferenceServerClient(address) as client:
        short = {"max_tokens": ("INT32", [3])}
        return {
            "live": [client.is_server_live(), client.is_server_ready(), client.is_model_ready("tiny")],
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata("tiny", as_json=True),
            "config": client.get_model_config("tiny", as_json=True),
            "whole": told(client.infer("tiny", prompt("hi", **short), request_id="r1")),
            "one_output": told(
                client.infer("tiny", prompt("hi", **short), outputs=[triton.InferRequestedOutput("text_output")])
            ),
            "parameters": told(client.infer("tiny", prompt("hi"), parameters={"max_tokens": 2, "temperature": 0.0})),
            "stream": streamed(client, 1, {"inputs": prompt("hi", **short), "request_id": "s1"}),
            "empty_end": streamed(
                client, 1, {"inputs": prompt("hi", **short), "enable_empty_final_response": True, "request_id": "s2"}
            ),
            "two": streamed(
                client,
                2,
                {"inputs": prompt("hi", **short), "request_id": "a"},
                {"inputs": prompt("you", **short), "request_id": "b"},
            ),
            "bad_amid": streamed(
                client,
                2,
                {"inputs": prompt("hi", max_tokens=("INT32", [-1])), "request_id": "bad"},
                {"inputs": prompt("hi", **short), "request_id": "good"},
            ),
            "errors": {
                "model": error_of(lambda: client.infer("huge", prompt("hi"))),
                "version": error_of(lambda: client.infer("tiny", prompt("hi"), model_version="7")),
                "range": error_of(lambda: client.infer("tiny", prompt("hi", top_p=("FP32", [0.0])))),
                "name": error_of(lambda: client.infer("tiny", prompt("hi", temprature=("FP32", [0.0])))),
                "priority": error_of(lambda: client.infer("tiny", prompt("hi"), priority=1)),
                "empty": error_of(lambda: client.infer("tiny", prompt(""))),
                "output": error_of(
                    lambda: client.infer("tiny", prompt("hi"), outputs=[triton.InferRequestedOutput("x")])
                ),
            },
            "timeout": error_of(lambda: client.infer("tiny", prompt("x" * 40), timeout=50_000)),
            "fields": fields(),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
