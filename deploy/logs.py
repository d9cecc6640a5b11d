"""What a process says of itself: one line a record, on stderr, with the process's name in it, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime

from protos.request_id import current_request_id

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
OURS = ("decode", "deploy", "kvtransfer", "model", "prefill", "protos", "router")


def configure_logging(process_name: str, level: str, log_format: str = "text") -> None:
    """Our own loggers speak from `level` on, libraries from warning on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines(process_name) if log_format == "json" else _text(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_caller_gone)


def _text(process_name: str) -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name} %(message)s", datefmt="%H:%M:%S")


class _JsonLines(logging.Formatter):
    """Whatever is said, traces of errors too, is one line."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False)


def _caller_gone(record: logging.LogRecord) -> bool:
    """One line for what gRPC reports with a traceback: the connection ended just as a call's end was to be sent."""
    if record.exc_info and type(record.exc_info[1]).__name__ == "ExecuteBatchError":
        record.msg, record.args = f"{record.getMessage()}: its caller's connection has ended", ()
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
    return True


def message_of(line: str) -> str | None:
    """What a process said in a line of its log as text; None if a library wrote it in a form of its own."""
    found = _LINE.fullmatch(line)
    return found[1] if found else None


_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} [A-Z]+ +\S+ (.+)")
