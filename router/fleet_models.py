"""What steps take on each worker: a step-time model of each kind, and how much slower than that each one of them is.

Workers are of a kind if they say the same of what they compute with. They feed one model, each measurement divided by
how slow that worker is beside the others, so that an unequal one does not spoil what is known of the rest.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from router.candidate import PrefillTimes, WorkerId
from router.measured_steps import PrefillSteps, Steps
from router.profile import WorkerProfile
from router.step_costs import Experts, StepCosts
from router.step_models import UNKNOWN, StepModel

_PER_S = 100.0  # of each sort, that a model learns from; more of them say nothing new, and each takes 70 us
_SHARE = 0.1  # of a measurement in how slow a worker is
_FORGOTTEN_S = 60.0  # after such a pause it is all that counts
_FADED_S = 600.0  # after such a time what was measured of a worker counts half
_MOST_SLOW = math.log(100.0)  # than its kind, or faster
_LEAST_EXPECTED_S = 1e-9
_MOST_KINDS = 64  # that are remembered without workers
_MOST_LEFT = 1000  # workers that have left and may come back
_NAME_LENGTH = 160
_LOOK_S = 1.0  # between looks of placement at what was learnt
_CENTRE_S = 1.0  # between looks at how slow the middle one is


@dataclass(frozen=True, slots=True)
class KindModel:
    """What is known of a kind of worker. Errors are relative, of what was expected of lately measured steps."""

    kind: str
    costs: StepCosts
    prefill_confidence: float  # 0 to 1
    decode_confidence: float
    prefill_error: float
    decode_error: float
    num_workers: int


class FleetModels:
    """Told of workers by the table. `experts` of the model that they run, if it has some."""

    def __init__(self, experts: Experts | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._experts = experts
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}  # used last: last
        self._workers: dict[WorkerId, _Measured] = {}
        self._left: dict[WorkerId, _Measured] = {}

    def join(self, profile: WorkerProfile) -> None:
        """One that was here before is known; of another its calibration is learnt."""
        if profile.id in self._workers:
            return
        measured = self._left.pop(profile.id, None)
        if measured is None:
            measured = _Measured(kind_of(profile), profile.max_step_tokens)
        kind = self._kinds.pop(measured.kind, None) or _Kind(self._experts)
        self._kinds[measured.kind] = kind
        self._workers[profile.id] = kind.workers[profile.id] = measured
        if not measured.was_calibrated:
            measured.was_calibrated = True
            self._learn(kind, measured, profile.calibration)
        self._forget_kinds()

    def leave(self, worker_id: WorkerId) -> None:
        """What its kind has learnt stays."""
        measured = self._workers.pop(worker_id, None)
        if measured is None:
            return
        del self._kinds[measured.kind].workers[worker_id]
        self._left[worker_id] = measured
        while len(self._left) > _MOST_LEFT:
            del self._left[next(iter(self._left))]

    def observe(self, worker_id: WorkerId, steps: Iterable[Steps]) -> None:
        """What a worker has measured lately."""
        measured = self._workers.get(worker_id)
        if measured is not None:
            self._learn(self._kinds[measured.kind], measured, steps)

    def costs_of(self, worker_id: WorkerId) -> StepCosts:
        """As of that worker; some machine's while nothing is known, which the confidences say."""
        measured = self._workers.get(worker_id)
        if measured is None:
            return UNKNOWN
        return self._kinds[measured.kind].model.costs.scaled(*self.slowness_of(worker_id))

    def confidences_of(self, worker_id: WorkerId) -> tuple[float, float]:
        """In prefill and decode, each 0 to 1."""
        measured = self._workers.get(worker_id)
        if measured is None:
            return 0.0, 0.0
        model = self._kinds[measured.kind].model
        return model.prefill_confidence, model.decode_confidence

    def slowness_of(self, worker_id: WorkerId) -> tuple[float, float]:
        """How many times as long as the middle one of its kind it takes to prefill, and to decode."""
        measured = self._workers.get(worker_id)
        if measured is None:
            return 1.0, 1.0
        now = self._clock()
        return math.exp(measured.prefill.at(now)), math.exp(measured.decode.at(now))

    def prefill_times_of(self, worker_id: WorkerId, now: float) -> PrefillTimes | None:
        """As they were a second ago at most: it is asked for whenever something is sent to the worker.

        None while nothing is known.
        """
        measured = self._workers.get(worker_id)
        if measured is None or measured.max_step_tokens < 1:
            return None
        if now - measured.looked_at >= _LOOK_S:
            model, slow = self._kinds[measured.kind].model, math.exp(measured.prefill.at(now))
            base_s, token_s, pair_s = model.prefill_coefficients
            confidence, most = model.prefill_confidence, measured.max_step_tokens
            times = PrefillTimes(base_s * slow, token_s * slow, pair_s * slow, confidence, most)
            measured.looked_at, measured.prefill_times = now, times if confidence > 0.0 else None
        return measured.prefill_times

    def kinds(self) -> list[KindModel]:
        """By name, those that have workers. Changes nothing: metrics are read in a thread of their own."""
        return sorted(self._known(), key=lambda kind: kind.kind)

    def _known(self) -> Iterator[KindModel]:
        for name, kind in list(self._kinds.items()):
            if kind.workers:
                model = kind.model
                yield KindModel(
                    name,
                    model.costs,
                    model.prefill_confidence,
                    model.decode_confidence,
                    model.prefill_miss,
                    model.decode_miss,
                    len(kind.workers),
                )

    def _learn(self, kind: _Kind, measured: _Measured, steps: Iterable[Steps]) -> None:
        now = self._clock()
        for each in steps:
            kind.learn(measured, each, now)

    def _forget_kinds(self) -> None:
        without = [name for name, kind in self._kinds.items() if not kind.workers]
        for name in without[: max(0, len(without) - _MOST_KINDS)]:
            del self._kinds[name]
            self._left = {known: each for known, each in self._left.items() if each.kind != name}


