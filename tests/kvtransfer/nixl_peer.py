"""Processes with a cache that others write into: each says who it is, then answers lists of blocks with their digest.

They are forked from one process that has imported nixl (which takes seconds) but has not used it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvtransfer.geometry import CacheSpan
from kvtransfer.nixl_agent import NixlAgent
from model.kv_layout import KVLayout
from tests.kvtransfer.cache import Cache
from tests.kvtransfer.progress import making_progress

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = KVLayout(model_digest="tiny", dtype="bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16)
NUM_BLOCKS = 512


@dataclass
class NixlPeer:
    """One of these processes, as the test sees it."""

    pid: int
    name: str
    metadata: bytes
    span: CacheSpan
    stream: IO[str]

    @classmethod
    def greet(cls, stream: IO[str]) -> NixlPeer:
        hello = json.loads(stream.readline())
        span = CacheSpan(LAYOUT, hello["address"], NUM_BLOCKS)
        return cls(hello["pid"], hello["name"], bytes.fromhex(hello["metadata"]), span, stream)

    def digest(self, block_ids: Sequence[int]) -> str:
        self.stream.write(json.dumps(list(block_ids)) + "\n")
        self.stream.flush()
        return self.stream.readline().strip()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextmanager
def nixl_peers(*names: str) -> Iterator[list[NixlPeer]]:
    """Starts one process for each name; they end when the block does, and must have said nothing on their own."""
    pairs = [socket.socketpair() for _ in names]
    theirs = [their_end.fileno() for _, their_end in pairs]
    arguments = [f"{name}:{fd}" for name, fd in zip(names, theirs, strict=True)]
    command = [sys.executable, "-m", "tests.kvtransfer.nixl_peer", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, pass_fds=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for _, their_end in pairs:
        their_end.close()
    streams = [our_end.makefile("rw") for our_end, _ in pairs]
    try:
        yield [NixlPeer.greet(stream) for stream in streams]
    finally:
        for stream, (our_end, _) in zip(streams, pairs, strict=True):
            stream.close()
            our_end.close()
        said = process.communicate(timeout=60)[0]
    assert said == ""


def digest(cache: Cache, block_ids: Sequence[int]) -> str:
    return hashlib.sha256(cache.blocks(block_ids).tobytes()).hexdigest()


def _serve(name: str, stream: IO[str]) -> None:
    cache = Cache(LAYOUT, NUM_BLOCKS, fill=0)
    agent = NixlAgent(name, cache.address, cache.num_bytes)
    hello = {"pid": os.getpid(), "name": name, "address": cache.address, "metadata": agent.metadata().hex()}
    stream.write(json.dumps(hello) + "\n")
    stream.flush()
    with making_progress(agent):
        for line in stream:
            stream.write(digest(cache, json.loads(line)) + "\n")
            stream.flush()
    agent.close()


def main(arguments: list[str]) -> None:
    NixlAgent.load()
    children = []
    for argument in arguments:
        name, _, fd = argument.partition(":")
        pid = os.fork()
        if pid == 0:
            for other in arguments:
                other_fd = other.partition(":")[2]
                if other_fd != fd:
                    os.close(int(other_fd))
            with socket.socket(fileno=int(fd)) as end, end.makefile("rw") as stream:
                _serve(name, stream)
            return
        children.append(pid)
    for argument in arguments:
        os.close(int(argument.partition(":")[2]))
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
