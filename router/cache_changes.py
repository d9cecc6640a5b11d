"""What a worker says of its prefix cache: a message of its feed, as the router reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.block_pool import BlockHash


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Numbered one by one in an epoch. A dump is all that is findable, in one message or several in a row."""

    number: int
    stored: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()
    begins_dump: bool = False
    ends_dump: bool = False
