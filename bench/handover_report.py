"""What `bench.handover` says: tables for people, and the figures of its line of JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.handover_sides import Handover
from bench.wire_error import CodingResult

HALF_LINK, FULL_LINK = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """Beside a real model."""

    num_tokens: int
    hidden: Handover  # medians over the rounds
    after: Handover
    raw_bytes_per_s: float
    pull_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.after.sent_bytes / self.after.posting_s

    @property
    def rate_vs_raw(self) -> float:
        return self.bytes_per_s / self.raw_bytes_per_s

    @property
    def writing_share(self) -> float:
        """Of the transfer thread's time: the agent's own."""
        return self.after.writing_s / self.after.posting_s


@dataclass(frozen=True, slots=True)
class PacedRow:
    """Beside KV that takes `1 / link_share` of the bare transfer time to make. `total_s` is until it is accepted."""

    num_tokens: int
    link_share: float
    bare_s: float
    exposed_s: float
    total_s: float
    posting_s: float  # the transfer thread's time
    record_s: float  # of `exposed_s`
    round_trip_s: float
    checking_s: float

    @property
    def exposed(self) -> float:
        """In bare transfers."""
        return self.exposed_s / self.bare_s

    @property
    def total(self) -> float:
        return self.total_s / self.bare_s


@dataclass(frozen=True, slots=True)
class MooncakeRow:
    """Bytes per second when all of them are there already: written by us, and written, recorded, checked, accepted."""

    num_tokens: int
    mooncake: float
    written: float
    accepted: float
    nixl: float


def model_table(rows: Sequence[Row], title: str) -> Table:
    table = _table(title, ("tokens", "MB", "TTFT", "exposed", "share", "after", "share", "pull"))
    for name in ("rate", "of it NIXL", "NIXL alone"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_tokens),
            f"{row.hidden.sent_bytes / 1e6:.1f}",
            f"{row.hidden.ttft_s * 1e3:.0f}",
            f"{row.hidden.exposed_s * 1e3:.2f}",
            f"{row.hidden.exposed_share:.2%}",
            f"{row.after.exposed_s * 1e3:.2f}",
            f"{row.after.exposed_share:.2%}",
            f"{row.pull_s * 1e3:.2f}",
            f"{row.bytes_per_s / 1e9:.2f}",
            f"{row.writing_share:.0%}",
            f"{row.raw_bytes_per_s / 1e9:.2f}",
        )
    return table


def paced_table(rows: Sequence[PacedRow], verify_kv: str, checked_share: float) -> Table:
    checks = f"--verify-kv {verify_kv} checks {checked_share:.0%} of the blocks"
    title = f"Beside KV made as a GPU makes it; x: times a bare transfer; {checks}"
    names = (
        "tokens",
        "made at",
        "bare ms",
        "exposed ms",
        "x",
        "until accepted ms",
        "x",
        "writing ms",
        "record ms",
        "checking ms",
        "a call ms",
    )
    table = _table(title, names)
    for row in rows:
        table.add_row(
            str(row.num_tokens),
            f"{row.link_share:.0%}",
            f"{row.bare_s * 1e3:.2f}",
            f"{row.exposed_s * 1e3:.2f}",
            f"{row.exposed:.2f}",
            f"{row.total_s * 1e3:.2f}",
            f"{row.total:.2f}",
            f"{row.posting_s * 1e3:.2f}",
            f"{row.record_s * 1e3:.2f}",
            f"{row.checking_s * 1e3:.2f}",
            f"{row.round_trip_s * 1e3:.2f}",
        )
    return table


def mooncake_table(rows: Sequence[MooncakeRow]) -> Table:
    table = _table("GB/s of finished KV", ("tokens", "Mooncake over TCP", "ours", "until accepted", "NIXL alone"))
    for row in rows:
        rates = (row.mooncake, row.written, row.accepted, row.nixl)
        table.add_row(str(row.num_tokens), *(f"{rate / 1e9:.2f}" for rate in rates))
    return table


def wire_table(results: Sequence[CodingResult], max_tokens: int) -> Table:
    title = "Eight bits on the wire: answers beside those from the cache as it is, greedy"
    table = _table(title, ("coding", "bytes", f"differ within {max_tokens} tokens", "first difference, median"))
    for result in results:
        place = first_difference_median(result)
        differing = f"{result.share_differing(max_tokens):.0%} of {len(result.differing)}"
        table.add_row(
            result.coding.value, f"{result.bytes_ratio:.1%}", differing, "none" if place is None else f"{place:g}"
        )
    return table


def first_difference_median(result: CodingResult) -> float | None:
    """Over all prompts; None if half of the answers do not differ at all."""
    median = statistics.median_high(math.inf if place is None else place for place in result.differing)
    return None if math.isinf(median) else median


def model_figures(rows: Sequence[Row]) -> dict[str, float]:
    of_1024 = next(row for row in rows if row.num_tokens == 1024)
    from_1024 = [row for row in rows if row.num_tokens >= 1024]
    return {
        "exposed_share_1024": round(of_1024.hidden.exposed_share, 4),
        "exposed_share_max_from_1024": round(max(row.hidden.exposed_share for row in from_1024), 4),
        "vs_after_prefill": round(of_1024.hidden.exposed_s / of_1024.after.exposed_s, 3),
        "vs_pull": round(of_1024.hidden.exposed_s / of_1024.pull_s, 3),
        "rate_vs_raw_nixl": round(rows[-1].rate_vs_raw, 3),
        "rate_vs_raw_nixl_min_from_1024": round(min(row.rate_vs_raw for row in from_1024), 3),
        "nixl_share_of_writing": round(rows[-1].writing_share, 3),
    }


def paced_figures(rows: Sequence[PacedRow]) -> dict[str, float]:
    """At the longest prompt, and the worst of all."""
    exposed = {row.num_tokens: row.exposed for row in rows if row.link_share == HALF_LINK}
    total = {row.num_tokens: row.total for row in rows if row.link_share == FULL_LINK}
    return {
        "exposed_at_half_link": round(exposed[max(exposed)], 3),
        "total_at_full_link": round(total[max(total)], 3),
        "exposed_at_half_link_max": round(max(exposed.values()), 3),
        "total_at_full_link_max": round(max(total.values()), 3),
    }


def mooncake_figures(rows: Sequence[MooncakeRow]) -> dict[str, float]:
    """How many times as fast as Mooncake, at the longest prompt."""
    longest = max(rows, key=lambda row: row.num_tokens)
    return {
        "vs_mooncake": round(longest.written / longest.mooncake, 3),
        "vs_mooncake_until_accepted": round(longest.accepted / longest.mooncake, 3),
    }


def wire_figures(results: Sequence[CodingResult], max_tokens: int) -> Mapping[str, Mapping[str, float | None]]:
    return {
        f"wire_{result.coding.value}": {
            "bytes": round(result.bytes_ratio, 4),
            "first_difference_median": first_difference_median(result),
            "share_differing": round(result.share_differing(max_tokens), 3),
        }
        for result in results
    }


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    return table
