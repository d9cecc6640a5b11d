"""`python outside_client.py HOW ADDRESS ...`: clients that know nothing of this project. They say as JSON what came.

A process of its own: a client may be killed or stopped, and tritonclient names protobuf packages that ours name, too.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

READER_OPTIONS = (("grpc.http2.lookahead_bytes", 256), ("grpc.http2.bdp_probe", 0))  # a window of 64 KiB, and no more
METHOD = "/pdserve.v1.Inference/Generate"


def reflected(channel: grpc.Channel, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Generate, as grpcurl calls it: from the server's own descriptors and JSON."""
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("pdserve.v1.Inference").FindMethodByName("Generate")
    answer = message_factory.GetMessageClass(method.output_type)
    asked = json_format.ParseDict(request, message_factory.GetMessageClass(method.input_type)())
    stream = channel.unary_stream(METHOD, type(asked).SerializeToString, answer.FromString)(asked, timeout=60)
    return [json_format.MessageToDict(message, preserving_proto_field_name=True) for message in stream]


def asked_by_triton(address: str, request: dict[str, Any]) -> dict[str, Any]:
    import numpy
    import tritonclient.grpc as triton

    prompt = triton.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(numpy.array([request["text"].encode()], dtype=object))
    with triton.InferenceServerClient(address) as client:
        whole = client.infer(request["model"], [prompt], parameters=request["parameters"])
        came: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(request["model"], [prompt], parameters=request["parameters"])
        pieces: list[str] = []
        while True:
            result, error = came.get(timeout=60)
            if error is not None:
                raise error
            pieces.append(result.as_numpy("text_output")[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return {
        "whole": whole.as_numpy("text_output")[0].decode(),
        "num_output_tokens": int(whole.as_numpy("num_output_tokens")[0]),
        "pieces": pieces,
    }


def half_read(channel: grpc.Channel, raw_request: bytes, pause_s: float) -> dict[str, Any]:
    """Reads one message, says so, reads nothing for a while, and then the rest."""
    reading: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
    stream = reading(raw_request, timeout=300)
    next(stream)
    print("begun", flush=True)
    time.sleep(pause_s)
    try:
        return {"num_messages": sum(1 for _ in stream)}
    except grpc.RpcError as error:
        return {"code": error.code().name, "details": error.details()}


def main(how: str, address: str, *arguments: str) -> object:
    if how == "triton":
        return asked_by_triton(address, json.loads(arguments[0]))
    with grpc.insecure_channel(address, options=READER_OPTIONS if how == "half" else ()) as channel:
        if how == "reflected":
            return reflected(channel, json.loads(arguments[0]))
        return half_read(channel, bytes.fromhex(arguments[0]), float(arguments[1]))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
