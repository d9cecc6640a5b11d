"""Who holds which heads and who writes to whom: by hand, and that every head comes to every replica once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.ranks import Rank, exchanged_heads, exchanges

HELD = [  # KV heads, ranks, heads of each rank
    (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    (4, 2, [[0, 1], [2, 3]]),
    (6, 3, [[0, 1], [2, 3], [4, 5]]),
    (2, 4, [[0], [0], [1], [1]]),
    (1, 4, [[0], [0], [0], [0]]),  # a latent cache, too
]

EXCHANGED = [  # KV heads, source ranks, target ranks, (source, target, heads)
    (4, 1, 2, [(0, 0, [0, 1]), (0, 1, [2, 3])]),
    (4, 2, 1, [(0, 0, [0, 1]), (1, 0, [2, 3])]),
    (4, 2, 4, [(0, 0, [0]), (0, 1, [1]), (1, 2, [2]), (1, 3, [3])]),
    (4, 4, 2, [(0, 0, [0]), (1, 0, [1]), (2, 1, [2]), (3, 1, [3])]),
    (6, 3, 2, [(0, 0, [0, 1]), (1, 0, [2]), (1, 1, [3]), (2, 1, [4, 5])]),
    (2, 2, 4, [(0, 0, [0]), (0, 1, [0]), (1, 2, [1]), (1, 3, [1])]),  # every replica is filled
    (2, 4, 2, [(0, 0, [0]), (2, 1, [1])]),  # the other replicas have nothing to do
    (2, 4, 4, [(0, 0, [0]), (1, 1, [0]), (2, 2, [1]), (3, 3, [1])]),  # each fills its own
    (2, 4, 8, [(0, 0, [0]), (0, 1, [0]), (1, 2, [0]), (1, 3, [0])] + [(s, t, [1]) for s, t in
              ((2, 4), (2, 5), (3, 6), (3, 7))]),
    (1, 2, 4, [(0, 0, [0]), (0, 1, [0]), (1, 2, [0]), (1, 3, [0])]),
    (1, 4, 2, [(0, 0, [0]), (2, 1, [0])]),
]  # fmt: skip


@pytest.mark.parametrize(("num_heads", "num_ranks", "held"), HELD)
def test_heads_of_ranks(num_heads: int, num_ranks: int, held: list[list[int]]) -> None:
    assert [list(Rank(index, num_ranks).heads(num_heads)) for index in range(num_ranks)] == held


@pytest.mark.parametrize(("num_heads", "num_sources", "num_targets", "expected"), EXCHANGED)
def test_pairs_that_exchange(
    num_heads: int, num_sources: int, num_targets: int, expected: list[tuple[int, int, list[int]]]
) -> None:
    pairs = exchanges(num_heads, num_sources, num_targets)
    found = [(one.index, other.index, list(exchanged_heads(one, other, num_heads))) for one, other in pairs]
    assert found == expected
    assert {(one.num_ranks, other.num_ranks) for one, other in pairs} == {(num_sources, num_targets)}


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24))
def test_each_head_of_each_target_comes_once_from_one_who_holds_it(heads: int, sources: int, targets: int) -> None:
    if any(heads % ranks and ranks % heads for ranks in (sources, targets)):
        with pytest.raises(ValueError, match="cannot be shared evenly"):
            exchanges(heads, sources, targets)
        return
    for index in range(targets):
        target, received = Rank(index, targets), []
        for other in range(sources):
            source = Rank(other, sources)
            received += (given := list(exchanged_heads(source, target, heads)))
            assert set(given) <= set(source.heads(heads))
        assert sorted(received) == list(target.heads(heads))


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="3 KV heads cannot be shared evenly by 2 ranks"):
        Rank(0, 2).heads(3)
    for index, num_ranks in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {index} is not one of {num_ranks}"):
            Rank(index, num_ranks)
