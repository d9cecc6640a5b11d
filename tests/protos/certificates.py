"""Certificates for tests, made on the spot by authorities of their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from protos.tls import TlsFiles

HOST = "127.0.0.1"


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def issue(self, name: str, *identities: str, has_expired: bool = False) -> TlsFiles:
        """Under the same name again: the files are replaced."""
        not_after = datetime.now(UTC) - timedelta(days=1) if has_expired else None
        issued = self._ca.issue_cert(*(identities or (HOST,)), not_after=not_after)
        cert, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return TlsFiles(cert, key, self.path)
