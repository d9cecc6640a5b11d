"""Classes of SLOs: what is promised to the keys that name one, and how operators write them.

`interactive=ttft:0.5,tpot:0.05,share:0.95`. Who names no class has the default one, which has no name inside and is
called `default` where people read or write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from router.config import SloPolicy

DEFAULT = "default"
MAX_CLASSES = 16  # beside the default one: each is a label of metrics
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "share": "percentile"}
_FORM = "NAME=ttft:SECONDS,tpot:SECONDS,share:SHARE"


def parse_classes(texts: Iterable[str], default: SloPolicy) -> dict[str, SloPolicy]:
    """By name, in the order given. What one leaves out is the default's. Raises ValueError that names the class, the
    field and its limit."""
    classes: dict[str, SloPolicy] = {}
    for text in texts:
        name, policy = _parse_class(text, default)
        if name in classes:
            raise ValueError(f"the class {name!r} is given twice")
        classes[name] = policy
    check_classes(classes)
    return classes


def check_classes(classes: Mapping[str, SloPolicy]) -> None:
    """Raises ValueError."""
    if len(classes) > MAX_CLASSES:
        raise ValueError(f"there are {len(classes)} classes; at most {MAX_CLASSES} may be given beside the default one")
    for name in classes:
        if name == DEFAULT:
            raise ValueError(f"{DEFAULT!r} is the class of --slo-ttft, --slo-tpot and --slo-share; choose another name")
        if not _NAME.fullmatch(name):
            raise ValueError(f"class {name!r}: a name is 1 to 64 letters, digits and characters of ._@-")


def _parse_class(text: str, default: SloPolicy) -> tuple[str, SloPolicy]:
    name, is_there, fields = text.partition("=")
    if not is_there or not fields:
        raise ValueError(f"{text!r} is not of the form {_FORM}")
    given: dict[str, float] = {}
    for each in fields.split(","):
        field, _, value = each.partition(":")
        if field not in _FIELDS:
            raise ValueError(f"class {name!r}: {field!r} is no field; there are {', '.join(_FIELDS)}")
        if _FIELDS[field] in given:
            raise ValueError(f"class {name!r}: {field} is given twice")
        given[_FIELDS[field]] = _number(name, field, value)
    return name, replace(default, **given)


def _number(name: str, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"class {name!r}: {field} is {text!r}; it must be a number") from None
    if field == "share" and not 0 < value < 1:
        raise ValueError(f"class {name!r}: share is {text}; it must be above 0 and below 1")
    if not 0 < value < float("inf"):
        raise ValueError(f"class {name!r}: {field} is {text}; it must be a number of seconds above 0")
    return value
