"""Who may call what, over real connections; and that nobody is asked where nothing was configured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from protos import decode_pb2, faults_pb2, inference_pb2, insights_pb2, plans_pb2, prefill_pb2, workers_pb2
from protos.access import needed_scope
from protos.caller import ANYONE, Caller, Scope, current_caller
from protos.channel import open_channel, service_errors
from protos.credentials import Credentials
from protos.errors import FailedPrecondition, PermissionDenied, Unauthenticated
from protos.guard import Guard
from protos.secret import ClusterSecret
from protos.serve import GrpcServer
from tests.protos.slow_client import SlowClient

SECRET, OTHER_SECRET = "s" * 32, "t" * 32
KEYS = {"infer-key": Scope.INFER, "read-key": Scope.READ, "operate-key": Scope.OPERATE}
INFERENCE, POOLS = "/pdserve.v1.Inference/GetModel", "/pdserve.v1.Pools"


class Users:
    """Three users, of one scope each."""

    def authenticate(self, authorization: str | None) -> Caller:
        key = (authorization or "").removeprefix("Bearer ")
        if key not in KEYS:
            raise Unauthenticated("no such key")
        return Caller(key=key.removesuffix("-key"), tenant="t", scopes=KEYS[key])


@pytest.fixture
def secret(tmp_path: Path) -> ClusterSecret:
    (tmp_path / "secret").write_text(SECRET + "\n")
    return ClusterSecret(tmp_path / "secret")


def of_cluster(folder: Path, text: str = SECRET) -> Credentials:
    (folder / "shown").write_text(text)
    return Credentials(secret=ClusterSecret(folder / "shown"))


def of_user(key: str) -> Credentials:
    return Credentials(api_key=key)


class Services:
    """Every method of these answers with the name of its caller."""

    def __init__(self, server: GrpcServer) -> None:
        for service, methods in {
            "pdserve.v1.Inference": ("GetModel",),
            "pdserve.v1.Pools": ("GetStatus", "SetRole", "SetDraining"),
            "pdserve.v1.Workers": ("Register",),
            "pdserve.v1.Decode": ("Reserve",),
            "pdserve.v1.NotListed": ("Anything",),
        }.items():
            server.add_handlers(service, dict.fromkeys(methods, grpc.unary_unary_rpc_method_handler(self._answer)))

    async def _answer(self, request: object, context: object) -> bytes:
        return current_caller.get().key.encode()


@asynccontextmanager
async def serving(guard: Guard | None) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", 0, guard=guard)
    Services(server)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def call(server: GrpcServer, method: str, credentials: Credentials | None, *more: tuple[str, str]) -> str:
    """The name of the caller, as the handler saw it."""
    async with open_channel(server.address, credentials) as channel:
        start: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        with service_errors():
            return (await start(b"", timeout=10, metadata=more)).decode()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "method, scope",
    [
        (INFERENCE, "infer"),
        (f"{POOLS}/GetStatus", "read"),
        (f"{POOLS}/SetRole", "operate"),
        (f"{POOLS}/SetDraining", "operate"),
        ("/pdserve.v1.NotListed/Anything", "operate"),
        ("/pdserve.v1.Workers/Register", "cluster"),
        ("/pdserve.v1.Decode/Reserve", "cluster"),
    ],
)
async def test_a_key_opens_what_its_scope_is_for(key: str, method: str, scope: str, secret: ClusterSecret) -> None:
    own = key.removesuffix("-key")
    async with serving(Guard(secret, Users())) as server:
        if own == scope:
            assert await call(server, method, of_user(key)) == own
        else:
            with pytest.raises(PermissionDenied, match=f"needs the scope {scope}; {own} has {own}"):
                await call(server, method, of_user(key))


async def test_who_shows_nothing_or_something_else_is_not_let_in(secret: ClusterSecret, tmp_path: Path) -> None:
    async with serving(Guard(secret, Users())) as server:
        for method in (INFERENCE, f"{POOLS}/GetStatus", f"{POOLS}/SetRole"):
            for credentials in (None, of_user("a-guess")):
                with pytest.raises(Unauthenticated, match="no such key"):
                    await call(server, method, credentials)
            with pytest.raises(Unauthenticated, match="not that of this cluster") as caught:
                await call(server, method, of_cluster(tmp_path, OTHER_SECRET))
            assert OTHER_SECRET not in str(caught.value)
        with pytest.raises(Unauthenticated, match="only routers and workers"):
            await call(server, "/pdserve.v1.Workers/Register", None)


async def test_two_authorizations_are_one_too_many(secret: ClusterSecret) -> None:
    async with serving(Guard(secret, Users())) as server:
        with pytest.raises(Unauthenticated, match="more than one authorization"):
            await call(server, INFERENCE, of_user("infer-key"), ("authorization", "Bearer read-key"))


async def test_the_cluster_speaks_for_itself_and_may_look_but_asks_nothing(
    secret: ClusterSecret, tmp_path: Path
) -> None:
    async with serving(Guard(secret, Users())) as server:
        for method in ("/pdserve.v1.Workers/Register", "/pdserve.v1.Decode/Reserve", f"{POOLS}/GetStatus"):
            assert await call(server, method, of_cluster(tmp_path)) == "cluster"
        for method in (INFERENCE, f"{POOLS}/SetRole"):
            with pytest.raises(PermissionDenied, match="cluster has read, cluster"):
                await call(server, method, of_cluster(tmp_path))


async def test_a_worker_knows_no_users_and_guards_what_is_the_clusters(secret: ClusterSecret, tmp_path: Path) -> None:
    async with serving(Guard(secret)) as server:
        assert await call(server, "/pdserve.v1.Decode/Reserve", of_cluster(tmp_path)) == "cluster"
        for credentials in (None, of_user("infer-key")):
            with pytest.raises(Unauthenticated, match="only routers and workers"):
                await call(server, "/pdserve.v1.Decode/Reserve", credentials)


async def test_nobody_is_asked_where_nothing_is_configured(tmp_path: Path) -> None:
    async with serving(None) as server:
        for method in (INFERENCE, f"{POOLS}/SetRole", "/pdserve.v1.Workers/Register"):
            for credentials in (None, of_user("any"), of_cluster(tmp_path)):
                assert await call(server, method, credentials) == ANYONE.key


async def test_where_keys_are_asked_for_and_no_secret_is_set_nobody_is_a_worker(tmp_path: Path) -> None:
    async with serving(Guard(None, Users())) as server:
        for credentials in (None, of_cluster(tmp_path)):
            with pytest.raises(Unauthenticated):
                await call(server, "/pdserve.v1.Workers/Register", credentials)
        with pytest.raises(PermissionDenied, match="needs the scope cluster"):
            await call(server, "/pdserve.v1.Workers/Register", of_user("operate-key"))


async def test_health_is_open_and_what_lasts_is_for_those_with_a_key(secret: ClusterSecret) -> None:
    async with serving(Guard(secret, Users())) as server:
        async with open_channel(server.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(Unauthenticated), service_errors():
                await _services(channel)
            with pytest.raises(Unauthenticated), service_errors():
                await health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()).read()
        async with open_channel(server.address, of_user("read-key")) as channel:
            assert "pdserve.v1.Inference" in await _services(channel)


async def _services(channel: grpc.aio.Channel) -> set[str]:
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    response = await reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked).read()
    return {service.name for service in response.list_services_response.service}


async def test_who_is_refused_is_so_before_anything_is_received(secret: ClusterSecret) -> None:
    """Of this call nothing but the headers ever arrives."""
    async with serving(Guard(secret, Users())) as server:
        async with SlowClient(server.address, INFERENCE, None) as client, asyncio.timeout(10):
            while not client.headers:
                await asyncio.sleep(0.01)
        assert b"grpc-status\x0216" in client.headers[0] and b"no such key" in client.headers[0]


async def test_refusals_are_counted(secret: ClusterSecret) -> None:
    labels = {"method": INFERENCE, "code": "UNAUTHENTICATED"}
    before = REGISTRY.get_sample_value("pdserve_grpc_calls_total", labels) or 0.0
    async with serving(Guard(secret, Users())) as server:
        with pytest.raises(Unauthenticated):
            await call(server, INFERENCE, None)
    assert REGISTRY.get_sample_value("pdserve_grpc_calls_total", labels) == before + 1


async def test_a_new_secret_takes_over_without_a_break(
    secret: ClusterSecret, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Below the old one at the server first, then in place of it at the caller, then alone at the server."""
    monkeypatch.setattr("protos.watched.LOOK_S", 0.0)
    caplog.set_level(logging.DEBUG)
    method, at_server = "/pdserve.v1.Decode/Reserve", tmp_path / "secret"
    async with serving(Guard(secret)) as server:
        with pytest.raises(Unauthenticated):
            await call(server, method, of_cluster(tmp_path, OTHER_SECRET))
        at_server.write_text(f"{SECRET}\n{OTHER_SECRET}\n")
        assert await call(server, method, of_cluster(tmp_path, OTHER_SECRET)) == "cluster"
        assert await call(server, method, of_cluster(tmp_path, SECRET)) == "cluster"
        at_server.write_text(f"{OTHER_SECRET}\n")
        with pytest.raises(Unauthenticated):
            await call(server, method, of_cluster(tmp_path, SECRET))
        at_server.write_text("too short")
        assert await call(server, method, of_cluster(tmp_path, OTHER_SECRET)) == "cluster"
    assert "a secret is a line of at least 32" in caplog.text
    assert not {SECRET, OTHER_SECRET, "too short"} & set(caplog.text.split())


