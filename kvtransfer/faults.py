"""Which faults are to happen, as one frozen value, and how it is written: `drop commit 3; kill at reserved 5`.

Pure: what makes them happen is in `kvtransfer.fault_injection`. The language is described in docs/operations.md.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NoReturn, TypeVar


class Fault(enum.Enum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    FAIL = "fail"
    STALL = "stall"
    KILL = "kill"


class Target(enum.Enum):
    """What a fault happens to: the messages of a hand-over, as the sender's side sees them, and its writes."""

    DESCRIBE = "describe"
    DESCRIBE_ANSWER = "describe answer"
    HEARTBEAT = "heartbeat"
    HEARTBEAT_ANSWER = "heartbeat answer"
    RESERVE = "reserve"
    RESERVE_ANSWER = "reserve answer"
    COMMIT = "commit"
    COMMIT_ANSWER = "commit answer"
    RELEASE = "release"
    RELEASE_ANSWER = "release answer"
    WRITE = "write"


class Stage(enum.Enum):
    """Where a process can be killed: on the prefill side, then on the decode side, in the order in which they come."""

    RESERVING = "reserving"  # about to ask for a ticket
    RESERVED = "reserved"  # has it
    FIRST_WRITE = "first-write"  # the first write since a ticket came is posted
    COMPUTED = "computed"  # the first token is there and nobody has it yet
    COMMITTING = "committing"  # everything is written, the record is about to go
    COMMITTED = "committed"  # it was accepted
    RELEASING = "releasing"  # about to give a ticket back

    GRANTED = "granted"  # a ticket is granted, and not yet sent
    RECORD_ARRIVED = "record-arrived"
    RECORD_ACCEPTED = "record-accepted"  # and not yet answered
    FIRST_STEP = "first-step"  # the first tokens are about to be sent
    MID_STREAM = "mid-stream"  # later ones are, and they are not the last


_EMPTY = (Target.COMMIT_ANSWER, Target.RELEASE_ANSWER)
_ONE_OF_A_CALL = (Target.DESCRIBE_ANSWER, Target.RESERVE_ANSWER, *_EMPTY)
_CAN_HAPPEN_TO: dict[Fault, Collection[Target]] = {
    Fault.DROP: tuple(Target),
    Fault.DELAY: tuple(Target),
    Fault.DUPLICATE: [target for target in Target if target not in _ONE_OF_A_CALL],
    Fault.CORRUPT: [target for target in Target if target not in _EMPTY],
    Fault.FAIL: [Target.WRITE],
    Fault.STALL: [Target.WRITE],
}
_TAKES_DURATION = {Fault.DELAY, Fault.STALL}
_NO_FAULTS = "none"
_Named = TypeVar("_Named", Fault, Target, Stage)


class FaultPlanUnreadable(ValueError):
    """The message names the word that is wrong, and what could stand there."""


@dataclass(frozen=True, slots=True)
class Occasions:
    """Numbers `first` to `last`, counted from 1 for each target in each process; of them a `share`, drawn at random."""

    first: int = 1
    last: float = math.inf
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class FaultRule:
    """`duration_s`: of a delay or a stall; infinity if a stall names none, 0 for other faults."""

    fault: Fault
    target: Target | Stage
    occasions: Occasions
    duration_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.fault.value} {'at ' * isinstance(self.target, Stage)}{self.target.value}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """`text` is what it was read from."""

    rules: tuple[FaultRule, ...] = ()
    seed: int = 0
    text: str = _NO_FAULTS

    @staticmethod
    def parse(text: str) -> FaultPlan:
        """Raises FaultPlanUnreadable."""
        rules, seed = [], 0
        for sentence in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
            words = _Words(sentence)
            if sentence == _NO_FAULTS:
                continue
            if words.skip("seed"):
                seed = words.number("a seed")
            else:
                rules.append(_rule(words))
            words.end()
        return FaultPlan(tuple(rules), seed, text.strip() or _NO_FAULTS)


def _rule(words: _Words) -> FaultRule:
    fault = words.one_of(Fault, "a fault")
    target: Target | Stage
    if fault is Fault.KILL:
        if not words.skip("at"):
            words.complain("'at'")
        target = words.one_of(Stage, "a stage")
    else:
        target = words.one_of(_CAN_HAPPEN_TO[fault], f"what can be hit by {fault.value!r}")
    occasions = words.occasions()
    if fault is Fault.STALL and words.is_at_end:
        return FaultRule(fault, target, occasions, math.inf)
    return FaultRule(fault, target, occasions, words.duration_s() if fault in _TAKES_DURATION else 0.0)


class _Words:
    """One sentence of a plan, read word by word."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence
        self._words = sentence.split()

    @property
    def is_at_end(self) -> bool:
        return not self._words

    def skip(self, word: str) -> bool:
        """Whether it was this word."""
        is_next = self._words[:1] == [word]
        del self._words[:is_next]
        return is_next

    def one_of(self, known: Iterable[_Named], what: str) -> _Named:
        """The longest name of `known` that comes next."""
        names = {each.value: each for each in known}
        for count in (2, 1):
            name = " ".join(self._words[:count])
            if name in names:
                del self._words[:count]
                return names[name]
        self.complain(f"{what}: {', '.join(names)}")

    def number(self, what: str) -> int:
        return int(self._match(r"([0-9]{1,18})", f"{what}: a whole number")[1])

    def occasions(self) -> Occasions:
        pattern = r"(?P<all>\*)|(?P<percent>[0-9]{1,3}(\.[0-9]+)?)%|(?P<first>[0-9]{1,9})(-(?P<last>[0-9]{1,9}))?"
        what = "occasions: 3, 1-5, 10% (more than 0 and at most 100) or *, counted from 1"
        found = self._match(pattern, what, is_right=_are_occasions)
        if found["all"]:
            return Occasions()
        if found["percent"]:
            return Occasions(share=float(found["percent"]) / 100)
        first = int(found["first"])
        return Occasions(first, int(found["last"] or first))

    def duration_s(self) -> float:
        found = self._match(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(ms|s)", "a time: 0.5s or 20ms")
        return float(found[1]) / (1000 if found[2] == "ms" else 1)

    def end(self) -> None:
        if self._words:
            self.complain("the end of this fault")

    def complain(self, expected: str) -> NoReturn:
        word = f"{self._words[0]!r} in" if self._words else "after"
        raise FaultPlanUnreadable(f"fault plan: {word} {self._sentence!r}: expected {expected}")

    def _match(
        self, pattern: str, expected: str, *, is_right: Callable[[re.Match[str]], bool] = lambda found: True
    ) -> re.Match[str]:
        found = re.fullmatch(pattern, self._words[0]) if self._words else None
        if found is None or not is_right(found):
            self.complain(expected)
        del self._words[0]
        return found


def _are_occasions(found: re.Match[str]) -> bool:
    if found["percent"]:
        return 0 < float(found["percent"]) <= 100
    return found["first"] is None or 1 <= int(found["first"]) <= int(found["last"] or found["first"])
