"""What keys with limits have used at the other routers, as far as those have told. Pure: the time is passed in.

A router tells running totals of the keys that changed last, so that a record that was missed costs nothing. Where there
is no total to compare with (one of the two routers is new here, or was away), what was used before is not known: then
what is missing at the other one is missing here too, which cannot be counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from router.shared_records import KeyUse, KeyUses, LimitedKey

_MIN_PRUNED = 1000  # keys of a router
_KEPT_S = 5.0  # totals, after they were told: they are likely to be told again


@dataclass(frozen=True, slots=True)
class Used:
    """Since it was last told."""

    key: LimitedKey
    num_requests: int
    num_taken_tokens: int
    num_returned_tokens: int

    def __bool__(self) -> bool:
        return bool(self.num_requests or self.num_taken_tokens or self.num_returned_tokens)


@dataclass(frozen=True, slots=True)
class Missing:
    """Of the key's buckets at the other router; it may be missing here already."""

    key: LimitedKey
    requests: float
    tokens: float

    def __bool__(self) -> bool:
        return bool(self.requests or self.tokens)


@dataclass(slots=True)
class _Told:
    """Of one key at one router. `num_returnable_tokens`: taken there and counted here, so that they may come back."""

    use: KeyUse
    at: float
    num_returnable_tokens: int = 0


@dataclass(slots=True)
class _Router:
    number: int | None = None  # of the last change that it told of
    told: dict[LimitedKey, _Told] = field(default_factory=dict)
    prune_at: int = _MIN_PRUNED

    def total(self, key: LimitedKey, use: KeyUse, now: float) -> _Told | None:
        """What to compare with; none if that is not known."""
        told = self.told.get(key)
        if told is not None and told.use.since == use.since:
            return told
        has_begun_since = self.number is not None and use.since > self.number
        return _Told(KeyUse(use.since), now) if has_begun_since else None


class UsedElsewhere:
    """By router, until that has left."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}

    def num_running(self, key: LimitedKey) -> int:
        told = (router.told.get(key) for router in self._routers.values())
        return sum(each.use.num_running for each in told if each is not None)

    def left(self, router_id: str) -> None:
        """What it has used stays used; what ran there has ended, or nobody knows."""
        self._routers.pop(router_id, None)

    def learn(self, router_id: str, uses: KeyUses, now: float) -> Iterator[Used | Missing]:
        """What is to be counted here, once it has been iterated over to its end."""
        router = self._routers.setdefault(router_id, _Router())
        for key, use in uses.by_key.items():
            learnt: Used | Missing
            total = router.total(key, use, now)
            if total is None:
                router.told[key], learnt = _Told(use, now), Missing(key, use.missing_requests, use.missing_tokens)
            else:
                router.told[key], learnt = _compared(key, use, total, now)
            if learnt:
                yield learnt
        if router.number is None or router.number < uses.left_out:  # a change may have been missed
            _end_unseen(router.told, uses.by_key)
        router.number = uses.number
        if len(router.told) > router.prune_at:
            router.told = {key: told for key, told in router.told.items() if _matters(told, now)}
            router.prune_at = max(_MIN_PRUNED, 2 * len(router.told))


def _compared(key: LimitedKey, use: KeyUse, total: _Told, now: float) -> tuple[_Told, Used]:
    num_requests = max(0, use.num_requests - total.use.num_requests)
    num_taken = max(0, use.num_taken_tokens - total.use.num_taken_tokens)
    returnable = total.num_returnable_tokens + num_taken
    num_returned = min(returnable, max(0, use.num_returned_tokens - total.use.num_returned_tokens))
    return _Told(use, now, returnable - num_returned), Used(key, num_requests, num_taken, num_returned)


def _end_unseen(told: Mapping[LimitedKey, _Told], seen: Mapping[LimitedKey, KeyUse]) -> None:
    """Better too few are thought to run than some for ever."""
    for key in told.keys() - seen.keys():
        told[key].use = replace(told[key].use, num_running=0)


def _matters(told: _Told, now: float) -> bool:
    return told.use.num_running > 0 or now - told.at < _KEPT_S
