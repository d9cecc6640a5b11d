"""TLS from PEM files, for both ends of a connection. New connections are made with what the files say at the time."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from protos.watched import Watched, read_file

logger = logging.getLogger(__name__)

_HANDSHAKE_MESSAGES = 4  # more than a handshake between two ends in one process takes


class TlsFilesUnusable(ValueError):
    """The message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`cert` (a chain, its leaf first) and `key` are who we are: a server has them, a client may.

    `ca`: who vouches for others; None: whoever this system trusts. `peer_name`: the name that the certificates of those
    we call have to carry, instead of the address they are called at.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    require_client_cert: bool = False
    peer_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise TlsFilesUnusable(f"there is a TLS {given} and no {missing}: give both")
        if self.require_client_cert and self.ca is None:
            raise TlsFilesUnusable("client certificates are asked for, but there is no CA to check them against")

    def watch(self) -> Watched[Pems]:
        """Raises OSError or TlsFilesUnusable, naming the file."""
        return Watched([path for path in (self.cert, self.key, self.ca) if path], self._checked)

    def _checked(self, contents: Sequence[bytes]) -> Pems:
        remaining = list(contents)
        cert, key = (remaining.pop(0), remaining.pop(0)) if self.cert else (None, None)
        pems = Pems(cert, key, remaining.pop(0) if self.ca else None)
        if self.ca and pems.ca is not None:
            _check_ca(self.ca, pems.ca)
        if self.cert and self.key:
            _check_pair(self.cert, self.key)
            if (read_file(self.cert), read_file(self.key)) != (cert, key):  # the check has read the files itself
                raise TlsFilesUnusable(f"{self.cert} and {self.key} were changed while they were read")
        return pems


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the files, checked. Never printed."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None

    def __repr__(self) -> str:
        return "Pems(...)"

    def for_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        if self.cert is None or self.key is None:
            raise TlsFilesUnusable("a server needs a TLS certificate and its key")
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Each new connection gets the certificate that the files hold then. Raises OSError or TlsFilesUnusable."""
    watched = tls.watch()
    last = watched.value

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """None: as before. gRPC asks for each connection."""
        nonlocal last
        if (current := watched.value) is last:
            return None
        last = current
        return current.for_server()

    fetched = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)  # the types do not know of None
    return grpc.dynamic_ssl_server_credentials(last.for_server(), fetched, tls.require_client_cert)


def server_context(tls: TlsFiles) -> ssl.SSLContext:
    """The same for a server that is not gRPC's: what Python's own `ssl` takes. Raises OSError or TlsFilesUnusable."""
    watched = tls.watch()
    last, current = watched.value, _context(tls)

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        """Asked as each connection begins, whether or not it names a server."""
        nonlocal last, current
        if (pems := watched.value) is not last:
            last, current = pems, _context(tls)
        connection.context = current

    outermost = _context(tls)
    outermost.sni_callback = choose
    return outermost


def _context(tls: TlsFiles) -> ssl.SSLContext:
    if tls.cert is None or tls.key is None:
        raise TlsFilesUnusable("a server needs a TLS certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    if tls.require_client_cert:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def handshake_problem(details: str) -> str:
    """What gRPC says of a connection that could not be made, in words for people; empty if it is not about TLS."""
    if found := re.search(r"CERTIFICATE_VERIFY_FAILED: ([a-z ]+)", details):
        return f"TLS: the certificate there is refused: {found[1]}"
    if "Hostname Verification" in details:
        return "TLS: the certificate there is not for this address; --tls-peer-name says which name to expect"
    if "handshake failed" in details:
        return "TLS: the handshake failed; it may speak no TLS there"
    if details.startswith("failed to connect") and details.endswith("Socket closed"):
        return "the connection was closed: it may ask for TLS there, or for a client certificate"
    return ""


def _check_ca(path: Path, content: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsFilesUnusable(f"{path} holds no certificates in PEM form") from error


def _check_pair(cert: Path, key: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFilesUnusable(f"{key} is not the key of the certificate in {cert}") from error
        wrong = key if _has_certificate(cert) else cert
        what = "a private key, without a passphrase," if wrong is key else "a certificate"
        raise TlsFilesUnusable(f"{wrong} does not hold {what} in PEM form") from error
    if problem := _problem_seen_by_client(context, cert):
        logger.warning("clients will refuse the certificate in %s: %s", cert, problem)


def _no_password() -> str:
    """Instead of a prompt on the terminal."""
    return ""


def _has_certificate(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _problem_seen_by_client(server: ssl.SSLContext, cert: Path) -> str:
    """By a handshake in memory with a client that trusts this very certificate: it has expired, or is for other uses.

    The standard library reads no certificates, and this is the judgement that matters.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_HANDSHAKE_MESSAGES):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return ""
