"""Which scope a method asks of its caller. What is not listed asks for `operate`, so that no new service is open."""

from __future__ import annotations

from protos.caller import Scope

ANY_KEY = Scope(0)  # any caller that is known

_BY_SERVICE: dict[str, Scope | None] = {  # None: whoever can reach us
    "grpc.health.v1.Health": None,  # load balancers have no keys; it tells no more than "serving"
    "grpc.reflection.v1alpha.ServerReflection": ANY_KEY,
    "inference.GRPCInferenceService": Scope.INFER,
    "pdserve.v1.Inference": Scope.INFER,
    "pdserve.v1.Pools": Scope.OPERATE,
    "pdserve.v1.Plans": Scope.OPERATE,
    "pdserve.v1.Insights": Scope.READ,
    "pdserve.v1.Workers": Scope.CLUSTER,
    "pdserve.v1.Prefill": Scope.CLUSTER,
    "pdserve.v1.Decode": Scope.CLUSTER,
    "pdserve.v1.Bundles": Scope.CLUSTER,
    "pdserve.v1.Direct": None,  # it asks for the permit that the router gave
    "pdserve.v1.Faults": Scope.CLUSTER,
    "pdserve.v1.Inside": Scope.CLUSTER,
}
_BY_METHOD: dict[str, Scope | None] = {  # where it is not that of the service
    "grpc.health.v1.Health/Watch": ANY_KEY,  # it lasts: strangers could hold all the calls that a server bears
    "pdserve.v1.Pools/GetStatus": Scope.READ,
    "pdserve.v1.Pools/ListDecisions": Scope.READ,
    "pdserve.v1.Plans/GetPlan": Scope.READ,
    "inference.GRPCInferenceService/ServerLive": None,
    "inference.GRPCInferenceService/ServerReady": None,
}


def needed_scope(method: str) -> Scope | None:
    """Of a method by its full name, as in `/pdserve.v1.Inference/Generate`. None: it is open to everybody."""
    name = method.removeprefix("/")
    if name in _BY_METHOD:
        return _BY_METHOD[name]
    return _BY_SERVICE.get(name.rpartition("/")[0], Scope.OPERATE)


def names(scopes: Scope) -> str:
    """As people write them."""
    return ", ".join(scope.name.lower() for scope in Scope if scope in scopes and scope.name) or "none"
