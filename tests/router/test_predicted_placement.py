"""Placement among workers whose speed is known: tables worked out by hand, and properties."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.kv_layout import KVLayout
from router.cache_changes import CacheChanges
from router.candidate import Candidate, Role, WorkerId
from router.config import LimitPolicy, PlacementPolicy
from router.demand import Demand
from router.fleet import Fleet
from router.placement import Grounds, Placement, place
from router.prediction import EXPECTED_OUTPUT_TOKENS, FIXED_SEQUENCES, Pace
from router.prefix_index import PrefixIndex
from router.worker import Worker, WorkerLoad, WorkerState
from router.workers import WorkerTable
from tests.router.test_placement import B, D, P, names, worker
from tests.router.test_workers import profile

BLOCK = 16
HASHES = [bytes([number]) * 16 for number in range(64)]
LAYOUT = KVLayout("m1", "float32", 2, 2, 8, block_size=BLOCK)
POLICY = PlacementPolicy()


def measured(name: str, role: Role, *, rate: float = 1024.0, step: float = 0.025, **fields: int | float) -> Candidate:
    """`rate` tokens a second in prefill; steps of `step` seconds where one sequence decodes."""
    known = replace(worker(name, role, blocks=1000, free=1000), prefill_tokens_per_s=rate, decode_step_s=step)
    return replace(known, decode_batch=1.0, tokens_per_step=1.0, **fields)  # type: ignore[arg-type]


def demand(num_tokens: int = 1001, held: Mapping[str, int] | None = None, **fields: object) -> Demand:
    """A prompt of `num_tokens - 1` tokens and one. `held`: blocks of it, by worker."""
    index = PrefixIndex()
    for name, num_blocks in (held or {}).items():
        index.join(WorkerId(name, "e1"), 1000)
        dump = CacheChanges(1, HASHES[:num_blocks], begins_dump=True, ends_dump=True)
        index.apply(WorkerId(name, "e1"), dump)
    num_blocks = LAYOUT.num_blocks(num_tokens)
    known = Demand(num_blocks, num_blocks + 10, True, num_tokens, num_tokens + 160, index.match(HASHES), BLOCK)
    return replace(known, **fields)  # type: ignore[arg-type]


def placed(
    workers: Sequence[Candidate], wanted: Demand, policy: PlacementPolicy = POLICY, seed: int = 1, now: float = 0.0
) -> Placement:
    return place(Fleet(workers, now), wanted, (), random.Random(seed), policy)


def test_what_is_predicted_is_told() -> None:
    """1,000 tokens less 320 that are held, behind 344 others, at 1,024 a second. 25 sequences share a step of 25 ms:
    one alone has one of 25 / 25 ms a token; four have 28 / 25 of that."""
    fleet = [measured("p", P, num_queued_tokens=344), measured("d", D, num_active=3)]
    found = placed(fleet, demand(held={"p": 20, "d": 8}))
    assert names(found) == ("p", "d")
    assert found.ttft_s == pytest.approx(1.0)
    assert found.tpot_s == pytest.approx(0.025 * 28 / 25)
    assert (found.num_cached_tokens, found.num_held_tokens) == (320, 128)
    assert found.is_within_limits
    assert found.grounds is Grounds.PREFIX
    assert found.reason == "prefix: p holds 320 of 1000 tokens; first token in 1.000 s"
    assert found.answer_s(101) == pytest.approx(1.0 + 100 * 0.028)


def test_prefill_goes_where_the_prompt_is_computed_first_and_not_where_fewest_wait() -> None:
    slow, fast = measured("slow", P, rate=512.0), measured("fast", P, rate=2048.0, num_queued_tokens=2000)
    assert names(placed([slow, fast, measured("d", D)], demand()))[0] == "fast"  # 1.47 s against 1.95 s
    assert names(placed([slow, fast, measured("d", D)], demand(501)))[0] == "slow"  # 0.98 s against 1.22 s


@pytest.mark.parametrize("queued, chosen", [(639, "holds"), (641, "idle")])
def test_a_prefix_is_worth_the_tokens_it_saves(queued: int, chosen: str) -> None:
    """40 blocks are 640 tokens: who holds them may have so many more to do first."""
    fleet = [measured("holds", P, num_queued_tokens=queued), measured("idle", P), measured("d", D)]
    assert names(placed(fleet, demand(held={"holds": 40})))[0] == chosen


@pytest.mark.parametrize("active, chosen", [(4, "holds"), (7, "idle")])
def test_a_prefix_on_a_decode_worker_is_worth_its_transfer(active: int, chosen: str) -> None:
    """640 tokens of 10 MB at 4 GB/s are 1.6 s; a sequence more makes 256 tokens of 1 ms later, each: 0.256 s."""
    fleet = [measured("p", P), measured("holds", D, num_active=active), measured("idle", D)]
    wanted = demand(held={"holds": 40}, token_bytes=10 * 10**6)
    found = placed(fleet, wanted)
    assert names(found) == ("p", chosen)
    if chosen == "holds":
        assert found.reason.startswith("prefix: the decode worker holds a part of 1000 tokens")


@pytest.mark.parametrize(
    "num_bytes, seconds, active, chosen",
    [
        (0, 0.0, 4, "holds"),  # as is assumed: 640 tokens of 10 MB at 4 GB/s are 1.6 s; a sequence costs 0.256 s
        (0, 0.0, 7, "idle"),
        (40e9, 1.0, 0, "holds"),
        (40e9, 1.0, 1, "idle"),  # 40 GB/s: 0.16 s
        (1e9, 1.0, 24, "holds"),  # 1 GB/s: 6.4 s
        (1e9, 1.0, 26, "idle"),
        (5e7, 0.05, 12, "holds"),  # 1 GB/s, but not for long: at 2 GB/s, between what is measured and assumed, 3.2 s
        (5e7, 0.05, 13, "idle"),
    ],
)
def test_transfer_takes_as_long_as_the_workers_hand_overs_took(
    num_bytes: float, seconds: float, active: int, chosen: str
) -> None:
    prefill = replace(measured("p", P), transfer_bytes=num_bytes, transfer_s=seconds * (1 - 1e-9))
    fleet = [prefill, measured("holds", D, num_active=active), measured("idle", D)]
    assert names(placed(fleet, demand(held={"holds": 40}, token_bytes=10**7))) == ("p", chosen)


@pytest.mark.parametrize("token_bytes, chosen", [(10**5, {"far", "near"}), (10**7, {"near"})])
def test_a_link_that_is_far_slower_counts_where_sending_takes_longer_than_computing(
    token_bytes: int, chosen: set[str]
) -> None:
    """1,000 tokens take 0.98 s to compute, and at 400 MB/s 0.25 s to send, or 25 s; near ones take a tenth of that."""
    far = replace(measured("far", P), transfer_bytes=4e8, transfer_s=1.0)
    others = [replace(measured(f"near{number}", P), transfer_bytes=4e9, transfer_s=1.0) for number in range(2)]
    fleet, found = [far, *others, measured("d", D)], set()
    for seed in range(30):
        prefill = placed(fleet, demand(token_bytes=token_bytes), seed=seed).prefill
        assert prefill is not None
        found.add(prefill.id.name.rstrip("01"))
    assert found == chosen


def test_links_that_differ_a_little_are_alike() -> None:
    fleet = [replace(measured(f"p{n}", P), transfer_bytes=4e9, transfer_s=1.0 + 0.3 * n) for n in range(4)]
    fleet.append(measured("d", D))
    chosen = Counter(names(placed(fleet, demand(token_bytes=10**7), seed=seed))[0] for seed in range(400))
    assert len(chosen) == 4 and min(chosen.values()) >= 60, chosen  # 100 each, give or take 9


def test_a_worker_whose_drafts_are_accepted_is_faster() -> None:
    """Twice the tokens of a step are two steps of 1.49, which are 2.2: for a batch of 31 and this one, each token takes
    as long as for one sequence alone without drafts."""
    drafting = replace(measured("drafting", D), tokens_per_step=2.0)
    for active, chosen in ((30, "drafting"), (32, "plain")):
        fleet = [measured("p", P), replace(drafting, num_active=active), measured("plain", D)]
        assert names(placed(fleet, demand())) == ("p", chosen)


def test_blocks_count_as_they_will_be_when_the_prompt_has_been_computed() -> None:
    """In 0.98 s the growing one writes 16 sequences of 24 tokens more each, or so; the other one gives 80 back."""
    growing = measured("growing", D, num_active=16, num_free_blocks=80)
    full = measured("full", D, num_active=60, num_free_blocks=10)
    fleet = [measured("p", P), growing, full]
    assert names(placed(fleet, demand(), now=5.0))[1] == "growing"  # neither has room for 63 blocks
    releasing = replace(full, releases=((5.1, 80), (5.2, 80)))
    assert names(placed([measured("p", P), growing, releasing], demand(), now=5.0))[1] == "full"
    assert placed([measured("p", P), growing, releasing], demand(), now=5.0).is_within_limits


def test_limits_of_prefill_are_of_what_waits_there() -> None:
    """10 s at 1,024 tokens a second. A prompt that takes longer than that by itself is not refused for it."""
    policy = PlacementPolicy(limits=LimitPolicy(max_backlog_s=10.0))
    within, beyond = measured("within", P, num_queued_tokens=10240), measured("beyond", P, num_queued_tokens=10241)
    decode = measured("d", D)
    assert placed([within, decode], demand(), policy).is_within_limits
    assert not placed([beyond, decode], demand(), policy).is_within_limits
    assert placed([beyond, decode], demand(), policy).reason.endswith("; all are beyond their limits")
    assert names(placed([beyond, within, decode], demand(held={"beyond": 60}), policy))[0] == "within"
    huge = measured("idle", P, rate=1.0)
    assert placed([huge, decode], demand(), policy).is_within_limits


def test_limits_of_decode_are_its_sequences_and_its_blocks() -> None:
    first = measured("p", P)
    assert placed([first, measured("d", D, num_active=7, max_running=8)], demand()).is_within_limits
    assert not placed([first, measured("d", D, num_active=8, max_running=8)], demand()).is_within_limits
    assert placed([first, measured("d", D, num_active=800)], demand()).is_within_limits  # it has not said how many
    few = PlacementPolicy(limits=LimitPolicy(max_sequences=3))
    assert not placed([first, measured("d", D, num_active=3, max_running=8)], demand(), few).is_within_limits
    assert not placed([first, measured("d", D, num_free_blocks=62)], demand()).is_within_limits
    assert placed([first, measured("d", D, num_free_blocks=63)], demand()).is_within_limits
    assert placed(
        [first, measured("d", D, num_blocks=72)], demand()
    ).is_within_limits  # it will say that it is too small
    assert not placed([measured("b", B, num_active=8, max_running=8)], demand()).is_within_limits


@pytest.mark.parametrize(
    "num_answers, active, free, is_within",
    [
        (3, 5, 900, True),
        (4, 5, 900, False),  # 9 of 8
        (12, 0, 900, True),  # more than run at once: an idle worker takes them, and some wait there
        (12, 1, 900, False),
        (4, 0, 69, True),  # 63 blocks, and 2 more for each but the first
        (4, 0, 68, False),
        (4, 0, 63, False),
        (1, 0, 63, True),
    ],
)
@pytest.mark.parametrize("role", [D, B])
def test_several_answers_have_room_together(
    role: Role, num_answers: int, active: int, free: int, is_within: bool
) -> None:
    workers = [measured("w", role, num_active=active, num_free_blocks=free, max_running=8)]
    wanted = demand(num_answers=num_answers, num_own_blocks=2)
    assert placed([measured("p", P)] * (role is D) + workers, wanted).is_within_limits is is_within


def test_of_many_that_are_full_for_several_answers_the_one_with_room_is_found() -> None:
    full = [measured(f"d{n}", D, num_active=6, max_running=8) for n in range(20)]
    roomy = measured("roomy", D, num_active=7, max_running=10)
    found = placed([measured("p", P), *full, roomy], demand(num_answers=3, num_own_blocks=2))
    assert (names(found)[1], found.is_within_limits) == ("roomy", True)


def test_a_prompt_that_fills_a_cache_has_room_in_an_empty_one() -> None:
    """It needs 63 blocks, and one more for its answer only if that fills its last one."""
    filling = replace(demand(), num_blocks=64, num_blocks_in_all=63)
    for num_free, has_room in ((63, True), (62, False)):
        fleet = [measured("b", B, num_blocks=63, num_free_blocks=num_free)]
        assert placed(fleet, filling).is_within_limits is has_room


def test_before_speeds_are_known_limits_are_of_tokens() -> None:
    for queued, is_within in ((65536, True), (65537, False)):
        fleet = [worker("p", P, queued=queued, blocks=1000), worker("d", D, blocks=1000, free=1000)]
        found = placed(fleet, demand())
        assert (found.is_within_limits, found.ttft_s, found.tpot_s) == (is_within, None, None)
        assert found.grounds is Grounds.COUNTS


def test_before_speeds_are_known_a_sequence_counts_like_a_prompt() -> None:
    """Of 256 tokens."""
    running = worker("running", B, active=2, blocks=1000, free=1000)
    for queued, chosen in ((511, "queued"), (513, "running")):
        fleet = [running, worker("queued", B, queued=queued, blocks=1000, free=1000)]
        assert names(placed(fleet, demand())) == (None, chosen)


def test_before_speeds_are_known_a_prefix_counts_in_tokens() -> None:
    fleet = [worker("p0", P, queued=100, blocks=1000), worker("p1", P, blocks=1000)]
    fleet.append(worker("d", D, blocks=1000, free=1000))
    assert names(placed(fleet, demand(held={"p0": 7})))[0] == "p0"
    assert names(placed(fleet, demand(held={"p0": 6})))[0] == "p1"


def test_one_that_has_measured_nothing_is_taken_to_be_like_the_others() -> None:
    """A worker that has just come is neither left idle nor flooded."""
    new = worker("new", P, blocks=1000)
    known = [measured(f"p{number}", P, num_queued_tokens=50) for number in range(3)]
    decode = [measured("d", D, num_active=1), worker("d-new", D, blocks=1000, free=1000)]
    assert names(placed([new, *known, *decode], demand())) == ("new", "d-new")
    found = placed([replace(new, num_queued_tokens=51), *known, *decode], demand())
    assert names(found)[0] in {"p0", "p1", "p2"}
    assert placed([new, *decode], demand()).ttft_s == pytest.approx(1000 / 1024)


def test_a_session_stays_where_it_was_until_others_are_quicker_by_more_than_that_is_worth() -> None:
    policy = PlacementPolicy(affinity_s=0.1)
    wanted = demand(session=(WorkerId("p0", "e1"), WorkerId("d0", "e1")))
    others = [measured(f"p{number}", P) for number in range(1, 9)] + [measured(f"d{number}", D) for number in (1, 2)]
    for queued, chosen in ((0, True), (102, True), (103, False)):  # 102 tokens take 99.6 ms, 103 tokens 100.6
        fleet = [measured("p0", P, num_queued_tokens=queued), measured("d0", D), *others]
        for seed in range(20):
            found = placed(fleet, wanted, policy, seed)
            assert names(found)[1] == "d0"
            assert (names(found)[0] == "p0") == chosen
            assert (found.grounds is Grounds.SESSION) == chosen
    busy = [measured("p0", P), measured("d0", D, num_active=8, max_running=8), *others]
    assert names(placed(busy, wanted, policy))[1] != "d0"
    restarted = [replace(measured("p0", P), id=WorkerId("p0", "e2")), measured("d0", D), *others]
    assert len({names(placed(restarted, wanted, policy, seed))[0] for seed in range(40)}) > 5
    gone = [replace(measured("p0", P), is_ready=False), measured("d0", D), *others]
    assert names(placed(gone, wanted, policy))[0] != "p0"


LOCAL = PlacementPolicy(max_added_step_s=0.050)  # 51 tokens at 1,024 a second


@pytest.mark.parametrize(
    "num_prompt_tokens, held, queued, policy, chosen",
    [
        (50, 0, 0, LOCAL, (None, "d")),  # as quick as on p, and nothing has to be sent
        (50, 0, 0, POLICY, ("p", "d")),  # not wanted
        (60, 0, 0, LOCAL, ("p", "d")),  # others would feel it
        (60, 1, 0, LOCAL, (None, "d")),  # 44 tokens are left
        (1000, 60, 0, LOCAL, (None, "d")),  # 40 tokens are left
        (1000, 59, 0, LOCAL, ("p", "d")),  # 56 tokens are left
    ],
)
def test_a_prompt_is_prefilled_where_it_decodes_if_that_is_sooner_and_nobody_feels_it(
    num_prompt_tokens: int, held: int, queued: int, policy: PlacementPolicy, chosen: tuple[str | None, str]
) -> None:
    fleet = [measured("p", P), measured("d", D, num_active=5)]
    wanted = demand(num_prompt_tokens + 1, held={"d": held}, token_bytes=10**5)
    found = placed(fleet, wanted, policy)
    assert names(found) == chosen
    assert (found.grounds is Grounds.LOCAL) == (chosen[0] is None)


def test_a_prompt_is_prefilled_elsewhere_if_that_is_sooner() -> None:
    wanted = demand(51, token_bytes=10**5)
    busy = measured("d", D, num_queued_tokens=40)
    assert names(placed([measured("p", P), busy], wanted, LOCAL)) == ("p", "d")
    assert names(placed([measured("p", P, num_queued_tokens=41), busy], wanted, LOCAL)) == (None, "d")
    assert names(placed([measured("p", P, rate=4096.0), measured("d", D)], wanted, LOCAL)) == ("p", "d")


def test_of_decode_workers_the_one_that_holds_the_prompt_prefills_it_itself() -> None:
    fleet = [measured("p", P), measured("holds", D, num_active=1), measured("idle", D)]
    found = placed(fleet, demand(held={"holds": 60}, token_bytes=10**6), LOCAL)
    assert names(found) == (None, "holds")
    assert found.reason.startswith(
        "local: holds decodes and is done sooner if it prefills, too: it holds all but 40 of 1000"
    )


def test_without_a_prefill_worker_decode_workers_do_not_prefill() -> None:
    from protos.errors import NoWorker

    with pytest.raises(NoWorker, match="no worker can prefill"):
        placed([measured("d", D)], demand(17), LOCAL)


def test_of_workers_that_do_both_the_one_that_is_done_first_is_taken() -> None:
    """Each sequence that runs makes 256 tokens of 1 ms later, as 262 tokens to prefill would."""
    running = measured("running", B, num_active=2)
    assert names(placed([running, measured("queued", B, num_queued_tokens=600)], demand())) == (None, "running")
    assert names(placed([running, measured("queued", B, num_queued_tokens=400)], demand())) == (None, "queued")


def in_steps(seconds: float, typical_s: float) -> float:
    """The nearest of the speeds that are told apart."""
    return min((typical_s * 1.49**steps for steps in range(-9, 10)), key=lambda each: abs(math.log(each / seconds)))


def paces(workers: Sequence[Candidate]) -> dict[str, Pace]:
    """How fast each is taken to be beside the others: from the medians of those of the role, if there are any."""
    known = {each.id.name: (1 / each.prefill_tokens_per_s, each.decode_step_s / 25) for each in workers}
    prefill = [known[each.id.name][0] for each in workers if P in each.role] or [each[0] for each in known.values()]
    decode = [known[each.id.name][1] for each in workers if D in each.role] or [each[1] for each in known.values()]
    token_s, sequence_s = (math.exp(statistics.median(map(math.log, values))) for values in (prefill, decode))
    return {name: Pace(in_steps(each[0], token_s), in_steps(each[1], sequence_s)) for name, each in known.items()}


def cost(pace: Pace, num_queued: int, num_uncached: int, num_active: int | None, transfer_s: float) -> float:
    """Seconds until an answer of the expected length has ended; None active: up to its first token."""
    token_s, sequence_s = pace.token_s, pace.sequence_s
    assert token_s is not None and sequence_s is not None
    decode_s = 0.0 if num_active is None else EXPECTED_OUTPUT_TOKENS * sequence_s * (FIXED_SEQUENCES + num_active + 1)
    return token_s * (num_queued + num_uncached) + decode_s + transfer_s


measured_fleets = st.lists(
    st.builds(
        measured,
        st.uuids().map(str),
        st.sampled_from([P, D, B]),
        rate=st.sampled_from([500.0, 1000.0, 1050.0, 4000.0]),
        step=st.sampled_from([0.01, 0.02, 0.0205]),
        num_queued_tokens=st.sampled_from([0, 10, 500, 12000, 50000]),
        num_active=st.integers(0, 5),
        num_free_blocks=st.sampled_from([10, 200, 500]),
        max_running=st.sampled_from([0, 2, 4]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(measured_fleets, st.data(), st.integers(0, 2**32))
def test_nothing_better_was_to_be_had(workers: list[Candidate], data: st.DataObject, seed: int) -> None:
    """Against all pairs, looked at one by one: least predicted time among those within their limits."""
    held = {each.id.name: data.draw(st.sampled_from([0, 0, 3, 40])) for each in workers}
    wanted = demand(held=held, token_bytes=10**6)
    limits, taken = POLICY.limits, paces(workers)

    def uncached(each: Candidate) -> int:
        return 1000 - held[each.id.name] * BLOCK

    def is_beyond(each: Candidate, *, decodes: bool, in_s: float = 0.0) -> bool:
        backlog_s = taken[each.id.name].prefill_s(each.num_queued_tokens) or 0.0
        tpot_s = Pace.of(each).tpot_s(each.num_active) or 0.0
        free = each.num_free_blocks - each.num_active * min(in_s, 2.0) / tpot_s / BLOCK
        if not decodes:
            return backlog_s > limits.max_backlog_s
        return bool(each.max_running and each.num_active >= each.max_running) or free < wanted.num_blocks

    options: list[tuple[bool, float]] = []
    for first in workers:
        pace = taken[first.id.name]
        queue_s = pace.prefill_s(first.num_queued_tokens) or 0.0
        if first.role is B:
            beyond = is_beyond(first, decodes=False) or is_beyond(first, decodes=True, in_s=queue_s)
            seconds = cost(pace, first.num_queued_tokens, uncached(first), first.num_active, 0.0)
            options.append((beyond, seconds))
        elif first.role is P:
            ready_s = cost(pace, first.num_queued_tokens, uncached(first), None, 0.0)
            for then in workers:
                if then.role is not P:
                    beyond = is_beyond(first, decodes=False) or is_beyond(then, decodes=True, in_s=ready_s)
                    transfer_s = uncached(then) * 10**6 / POLICY.transfer_bytes_per_s
                    decode_s = cost(taken[then.id.name], 0, 0, then.num_active, transfer_s)
                    options.append((beyond, ready_s + decode_s))
    if not options:
        return
    found = placed(workers, wanted, seed=seed)
    within = [seconds for beyond, seconds in options if not beyond]
    chosen = found.prefill or found.decode
    assert chosen is not None and found.decode is not None
    pace = taken[chosen.id.name]
    if found.prefill is None:
        seconds = cost(pace, chosen.num_queued_tokens, uncached(chosen), chosen.num_active, 0.0)
    else:
        transfer_s = uncached(found.decode) * 10**6 / POLICY.transfer_bytes_per_s
        seconds = cost(pace, chosen.num_queued_tokens, uncached(chosen), None, 0.0)
        seconds += cost(taken[found.decode.id.name], 0, 0, found.decode.num_active, transfer_s)
    if within:
        assert found.is_within_limits
        assert seconds <= min(within) * (1 + 1e-9)
    else:
        assert not found.is_within_limits


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_an_idle_worker_is_never_ignored_while_another_queues(queued: list[int], active: list[int]) -> None:
    fleet = [measured(f"p{n}", P, num_queued_tokens=100 * each) for n, each in enumerate(queued)]
    fleet += [measured(f"d{n}", D, num_active=each) for n, each in enumerate(active)]
    found = placed(fleet, demand())
    assert found.prefill is not None and found.decode is not None
    assert found.prefill.num_queued_tokens == 100 * min(queued)
    assert found.decode.num_active == min(active)


def test_routers_that_see_the_same_do_not_all_choose_the_same() -> None:
    """Measurements of equal machines differ a little, and yet none attracts everybody."""
    noise = random.Random(3)

    def near(mean: float) -> float:
        return mean * noise.uniform(0.97, 1.03)

    fleet = Fleet([measured(f"p{n}", P, rate=near(1024)) for n in range(8)])
    for number in range(8):
        fleet.put(measured(f"d{number}", D, step=near(0.025)))
    chosen = [names(place(fleet, demand(), (), random.Random(seed))) for seed in range(400)]
    for position in (0, 1):
        counts = Counter(pair[position] for pair in chosen)
        assert len(counts) == 8 and min(counts.values()) >= 25, counts  # 50 each, give or take 7


class Table:
    """A worker table whose workers are as fast as each other, and whose clock stands still."""

    def __init__(self, num_each: int, rates: Sequence[float] = (1024.0,)) -> None:
        self.table = WorkerTable("t1", lambda: 1.0)
        self.rng = random.Random(11)
        self.workers: list[Worker] = []
        self._register(num_each, rates)
        self.table.snapshot()
        for each in self.workers:  # it is known by now who is faster than others
            self.table.report(each, each.load)

    def _register(self, num_each: int, rates: Sequence[float]) -> None:
        for number in range(2 * num_each):
            name, role = (f"p{number}", P) if number < num_each else (f"d{number}", D)
            load = WorkerLoad(
                WorkerState.READY,
                num_free_blocks=10**5,
                prefill_tokens_per_s=rates[number % len(rates)],
                decode_step_s=0.025,
                decode_batch=1.0,
                tokens_per_step=1.0,
            )
            self.workers.append(self.table.register(profile(name, role, num_blocks=10**5, layout=LAYOUT), load))

    def place(self, wanted: Demand) -> Placement:
        found = place(self.table.snapshot(), wanted, (), self.rng, PlacementPolicy(limits=LimitPolicy(1e9)))
        self.dispatch = self.table.dispatch(found, 1000 - found.num_cached_tokens, 63)
        return found


def test_equal_requests_spread_evenly() -> None:
    table = Table(num_each=7)
    chosen = [names(table.place(demand())) for _ in range(7 * 30)]
    for position in (0, 1):
        assert set(Counter(pair[position] for pair in chosen).values()) == {30}


def test_no_worker_starves() -> None:
    """A slow one gets its share as soon as the fast ones queue, and who holds nothing as soon as the holder does."""
    table = Table(num_each=4, rates=(4096.0, 4096.0, 4096.0, 4096.0 / 1.49**3))
    chosen = Counter(table.place(demand()).prefill.id.name for _ in range(129))  # type: ignore[union-attr]
    assert chosen == {"p0": 39, "p1": 39, "p2": 39, "p3": 12}  # 39 / 1.49 ** 3 is 11.8
    table = Table(num_each=4)
    chosen = Counter(table.place(demand(held={"p0": 31})).prefill.id.name for _ in range(500))  # type: ignore[union-attr]
    assert chosen["p0"] == pytest.approx(2 * chosen["p1"], abs=6)  # it has 504 of 1,000 tokens to compute each time
    assert min(chosen.values()) >= 98
