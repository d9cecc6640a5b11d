"""What the command line lets in, shows and refuses; and the commands that make keys."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from deploy import security_options
from deploy.cli import cli
from deploy.security_options import as_arguments, as_page_arguments, of_callers, taken_from
from deploy.worker_config import WorkerConfig
from protos.security import Exposed, Security
from protos.tls import TlsFiles
from router.config import RouterConfig
from router.keys import KeyFile
from tests.protos.certificates import Authority

ROOT = Path(__file__).resolve().parents[2]
CERTS = TlsFiles(Path("a.crt"), Path("a.key"), Path("ca.pem"))
SECRET = Path("secret")


def pdserve(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=environment)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_this_machine_nothing_need_be_set(host: str) -> None:
    Security().check(host, asks_for_keys=False)
    Security().check(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "a-name"])
@pytest.mark.parametrize(
    "security, asks_for_keys, missing",
    [
        (Security(), False, r"takes TLS .* and a secret of the cluster .* and keys of users \(--keys-file\)\. Give"),
        (Security(tls=CERTS, secret_file=SECRET), False, r"takes keys of users \(--keys-file\)\. Give"),
        (Security(secret_file=SECRET), True, r"takes TLS \(--tls-cert, --tls-key\)\. Give"),
        (Security(tls=CERTS), None, r"takes a secret of the cluster \(--cluster-secret-file\)\. Give"),
        (Security(secret_file=SECRET), None, r"takes TLS \(--tls-cert, --tls-key\)\. Give"),
    ],
)
def test_a_network_is_not_served_by_mistake(
    host: str, security: Security, asks_for_keys: bool | None, missing: str
) -> None:
    with pytest.raises(Exposed, match=missing) as caught:
        security.check(host, asks_for_keys=asks_for_keys)
    assert str(caught.value).startswith(f"--host {host} can be reached from other machines")
    assert "listen at 127.0.0.1, or say --insecure" in str(caught.value)


@pytest.mark.parametrize(
    "security, asks_for_keys",
    [
        (Security(insecure=True), False),
        (Security(insecure=True), None),
        (Security(tls=CERTS, secret_file=SECRET), True),
        (Security(tls=CERTS, secret_file=SECRET), None),
        (Security(tls=TlsFiles(CERTS.cert, CERTS.key, CERTS.ca, True), secret_file=SECRET), False),
    ],
)
def test_it_is_served_on_purpose(security: Security, asks_for_keys: bool | None) -> None:
    security.check("0.0.0.0", asks_for_keys=asks_for_keys)


def test_keys_alone_are_no_protection() -> None:
    """Not on this machine either: another user of it might register a worker."""
    for security in (Security(), Security(insecure=True), Security(tls=CERTS)):
        with pytest.raises(Exposed, match="anybody could register as a worker"):
            RouterConfig("m", security=security, keys_file=Path("keys.json"))


def test_metrics_stay_on_this_machine_where_the_rest_is_encrypted() -> None:
    assert Security().metrics_host_for("10.0.0.1") == "10.0.0.1"
    assert Security(tls=CERTS).metrics_host_for("10.0.0.1") == "127.0.0.1"
    assert Security(tls=CERTS, metrics_host="10.0.0.1").metrics_host_for("10.0.0.1") == "10.0.0.1"


def test_a_router_that_would_be_exposed_does_not_start() -> None:
    run = router("--host", "0.0.0.0")
    assert run.returncode == 1
    assert run.stderr.startswith("Error: --host 0.0.0.0 can be reached from other machines, which takes TLS")
    assert len(run.stderr.splitlines()) == 1


def router(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it takes over logging."""
    command = [sys.executable, "-m", "deploy.cli", "router", "--model", "/none", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_a_worker_that_would_be_exposed_does_not_start() -> None:
    settings = cli.commands["worker"].make_context("worker", ["--host", "0.0.0.0"]).params
    for name in ("log_level", "log_format"):
        del settings[name]
    security = taken_from(settings, is_worker=True)
    with pytest.raises(Exposed, match=r"takes TLS .* and a secret of the cluster \(--cluster-secret-file\)\. Give"):
        WorkerConfig(security=security, **settings)


def test_a_cluster_that_would_be_exposed_does_not_start() -> None:
    result = pdserve("up", "--host", "0.0.0.0", "--model", "/none")
    assert result.exit_code == 1
    assert "keys of users (--keys-file)" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "security",
    [
        Security(),
        Security(insecure=True, metrics_host="10.0.0.1"),
        Security(tls=CERTS, secret_file=SECRET),
        Security(tls=TlsFiles(CERTS.cert, CERTS.key, CERTS.ca, True, "pdserve")),
    ],
)
@pytest.mark.parametrize("is_worker", [False, True])
def test_a_child_process_is_told_the_same(security: Security, is_worker: bool) -> None:
    assert taken_from(settings_of(*as_arguments(security)), is_worker=is_worker) == security


