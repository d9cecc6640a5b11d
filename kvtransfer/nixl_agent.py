"""The transport: NIXL with its UCX backend, which writes over NVLink, RDMA, shared memory or TCP.

The only module that imports nixl. It uses the bindings directly: their Python wrapper configures the process's logging
and insists on a progress thread. Such a thread spins while another one copies, which costs a core while KV moves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agent import Grid, PeerUnreachable, Pieces, Region, WriteState

logger = logging.getLogger(__name__)

UNACKNOWLEDGED_S = 5  # what was sent and is not acknowledged for so long will not arrive any more
_ENVIRONMENT = {
    "UCX_LOG_LEVEL": "fatal",  # a peer's death is reported through us, not on stdout
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_HANDLE_ERRORS": "none",  # signal handlers are the process's own affair
    "UCX_DEBUG_SIGNO": "0",
    # NIXL cannot take a write back: what is queued for a peer that is cut off arrives when the link is whole again, in
    # blocks that have been given to others meanwhile. So the system drops a connection on which nothing gets through.
    "UCX_TCP_USER_TIMEOUT": f"{UNACKNOWLEDGED_S}s",
    "NIXL_LOG_LEVEL": "FATAL",
}
_Rows = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Nixl:
    """The bindings, and the errors they raise: these have no base of their own."""

    bindings: Any  # nixl ships no types
    errors: tuple[type[Exception], ...]


class NixlAgent:
    """Registers a cache, and what `register` adds, for its whole life. NIXL serializes the calls: any thread may make
    them.

    `device_id` is the CUDA device of the cache, -1 for host memory.
    """

    def __init__(self, name: str, cache_address: int, num_bytes: int, device_id: int = -1) -> None:
        self._name = name
        self._device_id = device_id
        self._nixl = self.load()
        bindings = self._nixl.bindings
        self._agent = bindings.nixlAgent(name, self._config())
        self._backends = [self._agent.createBackend("UCX", {})]
        self._registered: list[object] = []
        self.register(cache_address, num_bytes)
        self._metadata = bytes(self._agent.getLocalMD())
        self._peers: dict[str, _Peer] = {}
        self._lists: dict[Grid, int] = {}  # of our memory, as prepared

    @staticmethod
    def load() -> Nixl:
        """Imports nixl, late: its libraries read the environment when they are loaded. What the operator set stays."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        raise_exceptions = logging.raiseExceptions
        from nixl import _bindings

        logging.raiseExceptions = raise_exceptions  # nixl's own logging set-up changes it for everybody
        members = [value for name, value in vars(_bindings).items() if name.endswith("Error")]
        return Nixl(_bindings, tuple(value for value in members if isinstance(value, type)))

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> bytes:
        """As it was before more was registered: peers need not know of that."""
        return self._metadata

    def register(self, address: int, num_bytes: int) -> None:
        segment, row = self._segment(self._device_id), (address, num_bytes, max(self._device_id, 0), "")
        memory = self._nixl.bindings.nixlRegDList(segment, [row])
        self._agent.registerMem(memory, self._backends)
        self._registered.append(memory)

    def connect(self, peer_name: str, metadata: bytes, device_id: int) -> None:
        try:
            loaded_name = self._agent.loadRemoteMD(metadata).decode()
            if loaded_name != peer_name:
                self._agent.invalidateRemoteMD(loaded_name)
                raise PeerUnreachable(f"the metadata is that of agent {loaded_name!r}, not of {peer_name!r}")
            self._agent.makeConnection(peer_name, self._backends)
        except self._nixl.errors as error:
            raise PeerUnreachable(f"agent {peer_name!r} cannot be reached: {error}") from error
        self._peers[peer_name] = _Peer(device_id)

    def disconnect(self, peer_name: str) -> None:
        peer = self._peers.pop(peer_name, None)
        if peer is None:
            return
        for write in list(peer.moving):
            write.give_up()
        try:
            self._release(peer.lists)
            self._agent.invalidateRemoteMD(peer_name)
        except self._nixl.errors as error:
            logger.warning("agent %s could not be forgotten: %s", peer_name, error)

    def write(self, peer_name: str, what: Sequence[Region] | Pieces) -> NixlWrite:
        peer = self._peers.get(peer_name)
        if peer is None:
            raise PeerUnreachable(f"agent {peer_name!r} is not connected")
        try:
            if isinstance(what, Pieces):
                handle, num_bytes = self._request_pieces(peer_name, peer, what), what.num_bytes
            else:
                handle, num_bytes = self._request_regions(peer_name, peer, what), sum(r.num_bytes for r in what)
        except self._nixl.errors as error:
            raise PeerUnreachable(f"a write to agent {peer_name!r} could not be prepared: {error}") from error
        write = NixlWrite(self._agent, self._nixl, handle, num_bytes, peer.moving)
        write.post()
        return write

    def progress(self) -> None:
        try:
            self._agent.getNotifs({})  # nobody sends any: asking for them is what makes UCX go on
        except self._nixl.errors as error:
            logger.warning("the transport reported an error: %s", error)

    def close(self) -> None:
        for peer_name in list(self._peers):
            self.disconnect(peer_name)
        self._release(self._lists)
        for memory in self._registered:
            self._agent.deregisterMem(memory, self._backends)
        self._agent = None  # closes its connections

    def _config(self) -> object:
        config = self._nixl.bindings.nixlAgentConfig()
        config.useProgThread = False
        config.syncMode = self._nixl.bindings.NIXL_THREAD_SYNC_STRICT
        return config

    def _request_pieces(self, peer_name: str, peer: _Peer, pieces: Pieces) -> int:
        """NIXL makes one descriptor of pieces that follow each other on both sides, so a list serves runs as well."""
        write = self._nixl.bindings.NIXL_WRITE
        here = self._prepared(self._nixl.bindings.NIXL_INIT_AGENT, self._lists, pieces.local, self._device_id)
        there = self._prepared(peer_name, peer.lists, pieces.remote, peer.device_id)
        indices = pieces.local_indices, pieces.remote_indices
        return int(self._agent.makeXferReq(write, here, indices[0], there, indices[1], "", self._backends))

    def _request_regions(self, peer_name: str, peer: _Peer, regions: Sequence[Region]) -> int:
        rows = np.array([(r.local_address, r.remote_address, r.num_bytes) for r in regions], np.uint64)  # [R, 3]
        here = self._descriptors(rows[:, 0], rows[:, 2], self._device_id)
        there = self._descriptors(rows[:, 1], rows[:, 2], peer.device_id)
        write = self._nixl.bindings.NIXL_WRITE
        return int(self._agent.createXferReq(write, here, there, peer_name, "", self._backends))

    def _prepared(self, agent_name: str, lists: dict[Grid, int], grid: Grid, device_id: int) -> int:
        """The list of all pieces of a grid, made at its first use. It takes one row: NIXL computes the rest."""
        if (handle := lists.get(grid)) is None:
            row = (grid.base_address, grid.piece_bytes, max(device_id, 0), grid.stride_bytes, grid.num_pieces)
            segment, rows = self._segment(device_id), np.array([row], np.uint64)
            handle = lists[grid] = int(self._agent.prepXferDlist(agent_name, segment, rows, self._backends))
        return handle

    def _release(self, lists: dict[Grid, int]) -> None:
        while lists:
            self._agent.releasedDlistH(lists.popitem()[1])

    def _segment(self, device_id: int) -> object:
        return self._nixl.bindings.VRAM_SEG if device_id >= 0 else self._nixl.bindings.DRAM_SEG

    def _descriptors(self, addresses: _Rows, num_bytes: _Rows, device_id: int) -> object:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, num_bytes, max(device_id, 0)
        return self._nixl.bindings.nixlXferDList(self._segment(device_id), rows)


