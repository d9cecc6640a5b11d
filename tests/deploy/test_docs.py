"""The pages for people name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.cli import cli

ROOT = Path(__file__).resolve().parents[2]
METRIC_FILES = [*ROOT.glob("*/metrics.py"), ROOT / "deploy" / "worker_metrics.py"]


def test_operations_lists_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    listed = set(re.findall(r"`(pdserve_\w+?)(?:_total)?[`{]", page))
    exported = {
        name.removesuffix("_total")
        for path in METRIC_FILES
        for name in re.findall(r'(?:Counter|Gauge|Histogram|Family)\(\s*"(pdserve_\w+)"', path.read_text())
    }
    assert len(exported) > 30
    assert listed == exported


@pytest.mark.parametrize(
    "page", ["README.md", "docs/admission.md", "docs/hand-over.md", "docs/life-of-a-request.md", "docs/operations.md"]
)
def test_files_named_exist(page: str) -> None:
    named = set(re.findall(r"[`(]((?:\w+/)+\w[\w-]*\.(?:py|proto|md))[`)]", (ROOT / page).read_text()))
    assert not {name for name in named if not (ROOT / name).exists()}


def test_readme_tells_every_command() -> None:
    told = set(re.findall(r"`pdserve (\w+)", (ROOT / "README.md").read_text()))
    assert told | {"demo"} >= set(cli.commands)
