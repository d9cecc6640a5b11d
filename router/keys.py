"""API keys of users: a JSON file of their hashes, and who a key says is calling.

A key is 32 random bytes, and looked up for each call: SHA-256 is the right hash for it. Slow ones such as bcrypt make
up for passwords that can be guessed, which this cannot; they would cost each call some hundred milliseconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protos.caller import Caller, Limits, Scope
from protos.credentials import KEY_SCHEME
from protos.errors import Unauthenticated
from protos.watched import Watched, read_file
from router.slo_classes import DEFAULT

PREFIX = "pdserve-"  # so that scanners find a key where it should not be
SCOPES = {"infer": Scope.INFER, "read": Scope.READ, "operate": Scope.OPERATE}
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = tuple(limit.name for limit in fields(Limits))


class KeysUnusable(ValueError):
    """The message names the file and the entry."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key as the file has it."""

    name: str
    sha256: str  # of the key, hexadecimal
    tenant: str
    scopes: Scope
    limits: Limits = field(default_factory=Limits)
    created_at: datetime | None = None
    expires_at: datetime | None = None
    slo_class: str = ""

    def has_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def caller(self) -> Caller:
        slo_class = "" if self.slo_class == DEFAULT else self.slo_class
        return Caller(self.name, self.tenant, self.scopes, self.limits, slo_class)


class KeyFile:
    """Authenticates callers by the keys that the file holds at the time. Implements protos.caller.Authenticator."""

    def __init__(
        self,
        path: Path,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        slo_classes: Collection[str] | None = None,
    ) -> None:
        """`slo_classes`: those that keys may name; any, if it is None. Raises OSError or KeysUnusable."""
        self._path = path
        self._slo_classes = None if slo_classes is None else [DEFAULT, *slo_classes]
        self._now = now
        self._entries = Watched([path], self._parsed)

    def authenticate(self, authorization: str | None) -> Caller:
        """Raises Unauthenticated. What the time it takes tells is about a hash, which nobody can choose."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.casefold() != KEY_SCHEME.casefold() or not key.strip():
            raise Unauthenticated(
                "an API key is needed: `authorization: Bearer KEY`; --api-key-file on the command line"
            )
        entry = self._entries.value.get(_sha256(key.strip()))
        if entry is None:
            raise Unauthenticated("the API key is not known: it may have been revoked, or be cut off")
        if entry.has_expired(self._now()):
            raise Unauthenticated(f"the API key {entry.name!r} has expired")
        return entry.caller()

    def _parsed(self, contents: Sequence[bytes]) -> dict[str, KeyEntry]:
        entries, known = _entries(self._path, contents[0]), self._slo_classes
        for entry in entries:
            if known is not None and entry.slo_class and entry.slo_class not in known:
                told = f"slo_class is {entry.slo_class!r}; it has to be one of {', '.join(known)} (--slo-class)"
                raise KeysUnusable(f"{self._path}: key {entry.name!r}: {told}")
        return {entry.sha256: entry for entry in entries}


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def create_key(
    path: Path,
    name: str,
    *,
    tenant: str,
    scopes: Scope,
    limits: Limits | None = None,
    expires_at: datetime | None = None,
    slo_class: str = "",
) -> str:
    """Adds a key to the file, which is made if it is not there, and returns it: nothing else ever has it.

    Raises KeysUnusable if there is one of that name.
    """
    key = new_key()
    created_at = datetime.now(UTC).replace(microsecond=0)
    entry = KeyEntry(name, _sha256(key), tenant, scopes, limits or Limits(), created_at, expires_at, slo_class)
    entry = _entry(path, _as_json(entry))  # what could not be read again is not written
    with _changing(path) as entries:
        if name in {other.name for other in entries}:
            raise KeysUnusable(f"{path} has a key {name!r} already; revoke it first, or choose another name")
        entries.append(entry)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Raises KeysUnusable if there is none of that name."""
    with _changing(path) as entries:
        kept = [entry for entry in entries if entry.name != name]
        if len(kept) == len(entries):
            raise KeysUnusable(f"{path} has no key {name!r}; it has {', '.join(e.name for e in entries) or 'none'}")
        entries[:] = kept


def read_keys(path: Path) -> list[KeyEntry]:
    """Raises OSError or KeysUnusable."""
    return _entries(path, read_file(path))


