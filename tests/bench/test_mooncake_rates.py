"""How bench.handover asks for Mooncake's rates, with engines that stand for it: one that copies and some that fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.mooncake_rates import MooncakeUnusable, mooncake_rates
from model.kv_layout import KVLayout

LAYOUT = KVLayout("m", "bfloat16", num_layers=3, num_kv_heads=1, head_dim=16, block_size=16)  # 3 KiB a block
NUM_BLOCKS = 10
ENGINE = """
import ctypes, os, time

class Span(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]

class TransferEngine:
    def initialize(self, host, metadata, protocol, devices):
        assert (host, metadata, protocol, devices) == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        return {initialized}

    def register_memory(self, address, length):
        assert length == 3 * 10 * 1024
        return 0

    def get_rpc_port(self):
        return os.getpid()

    def batch_transfer_sync_write(self, name, here, there, lengths):
        time.sleep({write_s})
        libc, pid = ctypes.CDLL(None, use_errno=True), int(name.removeprefix("127.0.0.1:"))
        for one, other, length in list(zip(here, there, lengths))[{first}:]:
            spans = ctypes.byref(Span(one, length)), 1, ctypes.byref(Span(other, length)), 1
            assert libc.process_vm_writev(pid, *spans, 0) == length, os.strerror(ctypes.get_errno())
        return {written}
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mooncake").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "mooncake" / "engine.py"


def says(*, initialized: int = 0, written: int = 0, first: int = 0, write_s: float = 0.0) -> str:
    return ENGINE.format(initialized=initialized, written=written, first=first, write_s=write_s)


def rates() -> dict[int, float]:
    return mooncake_rates(sys.executable, LAYOUT, NUM_BLOCKS, [2, 10], num_rounds=3)


def test_rates_are_bytes_by_the_time_of_a_write(engine: Path) -> None:
    engine.write_text(says(write_s=0.1))
    found = rates()
    assert found.keys() == {2, 10}
    assert 0.5 * 2 * 3072 / 0.1 < found[2] < 2 * 3072 / 0.1
    assert 0.5 * 10 * 3072 / 0.1 < found[10] < 10 * 3072 / 0.1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (says(first=1), "what Mooncake has written is not there"),
        (says(written=-1), "a write failed: Mooncake returns -1"),
        (says(initialized=-5), "the engine does not start: Mooncake returns -5"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_a_failure_is_told_in_its_own_words(engine: Path, content: str, told: str) -> None:
    engine.write_text(content)
    with pytest.raises(MooncakeUnusable, match=told):
        rates()


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(MooncakeUnusable, match="No such file or directory"):
        mooncake_rates("/no/such/python", LAYOUT, NUM_BLOCKS, [2], num_rounds=1)