@pytest.mark.parametrize("text, problem", [("", "is empty"), ("short", "at least 32"), ("é" * 40, "printable ASCII")])
def test_a_secret_that_is_none_is_refused_without_being_repeated(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as caught:
        ClusterSecret(path)
    assert str(path) in str(caught.value)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("address", ["10.0.0.1:8500", "[2001:db8::1]:8500", "0.0.0.0:8500", "no-such-host.invalid:1"])
def test_secrets_do_not_go_over_a_network_in_clear(address: str, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"an API key would go to .* unencrypted: use TLS"):
        of_user("k").check_address(address)
    with pytest.raises(FailedPrecondition, match="the secret of the cluster would go"):
        of_cluster(tmp_path).check_address(address)
    Credentials(api_key="k", insecure=True).check_address(address)
    Credentials().check_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:8500", "[::1]:8500", "localhost:8500", "127.1.2.3:1"])
def test_they_may_stay_on_this_machine(address: str) -> None:
    of_user("k").check_address(address)


def test_every_method_of_ours_has_a_rule() -> None:
    """Listed here once more: who may call what is not changed in passing."""
    modules = (decode_pb2, faults_pb2, inference_pb2, insights_pb2, plans_pb2, prefill_pb2, workers_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    rules = {f"{s.name}/{m.name}": needed_scope(f"/{s.full_name}/{m.name}") for s in services for m in s.methods}
    by_scope = {scope: {name for name, needed in rules.items() if needed == scope} for scope in Scope}
    assert by_scope[Scope.INFER] == {
        f"Inference/{name}" for name in ("Generate", "Chat", "Route", "Tokenize", "GetModel")
    }
    assert by_scope[Scope.READ] == {
        "Pools/GetStatus",
        "Pools/ListDecisions",
        "Plans/GetPlan",
        *(f"Insights/{name}" for name in ("GetTraffic", "ListRequests", "GetWorkerInsights")),
    }
    assert by_scope[Scope.OPERATE] == {"Pools/SetRole", "Pools/SetDraining", "Plans/SetPlan"}
    assert {name.partition("/")[0] for name in by_scope[Scope.CLUSTER]} == {
        "Bundles",
        "Decode",
        "Faults",
        "Inside",
        "Prefill",
        "Workers",
    }
    assert {name for name, needed in rules.items() if needed is None} == {"Direct/Read"}  # which asks for a permit
    assert set().union(*by_scope.values()) | {"Direct/Read"} == set(rules)
