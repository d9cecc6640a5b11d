"""One request while it is served, as whoever looks from outside finds it: nothing here is kept beyond its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from router.account import Account
from router.progress import Progress
from router.timeline import RequestClock


@dataclass(slots=True, eq=False)
class Followed:
    """`last_message`: the answer's newest, which at its end is the summary."""

    request_id: str
    tenant: str
    clock: RequestClock
    slo_class: str = ""  # empty: the default one
    received_at: float = field(default_factory=time.time)
    num_prompt_tokens: int = 0
    has_arrived: bool = False  # it was found to be valid
    account: Account | None = None
    last_message: bytes = b""

    @property
    def answers(self) -> list[Progress]:
        """Those that have begun, the first one first."""
        return [] if self.account is None else self.account.answers

    @property
    def was_admitted(self) -> bool:
        return self.account is not None and self.account.admitted is not None
