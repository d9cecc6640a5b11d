"""Reads traces of requests that were published: Mooncake's JSON lines, and the CSV of Azure, BurstGPT and Vidur.

Row by row: a file may be larger than the memory. What is wrong in one is said with its file, line and field.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from router.traced_request import PREFIX_BLOCK_TOKENS, TracedRequest

_TICK_S = 3.0  # of Mooncake's recorded traces: all that came within it have one timestamp

Row: TypeAlias = tuple[int, Mapping[str, object]]  # with the number of its line


class TraceError(ValueError):
    """A file is not the trace that it should be."""

    def __init__(self, path: Path, line: int, field: str, what: str) -> None:
        where = f"{path}:{line}" if line else str(path)
        super().__init__(f"{where}: {field}: {what}" if field else f"{where}: {what}")
        self.path, self.line, self.field = path, line, field


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """`seed`: Mooncake's requests of one tick come at random moments in it, and not evenly. `per_s`: how many come, of
    a file that does not say when, at random moments too."""

    seed: int | None = None
    per_s: float | None = None


def read_trace(path: Path, options: TraceOptions = TraceOptions()) -> Iterator[TracedRequest]:
    """In the order of their times, the first of a CSV file at 0. The format is told by the name and the header.

    Raises:
        TraceError: as soon as the row is reached that is wrong.
        OSError: the file cannot be read.
    """
    if path.suffix == ".jsonl":
        return _mooncake(path, options)
    with path.open(newline="", encoding="utf-8") as file:
        header = tuple(next(csv.reader(file), []))
    for columns, read in _READERS.items():
        if set(columns) <= set(header):
            return read(path, options)
    known = "; ".join(", ".join(columns) for columns in _READERS)
    raise TraceError(path, 1, "", f"its columns are {', '.join(header) or 'none'}; of a trace that is known: {known}")


def _mooncake(path: Path, options: TraceOptions) -> Iterator[TracedRequest]:
    rng = None if options.seed is None else random.Random(options.seed)
    tick: list[TracedRequest] = []
    for line, row in _json_rows(path):
        request = _mooncake_request(path, line, row)
        if tick and request.at_s < tick[0].at_s:
            raise TraceError(path, line, "timestamp", f"{row['timestamp']} comes after a later one")
        if tick and request.at_s > tick[0].at_s:
            yield from _spread(tick, min(_TICK_S, request.at_s - tick[0].at_s), rng)
            tick = []
        tick.append(request)
    yield from _spread(tick, _TICK_S, rng)


def _mooncake_request(path: Path, line: int, row: Mapping[str, object]) -> TracedRequest:
    at_ms = _number(path, line, row, "timestamp")
    num_prompt, num_output = _count(path, line, row, "input_length"), _count(path, line, row, "output_length")
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise TraceError(path, line, "hash_ids", f"{ids!r} is not a list of whole numbers")
    num_blocks = -(-num_prompt // PREFIX_BLOCK_TOKENS)
    if len(ids) > num_blocks:
        raise TraceError(path, line, "hash_ids", f"{len(ids)} blocks of a prompt that has {num_blocks}")
    with _of_row(path, line):
        return TracedRequest(at_ms / 1000, num_prompt, num_output, tuple(ids[: num_prompt // PREFIX_BLOCK_TOKENS]))


def _spread(tick: list[TracedRequest], within_s: float, rng: random.Random | None) -> Iterator[TracedRequest]:
    """Over the time that one timestamp stands for, without overtaking the next. A single one stays where it is."""
    if rng is None or len(tick) == 1:
        moments = [index / len(tick) for index in range(len(tick))]
    else:
        moments = sorted(rng.random() for _ in tick)  # as a Poisson process that had so many
    for request, moment in zip(tick, moments, strict=True):
        yield TracedRequest(
            request.at_s + within_s * moment,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.prefix_blocks,
        )


def _azure(path: Path, options: TraceOptions) -> Iterator[TracedRequest]:
    def at_s(line: int, row: Mapping[str, object]) -> float:
        text = str(row["TIMESTAMP"])
        try:
            at = datetime.fromisoformat(text[:26])  # of a second it has seven digits
        except ValueError:
            raise TraceError(path, line, "TIMESTAMP", f"{text!r} is not a date and a time") from None
        return (at - datetime(1970, 1, 1)).total_seconds()

    return _timed(path, at_s, "ContextTokens", "GeneratedTokens", "TIMESTAMP")


def _burst_gpt(path: Path, options: TraceOptions) -> Iterator[TracedRequest]:
    """Without the requests that failed: they have no answer."""
    return _timed(
        path,
        lambda line, row: _number(path, line, row, "Timestamp"),
        "Request tokens",
        "Response tokens",
        "Timestamp",
        may_have_failed=True,
    )


def _vidur(path: Path, options: TraceOptions) -> Iterator[TracedRequest]:
    return _timed(
        path,
        lambda line, row: _number(path, line, row, "arrived_at"),
        "num_prefill_tokens",
        "num_decode_tokens",
        "arrived_at",
    )


def _vidur_lengths(path: Path, options: TraceOptions) -> Iterator[TracedRequest]:
    if options.per_s is None or not 0 < options.per_s < float("inf"):
        raise TraceError(path, 1, "arrived_at", "there is no such column: say how many come in a second (per_s)")
    return _with_arrivals(path, options.per_s, random.Random(options.seed or 0))


def _with_arrivals(path: Path, per_s: float, rng: random.Random) -> Iterator[TracedRequest]:
    at_s = 0.0
    for line, row in _csv_rows(path):
        num_prompt = _count(path, line, row, "num_prefill_tokens")
        yield TracedRequest(at_s, num_prompt, _count(path, line, row, "num_decode_tokens"))
        at_s += rng.expovariate(per_s)


def _timed(
    path: Path,
    at_s: Callable[[int, Mapping[str, object]], float],
    prompt: str,
    output: str,
    time: str,
    *,
    may_have_failed: bool = False,
) -> Iterator[TracedRequest]:
    first_s, last_s = None, 0.0
    for line, row in _csv_rows(path):
        this_s = at_s(line, row)
        first_s = this_s if first_s is None else first_s
        if this_s - first_s < last_s:
            raise TraceError(path, line, time, f"{row[time]} comes after a later one")
        last_s = this_s - first_s
        if may_have_failed and _number(path, line, row, output) == 0:
            continue
        yield TracedRequest(last_s, _count(path, line, row, prompt), _count(path, line, row, output))


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            yield reader.line_num, row


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            try:
                row = json.loads(text)
            except ValueError as error:
                raise TraceError(path, line, "", f"not JSON: {error}") from None
            if not isinstance(row, dict):
                raise TraceError(path, line, "", "not a JSON object")
            yield line, row


def _number(path: Path, line: int, row: Mapping[str, object], field: str) -> float:
    value = row.get(field)
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else float("nan")
    except ValueError:
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise TraceError(path, line, field, f"{value!r} is not a number from 0 on")
    return number


def _count(path: Path, line: int, row: Mapping[str, object], field: str) -> int:
    number = _number(path, line, row, field)
    if number < 1 or number != int(number):
        raise TraceError(path, line, field, f"{row[field]!r} is not a whole number from 1 on")
    return int(number)


@contextmanager
def _of_row(path: Path, line: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise TraceError(path, line, "", str(error)) from None


_READERS: dict[tuple[str, ...], Callable[[Path, TraceOptions], Iterator[TracedRequest]]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burst_gpt,
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"): _vidur,
    ("num_prefill_tokens", "num_decode_tokens"): _vidur_lengths,
}
