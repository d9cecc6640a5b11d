"""A number that can say how it came about. The formula is what was computed, and no comment beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType

from router.queueing import erlang_c

_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "ceil": math.ceil,
    "erlang_c": erlang_c,
    "floor": math.floor,
    "ln": math.log,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
}
_SCOPE = {"__builtins__": {}, **_FUNCTIONS}
_NAME = re.compile(r"\b[a-z_]\w*\b(?!\()")


@dataclass(frozen=True, slots=True)
class Figure:
    """`given`: what stands for the names of the formula. `unit`: B, s, FLOP and so on, without prefix; empty of a count
    or a ratio."""

    name: str
    value: float
    unit: str
    formula: str
    given: tuple[tuple[str, float], ...]

    @property
    def worked(self) -> str:
        """The formula with the numbers put in."""
        numbers = dict(self.given)
        return _NAME.sub(lambda name: _number(numbers[name[0]]), self.formula)


def figure(name: str, unit: str, formula: str, /, **given: float | Figure) -> Figure:
    """Computes `formula`, Python's arithmetic with ceil, erlang_c, floor, ln, max, min and sqrt, from what is given."""
    numbers = {key: value.value if isinstance(value, Figure) else value for key, value in given.items()}
    if numbers.keys() != _names_in(formula):
        raise TypeError(f"{name}: {formula!r} needs {sorted(_names_in(formula))} and was given {sorted(numbers)}")
    value = float(eval(_compiled(formula), _SCOPE, numbers))
    return Figure(name, value, unit, formula, tuple(numbers.items()))


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, formula, "eval")


@cache
def _names_in(formula: str) -> frozenset[str]:
    return frozenset(_NAME.findall(formula))


def _number(number: float) -> str:
    value = float(number)
    if value.is_integer() and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.5g}".replace("e+", "e").replace("e0", "e")