@contextmanager
def _changing(path: Path) -> Iterator[list[KeyEntry]]:
    """The entries, to be changed in place; one process at a time. The file is replaced, so it is never half there."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        entries = read_keys(path) if path.exists() else []
        yield entries
        _replace(path, json.dumps({"keys": [_as_json(entry) for entry in entries]}, indent=2) + "\n")
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    """A new file is readable for its owner alone, from its first byte on; one that is there keeps owner and mode."""
    target = path.resolve()  # a link stays one
    number, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(number, "w") as file:
            if target.exists():
                before = target.stat()
                os.fchown(number, before.st_uid, before.st_gid)
                os.fchmod(number, before.st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _as_json(entry: KeyEntry) -> dict[str, Any]:
    limits = {name: value for name in _LIMITS if (value := getattr(entry.limits, name)) is not None}
    times = {name: value.isoformat() for name in ("created_at", "expires_at") if (value := getattr(entry, name))}
    scopes = [name for name, scope in SCOPES.items() if scope in entry.scopes]
    return (
        {
            "name": entry.name,
            "sha256": entry.sha256,
            "tenant": entry.tenant,
            "scopes": scopes,
            "limits": limits,
        }
        | ({"slo_class": entry.slo_class} if entry.slo_class else {})
        | times
    )


def _entries(path: Path, content: bytes) -> list[KeyEntry]:
    try:
        rows = json.loads(content)["keys"]
    except (ValueError, KeyError, TypeError) as error:
        raise KeysUnusable(f'{path} is not of the form {{"keys": [...]}} in JSON') from error
    if not isinstance(rows, list):
        raise KeysUnusable(f'{path}: "keys" has to be a list')
    entries = [_entry(path, row) for row in rows]
    for what in ("name", "sha256"):
        counts = Counter(getattr(entry, what) for entry in entries)
        if repeated := next((value for value, number in counts.items() if number > 1), None):
            raise KeysUnusable(f"{path}: two keys have the {what} {repeated!r}")
    return entries


_FIELDS = {each.name for each in fields(KeyEntry)}


def _entry(path: Path, row: object) -> KeyEntry:
    """An unknown field is refused: it may be a limit or a date that is spelt wrong."""
    name = row.get("name") if isinstance(row, Mapping) else None
    where = f"{path}: key {name!r}"
    if not isinstance(row, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise KeysUnusable(f"{where}: a name is 1 to 64 letters, digits and characters of ._@-")
    if unknown := set(row) - _FIELDS:
        raise KeysUnusable(f"{where}: unknown {', '.join(sorted(map(str, unknown)))}")
    sha256, tenant, scopes = row.get("sha256"), row.get("tenant", ""), row.get("scopes")
    if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
        raise KeysUnusable(f"{where}: sha256 has to be 64 hexadecimal digits")
    if not isinstance(tenant, str) or (tenant and not _NAME.fullmatch(tenant)):
        raise KeysUnusable(f"{where}: a tenant is at most 64 letters, digits and characters of ._@-")
    slo_class = row.get("slo_class", "")
    if not isinstance(slo_class, str) or (slo_class and not _NAME.fullmatch(slo_class)):
        raise KeysUnusable(f"{where}: slo_class is at most 64 letters, digits and characters of ._@-")
    if not isinstance(scopes, list) or not scopes or not {str(scope) for scope in scopes} <= SCOPES.keys():
        raise KeysUnusable(f"{where}: scopes have to be some of {', '.join(SCOPES)}")
    granted = Scope(0)
    for scope in scopes:
        granted |= SCOPES[scope]
    entry = KeyEntry(name, sha256, tenant, granted, _limits(where, row.get("limits", {})), slo_class=slo_class)
    return replace(entry, created_at=_time(where, row, "created_at"), expires_at=_time(where, row, "expires_at"))


def _limits(where: str, row: object) -> Limits:
    if not isinstance(row, Mapping) or (set(row) - set(_LIMITS)):
        raise KeysUnusable(f"{where}: limits may have {', '.join(_LIMITS)}")
    for name, value in row.items():
        if type(value) is not int or value < 1:
            raise KeysUnusable(f"{where}: {name} is {value!r}; it has to be a whole number of at least 1")
    return Limits(**row)


def _time(where: str, row: Mapping[str, Any], name: str) -> datetime | None:
    """In ISO 8601, with its offset from UTC: without one nobody knows when it is."""
    if row.get(name) is None:
        return None
    try:
        time = datetime.fromisoformat(str(row[name]))
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise KeysUnusable(f"{where}: {name} has to be a time with an offset, such as 2027-01-31T00:00:00Z")
    return time
