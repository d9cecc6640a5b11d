"""Which slots of the memory that packed blocks are written from are free. Bookkeeping: it knows slots, never memory."""

from __future__ import annotations

from collections import Counter


class Staging:
    """For one thread. A peer gets none while it has as many as are free: one that takes no writes leaves half of them
    to the others, and a second one half of those."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 1")
        self._free = list(range(num_slots))
        self._num_held: Counter[str] = Counter()  # by peer

    @property
    def num_free(self) -> int:
        return len(self._free)

    def has_room(self, peer_name: str) -> bool:
        return len(self._free) > self._num_held[peer_name]

    def take(self, peer_name: str) -> int:
        """A slot, for a write to this peer. There must be one."""
        slot = self._free.pop()
        self._num_held[peer_name] += 1
        return slot

    def give_back(self, slot: int, peer_name: str) -> None:
        self._free.append(slot)
        self._num_held[peer_name] -= 1
        if not self._num_held[peer_name]:
            del self._num_held[peer_name]  # peers come and go
