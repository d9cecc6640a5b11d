"""A step of a simulated worker that is in progress, and who is told what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from router.simulated_request import Decoding, Prefilling

if TYPE_CHECKING:
    from router.simulated_worker import SimulatedWorker


class Listener(Protocol):
    """Who is told what comes of a worker's steps."""

    def ask_for_ticket(self, prefilling: Prefilling) -> None: ...

    def wrote(self, worker: SimulatedWorker, prefilling: Prefilling, num_tokens: int, began_at: float) -> None:
        """Such a step is over: the KV of so many tokens has gone out while it lasted."""

    def prefilled(self, worker: SimulatedWorker, prefilling: Prefilling) -> None: ...

    def first_token(self, decoding: Decoding) -> None:
        """Of a prompt that was computed where it decodes, for the first time or again."""

    def preempted(self, decoding: Decoding) -> None: ...

    def stopped(self, worker: SimulatedWorker, decoding: Decoding) -> None:
        """It has its last token, or stands still to be handed over."""


@dataclass(slots=True)
class Step:
    """In progress. Without chunks it is so many rounds of decoding."""

    began_at: float
    num_rounds: int
    prompts: Sequence[tuple[Prefilling, int]] = ()
    computing: Sequence[tuple[Decoding, int]] = ()

    @property
    def is_mixed(self) -> bool:
        return bool(self.prompts or self.computing)
