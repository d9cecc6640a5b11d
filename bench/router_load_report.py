"""What the router's load bench found: its rows, its tables and its line of JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from bench.router_load_peers import PeerRate
from bench.router_load_sides import Measured


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """From a token's making to its arrival, in ms: p50 and p99, straight from the worker and through the router."""

    num_streams: int
    straight_ms: tuple[float, float]
    through_ms: tuple[float, float]

    @classmethod
    def of(cls, num_streams: int, straight: Sequence[Measured], through: Sequence[Measured]) -> LatencyRow:
        (p50, p99), (through_p50, through_p99) = (
            tuple(median(one.latency_ms(share) for one in rounds) for share in (0.5, 0.99))
            for rounds in (straight, through)
        )
        return cls(num_streams, (p50, p99), (through_p50, through_p99))

    @property
    def added_ms(self) -> tuple[float, float]:
        return self.through_ms[0] - self.straight_ms[0], self.through_ms[1] - self.straight_ms[1]


@dataclass(frozen=True, slots=True)
class RateRow:
    name: str
    num_streams: int
    tokens_per_s: float
    tokens_per_message: float
    router_cores: float
    tokens_per_core_s: float  # of the router's CPU time
    asker_cores: float

    @classmethod
    def of(cls, name: str, num_streams: int, rounds: Sequence[Measured]) -> RateRow:
        return cls(
            name,
            num_streams,
            median(one.tokens_per_s for one in rounds),
            median(one.tokens_per_message for one in rounds),
            median(one.side_cores for one in rounds),
            median(one.tokens_per_core_s for one in rounds),
            median(one.asker_cores for one in rounds),
        )


@dataclass(frozen=True, slots=True)
class Memory:
    num_streams: int
    num_tokens: int  # of each answer by then
    bytes_per_stream: float


@dataclass(frozen=True, slots=True)
class PeerRow:
    """64 streams whose tokens gather: tokens/s, and tokens/s per core of CPU time, ours and theirs."""

    name: str
    ours: tuple[float, float]
    theirs: tuple[float, float]

    @classmethod
    def of(cls, name: str, ours: Sequence[Measured], theirs: Sequence[PeerRate]) -> PeerRow:
        return cls(
            name,
            (median(one.tokens_per_s for one in ours), median(one.tokens_per_core_s for one in ours)),
            (median(one.tokens_per_s for one in theirs), median(one.tokens_per_core_s for one in theirs)),
        )


def latency_table(rows: Sequence[LatencyRow]) -> Table:
    table = Table(title="ms from a token's making to its arrival", caption=_load())
    for heading in ("streams", "straight p50", "p99", "through p50", "p99", "added p50", "p99"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = (*row.straight_ms, *row.through_ms, *row.added_ms)
        table.add_row(str(row.num_streams), *(f"{number:.2f}" for number in numbers))
    return table


def rate_table(rows: Sequence[RateRow], num_cores: int) -> Table:
    caption = f"{num_cores} cores, shared with workers and those who ask; {_load()}"
    table = Table(title="streamed tokens, as many as one process passes on", caption=caption)
    for heading in ("what", "streams", "tokens/s", "per message", "its cores", "tokens/s per core", "askers' cores"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_streams),
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_message:.1f}",
            f"{row.router_cores:.2f}",
            f"{row.tokens_per_core_s:,.0f}",
            f"{row.asker_cores:.2f}",
        )
    return table


def other_table(
    placements: Mapping[int, float], memory: Memory, answers: Sequence[Measured], scaling: float, num_cores: int
) -> Table:
    table = Table(title="the rest", show_header=False)
    for count, took_us in placements.items():
        table.add_row(f"placement among {count} workers", f"{took_us:.0f} µs")
    table.add_row("answers of one token, 64 at once", f"{median(one.answers_per_s for one in answers):,.0f} /s")
    each = f"each of {memory.num_streams} streams, {memory.num_tokens} tokens into its answer"
    table.add_row(f"memory for {each}", f"{memory.bytes_per_stream / 1024:.0f} KiB")
    note = "" if num_cores >= 8 else f" (no measure of it on {num_cores} cores)"
    table.add_row(f"two routers over one, message by message{note}", f"{scaling:.2f} x")
    return table


def peer_table(rows: Sequence[PeerRow]) -> Table:
    caption = f"the peers speak HTTP and send an event for each token; Dynamo's engine is its own; {_load()}"
    table = Table(title="64 streams whose tokens gather, tokens/s", caption=caption)
    for heading in ("peer", "this router", "peer", "ratio", "this router per core", "peer per core"):
        table.add_column(heading, justify="right")
    for row in rows:
        (ours, ours_per_core), (theirs, theirs_per_core) = row.ours, row.theirs
        rates = (f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
        table.add_row(row.name, *rates, f"{ours_per_core:,.0f}", f"{theirs_per_core:,.0f}")
    return table


def result(
    latencies: Sequence[LatencyRow],
    rates: Sequence[RateRow],
    placements: Mapping[int, float],
    memory: Memory,
    answers: Sequence[Measured],
    scaling: float,
    peers: Sequence[PeerRow],
) -> dict[str, object]:
    """`tokens_per_s` is message by message, of 64 streams."""
    one_by_one, gathered = (
        next(row for row in rates if row.name == name and row.num_streams == 64)
        for name in ("message by message", "as they gather")
    )
    return {
        "bench": "router_load",
        "tokens_per_s": round(one_by_one.tokens_per_s),
        "tokens_per_core_s": round(one_by_one.tokens_per_core_s),
        "gathered_tokens_per_s": round(gathered.tokens_per_s),
        "gathered_tokens_per_core_s": round(gathered.tokens_per_core_s),
        **{f"added_p99_ms_{row.num_streams}": round(row.added_ms[1], 2) for row in latencies},
        **{f"placement_us_{count}": round(took_us) for count, took_us in placements.items()},
        "answers_per_s": round(median(one.answers_per_s for one in answers)),
        "kib_per_stream": round(memory.bytes_per_stream / 1024),
        "two_routers": round(scaling, 2),
        **{f"over_{row.name}": round(row.ours[0] / row.theirs[0], 2) for row in peers},
        "load": round(os.getloadavg()[0], 1),
    }


def _load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"
