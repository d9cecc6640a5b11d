"""KV that prefill workers send to decode workers: per request and per second, against their links."""

from __future__ import annotations

from dataclasses import dataclass

from router.figure import Figure, figure
from router.hardware import Hardware
from router.memory_plan import Holding
from router.precision import wire_bytes_per_value
from router.prefill_pool import PrefillPool

LINK_EFFICIENCY = 0.7  # of the published speed that transfers of KV were measured to reach
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class KvTraffic:
    """`exposed`: what comes after the prompt is computed, one part's last layer; `hides`: KV is computed no faster than
    it is sent."""

    request: Figure
    per_s: Figure
    link: Figure
    utilisation: Figure
    made: Figure
    exposed: Figure

    @property
    def hides(self) -> bool:
        return self.made.value <= self.link.value

    @property
    def figures(self) -> tuple[Figure, ...]:
        return (self.request, self.per_s, self.link, self.utilisation, self.made, self.exposed)


def kv_traffic(
    pool: PrefillPool,
    holdings: tuple[Holding, ...],
    hardware: Hardware,
    coding: str,
    link_efficiency: float = LINK_EFFICIENCY,
) -> KvTraffic:
    """All of a prompt's KV is sent: that the decode worker holds a part of it already is not counted on."""
    forecast = pool.kind.forecast
    request = request_bytes(forecast.prompt.mean, holdings, coding)
    per_s = figure(
        "KV per second",
        "B/s",
        "requests_per_s * request",
        requests_per_s=forecast.requests_per_s,
        request=request,
    )
    num_gpus = pool.kind.layout.num_gpus
    link = figure(
        "links of a prefill worker",
        "B/s",
        "gpus * network * efficiency",
        gpus=num_gpus,
        network=hardware.network_bytes_per_s,
        efficiency=link_efficiency,
    )
    utilisation = figure(
        "links, utilisation", "", "per_s / (workers * link)", per_s=per_s, workers=pool.num_workers, link=link
    )
    made = figure(
        "KV made while a worker prefills",
        "B/s",
        "request * lanes / prefill_s",
        request=request,
        lanes=pool.kind.layout.num_lanes,
        prefill_s=pool.service.mean,
    )
    exposed = figure(
        "hand-over after the prompt",
        "s",
        "request / layers * min(1, part / prompt) / link",
        request=request,
        layers=holdings[0].shape.num_layers,
        part=pool.kind.step_tokens.prefill,
        prompt=forecast.prompt.mean,
        link=link,
    )
    return KvTraffic(request, per_s, link, utilisation, made, exposed)


def request_bytes(num_tokens: float, holdings: tuple[Holding, ...], coding: str) -> Figure:
    sent = []
    for holding in holdings:
        size = holding.shape.attention.vector_size
        bytes_per_value = wire_bytes_per_value(coding, holding.bytes_per_kv_value, BLOCK_TOKENS, size)
        sent.append(holding.shape.kv_bytes("KV per request", num_tokens, bytes_per_value))
    if len(sent) == 1:
        return sent[0]
    return figure("KV per request, with the draft model's", "B", "target + draft", target=sent[0], draft=sent[1])
