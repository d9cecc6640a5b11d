"""The files of the dashboard's page, and how messages are spelled for it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import timestamp_pb2

from protos import insights_pb2, plans_pb2, workers_pb2
from router.dashboard.spelling import plain

STATIC = Path(__file__).resolve().parents[2] / "router" / "dashboard" / "static"
VENDOR = STATIC / "vendor"
VENDORED: list[dict[str, Any]] = json.loads((VENDOR / "VENDORED.json").read_text())["files"]
OWN = sorted(path for path in STATIC.rglob("*") if path.is_file() and VENDOR not in path.parents)
MAX_LINES, MAX_LINE = 300, 120


@pytest.mark.parametrize("entry", VENDORED, ids=lambda entry: entry["file"])
def test_libraries_are_as_they_came_but_for_what_is_said(entry: dict[str, Any]) -> None:
    content = (VENDOR / entry["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    for before, after in entry.get("changed", {}).items():
        assert content.count(after.encode()) == 1
        content = content.replace(after.encode(), before.encode())
    assert hashlib.sha256(content).hexdigest() == entry.get("original_sha256", entry["sha256"])
    assert len((VENDOR / entry["licence_file"]).read_text()) > 1000


def test_every_library_is_listed_with_its_licence() -> None:
    listed = {entry["file"] for entry in VENDORED}
    assert {path.name for path in VENDOR.glob("*.mjs")} == listed
    assert {path.name for path in VENDOR.glob("LICENSE.*")} >= {entry["licence_file"] for entry in VENDORED}


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(STATIC)))
def test_page_names_nothing_elsewhere_and_runs_nothing_inline(path: Path) -> None:
    source = path.read_text()
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", source.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"\beval\(|new Function|innerHTML|dangerouslySetInnerHTML|document\.write", source)
    if path.suffix == ".html":
        assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", source)


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix == ".js"], ids=lambda path: path.name)
def test_scripts_are_short_and_say_what_they_are(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ") and lines[0].endswith(".")
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_LINE


def test_what_scripts_import_is_there() -> None:
    found = [
        (path, name)
        for path in OWN
        for name in re.findall(r'(?:^(?:import|\}) .*from |\bimport\()"([^"]+)"\)?;$', path.read_text(), re.MULTILINE)
    ]
    assert len(found) > 60
    assert not [(path.name, name) for path, name in found if not (name[0] == "." and (path.parent / name).is_file())]


def test_enumerations_are_words() -> None:
    worker = workers_pb2.WorkerStatus(role=workers_pb2.ROLE_BOTH)
    worker.load.state = workers_pb2.WORKER_STATE_SILENT
    told = plain(worker)
    assert (told["role"], told["load"]["state"]) == ("both", "silent")
    assert plain(plans_pb2.Flip(state=plans_pb2.FLIP_STATE_FAILED))["state"] == "failed"
    assert plain(plans_pb2.PlanStatus())["mode"] == ""
    assert plain(plans_pb2.PlanStatus.FromString(b"\x08\x63"))["mode"] == ""  # a mode 99, of a newer router


def test_numbers_are_numbers() -> None:
    ratio = plans_pb2.RatioForecast(num_prefill=3, ttft_s=float("inf"), tpot_s=float("nan"), goodput=1.5)
    told = plain(ratio)
    assert (told["num_prefill"], told["ttft_s"], told["tpot_s"], told["goodput"]) == (3, None, None, 1.5)
    drafts = plain(insights_pb2.DraftInsights(lengths=[1, 2**40], acceptance=[0.5]))
    assert (drafts["lengths"], drafts["acceptance"]) == ([1, 2**40], [0.5])


def test_what_is_not_set_is_null_where_that_can_be_told() -> None:
    told = plain(plans_pb2.PlanStatus())
    assert (told["proposed"], told["manual_for_s"], told["flips"], told["num_prefill"]) == (None, None, [], 0)
    assert plain(plans_pb2.PlanStatus(manual_for_s=0.0))["manual_for_s"] == 0.0


def test_times_are_seconds() -> None:
    at = timestamp_pb2.Timestamp(seconds=1_700_000_000, nanos=250_000_000)
    assert plain(plans_pb2.Flip(at=at))["at"] == 1_700_000_000.25


def test_bytes_are_left_out() -> None:
    assert "stored" not in plain(workers_pb2.CacheChanges(stored=b"\xff", number=3))
