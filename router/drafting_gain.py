"""What guessing tokens ahead gains at a batch: tokens a step emits, over what drafting and verifying them cost."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import InvalidArgument
from router.figure import Figure, figure
from router.roofline import Roofline

MAX_DRAFT_TOKENS = 7


@dataclass(frozen=True, slots=True)
class Drafting:
    """`acceptance`: the chance that a draft stands if those before it do. A draft costs a step of `model` if there is
    one, or else `cost` plain steps of the target."""

    acceptance: float
    cost: float = 0.0
    model: Roofline | None = None
    max_tokens: int = MAX_DRAFT_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise InvalidArgument(
                f"acceptance is {self.acceptance:g}; it must be from 0 to below 1", field="acceptance"
            )
        if not self.cost >= 0:
            raise InvalidArgument(f"draft cost is {self.cost:g}; it must be 0 or more", field="draft_cost")
        if self.max_tokens < 1:
            raise InvalidArgument(f"max_tokens is {self.max_tokens}; it must be at least 1", field="max_draft_tokens")


@dataclass(frozen=True, slots=True)
class DraftGain:
    """At one batch, with the number of drafts that gains most; 0 if none gains."""

    num_sequences: float
    num_draft_tokens: int
    emitted: Figure
    iteration: Figure
    token: Figure  # seconds
    speedup: Figure
    textbook: Figure


def emitted_tokens(acceptance: float, num_draft_tokens: int) -> Figure:
    """Per sequence and iteration: those that stand, and the one that the target adds."""
    return figure(
        "tokens per iteration",
        "",
        "(1 - acceptance ** (drafts + 1)) / (1 - acceptance)",
        acceptance=acceptance,
        drafts=num_draft_tokens,
    )


def textbook_speedup(emitted: Figure, num_draft_tokens: int, cost: float) -> Figure:
    """Verifying taken to cost what a plain step does."""
    return figure(
        "speed-up, verifying for nothing",
        "",
        "emitted / (drafts * cost + 1)",
        emitted=emitted,
        drafts=num_draft_tokens,
        cost=cost,
    )


def draft_gain(roofline: Roofline, drafting: Drafting | None, num_sequences: float, context: float) -> DraftGain:
    """With the best number of drafts."""
    longest = 0 if drafting is None else drafting.max_tokens
    best = min(range(longest + 1), key=lambda k: token_s(roofline, drafting, num_sequences, context, k))
    return gain_of(roofline, drafting, num_sequences, context, best)


def token_s(roofline: Roofline, drafting: Drafting | None, num_sequences: float, context: float, k: int) -> float:
    """The same as the figure, for searching."""
    step = roofline.decode_s(num_sequences, context, k + 1)
    if drafting is None or k == 0:
        return step
    emitted = (1 - drafting.acceptance ** (k + 1)) / (1 - drafting.acceptance)
    return (k * _draft_s(roofline, drafting, num_sequences, context) + step) / emitted


def best_token_s(roofline: Roofline, drafting: Drafting | None, num_sequences: float, context: float) -> float:
    longest = 0 if drafting is None else drafting.max_tokens
    return min(token_s(roofline, drafting, num_sequences, context, k) for k in range(longest + 1))


def gain_of(
    roofline: Roofline, drafting: Drafting | None, num_sequences: float, context: float, num_draft_tokens: int
) -> DraftGain:
    plain = roofline.decode_s(num_sequences, context)
    draft = 0.0 if drafting is None else _draft_s(roofline, drafting, num_sequences, context)
    emitted = emitted_tokens(drafting.acceptance if drafting else 0.0, num_draft_tokens)
    iteration = figure(
        "iteration",
        "s",
        "drafts * draft + verify",
        drafts=num_draft_tokens,
        draft=draft,
        verify=roofline.decode_s(num_sequences, context, num_draft_tokens + 1),
    )
    token = figure("time per token", "s", "iteration / emitted", iteration=iteration, emitted=emitted)
    speedup = figure("speed-up", "", "plain / token", plain=plain, token=token)
    return DraftGain(
        num_sequences=num_sequences,
        num_draft_tokens=num_draft_tokens,
        emitted=emitted,
        iteration=iteration,
        token=token,
        speedup=speedup,
        textbook=textbook_speedup(emitted, num_draft_tokens, draft / plain),
    )


def _draft_s(roofline: Roofline, drafting: Drafting, num_sequences: float, context: float) -> float:
    if drafting.model is not None:
        return drafting.model.decode_s(num_sequences, context)
    return drafting.cost * roofline.decode_s(num_sequences, context)
