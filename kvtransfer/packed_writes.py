"""One sequence's writes in eight bits: each packs a part of a layer when its turn comes, into a slot that it has until
it has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from kvtransfer import metrics
from kvtransfer.agent import Pieces
from kvtransfer.packing import Packing
from kvtransfer.peer import Peer
from kvtransfer.runs import Part, Run
from kvtransfer.ticket import Ticket
from model.block_sums import RunningSums


class PackedWrites:
    """`num_tokens` are those of the ticket's blocks; `sums` are of the blocks that it wants checked."""

    beside = None  # checksums are added up as soon as it is packed

    def __init__(self, packing: Packing, peer: Peer, ticket: Ticket, num_tokens: int, sums: RunningSums | None) -> None:
        self._packing = packing
        self._peer = peer
        self._ticket = ticket
        self._num_tokens = num_tokens
        self._sums = sums
        self._slots = {index: slot for slot, index in enumerate(ticket.checked)}
        self._staged: dict[Part, int] = {}  # slots of the staging memory, of what was packed and has not ended

    def parts(self, run: Run, layer: int) -> Iterator[tuple[Part, float]]:
        """What to write of a layer of a run. Each goes alone: it takes a slot, and there may be room for one only."""
        size, num_blocks = self._packing.blocks_per_slot, len(run.blocks)
        for start in range(0, num_blocks, size):
            yield Part(run, range(layer, layer + 1), range(start, min(start + size, num_blocks))), math.inf

    def has_room(self) -> bool:
        return self._packing.staging.has_room(self._peer.agent_name)

    def work_out(self, parts: Sequence[Part]) -> Pieces:
        """On the transfer thread, when they are about to be posted."""
        found = Pieces.of_all([self._pack(part) for part in parts])
        self._peer.check_lease(self._ticket.ticket_id)  # last: packing takes its time
        return found

    def ended(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if (slot := self._staged.pop(part, None)) is not None:
                self._packing.staging.give_back(slot, self._peer.agent_name)

    def _pack(self, part: Part) -> Pieces:
        packing, span, size = self._packing, self._peer.span, self._peer.span.layout.block_size
        num_tokens = min(self._num_tokens, part.indices.stop * size) - part.indices.start * size
        checked = [(at, self._slots[index]) for at, index in enumerate(part.indices) if index in self._slots]
        local_ids = part.run.local_ids[part.blocks.start : part.blocks.stop]
        started = time.perf_counter()
        slot = self._staged[part] = packing.staging.take(self._peer.agent_name)
        here = packing.pack(slot, part.layers.start, local_ids, num_tokens, self._sums, checked)
        metrics.PACK_SECONDS.inc(time.perf_counter() - started)
        there = span.indices(part.layers, part.run.there[part.blocks.start : part.blocks.stop])
        return Pieces(packing.grid, packing.remote_grid(span), here, there)
