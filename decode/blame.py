"""Who is to blame when a drafter raises: its batch is tried again in halves, down to the sequences that fail alone.

So one broken sequence among N costs about 2 log2 N calls, and N broken ones 2 N; each is paid for by at least one
sequence that drafts no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from model.runner import DraftingState

logger = logging.getLogger(__name__)

Call = Callable[[Sequence[int]], None]
"""Does something for the sequences with these indexes."""


def mark_failing(what: str, call: Call, states: Sequence[DraftingState]) -> int:
    """`call` for all sequences, none of which has failed; marks those for which it raises even alone.

    If it raises for the batch only, as for want of memory, all are marked: it would raise again (if one of them failed
    by itself as well, in the next step). Where it raised, the states are as they were. Returns how many sequences are
    marked, those by `call` itself among them.
    """
    before = [_Kept(state) for state in states]
    error = _try(call, before, range(len(states)))
    if error is None:
        return sum(state.failed for state in states)
    for kept in before if not any(state.failed for state in states) else ():
        kept.state.failed = True
    num_failed = sum(state.failed for state in states)
    logger.error("%s %d sequences failed; %d go on without drafts", what, len(states), num_failed, exc_info=error)
    return num_failed


def _try(call: Call, before: Sequence[_Kept], indexes: Sequence[int]) -> Exception | None:
    """Returns what was raised for them together, after it has found out for which of them alone."""
    if not indexes:
        return None
    try:
        call(indexes)
    except Exception as error:
        for index in indexes:
            before[index].put_back()
        if len(indexes) == 1:
            before[indexes[0]].state.failed = True
        else:
            half = len(indexes) // 2
            _try(call, before, indexes[:half])
            _try(call, before, indexes[half:])
        return error
    return None


class _Kept:
    """What a drafter knows of a sequence, as it is now: a tensor, or a dataclass whose fields it assigns to."""

    __slots__ = ("_contents", "state")

    def __init__(self, state: DraftingState) -> None:
        self.state = state
        self._contents = _contents(state)

    def put_back(self) -> None:
        for holder, name, content in self._contents:
            setattr(holder, name, content)
        self.state.failed = False


def _contents(holder: object) -> list[tuple[object, str, object]]:
    """The fields of a dataclass, and of dataclasses in them."""
    found: list[tuple[object, str, object]] = []
    for name in getattr(holder, "__dataclass_fields__", ()):
        content = getattr(holder, name)
        found.append((holder, name, content))
        if hasattr(content, "__dataclass_fields__"):
            found += _contents(content)
    return found
