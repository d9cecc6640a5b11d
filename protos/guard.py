"""At the door of a server: who is calling, and may they? By what a call shows in its `authorization`."""

from __future__ import annotations

from collections.abc import Iterable

from protos import access
from protos.caller import ANYONE, Authenticator, Caller, Scope
from protos.credentials import AUTHORIZATION, SECRET_SCHEME
from protos.errors import PermissionDenied, Unauthenticated
from protos.secret import ClusterSecret

_CLUSTER = Caller(key="cluster", scopes=Scope.CLUSTER | Scope.READ)


class Guard:
    """Without an authenticator users need no key. Without either, routers and workers need no secret; with one alone
    nobody is taken for a worker.
    """

    def __init__(self, secret: ClusterSecret | None = None, authenticator: Authenticator | None = None) -> None:
        self._secret = secret
        self._authenticator = authenticator

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises Unauthenticated or PermissionDenied."""
        needed = access.needed_scope(method)
        if needed is None or not self._asks(needed):
            return ANYONE
        caller = self._caller(needed, _authorization(metadata))
        if needed & ~caller.scopes:
            raise PermissionDenied(
                f"{method} needs the scope {access.names(needed)}; {caller.key or 'the caller'} has "
                f"{access.names(caller.scopes)}"
            )
        return caller

    def _asks(self, needed: Scope) -> bool:
        """A worker has no keys of users, so that there only the calls of the cluster are guarded."""
        return self._authenticator is not None or (needed is Scope.CLUSTER and self._secret is not None)

    def _caller(self, needed: Scope, authorization: str | None) -> Caller:
        scheme, _, shown = (authorization or "").partition(" ")
        if self._secret is not None and scheme == SECRET_SCHEME:
            if self._secret.is_known(shown.strip()):
                return _CLUSTER
            raise Unauthenticated("the secret is not that of this cluster: --cluster-secret-file has to hold the same")
        if needed is Scope.CLUSTER and (self._authenticator is None or not scheme):
            raise Unauthenticated(
                "only routers and workers of this cluster may call this: they show the secret in --cluster-secret-file"
            )
        assert self._authenticator is not None
        return self._authenticator.authenticate(authorization)


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The only value: two could be read in two ways. None if there is none."""
    found = [value for key, value in metadata if key == AUTHORIZATION]
    if len(found) > 1:
        raise Unauthenticated("the call has more than one authorization header")
    return next((value for value in found if isinstance(value, str)), None)
