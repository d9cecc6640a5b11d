"""How the blocks of one sequence are written: in runs, layer by layer. Which of them have arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtransfer.agent import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive blocks of the sequence that are written together: where they are here, and at the peer."""

    local_ids: tuple[int, ...]
    start: int  # index into the ticket's blocks
    here: Indices
    there: Indices
    checked: tuple[tuple[int, int], ...]  # local block, and slot of its sums, of those that have any


@dataclass(frozen=True, slots=True)
class Part:
    """These layers of a run."""

    run: Run
    layers: range


def merged(parts: Sequence[Part]) -> list[Part]:
    """One part for neighbouring layers of the same run."""
    found = list[Part]()
    for part in parts:
        if found and found[-1].run is part.run and found[-1].layers.stop == part.layers.start:
            found[-1] = replace(found[-1], layers=range(found[-1].layers.start, part.layers.stop))
        else:
            found.append(part)
    return found


class Arrived:
    """How many blocks of the ticket, from the first on, have arrived with all their layers. Parts come in any order."""

    def __init__(self, num_layers: int) -> None:
        self.num_blocks = 0
        self._num_all_layers = num_layers
        self._num_layers: Counter[Run] = Counter()  # of runs that are beyond `num_blocks`

    def add(self, parts: Sequence[Part]) -> bool:
        """Whether `num_blocks` grew."""
        before = self.num_blocks
        for part in parts:
            self._num_layers[part.run] += len(part.layers)
        for run in sorted(self._num_layers, key=lambda run: run.start):
            if run.start != self.num_blocks or self._num_layers[run] < self._num_all_layers:
                break
            del self._num_layers[run]
            self.num_blocks += len(run.local_ids)
        return self.num_blocks > before
