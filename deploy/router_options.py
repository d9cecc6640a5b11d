"""The flags of the router that `pdserve up` has too: how much it lets in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from deploy import options

F = TypeVar("F", bound=Callable[..., Any])


class RouterOption(click.Option):
    """How the router works: `pdserve up` has it too, and passes it on."""


def router_setting(flag: str, **attributes: Any) -> Callable[[F], F]:
    return options.setting(flag, cls=RouterOption, **attributes)


admission_options = options.group_of(
    router_setting(
        "--max-queued", type=click.IntRange(1), default=1024, help="Requests that wait at the router, at most."
    ),
    router_setting(
        "--max-queue-s",
        type=click.FloatRange(0, min_open=True),
        default=60.0,
        help="A request that would wait longer is refused at once.",
    ),
    router_setting(
        "--max-decoding",
        type=click.IntRange(1),
        default=256,
        help="Requests on one decode worker, at most; the others wait at the router.",
    ),
    router_setting(
        "--max-prefilling",
        type=click.IntRange(1),
        default=65536,
        help="Prompt tokens queued on one prefill worker before others wait at the router.",
    ),
)


def of_router(context: click.Context) -> list[str]:
    """The arguments for the router that a command starts."""
    return options.as_arguments(context, lambda option: isinstance(option, RouterOption))
