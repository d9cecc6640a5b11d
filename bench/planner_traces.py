"""The loads that planners are compared under: with the statistics of published traces, or read from a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from router.outcomes import Slo
from router.synthetic_trace import Lengths, Phase, Prefixes, overlaid, synthetic_trace
from router.traced_request import TracedRequest
from router.traces import TraceOptions, read_trace

CHAT, LONG = Slo(1.0, 0.05), Slo(10.0, 0.1)  # of prompts of a page or two; of Mooncake's, which are books

# Means, medians and 99th percentiles of tokens: Azure conversation 1,155/1,020/4,142 and 211/129/601, Azure code
# 2,048/1,469/7,436 and 28/13/251, Mooncake conversation 12,035/6,909/85,400 and 343/350/1,119, Mooncake synthetic
# 15,325/11,587/66,456 and 149/69/768, of whose prompts 37 and 65 % begin as others do, in what is added to them below.
CONVERSATION = Lengths(1155, 0.6, 16, 8000), Lengths(211, 0.9, 2, 1500)
CODE = Lengths(2048, 0.75, 16, 10_000), Lengths(28, 1.25, 2, 600)
LONG_CONVERSATION = Lengths(8_960, 1.05, 64, 80_000), Lengths(343, 0.6, 2, 1500)
_ALONE = Prefixes()
LONG_DOCUMENTS = Lengths(6_100, 0.75, 64, 60_000), Lengths(149, 1.1, 2, 1000)


@dataclass(frozen=True, slots=True)
class Load:
    """A trace, cut off at a length, and what its requests are promised. `requests(seed)` are the same each time."""

    name: str
    slo: Slo
    requests: Callable[[int], Iterator[TracedRequest]]


def synthetic_loads(phase_s: float, scale: float) -> list[Load]:
    """`scale` times the requests of a fleet of 8 workers; each load lasts three phases."""
    chat = _phase(CONVERSATION, 8.3 * scale, phase_s)
    code = _phase(CODE, 7.0 * scale, phase_s)
    burst = _phase(CODE, 5.0 * scale, phase_s / 20)
    long_chat = _phase(LONG_CONVERSATION, 1.4 * scale, 3 * phase_s, Prefixes(0.5, 12, 12))
    documents = _phase(LONG_DOCUMENTS, 2.2 * scale, 3 * phase_s, Prefixes(0.9, 10, 20))
    to_zero, and_back = replace(chat, per_s=10 * scale, end_per_s=0.0), replace(chat, per_s=0.0, end_per_s=10 * scale)

    def shift(seed: int) -> Iterator[TracedRequest]:
        bursts = (
            synthetic_trace([burst], seed + 100 + number, start_s=phase_s * (1 + share))
            for number, share in enumerate((0.3, 0.7))
        )
        return overlaid(synthetic_trace([chat, code, chat], seed), *bursts)

    def phases(*several: Phase) -> Callable[[int], Iterator[TracedRequest]]:
        return lambda seed: synthetic_trace(several, seed)

    return [
        Load("conversation, code, conversation", CHAT, shift),
        Load("long conversation", LONG, phases(long_chat)),
        Load("long documents", LONG, phases(documents)),
        Load("constant", CHAT, phases(replace(chat, duration_s=3 * phase_s))),
        Load(
            "step",
            CHAT,
            phases(replace(chat, per_s=4 * scale), replace(chat, per_s=10 * scale, duration_s=2 * phase_s)),
        ),
        Load(
            "ramp to zero and back",
            CHAT,
            phases(replace(to_zero, duration_s=1.5 * phase_s), replace(and_back, duration_s=1.5 * phase_s)),
        ),
    ]


def _phase(lengths: tuple[Lengths, Lengths], per_s: float, duration_s: float, prefixes: Prefixes = _ALONE) -> Phase:
    return Phase(duration_s, per_s, *lengths, prefixes)


def recorded_loads(folder: Path, phase_s: float, scale: float) -> list[Load]:
    """Of `azure/` and `mooncake/`, sped up to what 8 workers times `scale` bear. The loads that are not of traces are
    synthetic ones here as well."""
    azure, mooncake = folder / "azure", folder / "mooncake"
    chat, code = azure / "AzureLLMInferenceTrace_conv.csv", azure / "AzureLLMInferenceTrace_code.csv"

    def shift(seed: int) -> Iterator[TracedRequest]:
        yield from _from(chat, 0.0, phase_s, 1.5 * scale)
        yield from _from(code, phase_s, phase_s, 2.4 * scale)
        yield from _from(chat, 2 * phase_s, phase_s, 1.5 * scale, skip_s=1.5 * scale * phase_s)

    def mooncakes(name: str, speed: float) -> Callable[[int], Iterator[TracedRequest]]:
        return lambda seed: _from(mooncake / f"{name}_trace.jsonl", 0.0, 3 * phase_s, speed * scale)

    loads: Mapping[str, Callable[[int], Iterator[TracedRequest]]] = {
        "conversation, code, conversation": shift,
        "long conversation": mooncakes("conversation", 0.4),
        "long documents": mooncakes("synthetic", 0.3),
    }
    return [replace(load, requests=loads.get(load.name, load.requests)) for load in synthetic_loads(phase_s, scale)]


def _from(path: Path, start_s: float, duration_s: float, speed: float, skip_s: float = 0.0) -> Iterator[TracedRequest]:
    """A part of a file, so many times as fast."""
    rows = (request for request in read_trace(path, TraceOptions(seed=0)) if request.at_s >= skip_s)
    moved = (replace(request, at_s=start_s + (request.at_s - skip_s) / speed) for request in rows)
    return takewhile(lambda request: request.at_s < start_s + duration_s, _fitting(moved))


def _fitting(requests: Iterable[TracedRequest], most_tokens: int = 100_000) -> Iterator[TracedRequest]:
    """Those that a worker's cache can hold."""
    return (each for each in requests if each.num_prompt_tokens + each.num_output_tokens <= most_tokens)
