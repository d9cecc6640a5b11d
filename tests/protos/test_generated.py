"""The generated code that is checked in is what the .proto files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protos.__main__ import ROOT, generate, stale_files


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return generate(tmp_path_factory.mktemp("generated"))


def test_generated_code_is_fresh(generated: dict[str, str]) -> None:
    assert stale_files(generated) == []


def test_every_proto_has_all_its_files(generated: dict[str, str]) -> None:
    names = {path.stem for path in (ROOT / "protos").glob("*.proto")}
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    assert set(generated) == {f"protos/{name}{ending}" for name in names for ending in endings}


def test_stale_missing_and_orphaned_files_are_told(generated: dict[str, str]) -> None:
    changed = {**generated, "protos/inference_pb2.py": "# other", "protos/new_pb2.py": ""}
    del changed["protos/workers_pb2.pyi"]
    assert stale_files(changed) == ["protos/inference_pb2.py", "protos/new_pb2.py", "protos/workers_pb2.pyi"]


def test_command_checks() -> None:
    command = [sys.executable, "-m", "protos", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    assert Path(ROOT / "protos" / "inference.proto").exists() and "32 files are fresh" in run.stdout
