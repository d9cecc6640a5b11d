"""Which workers change their roles for given sizes: as few as will do, and those that are missed least."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import FailedPrecondition, InvalidArgument
from router.candidate import Candidate, Role, WorkerId
from router.pool_scaler import roles_for


def worker(name: str, role: Role, load: int = 0, *, flippable: bool = True) -> Candidate:
    """`load`: tokens that are queued, and sequences that decode."""
    known = Candidate(WorkerId(name, "e"), f"{name}:1", role, True, "f", 100, load, load, num_free_blocks=100)
    return replace(known, flippable=flippable)


FOUR = [
    worker("p0", Role.PREFILL, 500),
    worker("p1", Role.PREFILL, 20),
    worker("d0", Role.DECODE, 9),
    worker("d1", Role.DECODE, 3),
]
FIXED = worker("f", Role.PREFILL, flippable=False)


def test_the_idlest_of_the_pool_that_is_too_large_goes() -> None:
    assert roles_for(FOUR, 2, 2) == {}
    assert roles_for(FOUR, 3, 1) == {"d1": Role.PREFILL}
    assert roles_for(FOUR, 1, 3) == {"p1": Role.DECODE}


def test_who_does_both_goes_before_one_changes_sides() -> None:
    both = [worker("b0", Role.BOTH, 5), worker("b1", Role.BOTH, 1)]
    assert roles_for(both, 1, 1) == {"b1": Role.PREFILL, "b0": Role.DECODE}
    assert roles_for([*FOUR[:2], *both], 2, 2) == {"b0": Role.DECODE, "b1": Role.DECODE}
    assert roles_for([*FOUR, both[0]], 3, 2) == {"b0": Role.PREFILL}


def test_fixed_workers_are_counted_and_stay() -> None:
    assert roles_for([*FOUR, FIXED], 2, 3) == {"p1": Role.DECODE}
    fixed_both = worker("g", Role.BOTH, flippable=False)  # in both pools
    assert roles_for([FOUR[0], FOUR[2], fixed_both], 2, 2) == {}
    assert roles_for([FOUR[0], FOUR[2], fixed_both], 3, 1) == {"d0": Role.PREFILL}


@pytest.mark.parametrize(
    "num_prefill, num_decode, field, told",
    [
        (0, 4, "num_prefill", "num_prefill is 0; it must be at least 1"),
        (4, 0, "num_decode", "num_decode is 0; it must be at least 1"),
        (-1, 5, "num_prefill", "num_prefill is -1; it must be at least 1"),
        (
            3,
            3,
            "num_prefill",
            "num_prefill and num_decode are 6 together; they must be 5: 4 of the workers in service can be flipped, "
            "and f (prefill) is fixed",
        ),
    ],
)
def test_what_cannot_be_is_told_with_its_limit(num_prefill: int, num_decode: int, field: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{re.escape(told)}$") as caught:
        roles_for([*FOUR, FIXED], num_prefill, num_decode)
    assert caught.value.field == field


def test_fixed_workers_may_forbid_it() -> None:
    fixed = [replace(each, flippable=False) for each in FOUR]
    with pytest.raises(FailedPrecondition, match=r"num_prefill is 1, but p0 \(prefill\), p1 \(prefill\) are fixed"):
        roles_for(fixed, 1, 3)
    with pytest.raises(FailedPrecondition, match=r"num_decode is 1, but d0 \(decode\), d1 \(decode\) are fixed"):
        roles_for(fixed, 3, 1)
    with pytest.raises(FailedPrecondition, match="1 workers are in service: two pools take two"):
        roles_for([worker("b", Role.BOTH)], 1, 1)


@given(
    st.lists(
        st.tuples(st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]), st.integers(0, 9), st.booleans()),
        min_size=2,
        max_size=9,
    ),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_the_pools_get_just_these_sizes_or_nothing_is_changed(
    specs: list[tuple[Role, int, bool]], num_prefill: int, num_decode: int
) -> None:
    workers = [worker(f"w{i}", role, load, flippable=can) for i, (role, load, can) in enumerate(specs)]
    try:
        roles = roles_for(workers, num_prefill, num_decode)
    except (InvalidArgument, FailedPrecondition):
        return
    after = [roles.get(each.id.name, each.role) for each in workers]
    assert [sum(role in each for each in after) for role in (Role.PREFILL, Role.DECODE)] == [num_prefill, num_decode]
    assert all(each.flippable and each.role != roles[each.id.name] for each in workers if each.id.name in roles)
    movable = [each.role for each in workers if each.flippable]
    wanted = num_prefill - sum(Role.PREFILL in each.role for each in workers if not each.flippable)
    too_many = movable.count(Role.PREFILL) - wanted, movable.count(Role.DECODE) - (len(movable) - wanted)
    assert len(roles) == movable.count(Role.BOTH) + max(0, *too_many)
