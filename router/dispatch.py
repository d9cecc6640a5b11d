"""What was sent to workers and has not ended yet, with its sums kept: what a worker is known to have to do costs the
same to ask whether a few requests run there or thousands.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from router.first_token import rank_of
from router.spill import Spilled

_NUM_RELEASES = 8  # that placement is told of
_NUM_PROMPTS = 64  # that placement is told of
_STAY_SHARE = 0.05  # of each sequence that has ended in the mean
_NUM_STAYS = 20  # before so many have ended nothing is known: the short ones end first


@dataclass(slots=True, eq=False)
class Dispatch:
    """The load that one attempt puts on its workers, from placement until `end`.

    `num_tokens` have to be computed. Of the decode worker `num_blocks` are for the prompt, and `num_blocks_in_all` are
    given back by `ends_at`, if that is known: an answer may end before its last token, but not after it.

    `leaving` is set while its decode worker is to be emptied: the sequence had better go elsewhere. `eased` is called
    when some of the load has ended.
    """

    at: float
    num_tokens: int
    num_blocks: int
    prefill: Dispatches | None
    decode: Dispatches | None
    num_blocks_in_all: int = 0
    ends_at: float | None = None
    is_prefilled: bool = False
    prefilled_at: float | None = None
    clock: Callable[[], float] = time.monotonic
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    eased: Callable[[], None] = lambda: None

    def begin(self) -> None:
        for dispatches in self._places():
            dispatches.begin(self)

    def prefilled(self) -> None:
        """The first token is there: nothing is queued any more, and the decode worker's report has the blocks."""
        if not self.is_prefilled:
            self.is_prefilled = True
            self.prefilled_at = self.clock()
            for dispatches in self._places():
                dispatches.prefilled(self)
            self.eased()

    @property
    def prefills_on(self) -> Dispatches | None:
        """Where its prompt is computed."""
        return self.decode if self.prefill is None else self.prefill

    def handed_over(self) -> None:
        """The sequence has gone on elsewhere; what is left of this is to be ended."""
        if self.decode is not None:
            self.decode.num_handed_over += 1

    def end(self) -> None:
        stay_s = None if self.prefilled_at is None else self.clock() - self.prefilled_at
        self.prefilled()  # or never will be
        for dispatches in self._places():
            dispatches.end(self, stay_s)
        self.eased()

    def _places(self) -> list[Dispatches]:
        return [dispatches for dispatches in (self.prefill, self.decode) if dispatches is not None]


class Dispatches:
    """Those of one worker. `on_change` is called whenever a sum is another."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.num_decoding = 0  # or on their way to
        self.num_coming = 0  # of those that decode here, until they are prefilled
        self.num_coming_blocks = 0
        self.num_handed_over = 0  # to other workers, in all
        self.spilled = Spilled()
        self._num_stays = 0
        self._mean_stay_s = 0.0
        self.num_unreported_tokens = 0  # of those that prefill here, until they have or a report has them
        self._running: set[Dispatch] = set()
        self._unreported: dict[Dispatch, None] = {}  # oldest first
        self._prompts: list[tuple[float, int]] = []  # of those that prefill here, until they have: rank, and tokens
        self._ends: list[tuple[float, int]] = []  # of those that decode here, and blocks that are given back then

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Dispatch]:
        return iter(self._running)

    @property
    def stay_s(self) -> float:
        """Of those that decoded here, from the first token on: a decayed mean; 0 while it is not known."""
        return self._mean_stay_s if self._num_stays >= _NUM_STAYS else 0.0

    @property
    def num_in_hand(self) -> int:
        """Requests that this worker has something to do for yet: one that was prefilled here and decodes elsewhere is
        not among them."""
        return sum(dispatch.decode is self or not dispatch.is_prefilled for dispatch in self._running)

    def releases(self, after: float) -> tuple[tuple[float, int], ...]:
        """The next ends: when, and how many blocks are given back then."""
        first = bisect_left(self._ends, (after, 0))
        return tuple(self._ends[first : first + _NUM_RELEASES])

    def prompts(self) -> tuple[tuple[float, int], ...]:
        """That wait to be computed here or are, those first that come first: rank and tokens of each."""
        return tuple(self._prompts[:_NUM_PROMPTS])

    def begin(self, dispatch: Dispatch) -> None:
        self._running.add(dispatch)
        if dispatch.decode is self:
            self.num_decoding += 1
            self.num_coming += 1
            self.num_coming_blocks += dispatch.num_blocks
            if dispatch.prefill is None:
                self.spilled = self.spilled.and_then(dispatch.at, dispatch.num_tokens)
            if dispatch.ends_at is not None:
                insort(self._ends, (dispatch.ends_at, dispatch.num_blocks_in_all))
        if dispatch.prefills_on is self:
            self._unreported[dispatch] = None
            self.num_unreported_tokens += dispatch.num_tokens
            insort(self._prompts, (rank_of(dispatch.num_tokens, dispatch.at), dispatch.num_tokens))
        self.on_change()

    def reported(self, until: float) -> None:
        """The worker has counted what was sent by then. `until` never decreases from call to call."""
        while self._unreported and (oldest := next(iter(self._unreported))).at <= until:
            self._no_longer_unreported(oldest)

    def prefilled(self, dispatch: Dispatch) -> None:
        if dispatch.decode is self:
            self.num_coming -= 1
            self.num_coming_blocks -= dispatch.num_blocks
        if dispatch in self._unreported:
            self._no_longer_unreported(dispatch)
        if dispatch.prefills_on is self:
            prompt = rank_of(dispatch.num_tokens, dispatch.at), dispatch.num_tokens
            if (index := bisect_left(self._prompts, prompt)) < len(self._prompts) and self._prompts[index] == prompt:
                del self._prompts[index]
        self.on_change()

    def end(self, dispatch: Dispatch, stay_s: float | None) -> None:
        if dispatch not in self._running:
            return
        self._running.remove(dispatch)
        if dispatch.decode is self:
            self.num_decoding -= 1
            if stay_s is not None:
                self._num_stays += 1
                self._mean_stay_s += (stay_s - self._mean_stay_s) * max(_STAY_SHARE, 1 / self._num_stays)
            if dispatch.ends_at is not None:
                del self._ends[bisect_left(self._ends, (dispatch.ends_at, dispatch.num_blocks_in_all))]
        self.on_change()

    def _no_longer_unreported(self, dispatch: Dispatch) -> None:
        del self._unreported[dispatch]
        self.num_unreported_tokens -= dispatch.num_tokens
