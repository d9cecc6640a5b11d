"""The flags of `pdserve generate` and `pdserve chat`: how tokens are chosen, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable

import click

from deploy.options import F, group_of
from model.sampling_params import MAX_DRAFT_TOKENS


def _speculation(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """`off` or a number of tokens, as max_draft_tokens: 0 is off."""
    if value is None:
        return None
    if value == "off":
        return 0
    if not value.isdecimal() or int(value) > MAX_DRAFT_TOKENS:
        raise click.BadParameter(f"{value!r} is neither off nor a number of tokens from 0 to {MAX_DRAFT_TOKENS}")
    return int(value)


def sampling_options(
    *, temperature: str = "1", repetition_penalty: str = "1", max_tokens: str = "what the context leaves"
) -> Callable[[F], F]:
    """What holds where an option is not given, in words."""
    return group_of(
        click.option("--temperature", type=float, help=f"0 takes the likeliest token.  [default: {temperature}]"),
        click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all."),
        click.option("--top-p", type=float, help="Keep the likeliest tokens that sum to p."),
        click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest one."),
        click.option(
            "--repetition-penalty",
            type=float,
            help=f"Above 1: avoid what prompt and answer contain.  [default: {repetition_penalty}]",
        ),
        click.option("--presence-penalty", type=float, help="Above 0: avoid what the answer contains."),
        click.option("--frequency-penalty", type=float, help="Above 0: the more, the more often it does."),
        click.option("--seed", type=int, help="The same seed gives the same text.  [default: drawn]"),
        click.option(
            "--max-tokens",
            type=int,
            help=f"Length of the answer, at most.  [default: {max_tokens}]",
        ),
        click.option("--min-tokens", type=int, help="Length of the answer, at least."),
        click.option(
            "--stop-token-id", "stop_token_ids", type=int, multiple=True, help="Ends the answer; may be repeated."
        ),
        click.option(
            "--speculation",
            "max_draft_tokens",
            metavar="off|N",
            callback=_speculation,
            help="Tokens guessed ahead in one step, at most, and no more than the worker allows.  "
            f"[default: what is fastest]  [0<=N<={MAX_DRAFT_TOKENS}]",
        ),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's own end tokens."),
    )


reading_options = group_of(
    click.option("--deadline-s", type=click.FloatRange(0, min_open=True), help="Give up after this long."),
    click.option(
        "--direct",
        is_flag=True,
        help="Read the answer at its decode worker; the router has to be started with --direct too.",
    ),
    click.option("--quiet", "-q", is_flag=True, help="Print the answer only."),
)