def test_a_dashboard_is_told_what_it_has_flags_for() -> None:
    security = Security(TlsFiles(CERTS.cert, CERTS.key, CERTS.ca, True, "pd"), SECRET, insecure=True)
    arguments = [
        "--tls-cert",
        "a.crt",
        "--tls-key",
        "a.key",
        "--tls-ca",
        "ca.pem",
        "--tls-peer-name",
        "pd",
        "--insecure",
    ]
    assert as_page_arguments(security) == arguments
    assert as_page_arguments(Security(secret_file=SECRET)) == []


def test_people_are_told_how_to_call_what_they_started() -> None:
    assert of_callers(Security(), asks_for_keys=False) == []
    assert of_callers(Security(tls=CERTS), asks_for_keys=True) == ["--tls-ca", "ca.pem", "--api-key-file", "FILE"]
    public = Security(tls=TlsFiles(CERTS.cert, CERTS.key))
    assert of_callers(public, asks_for_keys=False) == ["--tls"]


def test_a_worker_that_knows_an_authority_asks_callers_for_its_certificates() -> None:
    given = ("--tls-cert", "a.crt", "--tls-key", "a.key")
    for more, asks in (
        (("--tls-ca", "ca.pem"), True),
        ((), False),
        (("--tls-ca", "ca.pem", "--no-tls-client-certs"), False),
    ):
        tls = taken_from(settings_of(*given, *more), is_worker=True).tls
        assert tls is not None and tls.require_client_cert is asks
        tls = taken_from(settings_of(*given, *more)).tls
        assert tls is not None and not tls.require_client_cert


def settings_of(*arguments: str) -> dict[str, Any]:
    @click.command()
    @security_options.serving_options
    def command(**settings: Any) -> dict[str, Any]:
        return settings

    settings: dict[str, Any] = command.main(list(arguments), standalone_mode=False)
    return settings


def test_files_that_are_wrong_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    run = router("--cluster-secret-file", str(missing))
    assert (run.returncode, run.stderr) == (1, f"Error: {missing} cannot be read: No such file or directory\n")


