"""How long requests wait for one of several servers, on average and at a percentile; see `router.queueing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.figure import Figure, figure
from router.forecast import Lengths


@dataclass(frozen=True, slots=True)
class Service:
    """How long one request keeps a server. `variability`: variance over squared mean; `late`: of a long one."""

    mean: Figure
    variability: Figure
    late: Figure

    @classmethod
    def of(cls, what: str, lengths: Lengths, seconds: Callable[[float], float], percentile: float) -> Service:
        times = [seconds(length) for length in lengths.samples()]
        mean = figure(f"{what}, mean time", "s", "seconds / samples", seconds=sum(times), samples=len(times))
        variability = figure(
            f"{what}, variability of times",
            "",
            "max(0, squares / samples / mean ** 2 - 1)",
            squares=sum(time**2 for time in times),
            samples=len(times),
            mean=mean,
        )
        longest = lengths.quantile(percentile)
        late = figure(f"{what}, time of {longest:,.0f} tokens", "s", "seconds", seconds=seconds(longest))
        return cls(mean, variability, late)

    @property
    def figures(self) -> tuple[Figure, ...]:
        return (self.mean, self.variability, self.late)


@dataclass(frozen=True, slots=True)
class Waiting:
    load: Figure  # servers that are busy on average
    utilisation: Figure
    chance: Figure
    mean: Figure
    percentile: Figure

    @property
    def figures(self) -> tuple[Figure, ...]:
        return (self.load, self.utilisation, self.chance, self.mean, self.percentile)


def waiting(
    what: str, requests_per_s: float, arrival_variability: float, service: Service, num_servers: int, percentile: float
) -> Waiting:
    """For fewer busy servers than there are.

    Raises:
        ValueError: they cannot keep up.
    """
    load = figure(
        f"{what}, servers busy",
        "",
        "requests_per_s * service_s",
        requests_per_s=requests_per_s,
        service_s=service.mean,
    )
    if load.value >= num_servers:
        raise ValueError(f"{num_servers} servers cannot do what keeps {load.value:.2f} busy")
    utilisation = figure(f"{what}, utilisation", "", "load / servers", load=load, servers=num_servers)
    chance = figure(f"{what}, chance to wait", "", "erlang_c(servers, load)", servers=num_servers, load=load)
    given: dict[str, float | Figure] = {
        "service_s": service.mean,
        "servers": num_servers,
        "load": load,
        "chance": chance,
    }
    mean = figure(
        f"{what}, mean wait",
        "s",
        "(arrivals + lengths) / 2 * chance * service_s / (servers - load)",
        arrivals=arrival_variability,
        lengths=service.variability,
        **given,
    )
    late = figure(
        f"{what}, wait at the percentile",
        "s",
        "(arrivals + lengths) / 2 * service_s / (servers - load) * max(0, ln(max(chance, 1e-300) / (1 - percentile)))",
        arrivals=arrival_variability,
        lengths=service.variability,
        percentile=percentile,
        **given,
    )
    return Waiting(load, utilisation, chance, mean, late)


def together(name: str, wait: Waiting, service: Service) -> Figure:
    """The percentile of waiting and being served: the excesses of both over their means, which are independent, add in
    squares."""
    return figure(
        name,
        "s",
        "wait + service + sqrt(max(0, wait_late - wait) ** 2 + max(0, service_late - service) ** 2)",
        wait=wait.mean,
        wait_late=wait.percentile,
        service=service.mean,
        service_late=service.late,
    )
