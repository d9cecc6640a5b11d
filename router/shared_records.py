"""What routers keep in their store, and its form there. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from protos.caller import Limits
from router.candidate import Role, WorkerId

_LAST_AT = 253_402_300_799  # the year 9999 ends
_UNREADABLE = (KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class SentLoad:
    """What was sent to a worker and is not in its reports; as `router.dispatch` counts it."""

    num_decoding: int = 0
    num_coming_blocks: int = 0
    num_unreported_tokens: int = 0
    num_coming: int = 0
    num_spilled_tokens: int = 0

    def __add__(self, other: SentLoad) -> SentLoad:
        return SentLoad(
            self.num_decoding + other.num_decoding,
            self.num_coming_blocks + other.num_coming_blocks,
            self.num_unreported_tokens + other.num_unreported_tokens,
            self.num_coming + other.num_coming,
            self.num_spilled_tokens + other.num_spilled_tokens,
        )


@dataclass(frozen=True, slots=True)
class LimitedKey:
    """By name and limits: where these change, counting begins anew."""

    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class KeyUse:
    """Of one key at one router: totals, which only grow, what runs now, and what its buckets lacked when this was told.

    `since`: the change with which the totals began at 0; another one says that they did so again.
    """

    since: int
    num_requests: int = 0
    num_taken_tokens: int = 0
    num_returned_tokens: int = 0
    num_running: int = 0
    missing_requests: float = 0.0
    missing_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class KeyUses:
    """Those that changed last, of all at one router, whose changes are numbered.

    `number`: the last change of all. `left_out`: the last one of a key for which there was no room.
    """

    by_key: Mapping[LimitedKey, KeyUse] = field(default_factory=dict)
    number: int = 0
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        rows = [
            [
                *(key.name, key.limits.requests_per_minute, key.limits.tokens_per_minute, key.limits.num_concurrent),
                *(use.since, use.num_requests, use.num_taken_tokens, use.num_returned_tokens, use.num_running),
                *(round(use.missing_requests, 3), round(use.missing_tokens, 3)),
            ]
            for key, use in self.by_key.items()
        ]
        return {"number": self.number, "left_out": self.left_out, "rows": rows}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> KeyUses:
        """Raises ValueError, KeyError or TypeError."""
        by_key: dict[LimitedKey, KeyUse] = {}
        for name, requests, tokens, concurrent, *counts, missing_requests, missing_tokens in record["rows"]:
            limits = Limits(*(None if limit is None else _count(limit) for limit in (requests, tokens, concurrent)))
            missing = _amount(missing_requests), _amount(missing_tokens)
            since, num_requests, num_taken, num_returned, num_running = map(_count, counts)
            use = KeyUse(since, num_requests, num_taken, num_returned, num_running, *missing)
            by_key[LimitedKey(str(name), limits)] = use
        return cls(by_key, _count(record["number"]), _count(record["left_out"]))


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """`beat` grows with every record of a router: one that stands still is of a router that has gone."""

    address: str
    beat: int
    loads: Mapping[WorkerId, SentLoad] = field(default_factory=dict)
    uses: KeyUses = field(default_factory=KeyUses)

    def to_bytes(self) -> bytes:
        rows = [
            [worker.name, worker.epoch, load.num_decoding, load.num_coming_blocks, load.num_unreported_tokens]
            for worker, load in self.loads.items()
        ]
        record = {
            "address": self.address,
            "beat": self.beat,
            "loads": rows,
            "coming": [load.num_coming for load in self.loads.values()],  # apart: older routers know rows of five
            "spilled": [load.num_spilled_tokens for load in self.loads.values()],
            "keys": self.uses.to_json(),
        }
        return json.dumps(record, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> RouterRecord:
        """Raises ValueError. A router of an older version tells of no keys."""
        try:
            record: dict[str, Any] = json.loads(raw)
            rows = record["loads"]
            none = [0] * len(rows)
            more = zip(record.get("coming", none), record.get("spilled", none), strict=True)
            loads = {
                WorkerId(str(name), str(epoch)): SentLoad(*map(int, (*sent, *others)))
                for (name, epoch, *sent), others in zip(rows, more, strict=True)
            }
            uses = KeyUses.from_json(record["keys"]) if "keys" in record else KeyUses()
            return cls(str(record["address"]), int(record["beat"]), loads, uses)
        except _UNREADABLE as error:
            raise ValueError(f"not the record of a router: {error}") from error


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an operator, or a plan, wants of a worker."""

    role: Role
    is_drained: bool


@dataclass(frozen=True, slots=True)
class VersionedAssignment:
    """Version 0 is how a worker started: nobody has decided anything yet."""

    assignment: Assignment
    version: int = 0
    writer: str = ""

    @property
    def rank(self) -> tuple[int, str]:
        """The greater one holds, wherever the two meet."""
        return self.version, self.writer

    def to_bytes(self) -> bytes:
        record = {
            "role": self.assignment.role.value,
            "drained": self.assignment.is_drained,
            "version": self.version,
            "writer": self.writer,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> VersionedAssignment:
        """Raises ValueError."""
        try:
            record: dict[str, Any] = json.loads(raw)
            assignment = Assignment(Role(record["role"]), bool(record["drained"]))
            return cls(assignment, int(record["version"]), str(record["writer"]))
        except _UNREADABLE as error:
            raise ValueError(f"not an assignment: {error}") from error


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided when, by whom and why, for people to read. `at`: in seconds since 1970."""

    at: float
    router: str  # that was asked, or plans
    what: str  # role, drain, no drain; plan, proposal, manual, auto, frozen; flip done, flip failed
    worker: str = ""
    role: str = ""
    by: str = ""  # the name of a key; empty where none is asked for
    reason: str = ""
    gain: float = 0.0  # requests a second within the SLOs, as predicted
    num_prefill: int = 0  # of a plan or a proposal, and of what is set by hand
    num_decode: int = 0
    took_s: float = 0.0  # of a flip
    num_moved: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)}).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Decision:
        """Raises ValueError."""
        try:
            record: dict[str, Any] = json.loads(raw)
            if (at := _amount(record["at"])) > _LAST_AT:
                raise ValueError(f"{at} is no time")
            return cls(
                at=at,
                router=str(record["router"]),
                what=str(record["what"]),
                worker=str(record["worker"]),
                role=str(record.get("role", "")),
                by=str(record.get("by", "")),
                reason=str(record.get("reason", "")),
                gain=float(record.get("gain", 0.0)),
                num_prefill=_count(record.get("num_prefill", 0)),
                num_decode=_count(record.get("num_decode", 0)),
                took_s=_amount(record.get("took_s", 0.0)),
                num_moved=_count(record.get("num_moved", 0)),
            )
        except _UNREADABLE as error:
            raise ValueError(f"not a decision: {error}") from error


def _count(value: object) -> int:
    """Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _amount(value: object) -> float:
    """Raises ValueError."""
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not an amount")
    return float(value)
