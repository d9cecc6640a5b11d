"""One sequence's writes from the cache as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtransfer.agent import Pieces
from kvtransfer.geometry import CacheSpan, pieces
from kvtransfer.peer import Peer
from kvtransfer.runs import Part, Run, merged
from kvtransfer.ticket import Ticket
from model.block_sums import RunningSums


class PlainWrites:
    """`sums` are of the blocks that the ticket wants checked."""

    def __init__(self, local: CacheSpan, peer: Peer, ticket: Ticket, sums: RunningSums | None) -> None:
        self._local = local
        self._peer = peer
        self._ticket = ticket
        self._sums = sums
        self._slots = {index: slot for slot, index in enumerate(ticket.checked)}

    def parts(self, run: Run, layer: int) -> Iterator[tuple[Part, float]]:
        """What to write of a layer of a run, with the number of bytes; see `TransferThread.post`."""
        yield Part(run, range(layer, layer + 1), run.blocks), len(run.blocks) * self._local.grid.piece_bytes

    def has_room(self) -> bool:
        return True

    def work_out(self, parts: Sequence[Part]) -> Pieces:
        """On the transfer thread, when they are about to be posted."""
        span = self._peer.span
        found = [pieces(self._local, span, part.layers, part.run.here, part.run.there) for part in merged(parts)]
        self._peer.check_lease(self._ticket.ticket_id)
        return Pieces.of_all(found)

    def beside(self, parts: Sequence[Part]) -> None:
        """Adds up checksums, which takes about as long as the writes."""
        if self._sums is not None:
            for part in merged(parts):
                slots = [(part.run.local_ids[i], self._slots.get(part.run.start + i)) for i in part.blocks]
                checked = [(block_id, slot) for block_id, slot in slots if slot is not None]
                if checked:
                    self._sums.add(part.layers, *zip(*checked, strict=True))

    def ended(self, parts: Sequence[Part]) -> None:
        """Nothing was taken for them."""
