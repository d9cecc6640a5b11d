"""What a process says of itself: one line a record, also of what a library would print as a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.logs import message_of

ROOT = Path(__file__).resolve().parents[2]
# gRPC's own logger and error: where the connection ends just as a call's end goes out, it logs that error this way.
REPORTING = """
from deploy.logs import configure_logging
configure_logging("decode-0", "info")
from grpc._cython import cygrpc
try:
    raise cygrpc.{error}("Failed")
except Exception:
    cygrpc._LOGGER.exception("{error} raised in core by servicer method [%s]", "/pdserve.v1.DecodeWorker/Generate")
"""


def printed(error: str) -> list[str]:
    command = [sys.executable, "-c", REPORTING.format(error=error)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()


def test_a_connection_that_ends_as_an_answer_does_is_one_line() -> None:
    (line,) = printed("ExecuteBatchError")
    message = message_of(line)
    assert message is not None and message.endswith("/Generate]: its caller's connection has ended")
    assert " WARNING decode-0 " in line


def test_other_errors_of_grpc_keep_their_traceback() -> None:
    first, *rest = printed("InternalError")
    assert " ERROR   decode-0 " in first and rest[0] == "Traceback (most recent call last):"
