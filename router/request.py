"""A request as it is served: every choice made out."""

from __future__ import annotations

from dataclasses import dataclass, field

from model.sampling_params import SamplingParams
from protos import tracing

DEFAULT_PRIORITY = 5


@dataclass(frozen=True, slots=True)
class Request:
    """What is served: tokens, and sampling with every field set.

    `priority`: higher goes first while requests wait. `session_id`: "" for a request of none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = DEFAULT_PRIORITY
    session_id: str = ""
    num_choices: int = 1  # answers to the one prompt
    echo: bool = False  # the prompt is told before them
    is_direct: bool = False  # the client reads from the decode worker itself
    emitted: tuple[tuple[int, ...], ...] = ()  # tokens that the client has of each answer: it goes on behind them
    span: tracing.Span = field(default=tracing.NO_SPAN, compare=False)

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        return self.emitted[choice] if choice < len(self.emitted) else ()

    @property
    def num_known_tokens(self) -> int:
        """Those of the prompt, and those that the client has of all answers."""
        return len(self.token_ids) + sum(map(len, self.emitted))

    @property
    def max_new_tokens(self) -> int:
        """Of all answers together."""
        return self.num_choices * self.sampling.max_tokens - sum(map(len, self.emitted))
