"""What a process shows those whom it calls, and by what it knows them."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import TypeAlias

from protos.secret import ClusterSecret
from protos.tls import TlsFiles

Metadata: TypeAlias = tuple[tuple[str, str], ...]

AUTHORIZATION = "authorization"
KEY_SCHEME, SECRET_SCHEME = "Bearer", "Cluster"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A process of the cluster has its `secret`, a user an `api_key`. Neither goes over a network unencrypted unless
    `insecure`, as where something else encrypts it.
    """

    tls: TlsFiles | None = None
    secret: ClusterSecret | None = None
    api_key: str = field(default="", repr=False)
    insecure: bool = False

    @property
    def has_secrets(self) -> bool:
        return bool(self.secret or self.api_key)

    def metadata(self) -> Metadata:
        """Of a call; the secret is the one that its file holds now."""
        if self.secret is not None:
            return ((AUTHORIZATION, f"{SECRET_SCHEME} {self.secret.current}"),)
        return ((AUTHORIZATION, f"{KEY_SCHEME} {self.api_key}"),) if self.api_key else ()

    def check_address(self, address: str) -> None:
        """Raises ValueError where a secret would be told to whoever listens on the way."""
        host = address.rpartition(":")[0].strip("[]")
        if self.has_secrets and self.tls is None and not self.insecure and not is_loopback(host):
            what = "the cluster's secret" if self.secret else "an API key"
            raise ValueError(
                f"{what} would go to {address} unencrypted: use TLS (--tls-ca names who vouches for the other side), "
                "or say --insecure if the network between is yours alone"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name is, if every address it has is; one without an address is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)
