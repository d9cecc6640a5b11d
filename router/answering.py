"""What the doors ask of the service behind them, which is `router.service.InferenceService`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, TypeAlias

from protos import inference_pb2 as pb

Messages: TypeAlias = AsyncGenerator[bytes, None]
"""Of one answer, each a serialized GenerateResponse. Closing it cancels the request."""


class Answering(Protocol):
    is_draining: bool

    def generate(self, message: pb.GenerateRequest, remaining_s: float | None) -> Messages: ...

    def chat(self, message: pb.ChatRequest, remaining_s: float | None) -> Messages: ...

    def model(self) -> pb.Model: ...
