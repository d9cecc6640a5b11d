"""Folders for logs: gone with their owner, or else at the next start, and never while the owner lives."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.log_folder import LogFolder, remove_left_behind

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import sys
from deploy.log_folder import LogFolder
folder = LogFolder()
(folder.path / "router.log").write_text("hello")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", OWNER]
    owner = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_it_goes_when_its_owner_ends_by_itself(temporary: Path) -> None:
    owner, folder = start_owner()
    assert folder.parent == temporary and (folder / "router.log").exists()
    owner.communicate()
    assert not list(temporary.iterdir())


def test_of_a_killed_owner_it_goes_with_the_next_start(temporary: Path) -> None:
    killed, left = start_owner()
    with killed:
        killed.send_signal(signal.SIGKILL)
    assert left.exists()
    folder = LogFolder()
    assert list(temporary.iterdir()) == [folder.path]
    folder.remove()
    assert not list(temporary.iterdir())


def test_of_a_living_owner_it_stays(temporary: Path) -> None:
    owner, folder = start_owner()
    remove_left_behind()
    assert (folder / "router.log").exists()
    owner.communicate()


def test_other_folders_of_such_a_name_stay(temporary: Path) -> None:
    (temporary / "pdserve-mine").mkdir()
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / ".owner").touch()
    (temporary / "pdserve-link").symlink_to(temporary / "elsewhere")
    remove_left_behind()
    assert {path.name for path in temporary.iterdir()} == {"pdserve-mine", "elsewhere", "pdserve-link"}
    assert (temporary / "elsewhere" / ".owner").exists()
