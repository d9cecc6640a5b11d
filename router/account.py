"""What one request takes, all its answers together: told to its key's limits and to the gate when it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.admission import Gate
from router.rate_limits import Allowance
from router.turns import Admitted


@dataclass(slots=True, eq=False)
class Account:
    """`admitted`: none of its answers waits at the gate any more. `num_output_tokens`: of each that has ended."""

    allowance: Allowance
    admitted: Admitted | None = None
    num_output_tokens: list[int] = field(default_factory=list)


@contextmanager
def accounted(allowance: Allowance, gate: Gate, num_prompt_tokens: int) -> Iterator[Account]:
    """Until all answers have ended, well or not."""
    account = Account(allowance)
    try:
        yield account
    finally:
        if account.admitted is not None:
            gate.answered(account.admitted, num_prompt_tokens, *account.num_output_tokens)
            allowance.used(num_prompt_tokens + sum(account.num_output_tokens))
