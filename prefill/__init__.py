"""Prefill policy (queue, chunking) and its gRPC service."""
