"""The values of a hand-over: what the two workers say to each other. No transport, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from model.kv_layout import KVLayout

AS_IS = "as-is"  # no coding: KV is written as it lies in the sender's cache


@dataclass(frozen=True, slots=True)
class SenderIdentity:
    """A prefill worker and its process start: the same worker restarted is another sender."""

    worker_id: str
    epoch: str


@dataclass(frozen=True, slots=True)
class HandoverTarget:
    """The decode worker, and its process start, that the router placed a sequence on."""

    worker_id: str
    address: str
    epoch: str


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """What a sender must know of a decode worker before it writes into it."""

    epoch: str
    agent_name: str
    agent_metadata: bytes
    layout: KVLayout
    num_blocks: int
    base_address: int
    device_id: int
    codings: tuple[str, ...] = ()  # that it takes KV in, besides as it is


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a sender asks for: room for the KV of `num_tokens` tokens whose full blocks have these hashes."""

    attempt_id: str
    request_id: str
    sender: SenderIdentity
    layout_fingerprint: str
    num_tokens: int
    block_hashes: tuple[bytes, ...]
    coding: str = AS_IS


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to write into `block_ids` (tokens `num_cached_tokens` onwards, in order) until the lease ends."""

    ticket_id: str
    epoch: str
    num_cached_tokens: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    lease_s: float
    checked: tuple[int, ...] = ()  # indices of block_ids: the record has to have checksums of these
    mac: bytes = field(default=b"", repr=False)  # to be returned with the record or the release
    coding: str = AS_IS  # in which the blocks are to be written


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a sender says of its tickets: those that it may be writing under, and how many blocks are written by now of
    some of them."""

    ticket_ids: Sequence[str]
    num_written_blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a heartbeat that was sent at `sent_at`, on our event loop's clock: the tickets that have ended."""

    ended_ticket_ids: tuple[str, ...]
    sent_at: float


@dataclass(frozen=True, slots=True)
class HandoverRecord:
    """What was written, and the token to go on from; sent once all of it has been written.

    The other tokens and the sampling reach the decode worker from the router.
    """

    ticket_id: str
    attempt_id: str
    epoch: str
    sender_epoch: str
    layout_fingerprint: str
    generations: tuple[int, ...]
    num_tokens: int
    first_token_id: int
    sent_tokens: int
    sent_bytes: int
    drafting: bytes = b""  # what the drafter needs beside the KV
    checksums: tuple[int, ...] = ()  # two for each block that the ticket wants checked
    mac: bytes = field(default=b"", repr=False)  # the ticket's
    coding: str = AS_IS


@dataclass(frozen=True, slots=True)
class ReceivedSequence:
    """A committed hand-over. Whoever takes it owns one reference to each block.

    `num_cached_tokens` of the `num_tokens` were held here already; `num_received_tokens` were written by the sender.
    """

    attempt_id: str
    block_ids: tuple[int, ...]
    num_tokens: int
    num_cached_tokens: int
    num_received_tokens: int
    first_token_id: int
    drafting: bytes = b""


@dataclass(frozen=True, slots=True)
class SendStats:
    """What one hand-over moved."""

    sent_tokens: int
    sent_bytes: int
