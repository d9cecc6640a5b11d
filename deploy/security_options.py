"""The flags that say whom to trust and what to show: for processes that serve, and for those that call the router."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import click

from deploy.options import F, group_of, router_option

if TYPE_CHECKING:
    from protos.client import PdserveClient
    from protos.security import Security
    from protos.tls import TlsFiles

Connect: TypeAlias = "Callable[..., PdserveClient]"

KEY_VARIABLE = "PDSERVE_API_KEY"
_FILE = click.Path(path_type=Path)


def _tls_options(envvar: str | None = None) -> tuple[Callable[[F], F], ...]:
    """`envvar` may name the CA instead of the option."""
    return (
        click.option("--tls-cert", type=_FILE, metavar="PEM", help="Certificate of this process, with its chain."),
        click.option("--tls-key", type=_FILE, metavar="PEM", help="Private key of --tls-cert."),
        click.option(
            "--tls-ca",
            type=_FILE,
            metavar="PEM",
            envvar=envvar,
            show_envvar=True,
            help="Who vouches for the others' certificates.  [default with TLS: this system's CAs]",
        ),
        click.option(
            "--tls-peer-name",
            metavar="NAME",
            default="",
            help="Name that certificates of those we call must carry.  [default: the address they are called at]",
        ),
    )


_tls_option = click.option("--tls", "use_tls", is_flag=True, help="Speak TLS; an option --tls-... says so too.")
_insecure_help = {
    "serving": "Listen beyond this machine although TLS, secret or keys are missing.",
    "calling": "Send the API key without TLS.",
    "page": "Serve the page beyond this machine, and pass API keys on, although TLS or the router's keys are missing.",
}


def _insecure_option(use: str) -> Callable[[F], F]:
    return click.option("--insecure", is_flag=True, help=_insecure_help[use])


serving_options = group_of(
    *_tls_options(),
    click.option(
        "--tls-client-certs/--no-tls-client-certs",
        "require_client_cert",
        default=None,
        help="Serve only who has a certificate of --tls-ca.  [default: a worker does, if it has --tls-ca]",
    ),
    click.option(
        "--cluster-secret-file",
        "secret_file",
        type=_FILE,
        metavar="FILE",
        help="What routers and workers know each other by, such as `openssl rand -hex 32` makes.",
    ),
    _insecure_option("serving"),
    click.option("--metrics-host", default="", help="Where metrics are served.  [default: --host; 127.0.0.1 with TLS]"),
)
keys_option = click.option(
    "--keys-file", type=_FILE, metavar="FILE", help="Ask callers for API keys: those of `pdserve key create`."
)
router_options = group_of(serving_options, keys_option)


def taken_from(settings: dict[str, Any], *, is_worker: bool = False) -> Security:
    """What `serving_options` have set, removed from the settings of a command. Raises TlsFilesUnusable."""
    from protos.security import Security

    required, has_ca = settings.pop("require_client_cert"), settings["tls_ca"] is not None
    tls = _tls(settings, is_worker and has_ca if required is None else required)
    taken = {name: settings.pop(name) for name in ("secret_file", "insecure", "metrics_host")}
    return Security(tls=tls, **taken)


def as_page_arguments(security: Security) -> list[str]:
    """For the dashboard as a child process, which is served and calls by the same certificate."""
    arguments: list[str] = []
    if tls := security.tls:
        arguments += _given({"--tls-cert": tls.cert, "--tls-key": tls.key, "--tls-ca": tls.ca})
        arguments += _given({"--tls-peer-name": tls.peer_name})
    return arguments + ["--insecure"] * security.insecure


def as_arguments(security: Security) -> list[str]:
    """For a child process, which has the same flags. Names of files: what is secret is in them."""
    arguments: list[str] = []
    if tls := security.tls:
        arguments += _given({"--tls-cert": tls.cert, "--tls-key": tls.key, "--tls-ca": tls.ca})
        arguments += _given({"--tls-peer-name": tls.peer_name})
        arguments.append("--tls-client-certs" if tls.require_client_cert else "--no-tls-client-certs")
    arguments += _given({"--cluster-secret-file": security.secret_file, "--metrics-host": security.metrics_host})
    return arguments + ["--insecure"] * security.insecure


def of_callers(security: Security, *, asks_for_keys: bool) -> list[str]:
    """What people have to say to call a router that is secured like this; in capitals what they have themselves."""
    flags: list[str] = []
    if tls := security.tls:
        flags += _given({"--tls-ca": tls.ca, "--tls-peer-name": tls.peer_name}) or ["--tls"]
        flags += ["--tls-cert", "PEM", "--tls-key", "PEM"] * tls.require_client_cert
    return flags + ["--api-key-file", "FILE"] * asks_for_keys


_calling_options = group_of(router_option, _tls_option, *_tls_options(envvar="PDSERVE_TLS_CA"))
page_options = group_of(_calling_options, _insecure_option("page"))


def tls_of_caller(settings: dict[str, Any]) -> TlsFiles | None:
    """What the options of a caller have set of it, removed from the settings of a command. Raises TlsFilesUnusable."""
    from protos.tls import TlsFiles

    use_tls = settings.pop("use_tls")
    return _tls(settings) or (TlsFiles() if use_tls else None)


def router_access(command: F) -> F:
    """For a command that calls the router: --router, and a `connect` that shows the key there. Never a key as argument:
    every user of a machine sees those."""

    @functools.wraps(command)
    def connected(*arguments: Any, api_key_file: Path | None, insecure: bool, **settings: Any) -> Any:
        from protos.client import PdserveClient

        tls = tls_of_caller(settings)
        connect = functools.partial(PdserveClient, api_key=_api_key(api_key_file), tls=tls, insecure=insecure)
        return command(*arguments, connect=connect, **settings)

    key_option = click.option(
        "--api-key-file",
        type=_FILE,
        metavar="FILE",
        envvar="PDSERVE_API_KEY_FILE",
        help=f"Holds the API key to show.  [default: the key in {KEY_VARIABLE}, if any]",
    )
    return cast("F", group_of(_calling_options, key_option, _insecure_option("calling"))(connected))


def _api_key(path: Path | None) -> str:
    from protos.watched import read_file

    key = os.environ.get(KEY_VARIABLE, "") if path is None else read_file(path).decode("utf-8", "replace")
    key = key.strip()
    if path is not None and not key:
        raise click.BadParameter(f"{path} is empty", param_hint="--api-key-file")
    return key


def _tls(settings: dict[str, Any], require_client_cert: bool = False) -> TlsFiles | None:
    from protos.tls import TlsFiles

    cert, key, ca, name = (settings.pop(f"tls_{name}") for name in ("cert", "key", "ca", "peer_name"))
    if not (cert or key or ca or require_client_cert):
        return None
    return TlsFiles(cert, key, ca, bool(require_client_cert), name)


def _given(options: Mapping[str, object]) -> list[str]:
    return [text for flag, value in options.items() if value for text in (flag, str(value))]
