"""What the key of a caller allows: requests and tokens in a minute, requests at once. Pure: the clock is passed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protos.caller import Caller
from protos.errors import LimitExceeded

_MINUTE_S = 60.0
_ROUNDING = 1e-6
_CONCURRENT_RETRY_S = 1.0  # when one of them ends is not known


@dataclass(slots=True)
class TokenBucket:
    """Holds a minute's worth at most and fills evenly. Below zero: more was taken than was foreseen."""

    per_minute: int
    level: float
    at: float

    def fill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / _MINUTE_S)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Until so much could be taken; it is at most what the bucket holds."""
        missing = amount - self.level
        if missing < _ROUNDING:
            return 0.0
        return missing * _MINUTE_S / self.per_minute if self.per_minute else _MINUTE_S


@dataclass(slots=True)
class _Key:
    requests: TokenBucket | None
    tokens: TokenBucket | None
    num_concurrent: int = 0

    def buckets(self) -> Iterator[TokenBucket]:
        yield from (bucket for bucket in (self.requests, self.tokens) if bucket is not None)

    def is_as_new(self) -> bool:
        return self.num_concurrent == 0 and all(bucket.level >= bucket.per_minute for bucket in self.buckets())


class Allowance:
    """What one request has taken of its key's limits."""

    def __init__(self, caller: Caller, key: _Key, clock: Callable[[], float]) -> None:
        self.tenant = caller.tenant
        self._caller = caller
        self._key = key
        self._clock = clock
        self._taken = 0
        self._num_used = 0

    def take_tokens(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """As many as the answer may have at most; what it does not have is given back at the end.

        Raises LimitExceeded.
        """
        bucket = self._key.tokens
        if bucket is None:
            return
        bucket.fill(self._clock())
        if num_prompt_tokens + 1 > bucket.per_minute:
            error = LimitExceeded(
                f"{_named(self._caller)} may take {bucket.per_minute} tokens per minute, and the prompt alone has "
                f"{num_prompt_tokens}"
            )
            error.retryable = False
            raise error
        amount = min(num_prompt_tokens + max_tokens, bucket.per_minute)  # one that has a minute to itself goes
        if (wait_s := bucket.wait_s(amount)) > 0:
            raise LimitExceeded(
                f"{_named(self._caller)} may take {bucket.per_minute} tokens per minute: "
                f"{bucket.per_minute - bucket.level:.0f} of them are used, and this request may take {amount}, prompt "
                "and max_tokens together",
                retry_after_s=wait_s,
            )
        bucket.level -= amount
        self._taken = amount

    def used(self, num_tokens: int) -> None:
        """Prompt and answer, as it was in the end. Nothing, unless this is called."""
        self._num_used = num_tokens

    def end(self) -> None:
        self._key.num_concurrent -= 1
        if (bucket := self._key.tokens) is not None:
            bucket.fill(self._clock())
            bucket.level = min(bucket.per_minute, bucket.level + self._taken - self._num_used)


class RateLimits:
    """By key; a key whose limits change begins anew with those."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[Caller, _Key] = {}

    @contextmanager
    def claimed(self, caller: Caller) -> Iterator[Allowance]:
        """For one request, from before it costs anything until its end. Raises LimitExceeded."""
        now, limits = self._clock(), caller.limits
        key = self._key_of(caller, now)
        if limits.num_concurrent is not None and key.num_concurrent >= limits.num_concurrent:
            raise LimitExceeded(
                f"{_named(caller)} may have {limits.num_concurrent} requests at once, and has {key.num_concurrent}",
                retry_after_s=_CONCURRENT_RETRY_S,
            )
        if (requests := key.requests) is not None:
            if (wait_s := requests.wait_s(1)) > 0:
                raise LimitExceeded(
                    f"{_named(caller)} may make {requests.per_minute} requests per minute, and has made them",
                    retry_after_s=wait_s,
                )
            requests.level -= 1
        key.num_concurrent += 1
        allowance = Allowance(caller, key, self._clock)
        try:
            yield allowance
        finally:
            allowance.end()

    def _key_of(self, caller: Caller, now: float) -> _Key:
        key = self._keys.get(caller)
        if key is None:
            self._keys = {known: other for known, other in self._keys.items() if not _is_idle(other, now)}
            requests, tokens = caller.limits.requests_per_minute, caller.limits.tokens_per_minute
            key = self._keys[caller] = _Key(_full(requests, now), _full(tokens, now))
        for bucket in key.buckets():
            bucket.fill(now)
        return key


def _full(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, per_minute, now)


def _is_idle(key: _Key, now: float) -> bool:
    for bucket in key.buckets():
        bucket.fill(now)
    return key.is_as_new()


def _named(caller: Caller) -> str:
    return f"the key {caller.key!r}" if caller.key else "a caller without a key"