def kind_of(profile: WorkerProfile) -> str:
    """In words, for people too."""
    drafter = "" if profile.drafter in ("", "none") else f", {profile.drafter}"
    what = " ".join(dict.fromkeys([profile.runner, profile.kernels])).strip() or "unknown"
    hardware = f" on {profile.hardware}" if profile.hardware else ""
    return f"{what}{hardware}{drafter}"[:_NAME_LENGTH] + f" [{profile.layout.fingerprint[:8]}]"


@dataclass(slots=True)
class _Slowness:
    """Beside what the model of its kind expects: a decayed mean of logarithms."""

    log: float = 0.0
    num_seen: int = 0
    seen_at: float = -math.inf

    def seen(self, ratio: float, now: float, confidence: float) -> None:
        """Of what was measured over what was expected. While little is known of the kind it is that which was wrong."""
        log = min(max(math.log(ratio), -_MOST_SLOW), _MOST_SLOW)
        pause = 0.0 if self.num_seen == 0 else (now - self.seen_at) / _FORGOTTEN_S
        share = min(1.0, max(_SHARE, 1.0 / (self.num_seen + 2.0), pause))
        self.log += confidence * share * (log - self.log)
        self.num_seen += 1
        self.seen_at = now

    def at(self, now: float) -> float:
        """It may have been a neighbour's doing, and with time nothing is left of it."""
        return self.log * 0.5 ** ((now - self.seen_at) / _FADED_S) if self.num_seen else 0.0


@dataclass(slots=True)
class _Measured:
    """Of one worker."""

    kind: str
    max_step_tokens: int
    was_calibrated: bool = False
    prefill: _Slowness = field(default_factory=_Slowness)
    decode: _Slowness = field(default_factory=_Slowness)
    prefill_times: PrefillTimes | None = None
    looked_at: float = -math.inf


class _Centre:
    """The middle one of a kind's workers: 0 if it takes what the model says."""

    def __init__(self) -> None:
        self.log = 0.0
        self._found_at = -math.inf

    def find(self, all_slow: Iterable[_Slowness], now: float) -> None:
        """Now and then: there may be a thousand."""
        if now - self._found_at >= _CENTRE_S:
            self._found_at = now
            logs = [each.at(now) for each in all_slow if each.num_seen]
            self.log = statistics.median(logs) if logs else 0.0


class _Allowance:
    """Of so many a second, a second's worth at once."""

    def __init__(self) -> None:
        self._left = _PER_S
        self._at = -math.inf

    def take(self, now: float) -> bool:
        self._left = min(_PER_S, self._left + (now - self._at) * _PER_S)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class _Kind:
    def __init__(self, experts: Experts | None) -> None:
        self.model = StepModel(experts=experts)
        self.workers: dict[WorkerId, _Measured] = {}
        self._centres = {is_prefill: _Centre() for is_prefill in (True, False)}
        self._allowances = {is_prefill: _Allowance() for is_prefill in (True, False)}

    def learn(self, measured: _Measured, steps: Steps, now: float) -> None:
        is_prefill = isinstance(steps, PrefillSteps)
        centre, model = self._centres[is_prefill], self.model
        if len(self.workers) == 1:  # there is nobody to compare it with
            measured.prefill, measured.decode, centre.log = _Slowness(), _Slowness(), 0.0
        elif (expected_s := model.expected_s(steps)) is not None:
            slowness = measured.prefill if is_prefill else measured.decode
            confidence = model.prefill_confidence if is_prefill else model.decode_confidence
            slowness.seen(steps.step_s / max(expected_s, _LEAST_EXPECTED_S), now, confidence)
            centre.find((each.prefill if is_prefill else each.decode for each in self.workers.values()), now)
            steps = steps.slowed(math.exp(centre.log - slowness.log))
        if self._allowances[is_prefill].take(now):
            model.observe(steps)
