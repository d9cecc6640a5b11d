"""What a process shows those whom it calls, and by what it knows them."""

from __future__ import annotations

import ipaddress
import re
from typing import TypeAlias

from protos.errors import FailedPrecondition
from protos.secret import ClusterSecret
from protos.tls import TlsFiles

Metadata: TypeAlias = tuple[tuple[str, str], ...]

AUTHORIZATION = "authorization"
_KEY = re.compile(r"[!-~]*")
KEY_SCHEME, SECRET_SCHEME = "Bearer", "Cluster"


class Credentials:
    """A process of the cluster has its `secret`, a user an `api_key`. Neither goes over a network unencrypted unless
    `insecure`, as where something else encrypts it.
    """

    def __init__(
        self,
        tls: TlsFiles | None = None,
        secret: ClusterSecret | None = None,
        api_key: str = "",
        *,
        insecure: bool = False,
    ) -> None:
        """Raises OSError or TlsFilesUnusable, naming the file; later, what was read before holds on. ValueError for
        what cannot be a key: gRPC would repeat it in its own error."""
        if not _KEY.fullmatch(api_key):
            raise ValueError("the API key has spaces, or characters that no key has: look where it came from")
        self.pems = None if tls is None else tls.watch()
        self.peer_name = "" if tls is None else tls.peer_name
        self._secret = secret
        self._api_key = api_key
        self._insecure = insecure

    def metadata(self) -> Metadata:
        """Of a call; the secret is the one that its file holds now."""
        if self._secret is not None:
            return ((AUTHORIZATION, f"{SECRET_SCHEME} {self._secret.current}"),)
        return ((AUTHORIZATION, f"{KEY_SCHEME} {self._api_key}"),) if self._api_key else ()

    def check_address(self, address: str) -> None:
        """Raises FailedPrecondition where a secret would be told to whoever listens on the way."""
        if self.pems is not None or self._insecure or not self.metadata():
            return
        if not is_loopback(address.rpartition(":")[0].strip("[]")):
            what = "the secret of the cluster" if self._secret else "an API key"
            raise FailedPrecondition(
                f"{what} would go to {address} unencrypted: use TLS (--tls-ca names who vouches for the other side), "
                "or say --insecure if the network between is yours alone"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Of names only `localhost`: where others lead may change at any time."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
