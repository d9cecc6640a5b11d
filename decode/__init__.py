"""Decoding: admission, batching, preemption, speculation (drafters, how much to draft, verification, the training of
draft heads), and the gRPC service."""

import model  # noqa: F401 - sets what torch reads as it is loaded