class _Peer:
    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self.lists: dict[Grid, int] = {}  # of its cache, as prepared
        self.moving: set[NixlWrite] = set()


class NixlWrite:
    """A transfer request of NIXL. Its handle is given back as soon as it has ended."""

    def __init__(self, agent: Any, nixl: Nixl, handle: int, num_bytes: int, moving: set[NixlWrite]) -> None:
        self._agent = agent
        self._nixl = nixl
        self._handle = handle
        self._num_bytes = num_bytes
        self._moving = moving
        self._state = WriteState.MOVING
        moving.add(self)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def post(self) -> None:
        self._observe(self._agent.postXferReq)

    def poll(self) -> WriteState:
        if self._state is WriteState.MOVING:
            self._observe(self._agent.getXferStatus)
        return self._state

    def give_up(self) -> None:
        if self._state is WriteState.MOVING:
            self._end(WriteState.FAILED)

    def _observe(self, ask: Callable[[int], object]) -> None:
        try:
            status = ask(self._handle)
        except self._nixl.errors as error:
            logger.info("a write of %d bytes failed: %s", self._num_bytes, error)
            self._end(WriteState.FAILED)
            return
        if status != self._nixl.bindings.NIXL_IN_PROG:
            self._end(WriteState.DONE if status == self._nixl.bindings.NIXL_SUCCESS else WriteState.FAILED)

    def _end(self, state: WriteState) -> None:
        self._state = state
        self._moving.discard(self)
        try:
            self._agent.releaseXferReq(self._handle)
        except self._nixl.errors as error:  # NIXL keeps a handle that it cannot cancel; forgetting the peer ends it
            logger.warning("a write of %d bytes could not be cancelled: %s", self._num_bytes, error)
        del self._agent, self._handle
