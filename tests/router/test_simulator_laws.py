"""What holds in every simulation: each request ends once, no block is lost, nobody idles beside what could run."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.candidate import Role
from router.outcomes import Outcome
from router.scenario import Delays, Failure, RoleChange, Scenario, WorkerSpec
from router.simulator import Simulation
from router.traced_request import TracedRequest
from tests.router.simulations import COSTS, LAYOUT, NO_TIME, a_worker, assert_at_rest

GIVEN_UP = {"NO_WORKER", "ATTEMPTS_EXHAUSTED", "OVERLOADED"}
NUM_BLOCKS = (100, 140, 600)  # the longest request fits into the smallest, hardly more than one does


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    roles = draw(st.lists(st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]), max_size=3))
    roles = [Role.PREFILL, Role.DECODE, *roles]
    workers = [
        a_worker(
            f"w{index}",
            role,
            num_blocks=draw(st.sampled_from(NUM_BLOCKS)),
            max_step_tokens=draw(st.sampled_from([64, 300, 2048])),
            max_running=draw(st.sampled_from([1, 3, 64])),
            link_bytes_per_s=draw(st.sampled_from([1e5, 1e7, 1e18])),
        )
        for index, role in enumerate(roles)
    ]
    names = st.sampled_from([worker.name for worker in workers])
    moments = st.floats(0.0, 6.0)
    back = st.one_of(st.none(), st.floats(6.0, 9.0))
    return Scenario(
        workers,
        LAYOUT,
        delays=Delays(
            message_s=draw(st.sampled_from([0.0, 0.003])),
            hand_over_s=draw(st.sampled_from([0.0, 0.01])),
            report_s=draw(st.sampled_from([0.05, 2.0])),
        ),
        failures=draw(st.lists(st.builds(Failure, moments, names, back), max_size=2)),
        role_changes=draw(
            st.lists(st.builds(RoleChange, moments, names, st.sampled_from(list(Role)), st.booleans()), max_size=3)
        ),
        max_tokens=draw(st.sampled_from([None, 200])),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def traces(draw: st.DrawFn) -> list[TracedRequest]:
    lengths = st.tuples(st.floats(0.0, 5.0), st.integers(1, 1300), st.integers(1, 200), st.integers(0, 2))
    rows = sorted(draw(st.lists(lengths, min_size=1, max_size=25)))
    return [
        TracedRequest(at_s, num_prompt, num_output, tuple(range(first, first + num_prompt // 512)))
        for at_s, num_prompt, num_output, first in rows
    ]


def run(scenario: Scenario, trace: list[TracedRequest], *, watched: bool) -> list[Outcome]:
    outcomes: list[Outcome] = []
    simulation = Simulation(scenario, trace, outcomes.append)

    def watch() -> None:
        for worker in simulation.cluster.workers.values():
            assert 0 <= worker.pool.num_used <= worker.spec.num_blocks
            if worker.is_idle:
                assert not worker.queue.can_run, f"{worker.spec.name} could prefill"
                assert worker.batch.num_running == len(worker.batch.halted), f"{worker.spec.name} could decode"
                if worker.batch.num_running < worker.spec.max_running:  # those that stand still have their places
                    assert all(each.held is None for each in worker.batch.waiting)

    if watched:
        simulation.after_event = watch
    totals = simulation.run()
    assert totals.num_requests == len(trace)
    busy_s = totals.prefill_busy_s + totals.decode_busy_s
    assert busy_s <= totals.duration_s * len(scenario.workers) + 1.0  # a last step may end after the last answer
    assert_at_rest(simulation)
    return outcomes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(scenarios(), traces())
def test_what_always_holds(scenario: Scenario, trace: list[TracedRequest]) -> None:
    outcomes = run(scenario, trace, watched=True)
    assert [outcome.ended_at_s for outcome in outcomes] == sorted(outcome.ended_at_s for outcome in outcomes)
    ended = sorted((each.at_s, each.num_prompt_tokens) for each in outcomes)
    assert ended == sorted((each.at_s, each.num_prompt_tokens) for each in trace)  # each once
    wanted = {(each.at_s, each.num_prompt_tokens): each.num_output_tokens for each in trace}
    for outcome in outcomes:
        if outcome.error:
            assert outcome.error in GIVEN_UP
            continue
        if len(wanted) == len(trace):
            assert outcome.num_output_tokens == wanted[outcome.at_s, outcome.num_prompt_tokens]
        assert outcome.ttft_s is not None
        num_computed = outcome.num_prompt_tokens - outcome.num_cached_tokens
        if num_computed > 1 and outcome.num_retries + outcome.num_resumes == 0:
            assert outcome.ttft_s >= COSTS.prefill_s([(num_computed, num_computed)]) - 1e-9
        if outcome.tpot_s is not None:
            assert outcome.tpot_s >= COSTS.decode_s(1, 0) - 1e-9
            assert outcome.worst_gap_s >= outcome.tpot_s - 1e-9
            last_s = outcome.at_s + outcome.ttft_s + outcome.tpot_s * (outcome.num_output_tokens - 1)
            assert abs(outcome.ended_at_s - last_s) <= 0.004


def test_one_that_comes_back_stops_once() -> None:
    """Preempted behind a token that it had got already, it stops at the same round as it would have."""

    def worker(name: str, role: Role, link_bytes_per_s: float, max_running: int = 1) -> WorkerSpec:
        options = {"num_blocks": 100, "max_step_tokens": 64, "max_running": max_running}
        return a_worker(name, role, link_bytes_per_s=link_bytes_per_s, **options)

    workers = [worker("w0", Role.PREFILL, 1e7), worker("w1", Role.DECODE, 1e5)]
    workers += [worker("w2", Role.PREFILL, 1e5), worker("w3", Role.DECODE, 1e7, max_running=3)]
    rows = [(0.0, 1, 1), (0.0, 1271, 43), (1.0, 209, 2), (2.0, 18, 33)]
    trace = [TracedRequest(at_s, num_prompt, num_output) for at_s, num_prompt, num_output in rows]
    outcomes = run(Scenario(workers, LAYOUT, failures=[Failure(0.0, "w1")]), trace, watched=True)
    assert sorted(outcome.num_output_tokens for outcome in outcomes) == [1, 2, 33, 43]


def test_one_that_goes_on_is_in_the_next_step_first() -> None:
    """w4 is to prefill from 3.2 s on, and what decodes there stands still for w0, which dies: it goes on at w4, in the
    midst of what others there decode, and has no token of that."""
    roles = (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.PREFILL, Role.BOTH)
    options = [(600, 64, 1, NO_TIME), (100, 300, 1, NO_TIME), (100, 300, 1, 1e5), (100, 300, 1, NO_TIME)]
    options.append((600, 300, 64, NO_TIME))
    workers = [
        a_worker(f"w{i}", role, num_blocks=blocks, max_step_tokens=step, max_running=most, link_bytes_per_s=link)
        for i, (role, (blocks, step, most, link)) in enumerate(zip(roles, options, strict=True))
    ]
    changes = [RoleChange(1.8171228633472256, "w0", Role.DECODE, False)]
    changes.append(RoleChange(3.2205017218777385, "w4", Role.PREFILL))
    changes.append(RoleChange(3.1198050377794413, "w1", Role.PREFILL, False))
    failures = [Failure(5.322386639122723, "w0", 7.219519485171773)]
    delays = Delays(message_s=0.0, hand_over_s=0.0, report_s=0.05)
    rows = [(0.0, 1, 1), (0.0, 300, 66), (0.0, 400, 43), (0.0, 1146, 57), (0.25, 614, 27), (1.0, 1, 1)]
    rows += [(1.1, 1198, 32), (1.21875, 908, 3), (1.84375, 4, 2)]
    trace = [TracedRequest(at, prompt, output, tuple(range(prompt // 512))) for at, prompt, output in rows]
    outcomes = run(Scenario(workers, LAYOUT, delays, failures, changes), trace, watched=True)
    made = sorted((each.at_s, each.num_prompt_tokens, each.num_output_tokens) for each in outcomes)
    assert made == sorted((each.at_s, each.num_prompt_tokens, each.num_output_tokens) for each in trace)


def test_one_that_was_preempted_stops_only_at_its_end() -> None:
    """It would have stopped in the round in which it computes its last token anew, had it not been preempted."""
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH)
    workers = [
        a_worker(f"w{i}", role, num_blocks=100, max_step_tokens=step, max_running=most, link_bytes_per_s=1e5)
        for i, (role, step, most) in enumerate(zip(roles, (64, 64, 64, 300), (1, 1, 1, 3), strict=True))
    ]
    rows = [(0.0, 1146, 105), (0.0, 1146, 105), (2.0, 1, 106)]
    trace = [TracedRequest(at, prompt, output, tuple(range(prompt // 512))) for at, prompt, output in rows]
    delays = Delays(message_s=0.0, hand_over_s=0.0, report_s=0.05)
    outcomes = run(Scenario(workers, LAYOUT, delays, [Failure(4.0, "w0")]), trace, watched=True)
    assert sorted(outcome.num_output_tokens for outcome in outcomes) == [105, 105, 106]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(scenarios(), traces())
def test_the_same_seed_gives_the_same_outcomes(scenario: Scenario, trace: list[TracedRequest]) -> None:
    assert run(scenario, trace, watched=False) == run(scenario, trace, watched=False)
