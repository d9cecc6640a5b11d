"""Prefill policy (queue, chunking) and its gRPC service."""

import model  # noqa: F401 - sets what torch reads as it is loaded
