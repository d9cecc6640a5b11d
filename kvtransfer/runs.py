"""How the blocks of one sequence are written: in runs, part after part. Which of them have arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.agent import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive blocks of the sequence that are computed together: where they are here, and at the peer."""

    start: int  # index into the ticket's blocks
    local_ids: tuple[int, ...]
    here: Indices
    there: Indices

    @property
    def blocks(self) -> range:
        return range(len(self.local_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """These layers of some blocks of a run; `blocks` are indices into it. Each is another one, whatever it holds."""

    run: Run
    layers: range
    blocks: range

    @property
    def indices(self) -> range:
        """Into the ticket's blocks."""
        return range(self.run.start + self.blocks.start, self.run.start + self.blocks.stop)


def merged(parts: Sequence[Part]) -> list[Part]:
    """One part for neighbouring layers of the same blocks."""
    found = list[Part]()
    first, stop = parts[0], parts[0].layers.stop
    for part in parts[1:]:
        if part.layers.start != stop or part.run is not first.run or part.blocks != first.blocks:
            found.append(Part(first.run, range(first.layers.start, stop), first.blocks))
            first = part
        stop = part.layers.stop
    found.append(Part(first.run, range(first.layers.start, stop), first.blocks))
    return found


class Arrived:
    """How many blocks of the ticket, from the first on, have arrived with all their layers. Parts come in any order."""

    def __init__(self, num_layers: int) -> None:
        self.num_blocks = 0
        self._num_layers = num_layers
        self._num_pieces: Counter[Run] = Counter()  # layers of blocks, of runs that are beyond `num_blocks`

    def add(self, parts: Sequence[Part]) -> bool:
        """Whether `num_blocks` grew."""
        before = self.num_blocks
        for part in parts:
            self._num_pieces[part.run] += len(part.layers) * len(part.blocks)
        for run in sorted(self._num_pieces, key=lambda run: run.start):
            if run.start != self.num_blocks or self._num_pieces[run] < len(run.blocks) * self._num_layers:
                break
            del self._num_pieces[run]
            self.num_blocks += len(run.blocks)
        return self.num_blocks > before
