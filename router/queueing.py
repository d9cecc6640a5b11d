"""Waiting in a queue of many servers, M/G/k: Erlang's formula, with Allen and Cunneen's correction for variability.

The tail is taken as exponential (Kimura): P(wait > t) = C exp(-t / mean wait of those who wait).
"""

from __future__ import annotations

_NONE = 1e-12


def erlang_c(num_servers: float, load: float) -> float:
    """The chance to find all servers busy, with Poisson arrivals and exponential service; `load` in servers."""
    if load >= num_servers:
        return 1.0
    blocked = 1.0  # Erlang's B, by its recursion: stable for thousands of servers
    for number in range(1, round(num_servers) + 1):
        blocked = load * blocked / (number + load * blocked)
        if blocked < _NONE:
            return 0.0
    return blocked / (1.0 - load / num_servers * (1.0 - blocked))
