"""A flag of the router that `pdserve up` has too, and passes on to the router it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from deploy.options import F, as_arguments, setting


class RouterOption(click.Option):
    """How the router works."""


def router_setting(*flag: str, **attributes: Any) -> Callable[[F], F]:
    return setting(*flag, cls=RouterOption, **attributes)


def of_router(context: click.Context) -> list[str]:
    """The arguments for the router that a command starts."""
    return as_arguments(context, lambda option: isinstance(option, RouterOption))
