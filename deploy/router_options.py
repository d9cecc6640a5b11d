"""The flags of the router that `pdserve up` has too, and of these how many requests may wait, and how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from deploy import options
from router.config import AdmissionPolicy

F = TypeVar("F", bound=Callable[..., Any])

_POLICY = AdmissionPolicy()


class RouterOption(click.Option):
    """How the router works: `pdserve up` has it too, and passes it on."""


def router_setting(flag: str, **attributes: Any) -> Callable[[F], F]:
    return options.setting(flag, cls=RouterOption, **attributes)


admission_options = options.group_of(
    router_setting(
        "--max-queued",
        type=click.IntRange(1),
        default=_POLICY.max_queued,
        help="Requests that wait at the router, at most.",
    ),
    router_setting(
        "--max-queue-s",
        type=click.FloatRange(0, min_open=True),
        default=_POLICY.max_queue_s,
        help="A request that would wait longer is refused at once.",
    ),
)


def take_policy(settings: dict[str, Any]) -> AdmissionPolicy:
    """Takes these options out of a command's settings."""
    return AdmissionPolicy(max_queued=settings.pop("max_queued"), max_queue_s=settings.pop("max_queue_s"))


def of_router(context: click.Context) -> list[str]:
    """The arguments for the router that a command starts."""
    return options.as_arguments(context, lambda option: isinstance(option, RouterOption))
