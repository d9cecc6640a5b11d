"""Decode policy (admission, batching, preemption) and its gRPC service."""
