"""Several messages of one answer as one that says the same: for whoever reads more slowly than they come."""

from __future__ import annotations

from collections.abc import Sequence

from protos import inference_pb2 as pb


def merged(messages: Sequence[bytes]) -> tuple[bytes, int]:
    """The first of these serialized `GenerateResponse`s, which follow on one another, as one; and how many it has.

    Tokens, their logprobs and texts are put together, and `output_index` is the first one's. What a worker says once,
    such as the reason, is in its last message. A part of the prompt stays a message of its own.
    """
    if len(messages) == 1:
        return messages[0], 1
    whole = pb.GenerateResponse.FromString(messages[0])
    if whole.HasField("prompt"):
        return messages[0], 1
    output_index, texts = whole.output_index, [whole.text]
    for raw in messages[1:]:
        message = pb.GenerateResponse.FromString(raw)
        if message.HasField("prompt"):
            break
        texts.append(message.text)
        whole.MergeFrom(message)
    whole.text, whole.output_index = "".join(texts), output_index
    return whole.SerializeToString(), len(texts)
