"""Which attempts are over, and why: a message that comes late must not start them again. Bounded memory."""

from __future__ import annotations

from collections import OrderedDict

from protos.errors import ServiceError


class EndedAttempts:
    """Forgets the oldest beyond `capacity`. The first reason given for an attempt stays."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._errors: OrderedDict[str, ServiceError] = OrderedDict()

    def add(self, attempt_id: str, error: ServiceError) -> None:
        self._errors.setdefault(attempt_id, error)
        while len(self._errors) > self._capacity:
            self._errors.popitem(last=False)

    def check(self, attempt_id: str) -> None:
        """Raises the reason if the attempt is over."""
        error = self._errors.get(attempt_id)
        if error is not None:
            raise again(error)


def again(error: ServiceError) -> ServiceError:
    """The same error to raise once more: raising one object twice would chain their tracebacks for ever."""
    return type(error)(error.message, field=error.field)
