"""Which rank of a worker holds which KV heads, and which ranks of two workers have something to exchange.

Ranks hold consecutive heads, all equally many. Where there are more ranks than heads, as many consecutive ranks each
hold the same one: replicas. A latent cache counts as one head, so that all ranks are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the `num_ranks` processes of a worker. By default the only one, which holds all heads."""

    index: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_ranks:
            raise ValueError(f"rank {self.index} is not one of {self.num_ranks}")

    def heads(self, num_kv_heads: int) -> range:
        """Those it holds. Raises ValueError if neither ranks nor heads can be shared out evenly."""
        if num_kv_heads % self.num_ranks and self.num_ranks % num_kv_heads:
            raise ValueError(f"{num_kv_heads} KV heads cannot be shared evenly by {self.num_ranks} ranks")
        first = self.index * num_kv_heads // self.num_ranks
        return range(first, first + max(1, num_kv_heads // self.num_ranks))

    def replica(self, num_kv_heads: int) -> tuple[int, int]:
        """Which of the replicas of its heads it is, and how many there are."""
        count = max(1, self.num_ranks // num_kv_heads)
        return self.index % count, count


ONLY = Rank()


def exchanged_heads(source: Rank, target: Rank, num_kv_heads: int) -> range:
    """The heads that one rank writes into the other. Over all sources, each head of a target comes exactly once.

    Of several source replicas each serves its share of the target's.
    """
    held, wanted = source.heads(num_kv_heads), target.heads(num_kv_heads)
    (source_replica, num_sources), (target_replica, num_targets) = (
        rank.replica(num_kv_heads) for rank in (source, target)
    )
    if target_replica * num_sources // num_targets != source_replica:
        return range(0)
    return range(max(held.start, wanted.start), min(held.stop, wanted.stop))


def exchanges(num_kv_heads: int, num_sources: int, num_targets: int) -> list[tuple[Rank, Rank]]:
    """The pairs (source, target) of ranks that exchange something, by target."""
    sources = [Rank(index, num_sources) for index in range(num_sources)]
    targets = [Rank(index, num_targets) for index in range(num_targets)]
    return [(one, other) for other in targets for one in sources if exchanged_heads(one, other, num_kv_heads)]
