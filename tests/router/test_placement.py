"""Placement as tables and properties: it is a pure function, so nothing runs here."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import NoWorker
from router.candidate import Candidate, Role, WorkerId
from router.demand import Demand
from router.fleet import Fleet
from router.placement import Placement, can_serve, place, place_moved

DEMAND = Demand(num_blocks=4, num_blocks_in_all=10, wants_decode=True)
ONE_TOKEN = Demand(num_blocks=4, num_blocks_in_all=4, wants_decode=False)


def worker(
    name: str,
    role: Role,
    *,
    queued: int = 0,
    active: int = 0,
    free: int = 50,
    ready: bool = True,
    layout: str = "a",
    blocks: int = 50,
    context: int | None = None,
) -> Candidate:
    return Candidate(
        id=WorkerId(name, "e1"),
        address=f"{name}:1",
        role=role,
        is_ready=ready,
        fingerprint=layout,
        num_blocks=blocks,
        num_queued_tokens=queued,
        num_active=active,
        num_free_blocks=free,
        max_context_tokens=context,
    )


def names(placement: Placement) -> tuple[str | None, str | None]:
    return (
        placement.prefill.id.name if placement.prefill else None,
        placement.decode.id.name if placement.decode else None,
    )


def placed(*workers: Candidate, demand: Demand = DEMAND, avoid: tuple[str, ...] = ()) -> tuple[str | None, str | None]:
    return names(place(Fleet(workers), demand, {WorkerId(name, "e1") for name in avoid}, random.Random(1)))


P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def test_what_is_held_for_another_request_is_not_taken() -> None:
    """Not even if there is no other, and whatever speaks for it."""
    fleet = Fleet([worker("p", P), worker("idle", D), worker("busy", D, active=9), worker("b", B, active=50)])
    idle, busy, both, p = (WorkerId(name, "e1") for name in ("idle", "busy", "b", "p"))
    assert names(place(fleet, DEMAND, (), random.Random(0), held={idle})) == ("p", "busy")
    assert names(place(fleet, DEMAND, {busy}, random.Random(0), held={idle})) == ("p", "b")
    assert names(place(fleet, DEMAND, {busy}, random.Random(0), held={idle, both})) == ("p", "busy")
    with pytest.raises(NoWorker):
        place(fleet, DEMAND, (), random.Random(0), held={p, both})
    close = replace(DEMAND, session=(idle,))
    assert names(place(fleet, close, (), random.Random(0), held={idle})) == ("p", "busy")


def test_a_worker_whose_cache_could_never_hold_the_answer_is_not_taken() -> None:
    small = worker("small", Role.DECODE, blocks=9)
    large = worker("large", Role.DECODE, active=7, blocks=10)
    prefill = worker("p", Role.PREFILL, blocks=4)
    assert names(place(Fleet([prefill, small, large]), DEMAND, (), random.Random(0))) == ("p", "large")
    assert names(place(Fleet([prefill, small, large]), DEMAND, [large.id], random.Random(0))) == ("p", "large")
    assert names(place(Fleet([worker("both", Role.BOTH, blocks=9), prefill, large]), DEMAND, (), random.Random(0))) == (
        "p",
        "large",
    )


def test_where_no_cache_is_large_enough_a_worker_is_asked_all_the_same() -> None:
    """It refuses, and says what would be right."""
    workers = [worker("p", Role.PREFILL), worker("d", Role.DECODE, blocks=9)]
    assert names(place(Fleet(workers), DEMAND, (), random.Random(0))) == ("p", "d")


LONG = replace(DEMAND, num_tokens=13, num_tokens_in_all=40)


def test_a_worker_that_takes_no_sequences_as_long_is_never_taken() -> None:
    """Prefill runs over the prompt only; who keeps the sequence, over all of it."""
    low, high = worker("low", P, context=12), worker("high", P, context=13, queued=99)
    short, long = worker("short", D, context=39), worker("long", D, context=40, active=9)
    assert placed(low, high, short, long, demand=LONG) == ("high", "long")
    assert placed(low, high, short, long, demand=LONG, avoid=("high", "long")) == ("high", "long")
    assert placed(worker("both", B, context=39), high, long, demand=LONG) == ("high", "long")
    assert placed(worker("both", B, context=40), high, long, demand=LONG) == (None, "both")
    assert placed(low, high, demand=replace(LONG, wants_decode=False)) == ("high", None)
    for workers, role in (
        ([low, long], "prefill"),
        ([high, short], "decode"),
        ([worker("b", B, context=39)], "prefill"),
    ):
        with pytest.raises(NoWorker, match=f"no worker can {role}: .* a --max-context below the 40 tokens of this"):
            place(Fleet(workers), LONG, (), random.Random(0))
    assert can_serve(Fleet([low, short]))


def test_roles_are_numbered_as_in_the_contract() -> None:
    from protos import workers_pb2

    numbers = (workers_pb2.ROLE_PREFILL, workers_pb2.ROLE_DECODE, workers_pb2.ROLE_BOTH)
    assert (Role.PREFILL.value, Role.DECODE.value, Role.BOTH.value) == numbers


def test_prefill_goes_where_fewest_tokens_wait() -> None:
    assert placed(worker("p0", P, queued=500), worker("p1", P, queued=499), worker("d", D)) == ("p1", "d")


def test_decode_goes_where_least_runs() -> None:
    assert placed(worker("p", P), worker("d0", D, active=3), worker("d1", D, active=2)) == ("p", "d1")


def test_decode_with_room_goes_before_decode_that_runs_less() -> None:
    full = worker("d0", D, active=0, free=3)
    assert placed(worker("p", P), full, worker("d1", D, active=9, free=4)) == ("p", "d1")
    assert placed(worker("p", P), full) == ("p", "d0")  # it will make room: prefill waits for its ticket


def test_of_equals_the_one_with_more_free_blocks_decodes() -> None:
    assert placed(worker("p", P), worker("d0", D, free=10), worker("d1", D, free=11)) == ("p", "d1")


def test_worker_that_does_both_keeps_the_sequence() -> None:
    assert placed(worker("b0", B, queued=1), worker("b1", B)) == (None, "b1")
    assert placed(worker("b", B), worker("p", P, queued=9), worker("d", D)) == (None, "b")


def test_worker_that_does_both_decodes_for_a_prefill_worker() -> None:
    assert placed(worker("b", B, queued=9), worker("p", P)) == ("p", "b")


def test_one_token_needs_prefill_only() -> None:
    assert placed(worker("p", P), demand=ONE_TOKEN) == ("p", None)
    assert placed(worker("b", B), demand=ONE_TOKEN) == ("b", None)


def test_layouts_agree() -> None:
    assert placed(worker("p", P, layout="b"), worker("d0", D), worker("d1", D, active=9, layout="b")) == ("p", "d1")
    quick_but_alone = worker("p0", P, layout="b")
    assert placed(quick_but_alone, worker("p1", P, queued=900), worker("d", D)) == ("p1", "d")


def test_avoided_workers_are_taken_only_if_there_is_no_other() -> None:
    fleet = (worker("p0", P), worker("p1", P, queued=900), worker("d0", D), worker("d1", D, active=9))
    assert placed(*fleet, avoid=("p0", "d0")) == ("p1", "d1")
    assert placed(*fleet, avoid=("p0", "p1", "d0")) == ("p0", "d1")
    assert placed(worker("p0", P), worker("d0", D), avoid=("p0", "d0")) == ("p0", "d0")


def test_restarted_worker_is_not_the_one_to_avoid() -> None:
    restarted = replace(worker("d0", D), id=WorkerId("d0", "e2"))
    avoid = {WorkerId("d0", "e1"), WorkerId("d1", "e1")}
    workers = [worker("p", P), restarted, worker("d1", D)]
    assert names(place(Fleet(workers), DEMAND, avoid, random.Random(1))) == ("p", "d0")


@pytest.mark.parametrize(
    "workers, problem",
    [
        ([], "no worker can prefill: none has registered. They may still be starting: `pdserve status` lists"),
        (
            [worker("d", D)],
            "no worker can prefill: 1 registered, none .* prefill or both. .* `pdserve role WORKER prefill`",
        ),
        (
            [worker("p", P)],
            "no worker can decode: 1 registered, none of them with the role decode or both. Start one, or",
        ),
        (
            [worker("p", P, ready=False), worker("d", D)],
            "no worker can prefill: 2 registered, 1 .*, 0 of these ready. `",
        ),
        ([worker("p", P), worker("d", D, ready=False)], "no worker can decode: 2 registered, 1 of them .*, 0 of these"),
        ([worker("b", B, ready=False)], "no worker can prefill: 1 registered, 1 of them"),
        (
            [worker("p", P), worker("d", D, layout="b")],
            "no worker can decode: 2 .* 1 of these ready but with another KV",
        ),
    ],
)
def test_who_is_missing_is_said(workers: list[Candidate], problem: str) -> None:
    with pytest.raises(NoWorker, match=problem):
        place(Fleet(workers), DEMAND, (), random.Random(1))
    assert not can_serve(Fleet(workers))


def test_ties_are_broken_by_chance_and_evenly() -> None:
    fleet = [worker(f"p{index}", P) for index in range(4)] + [worker(f"d{index}", D) for index in range(4)]
    rng = random.Random(7)
    chosen = [names(place(Fleet(fleet), DEMAND, (), rng)) for _ in range(800)]
    for position in (0, 1):
        counts = [sum(pair[position] == name for pair in chosen) for name in {pair[position] for pair in chosen}]
        assert len(counts) == 4 and min(counts) > 150


roles = st.sampled_from([P, D, B])
fleets = st.lists(
    st.builds(
        worker,
        st.uuids().map(str),
        roles,
        queued=st.integers(0, 3),
        active=st.integers(0, 3),
        free=st.integers(0, 8),
        ready=st.booleans(),
        layout=st.sampled_from(["a", "b"]),
    ),
    max_size=7,
)


@given(fleets, st.integers(0, 2**32), st.booleans())
def test_a_placement_is_always_one_that_works(workers: list[Candidate], seed: int, wants_decode: bool) -> None:
    demand = Demand(4, 10, wants_decode)
    try:
        placement = place(Fleet(workers), demand, (), random.Random(seed))
    except NoWorker:
        ready = [each for each in workers if each.is_ready]
        pairs = [(a, b) for a in ready for b in ready if P in a.role and D in b.role and a.fingerprint == b.fingerprint]
        assert not pairs if wants_decode else not any(P in each.role for each in ready)
        return
    first = placement.prefill or placement.decode
    assert first is not None and P in first.role
    assert all(each.is_ready for each in placement.workers)
    assert (placement.decode is not None) == wants_decode
    if placement.prefill is not None and placement.decode is not None:
        assert D in placement.decode.role
        assert placement.prefill.fingerprint == placement.decode.fingerprint
        assert placement.prefill.id != placement.decode.id


@given(fleets, st.integers(0, 2**32))
def test_serving_means_that_a_request_can_be_placed(workers: list[Candidate], seed: int) -> None:
    if can_serve(Fleet(workers)):
        assert place(Fleet(workers), DEMAND, (), random.Random(seed)).decode is not None
    else:
        with pytest.raises(NoWorker):
            place(Fleet(workers), DEMAND, (), random.Random(seed))


def moved_to(*others: Candidate, avoid: tuple[str, ...] = ()) -> str | None:
    source = worker("source", Role.DECODE)
    for is_ready in (True, False):  # it is leaving, or was taken back just now
        fleet = Fleet([replace(source, is_ready=is_ready), *others])
        found = place_moved(fleet, DEMAND, source.id, {WorkerId(n, "e1") for n in avoid}, random.Random(1))
    return None if found is None else found.id.name


def test_a_running_sequence_moves_to_another_decode_worker_with_room() -> None:
    near = worker("near", Role.DECODE, active=1)
    busy = worker("busy", Role.BOTH, active=5)
    assert moved_to(near, busy) == "near"
    assert moved_to(near, busy, avoid=("near",)) == "busy"
    assert moved_to(near, avoid=("near",)) == "near"  # there is no other
    assert moved_to(worker("prefill", Role.PREFILL)) is None
    assert moved_to(replace(near, is_ready=False)) is None
    assert moved_to(replace(near, fingerprint="another")) is None
    assert moved_to(replace(near, num_free_blocks=DEMAND.num_blocks - 1)) is None
    assert moved_to(replace(near, num_free_blocks=DEMAND.num_blocks)) == "near"
    small = replace(near, num_blocks=DEMAND.num_blocks_in_all - 1)
    assert moved_to(small) is None
    assert moved_to(small, busy) == "busy"
    fleet = Fleet([near])
    assert place_moved(fleet, DEMAND, WorkerId("gone", "e1"), (), random.Random(1)) is None


def test_a_sequence_that_moves_waits_only_where_all_do() -> None:
    full = worker("full", Role.DECODE, active=4)
    full = replace(full, max_running=4)
    roomy = worker("roomy", Role.DECODE, active=9)
    cramped = [worker(f"c{number}", Role.DECODE, free=3) for number in range(3)]
    assert moved_to(full, roomy, *cramped) == "roomy"
    assert moved_to(full, *cramped) == "full"
    assert moved_to(*cramped) is None
    assert moved_to(full, roomy, *cramped, avoid=("roomy",)) == "full"
    assert moved_to(roomy, *cramped, avoid=("roomy",)) == "roomy"  # the others have no room


def test_a_sequence_moves_to_who_is_faster() -> None:
    slow, fast = (
        replace(worker(name, Role.DECODE, active=active), decode_step_s=step_s, decode_batch=1.0)
        for name, active, step_s in (("slow", 0, 0.1), ("fast", 3, 0.01))
    )
    assert moved_to(slow, fast) == "fast"
