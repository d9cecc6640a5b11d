"""Decode policy (admission, batching, preemption) and its gRPC service."""

import model  # noqa: F401 - before torch
