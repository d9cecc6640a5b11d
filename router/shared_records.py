"""What routers keep in their store, and its form there. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.candidate import Role, WorkerId

_UNREADABLE = (KeyError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class SentLoad:
    """What was sent to a worker and is not in its reports; as `router.dispatch` counts it."""

    num_decoding: int = 0
    num_coming_blocks: int = 0
    num_unreported_tokens: int = 0

    def __add__(self, other: SentLoad) -> SentLoad:
        return SentLoad(
            self.num_decoding + other.num_decoding,
            self.num_coming_blocks + other.num_coming_blocks,
            self.num_unreported_tokens + other.num_unreported_tokens,
        )


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """`beat` grows with every record of a router: one that stands still is of a router that has gone."""

    address: str
    beat: int
    loads: Mapping[WorkerId, SentLoad] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        rows = [
            [worker.name, worker.epoch, load.num_decoding, load.num_coming_blocks, load.num_unreported_tokens]
            for worker, load in self.loads.items()
        ]
        return json.dumps({"address": self.address, "beat": self.beat, "loads": rows}).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> RouterRecord:
        """Raises ValueError."""
        try:
            record: dict[str, Any] = json.loads(raw)
            loads = {
                WorkerId(str(name), str(epoch)): SentLoad(int(decoding), int(blocks), int(tokens))
                for name, epoch, decoding, blocks, tokens in record["loads"]
            }
            return cls(str(record["address"]), int(record["beat"]), loads)
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
