"""Whom a process trusts and whom it lets in, as told at start; and that it is not open to a network by mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protos.credentials import Credentials, is_loopback
from protos.secret import ClusterSecret
from protos.tls import TlsFiles


class Exposed(ValueError):
    """What was asked for would let anybody in; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Security:
    """`insecure` says that the network is trusted, or that something else protects it."""

    tls: TlsFiles | None = None
    secret_file: Path | None = None
    insecure: bool = False
    metrics_host: str = ""

    def check(self, host: str, *, asks_for_keys: bool | None = None) -> None:
        """Raises Exposed if `host` is reached from other machines by whom nobody has let in. None: no users come here.

        Keys alone do not help: whoever may register as a worker is sent prompts.
        """
        if asks_for_keys and self.secret_file is None:
            raise Exposed(
                "users are asked for keys, but anybody could register as a worker, and be sent their prompts: "
                "give --cluster-secret-file too"
            )
        if self.tls is not None and self.tls.cert is None:
            raise Exposed("a server needs a certificate to speak TLS: give --tls-cert and --tls-key")
        if self.insecure or is_loopback(host):
            return
        checks_users = asks_for_keys is not False or (self.tls is not None and self.tls.require_client_cert)
        missing = [
            option
            for option, is_there in (
                ("TLS (--tls-cert, --tls-key)", self.tls is not None),
                ("a secret of the cluster (--cluster-secret-file)", self.secret_file is not None),
                ("keys of users (--keys-file)", checks_users),
            )
            if not is_there
        ]
        if missing:
            raise Exposed(
                f"--host {host} can be reached from other machines, which takes {' and '.join(missing)}. Give what is "
                "missing, listen at 127.0.0.1, or say --insecure if the network is yours alone"
            )

    def metrics_host_for(self, host: str) -> str:
        """Metrics go in clear and to anybody: where the rest is encrypted, they stay on this machine unless told."""
        return self.metrics_host or ("127.0.0.1" if self.tls else host)

    def check_files(self) -> None:
        """Raises OSError or ValueError, naming the file: before minutes of loading a model, say."""
        self.credentials(self.secret())

    def secret(self) -> ClusterSecret | None:
        """Raises OSError or ValueError, naming the file."""
        return ClusterSecret(self.secret_file) if self.secret_file else None

    def credentials(self, secret: ClusterSecret | None) -> Credentials | None:
        """For calls to other processes of the cluster; None where nothing is to be shown or checked."""
        return Credentials(self.tls, secret, insecure=self.insecure) if self.tls or secret else None
