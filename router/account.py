"""What one request takes, all its answers together: told to its key's limits and to the gate when it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.admission import Gate
from router.dispatch import Dispatch
from router.placement import Placement
from router.rate_limits import Allowance
from router.turns import Admitted

if TYPE_CHECKING:
    from router.progress import Progress


@dataclass(slots=True, eq=False)
class Account:
    """`admitted`: none of its answers waits at the gate any more. `kept`: load that was counted for answers that have
    not begun yet. `answers`: those that have. `num_output_tokens`: of each that has ended."""

    allowance: Allowance
    admitted: Admitted | None = None
    kept: list[Dispatch] = field(default_factory=list)
    answers: list[Progress] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    def let_in(self, admitted: Admitted) -> Dispatch:
        """Returns the load of the first answer, which is the caller's to end."""
        self.admitted = admitted
        first, *self.kept = admitted.dispatches
        return first

    def take(self, placement: Placement) -> Dispatch | None:
        """Of an answer that goes where all were let in; it is the caller's to end."""
        if self.admitted is None or placement is not self.admitted.placement:
            self.let_go()
        return self.kept.pop() if self.kept else None

    def let_go(self) -> None:
        """The answers that have not begun go elsewhere, or nowhere."""
        while self.kept:
            self.kept.pop().end()


@contextmanager
def accounted(allowance: Allowance, gate: Gate, num_prompt_tokens: int) -> Iterator[Account]:
    """Until all answers have ended, well or not."""
    account = Account(allowance)
    try:
        yield account
    finally:
        account.let_go()
        if account.admitted is not None:
            gate.answered(account.admitted, num_prompt_tokens, *account.num_output_tokens)
            allowance.used(num_prompt_tokens + sum(account.num_output_tokens))
