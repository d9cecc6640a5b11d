"""What the planned pools shall keep to."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Targets:
    """`percentile`: the share of requests that are within both times. `max_utilisation`: no pool is planned busier,
    however short its queue would be: what arrives is not quite as forecast."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05
    percentile: float = 0.9
    max_utilisation: float = 0.85

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} is {getattr(self, name):g}; it must be above 0", field=name)
        for name, least in (("percentile", 0.5), ("max_utilisation", 0.0)):
            if not least <= (value := getattr(self, name)) < 1 or value == 0:
                raise InvalidArgument(f"{name} is {value:g}; it must be above {least:g} and below 1", field=name)
