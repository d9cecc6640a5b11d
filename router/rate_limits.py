"""What the key of a caller allows: requests and tokens in a minute, requests at once. Pure: the clock is passed in.

Routers that share a store count together: each tells what its keys have used (`used_here`), and counts what the others
tell as used here too (`used_elsewhere`). Nobody is asked on the way of a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protos.caller import Caller, Limits
from protos.errors import LimitExceeded
from router.shared_records import KeyUse, KeyUses, LimitedKey
from router.token_bucket import TokenBucket
from router.used_elsewhere import Missing, Used, UsedElsewhere

_CONCURRENT_RETRY_S = 1.0  # when one of them ends is not known
_MAX_TOLD = 250  # keys in a record, those that changed last: several times what a router serves in a tenth of a second
_TOLD_S = 6.0  # after its last change: who has not heard of it by then has taken this router for gone, and asks anew
_MIN_PRUNED = 1000
_NONE = Limits()


@dataclass(slots=True)
class _Key:
    requests: TokenBucket | None
    tokens: TokenBucket | None
    since: int
    changed: int
    changed_at: float
    num_requests: int = 0
    num_taken_tokens: int = 0
    num_returned_tokens: int = 0
    num_running: int = 0

    def buckets(self) -> Iterator[TokenBucket]:
        yield from (bucket for bucket in (self.requests, self.tokens) if bucket is not None)

    def fill(self, now: float) -> None:
        for bucket in self.buckets():
            bucket.fill(now)

    def is_as_new(self, now: float) -> bool:
        """To the others as well: they have been told."""
        if self.num_running or now - self.changed_at < _TOLD_S:
            return False
        self.fill(now)
        return all(bucket.level >= bucket.per_minute for bucket in self.buckets())

    def use(self) -> KeyUse:
        return KeyUse(
            self.since,
            self.num_requests,
            self.num_taken_tokens,
            self.num_returned_tokens,
            self.num_running,
            0.0 if self.requests is None else self.requests.missing,
            0.0 if self.tokens is None else self.tokens.missing,
        )

    def used_elsewhere(self, used: Used) -> None:
        """What was given back first: the order is not known, and so it is never more than there was."""
        if self.requests is not None:
            self.requests.level -= used.num_requests
        if self.tokens is not None:
            self.tokens.give(used.num_returned_tokens)
            self.tokens.level -= used.num_taken_tokens

    def missing_elsewhere(self, missing: Missing) -> None:
        if self.requests is not None:
            self.requests.lower_to(missing.requests)
        if self.tokens is not None:
            self.tokens.lower_to(missing.tokens)


class Allowance:
    """What one request has taken of its key's limits; `changed` is called after each change of that."""

    def __init__(self, caller: Caller, key: _Key, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        self.tenant = caller.tenant
        self._caller = caller
        self._key = key
        self._clock = clock
        self._changed = changed
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
                f"{bucket.missing:.0f} of them are used, and this request may take {amount}, prompt "
                "and max_tokens together",
                retry_after_s=wait_s,
            )
        self._take(bucket, amount)
        self._taken = amount
        self._changed()

    def used(self, num_tokens: int) -> None:
        """Prompt and answer, as it was in the end. Nothing, unless this is called."""
        self._num_used = num_tokens

    def end(self) -> None:
        self._key.num_running -= 1
        if (bucket := self._key.tokens) is not None:
            bucket.fill(self._clock())
            if self._num_used > self._taken:
                self._take(bucket, self._num_used - self._taken)
            else:
                bucket.give(self._taken - self._num_used)
                self._key.num_returned_tokens += self._taken - self._num_used
        self._changed()

    def _take(self, bucket: TokenBucket, amount: int) -> None:
        bucket.level -= amount
        self._key.num_taken_tokens += amount


class RateLimits:
    """By key; a key whose limits change begins anew with those. For `router.sharing` it is its SharedLimits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[LimitedKey, _Key] = {}  # in the order in which they changed
        self._elsewhere = UsedElsewhere()
        self._prune_at = _MIN_PRUNED
        self._number = 0  # of the last change

    @contextmanager
    def claimed(self, caller: Caller) -> Iterator[Allowance]:
        """For one request, from before it costs anything until its end. Raises LimitExceeded."""
        now, limits, name = self._clock(), caller.limits, LimitedKey(caller.key, caller.limits)
        key = self._key_of(name, now)
        if limits.num_concurrent is not None:
            num_running = key.num_running + self._elsewhere.num_running(name)
            if num_running >= limits.num_concurrent:
                raise LimitExceeded(
                    f"{_named(caller)} may have {limits.num_concurrent} requests at once, and has {num_running}",
                    retry_after_s=_CONCURRENT_RETRY_S,
                )
        if (requests := key.requests) is not None:
            if (wait_s := requests.wait_s(1)) > 0:
                raise LimitExceeded(
                    f"{_named(caller)} may make {requests.per_minute} requests per minute, and has made them",
                    retry_after_s=wait_s,
                )
            requests.level -= 1
        key.num_requests += 1
        key.num_running += 1
        self._changed(name, key)
        allowance = Allowance(caller, key, self._clock, lambda: self._changed(name, key))
        try:
            yield allowance
        finally:
            allowance.end()

    @property
    def num_changes(self) -> int:
        """Of what `used_here` tells."""
        return self._number

    def used_here(self) -> KeyUses:
        now, by_key, as_new = self._clock(), dict[LimitedKey, KeyUse](), list[LimitedKey]()
        left_out = 0
        for name, key in reversed(self._keys.items()):
            if len(by_key) == _MAX_TOLD:
                left_out = key.changed
                break
            if key.is_as_new(now):
                as_new.append(name)
            else:
                key.fill(now)
                by_key[name] = key.use()
        self._forget(as_new)
        return KeyUses(by_key, self._number, left_out)

    def used_elsewhere(self, router_id: str, uses: KeyUses) -> None:
        """A key that has not been used here begins here too: what all have used of it is told to those who come."""
        now = self._clock()
        for learnt in self._elsewhere.learn(router_id, uses, now):
            key = self._key_of(learnt.key, now)
            if isinstance(learnt, Used):
                key.used_elsewhere(learnt)
            else:
                key.missing_elsewhere(learnt)

    def router_left(self, router_id: str) -> None:
        self._elsewhere.left(router_id)

    def _key_of(self, name: LimitedKey, now: float) -> _Key:
        if name.limits == _NONE:
            return _Key(None, None, 0, 0, now)  # nobody need know
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = self._new_key(name, now)
        key.fill(now)
        return key

    def _new_key(self, name: LimitedKey, now: float) -> _Key:
        if len(self._keys) >= self._prune_at:
            self._forget([other for other, known in self._keys.items() if known.is_as_new(now)])
            self._prune_at = max(_MIN_PRUNED, 2 * len(self._keys))
        self._number += 1
        requests, tokens = name.limits.requests_per_minute, name.limits.tokens_per_minute
        return _Key(_full(requests, now), _full(tokens, now), self._number, self._number, now)

    def _changed(self, name: LimitedKey, key: _Key) -> None:
        if name.limits == _NONE:
            return
        self._number += 1
        key.changed, key.changed_at = self._number, self._clock()
        self._keys[name] = self._keys.pop(name)  # the last one now

    def _forget(self, names: list[LimitedKey]) -> None:
        for name in names:
            del self._keys[name]


def _full(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, per_minute, now)


def _named(caller: Caller) -> str:
    return f"the key {caller.key!r}" if caller.key else "a caller without a key"
