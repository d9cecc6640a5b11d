"""What a process says of itself: one line a record, also of what a library would print as a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

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


IN_JSON = """
from deploy.logs import configure_logging
configure_logging("router", "info", "json")
import logging
from protos.request_id import current_request_id
logger = logging.getLogger("router.relay")
logger.info("two\\nlines of %s", "ünicode")
current_request_id.set("r-1")
try:
    raise ValueError("what went wrong")
except ValueError:
    logger.exception("failed")
logger.debug("not said")
"""

LOADS_GRPC = """
import os, sys
class Told:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"), file=sys.stderr)
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Told())
import deploy.cli, grpc
"""


def printed(error: str) -> list[str]:
    return said(REPORTING.format(error=error))


def said(code: str) -> list[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()


def test_a_connection_that_ends_as_an_answer_does_is_one_line() -> None:
    (line,) = printed("ExecuteBatchError")
    message = message_of(line)
    assert message is not None and message.endswith("/Generate]: its caller's connection has ended")
    assert " WARNING decode-0 " in line


def test_other_errors_of_grpc_keep_their_traceback() -> None:
    first, *rest = printed("InternalError")
    assert " ERROR   decode-0 " in first and rest[0] == "Traceback (most recent call last):"


def test_in_json_everything_is_a_line_and_names_its_request() -> None:
    first, second = (json.loads(line) for line in said(IN_JSON))
    written_at = datetime.fromisoformat(first.pop("time"))
    assert abs(datetime.now(UTC) - written_at) < timedelta(minutes=5)
    about = {"process": "router", "logger": "router.relay"}
    assert first == {"level": "info", "message": "two\nlines of ünicode", **about}
    assert (second["level"], second["message"], second["request_id"]) == ("error", "failed", "r-1")
    assert second["exception"].startswith("Traceback") and second["exception"].endswith("what went wrong")


def test_grpc_is_told_to_be_quiet_before_the_command_line_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    assert said(LOADS_GRPC) == ["ERROR"]
