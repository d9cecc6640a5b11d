"""The KV blocks of a simulated worker: how many are held, and which prefixes of prompts are found there.

As `model.block_pool` has it, but in numbers: blocks of one prefix block of a trace come and go together, as a *group*,
and the others have no names. What nobody holds stays findable until its room is needed, least recently used first:
groups for everybody, the others for the sequence that was preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from model.block_pool import BlockHash


@dataclass(slots=True, eq=False)
class Held:
    """Blocks of one sequence, those of its groups among them."""

    num_blocks: int
    groups: list[BlockHash] = field(default_factory=list)
    num_published: int = 0  # groups of its prompt that are complete and were told; it may hold another copy of some


class SimulatedPool:
    """`changes`: groups that have become findable (True) or ceased to be, since somebody last emptied it."""

    def __init__(self, num_blocks: int, group_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.group_blocks = group_blocks
        self.num_used = 0
        self.changes: dict[BlockHash, bool] = {}
        self._references: dict[BlockHash, int] = {}
        self._idle: OrderedDict[object, int] = OrderedDict()  # blocks by group, or by whose they were
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        """Those that a prefix may still find among them."""
        return self.num_blocks - self.num_used

    def num_found(self, groups: Sequence[BlockHash]) -> int:
        """Of a prompt's groups, from the first on."""
        for index, group in enumerate(groups):
            if group not in self._references:
                return index
        return len(groups)

    def num_idle_blocks(self, groups: Sequence[BlockHash]) -> int:
        """Of these groups, which are findable: those that would cease to be free."""
        return self.group_blocks * sum(group in self._idle for group in groups)

    def num_left(self, owner: object) -> int:
        """Of the blocks that were its own when it gave them back, from the first of them on."""
        return self._idle.get(owner, 0)

    def looked_up(self, groups: Sequence[BlockHash], owner: object = None) -> None:
        """In vain: there was no room for the rest. It counts as use."""
        for key in (owner, *reversed(groups)):
            if key in self._idle:
                self._idle.move_to_end(key)

    def hold(self, groups: Sequence[BlockHash], num_blocks: int, owner: object = None) -> Held:
        """`num_blocks` for a sequence that begins with these groups, all of them findable, and what is left of its own.
        There must be room."""
        for group in groups:
            if self._references[group] == 0:
                self._forget_idle(group)
                self.num_used += self.group_blocks
            self._references[group] += 1
        self._forget_idle(owner)
        self.take(num_blocks - self.group_blocks * len(groups))
        return Held(num_blocks, list(groups), len(groups))

    def take(self, num_blocks: int) -> None:
        """Without a name. There must be room; what is findable there has to go, the last block of a sequence first."""
        self.num_used += num_blocks
        assert 0 <= self.num_used <= self.num_blocks, f"{self.num_used} of {self.num_blocks} blocks are used"
        while self._num_idle > self.num_free:
            key, num_blocks = next(iter(self._idle.items()))
            num_evicted = min(num_blocks, self._num_idle - self.num_free)
            if isinstance(key, bytes):
                self._forget_idle(key)
                del self._references[key]
                self.changes[key] = False
            elif num_evicted == num_blocks:
                self._forget_idle(key)
            else:
                self._idle[key] -= num_evicted
                self._num_idle -= num_evicted

    def give_back(self, held: Held, num_full: int = 0, owner: object = None) -> None:
        """`num_full` of its blocks are full of KV. The last ones of a sequence are the first to go."""
        self.take(self.group_blocks * len(held.groups) - held.num_blocks)
        num_own = num_full - self.group_blocks * len(held.groups)
        if num_own > 0:
            self._set_idle(owner or held, num_own)
        for group in reversed(held.groups):
            self._references[group] -= 1
            if self._references[group] == 0:
                self._set_idle(group, self.group_blocks)
                self.num_used -= self.group_blocks
        held.num_blocks, held.groups = 0, []

    def publish(self, held: Held, groups: Sequence[BlockHash]) -> None:
        """The first groups of a sequence's prompt, as far as they are complete. A second copy stays private."""
        for group in groups[held.num_published :]:
            if group not in self._references:
                self._references[group] = 1
                self.changes[group] = True
                held.groups.append(group)
        held.num_published = max(held.num_published, len(groups))

    def _set_idle(self, key: object, num_blocks: int) -> None:
        self._idle[key] = num_blocks
        self._num_idle += num_blocks

    def _forget_idle(self, key: object) -> None:
        self._num_idle -= self._idle.pop(key, 0)
