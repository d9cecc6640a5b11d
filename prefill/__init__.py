"""Prefill policy (queue, chunking) and its gRPC service."""

import model  # noqa: F401 - before torch
