"""Which workers served a session last: its next request finds there what the last one left in their caches."""

from __future__ import annotations

from collections import OrderedDict

from router.candidate import WorkerId
from router.placement import Placement


class Sessions:
    """Of those that were served lately, `num_remembered` at most."""

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._workers: OrderedDict[str, tuple[WorkerId, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def workers_of(self, session_id: str) -> tuple[WorkerId, ...]:
        """Empty for a session that is not known, and for a request of none, whose id is empty."""
        return self._workers.get(session_id, ())

    def served(self, session_id: str, placement: Placement) -> None:
        if not session_id or self._num_remembered == 0:
            return
        self._workers[session_id] = tuple(worker.id for worker in placement.workers)
        self._workers.move_to_end(session_id)
        if len(self._workers) > self._num_remembered:
            self._workers.popitem(last=False)