Shown = Callable[..., dict[str, Any]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What the client of a command is made with."""

    def run(*arguments: str, **environment: str) -> dict[str, Any]:
        made: dict[str, Any] = {}

        def client(address: str, **credentials: Any) -> None:
            made.update(credentials, address=address)
            raise OSError("seen")

        monkeypatch.setattr("protos.client.PdserveClient", client)
        result = pdserve("status", *arguments, **environment)
        assert result.exit_code == (1 if made else 2), result.output
        return made or {"complaint": result.stderr}

    return run


def test_a_key_comes_from_a_file_or_from_the_environment(shown: Shown, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("from-file\n")
    assert shown()["api_key"] == ""
    assert shown(PDSERVE_API_KEY="from-environment")["api_key"] == "from-environment"
    assert shown("--api-key-file", str(path), PDSERVE_API_KEY="from-environment")["api_key"] == "from-file"
    assert shown(PDSERVE_API_KEY_FILE=str(path))["api_key"] == "from-file"


@pytest.mark.parametrize("text", ["two words", "n\u00e9", "a\tb"])
def test_what_is_no_key_is_not_repeated(text: str) -> None:
    result = pdserve("status", PDSERVE_API_KEY=text)
    assert result.exit_code == 1
    assert "the API key has spaces, or characters that no key has" in result.stderr and text not in result.stderr


def test_a_key_file_that_is_empty_is_no_key(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    assert "is empty" in shown("--api-key-file", str(tmp_path / "key"))["complaint"]


def test_tls_is_spoken_where_any_option_of_it_is_given(shown: Shown) -> None:
    assert shown()["tls"] is None
    assert shown("--tls")["tls"] == TlsFiles()
    assert shown("--tls-ca", "ca.pem")["tls"] == shown(PDSERVE_TLS_CA="ca.pem")["tls"] == TlsFiles(ca=Path("ca.pem"))


def test_no_command_takes_a_key_as_an_argument() -> None:
    """Every user of a machine sees those."""
    flags = {flag for command in cli.commands.values() for parameter in command.params for flag in parameter.opts}
    assert {flag for flag in flags if "key" in flag or "secret" in flag} == {
        "--api-key-file",
        "--cluster-secret-file",
        "--keys-file",
        "--tls-key",
    }


def test_a_key_would_not_be_sent_in_clear(tmp_path: Path) -> None:
    result = pdserve("status", "--router", "192.0.2.1:8500", PDSERVE_API_KEY="pdserve-x")
    assert result.exit_code == 1
    assert "an API key would go to 192.0.2.1:8500 unencrypted" in result.stderr and "pdserve-x" not in result.stderr


def test_files_are_checked_before_a_call(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for arguments, complaint in (
        (("--tls-ca", str(junk)), f"{junk} holds no certificates in PEM form"),
        (("--tls-ca", str(authority.path), "--tls-cert", str(junk)), "there is a TLS certificate and no key"),
    ):
        result = pdserve("status", *arguments)
        assert result.exit_code == 1 and complaint in result.stderr


def test_a_key_is_made_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    limited = (
        "--tenant",
        "shop",
        "--requests-per-minute",
        "60",
        "--tokens-per-minute",
        "9000",
        "--num-concurrent",
        "4",
    )
    made = pdserve("key", "create", "ann", "--scopes", "infer,read", *limited, "--file", str(path))
    assert made.exit_code == 0
    key = made.stdout.strip()
    caller = KeyFile(path).authenticate(f"Bearer {key}")
    assert (caller.key, caller.tenant, caller.limits.requests_per_minute) == ("ann", "shop", 60)
    assert key not in made.stderr and key not in path.read_text()
    pdserve("key", "create", "bob", "--expires-days", "0.5", "--file", str(path))
    listed = pdserve("key", "list", PDSERVE_KEYS_FILE=str(path)).stdout
    assert "ann  shop    infer, read  60 requests/min, 9000 tokens/min, 4 at once  never" in listed
    assert "bob  bob     infer        none" in listed
    assert "SLO class" not in listed
    pdserve("key", "create", "eve", "--slo-class", "fast", "--file", str(path))
    listed = pdserve("key", "list", PDSERVE_KEYS_FILE=str(path)).stdout
    assert "bob  bob     default    infer" in listed and "eve  eve     fast       infer" in listed
    pdserve("key", "revoke", "eve", "--file", str(path))
    assert pdserve("key", "revoke", "ann", "--file", str(path)).exit_code == 0
    assert [row["name"] for row in json.loads(path.read_text())["keys"]] == ["bob"]


@pytest.mark.parametrize(
    "arguments, code, complaint",
    [
        (["create", "ann", "--scopes", "infer,cluster"], 2, "'cluster'; there are infer, read, operate"),
        (["create", "ann", "--num-concurrent", "0"], 2, "0 is not in the range"),
        (["create", "an n"], 1, "a name is 1 to 64"),
        (["revoke", "ann"], 1, "has no key 'ann'; it has none"),
        (["list"], 1, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_with_keys_is_told(arguments: list[str], code: int, complaint: str, tmp_path: Path) -> None:
    result = pdserve("key", *arguments, "--file", str(tmp_path / "keys.json"))
    assert result.exit_code == code and complaint in result.stderr
    assert not (tmp_path / "keys.json").exists()
