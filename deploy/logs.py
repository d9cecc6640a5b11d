"""What a process says of itself: one line a record, on stderr, with the process's name in it."""

from __future__ import annotations

import logging
import os

LEVELS = ("debug", "info", "warning", "error")
OURS = ("decode", "deploy", "kvtransfer", "model", "prefill", "protos", "router")


def configure_logging(process_name: str, level: str) -> None:
    """Our own loggers speak from `level` on, libraries from warning on. Before gRPC is imported: it looks only then."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it calls a peer's end an event worth a line of its own
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name} %(message)s", datefmt="%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
