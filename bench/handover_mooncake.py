"""Mooncake's transfer engine on the blocks of a hand-over: the writing side, which starts the other one.

`bench.handover --mooncake` runs it under an interpreter that has Mooncake: it imports nothing of the project. The plan
comes as JSON in the first argument; the last line of its output is JSON: seconds by number of blocks, or an error.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
import zlib
from typing import IO, Any

HOST = "127.0.0.1"
PEER = "--peer"


class Side:
    """An engine over TCP without a metadata server, and a cache whose pages are there."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        layers, self._blocks, self._size = plan["num_layers"], plan["num_blocks"], plan["layer_block_bytes"]
        self._layers = range(layers)
        self.memory = mmap.mmap(-1, layers * self._blocks * self._size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.engine = TransferEngine()
        _check(self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "the engine does not start")
        for layer in self._layers:
            self.fill(layer, bytes(self._blocks * self._size))
        _check(self.engine.register_memory(self.address, len(self.memory)), "memory cannot be registered")

    def fill(self, layer: int, content: bytes) -> None:
        start = layer * self._blocks * self._size
        self.memory[start : start + len(content)] = content

    def fill_at_random(self) -> None:
        for layer in self._layers:
            self.fill(layer, os.urandom(self._blocks * self._size))

    def runs(self, first: int, count: int) -> list[tuple[int, int]]:
        """Offset and length of `count` blocks that follow each other, in every layer."""
        return [((layer * self._blocks + first) * self._size, count * self._size) for layer in self._layers]

    def checksum(self, runs: list[tuple[int, int]]) -> int:
        checksum, view = 0, memoryview(self.memory)
        for offset, length in runs:
            checksum = zlib.crc32(view[offset : offset + length], checksum)
        return checksum


def _check(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: Mooncake returns {code}")


def serve(plan: dict[str, Any]) -> None:
    """The side that is written to: says where it is, then the checksum of every list of runs that it is asked about."""
    side = Side(plan)
    _say({"port": side.engine.get_rpc_port(), "address": side.address})
    for line in sys.stdin:
        _say({"checksum": side.checksum(json.loads(line))})


def measure(plan: dict[str, Any]) -> dict[int, list[float]]:
    """By number of blocks."""
    peer = subprocess.Popen(
        [sys.executable, __file__, json.dumps(plan), PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdin is not None and peer.stdout is not None
    with peer:
        side = Side(plan)
        side.fill_at_random()
        there = _hear(peer.stdout)
        name = f"{HOST}:{there['port']}"
        seconds: dict[int, list[float]] = {count: [] for count in plan["counts"]}
        for number in range(plan["num_rounds"] + 1):
            for count, found in seconds.items():
                runs = side.runs(number * count % (plan["num_blocks"] - count + 1), count)
                took_s = write(side, name, there["address"], runs, number)
                print(json.dumps(runs), file=peer.stdin, flush=True)
                if _hear(peer.stdout)["checksum"] != side.checksum(runs):
                    raise RuntimeError("what Mooncake has written is not there")
                if number:  # the first connects
                    found.append(took_s)
        peer.stdin.close()
    return seconds


def write(side: Side, name: str, address: int, runs: list[tuple[int, int]], number: int) -> float:
    """All layers at once, which suits Mooncake best. The content is another one than in the rounds before."""
    for offset, length in runs:
        side.memory[offset] = side.memory[offset + length - 1] = number % 256
    here = [side.address + offset for offset, _ in runs]
    there = [address + offset for offset, _ in runs]
    lengths = [length for _, length in runs]
    started = time.perf_counter()
    code = side.engine.batch_transfer_sync_write(name, here, there, lengths)
    took_s = time.perf_counter() - started
    _check(code, "a write failed")
    return took_s


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


def _hear(stream: IO[str]) -> dict[str, Any]:
    for line in stream:
        if line.startswith("{"):  # or it is the engine's own
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError("the side that is written to has ended")


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    if PEER in sys.argv:
        serve(plan)
    else:
        try:
            _say({"seconds": measure(plan)})
        except (ImportError, RuntimeError) as error:
            _say({"error": f"{type(error).__name__}: {error}"})
