from __future__ import annotations

import heapq
import random
import statistics

import pytest

from router.forecast import Lengths
from router.queueing import erlang_c
from router.waiting import Service, together, waiting


@pytest.mark.parametrize(
    ("num_servers", "load", "chance"),
    [
        (1, 0.7, 0.7),  # one server: how busy it is
        (2, 1.0, 1 / 3),  # a^2 / (2 (1 - a/2)) over 1 + a + that = 1 / 3
        (10, 8.0, 0.4092),  # Erlang's tables
        (100, 90.0, 0.2169),
    ],
)
def test_erlang_c(num_servers: int, load: float, chance: float) -> None:
    assert erlang_c(num_servers, load) == pytest.approx(chance, abs=1e-4)


def test_of_very_many_servers_one_is_free() -> None:
    assert erlang_c(1_000_000, 40_000) == 0.0
    assert erlang_c(4, 4.0) == 1.0


def test_one_server_with_equal_prompts_waits_as_distserve_says() -> None:
    """M/D/1: TTFT = D + R D^2 / (2 (1 - R D)), here 0.1 + 6 * 0.01 / (2 * 0.4) = 0.175 s."""
    service = Service.of("prefill", Lengths(1000), lambda n: n / 10_000, 0.9)
    wait = waiting("prefill", 6.0, 1.0, service, 1, 0.9)
    assert service.mean.value + wait.mean.value == pytest.approx(0.175)
    assert wait.utilisation.value == pytest.approx(0.6)


def test_servers_that_cannot_keep_up_are_refused() -> None:
    service = Service.of("prefill", Lengths(1000), lambda n: n / 10_000, 0.9)
    with pytest.raises(ValueError, match=r"3 servers cannot do what keeps 3\.50 busy"):
        waiting("prefill", 35.0, 1.0, service, 3, 0.9)


def simulated(requests_per_s: float, lengths: Lengths, num_servers: int, rng: random.Random) -> list[float]:
    """Waiting and service of requests that come at random and take the server that is free first."""
    free_at = [0.0] * num_servers
    now, took = 0.0, []
    for _ in range(60_000):
        now += rng.expovariate(requests_per_s)
        start = max(now, heapq.heappop(free_at))
        end = start + lengths.quantile(rng.random()) / 10_000
        heapq.heappush(free_at, end)
        took.append(end - now)
    return sorted(took)


@pytest.mark.parametrize(("num_servers", "utilisation"), [(2, 0.6), (4, 0.8), (16, 0.85)])
@pytest.mark.parametrize("variability", [0.0, 0.5])
def test_waiting_is_that_of_a_simulated_queue(num_servers: int, utilisation: float, variability: float) -> None:
    lengths = Lengths(1000, variability)
    requests_per_s = utilisation * num_servers / 0.1
    took = simulated(requests_per_s, lengths, num_servers, random.Random(1))
    service = Service.of("prefill", lengths, lambda n: n / 10_000, 0.9)
    wait = waiting("prefill", requests_per_s, 1.0, service, num_servers, 0.9)
    assert service.mean.value + wait.mean.value == pytest.approx(statistics.fmean(took), rel=0.06)
    assert together("TTFT", wait, service).value == pytest.approx(took[int(0.9 * len(took))], rel=0.12)
