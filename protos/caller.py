"""Who is calling: what a door learns from a call's credentials, and what the services behind it go by."""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class Scope(enum.Flag):
    INFER = enum.auto()  # ask for answers
    READ = enum.auto()  # see status and decisions
    OPERATE = enum.auto()  # change roles, drain
    CLUSTER = enum.auto()  # speak as a router or a worker: by the cluster's secret, never by a key


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one key; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and answer together
    num_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """`key` names the credential, never contains it. Callers of one tenant share what is the tenant's."""

    key: str = ""
    tenant: str = ""
    scopes: Scope = Scope.INFER | Scope.READ | Scope.OPERATE
    limits: Limits = Limits()
    slo_class: str = ""  # what its requests are promised; empty: as anybody's


ANYONE = Caller()  # where no keys are asked for

current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYONE)  # set by the door, for one call


class Authenticator(Protocol):
    def authenticate(self, authorization: str | None) -> Caller:
        """By the value of a call's `authorization`, as in HTTP. Raises ServiceError for one that is not known."""
        ...
