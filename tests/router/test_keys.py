"""The file of API keys: what authenticates, what is refused, and how it is changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from protos.caller import Caller, Limits, Scope
from protos.errors import Unauthenticated
from router.keys import KeyFile, KeysUnusable, create_key, read_keys, revoke_key

NOON = datetime(2027, 1, 1, 12, tzinfo=UTC)
ROW = {"name": "ann", "sha256": hashlib.sha256(b"ann's").hexdigest(), "tenant": "t", "scopes": ["infer", "read"]}


@pytest.fixture(autouse=True)
def _seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.watched.LOOK_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": rows}))
    return path


def test_a_key_says_who_is_calling(path: Path) -> None:
    limits = Limits(requests_per_minute=60, num_concurrent=4)
    key = create_key(path, "ann", tenant="shop", scopes=Scope.INFER | Scope.READ, limits=limits)
    assert re.fullmatch(r"pdserve-[\w-]{43}", key)  # 32 bytes, 6 bits a character
    caller = KeyFile(path).authenticate(f"Bearer {key}")
    assert caller == Caller("ann", "shop", Scope.INFER | Scope.READ, limits)


def test_the_file_has_hashes_that_anybody_can_check_and_no_keys(path: Path) -> None:
    keys = [create_key(path, name, tenant="t", scopes=Scope.INFER) for name in ("ann", "bob")]
    text = path.read_text()
    rows = json.loads(text)["keys"]
    assert [row["sha256"] for row in rows] == [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    assert not [key for key in keys if key in text or key.removeprefix("pdserve-") in text]


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Cluster x", "KEY"])
def test_without_a_bearer_there_is_no_caller(authorization: str | None, path: Path) -> None:
    key = create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    with pytest.raises(Unauthenticated, match="an API key is needed"):
        KeyFile(path).authenticate(authorization and authorization.replace("KEY", key))


def test_the_scheme_is_written_as_people_write_it(path: Path) -> None:
    key = create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    assert KeyFile(path).authenticate(f"bearer  {key} ").key == "ann"


@pytest.mark.parametrize("change", ["{}x", "x{}", "{0}{0}", "{:.40}"], ids=["longer", "before", "twice", "cut"])
def test_a_key_that_is_nearly_one_is_unknown_and_not_repeated(change: str, path: Path) -> None:
    shown = change.format(create_key(path, "ann", tenant="t", scopes=Scope.INFER))
    with pytest.raises(Unauthenticated, match="not known") as caught:
        KeyFile(path).authenticate(f"Bearer {shown}")
    assert shown not in str(caught.value)


def test_the_hash_is_no_key(path: Path) -> None:
    """Who has read the file can do nothing with it."""
    create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    with pytest.raises(Unauthenticated):
        KeyFile(path).authenticate(f"Bearer {read_keys(path)[0].sha256}")


def test_a_key_ends_when_it_was_said_to(path: Path) -> None:
    key = create_key(path, "ann", tenant="t", scopes=Scope.INFER, expires_at=NOON)
    now = NOON - timedelta(seconds=1)
    keys = KeyFile(path, now=lambda: now)
    assert keys.authenticate(f"Bearer {key}").key == "ann"
    now = NOON
    with pytest.raises(Unauthenticated, match="the API key 'ann' has expired"):
        keys.authenticate(f"Bearer {key}")


def test_keys_come_and_go_while_they_are_in_use(path: Path) -> None:
    first = create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    keys = KeyFile(path)
    second = create_key(path, "bob", tenant="t", scopes=Scope.INFER)
    assert [keys.authenticate(f"Bearer {key}").key for key in (first, second)] == ["ann", "bob"]
    revoke_key(path, "ann")
    with pytest.raises(Unauthenticated, match="revoked"):
        keys.authenticate(f"Bearer {first}")
    assert keys.authenticate(f"Bearer {second}").key == "bob"


def test_a_file_that_breaks_changes_nothing_until_it_is_whole(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    keys = KeyFile(path)
    path.write_text('{"keys": [')
    assert [keys.authenticate(f"Bearer {key}").key for _ in range(2)] == ["ann", "ann"]
    assert caplog.text.count("is not of the form") == 1
    written(path)
    with pytest.raises(Unauthenticated):
        keys.authenticate(f"Bearer {key}")


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"name": "a b"}, "a name is 1 to 64"),
        ({"name": 3}, "a name is 1 to 64"),
        ({"sha256": "abc"}, "sha256 has to be 64"),
        ({"tenant": "a/b"}, "a tenant is at most"),
        ({"scopes": []}, "scopes have to be some of infer, read, operate"),
        ({"scopes": ["cluster"]}, "scopes have to be some of"),
        ({"scopes": "infer"}, "scopes have to be some of"),
        ({"limits": {"request_per_minute": 3}}, "limits may have requests_per_minute, tokens_per_minute"),
        ({"limits": {"tokens_per_minute": 0}}, "tokens_per_minute is 0; it has to be"),
        ({"limits": {"tokens_per_minute": True}}, "tokens_per_minute is True; it has to be"),
        ({"expires_at": "2027-01-01T00:00:00"}, "expires_at has to be a time with an offset"),
        ({"expires_at": "soon"}, "expires_at has to be a time with an offset"),
        ({"slo_class": 3}, "slo_class is at most 64"),
        ({"slo_class": "two words"}, "slo_class is at most 64"),
        ({"expire_at": "2027-01-01T00:00:00Z"}, "unknown expire_at"),
    ],
)
def test_an_entry_that_is_wrong_is_named(change: dict[str, Any], problem: str, path: Path) -> None:
    with pytest.raises(KeysUnusable, match=problem) as caught:
        KeyFile(written(path, ROW | change))
    assert str(path) in str(caught.value)


def test_a_key_names_a_class_that_there_is(path: Path) -> None:
    rows = [ROW | {"slo_class": "default"}, ROW | {"name": "bob", "sha256": hashlib.sha256(b"b").hexdigest()}]
    rows[1]["slo_class"] = "fast"
    keys = KeyFile(written(path, *rows), slo_classes=["fast", "slow"])
    assert [keys.authenticate(f"Bearer {key}").slo_class for key in ("ann's", "b")] == ["", "fast"]
    told = re.escape("key 'bob': slo_class is 'fast'; it has to be one of default, slow (--slo-class)")
    with pytest.raises(KeysUnusable, match=told):
        KeyFile(path, slo_classes=["slow"])
    written(path, ROW | {"slo_class": "gone"})
    assert keys.authenticate("Bearer b").slo_class == "fast"  # while a router runs the keys stay as they were


def test_a_class_is_written_only_where_there_is_one(path: Path) -> None:
    """Programs of a version before there were classes refuse what they do not know."""
    keys = [
        create_key(path, name, tenant="t", scopes=Scope.INFER, slo_class=each) for name, each in (("a", ""), ("b", "x"))
    ]
    assert [row.get("slo_class") for row in json.loads(path.read_text())["keys"]] == [None, "x"]
    assert "slo_class" not in json.loads(path.read_text())["keys"][0]
    assert [KeyFile(path).authenticate(f"Bearer {key}").slo_class for key in keys] == ["", "x"]


def test_entries_that_mean_the_same_are_refused(path: Path) -> None:
    with pytest.raises(KeysUnusable, match="two keys have the name 'ann'"):
        KeyFile(written(path, ROW, ROW | {"sha256": "0" * 64}))
    with pytest.raises(KeysUnusable, match="two keys have the sha256"):
        KeyFile(written(path, ROW, ROW | {"name": "bob"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": {}}', "\xff"])
def test_a_file_of_something_else_is_refused(text: str, path: Path) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeysUnusable, match=re.escape(str(path))):
        KeyFile(path)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(OSError, match=f"{path} cannot be read: No such file"):
        KeyFile(path)


def test_a_new_file_is_its_owners_and_one_that_is_there_stays_as_it_is(path: Path) -> None:
    create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    create_key(path, "bob", tenant="t", scopes=Scope.INFER)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(path.parent) == [path.name]


def test_names_are_used_once_and_known(path: Path) -> None:
    create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    before = path.read_bytes()
    with pytest.raises(KeysUnusable, match="has a key 'ann' already"):
        create_key(path, "ann", tenant="t", scopes=Scope.INFER)
    with pytest.raises(KeysUnusable, match="has no key 'bob'; it has ann"):
        revoke_key(path, "bob")
    with pytest.raises(KeysUnusable, match="a name is 1 to 64"):
        create_key(path, "no name", tenant="t", scopes=Scope.INFER)
    assert path.read_bytes() == before


def test_many_at_once_lose_nothing(path: Path) -> None:
    names = [f"user-{number}" for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda name: create_key(path, name, tenant="t", scopes=Scope.INFER), names))
    authenticator = KeyFile(path)
    assert [authenticator.authenticate(f"Bearer {key}").key for key in keys] == names
