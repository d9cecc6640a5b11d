"""What headers of a request say, beside the key: its id, and for how long its answer is of use."""

from __future__ import annotations

import math
from collections.abc import Mapping

from router.openai_errors import Problem

REQUEST_ID, DEADLINE = "x-request-id", "x-request-timeout-s"
MAX_ID_CHARACTERS = 120
MAX_DEADLINE_S = 86_400


def request_id_of(headers: Mapping[str, str]) -> str | None:
    """The client's own, if there is one. Raises Problem."""
    given = headers.get(REQUEST_ID)
    if given is None:
        return None
    if not 1 <= len(given) <= MAX_ID_CHARACTERS or not (given.isascii() and given.isprintable()):
        told = f"{REQUEST_ID} is {given[:200]!r}; it must be 1 to {MAX_ID_CHARACTERS} printable ASCII characters"
        raise Problem(400, told, param=REQUEST_ID)
    return given


def remaining_s_of(headers: Mapping[str, str]) -> float | None:
    """None: for ever. Raises Problem."""
    given = headers.get(DEADLINE)
    if given is None:
        return None
    try:
        remaining_s = float(given)
    except ValueError:
        remaining_s = math.nan
    if not 0 < remaining_s <= MAX_DEADLINE_S:
        told = f"{DEADLINE} is {given[:100]!r}; it must be a number of seconds above 0, {MAX_DEADLINE_S} at most"
        raise Problem(400, told, param=DEADLINE)
    return remaining_s
