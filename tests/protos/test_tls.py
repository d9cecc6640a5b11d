"""TLS between real ends: who is refused and told why, and what happens when the files are replaced."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from cryptography import x509

from protos import inference_pb2, inference_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.credentials import Credentials
from protos.errors import Unavailable
from protos.serve import GrpcServer
from protos.tls import TlsFiles, TlsFilesUnusable, server_context, server_credentials
from tests.protos.certificates import HOST, Authority
from tests.protos.echo import Echo


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of files are."""
    monkeypatch.setattr("protos.watched.LOOK_S", 0.0)


@asynccontextmanager
async def serving(tls: TlsFiles | None) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(HOST, 0, tls=tls)
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Echo())
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def ask(channel: grpc.aio.Channel) -> str:
    stub = inference_pb2_grpc.InferenceStub(channel)
    with service_errors("nobody"):
        return (await stub.GetModel(inference_pb2.GetModelRequest(model="fine"), timeout=10)).name


async def ask_once(server: GrpcServer, tls: TlsFiles | None) -> str:
    async with open_channel(server.address, Credentials(tls)) as channel:
        return await ask(channel)


def serial_shown_at(address: str) -> int:
    """Of the certificate that a new connection is shown, read by a TLS client that is not gRPC's."""
    host, _, port = address.rpartition(":")
    return x509.load_pem_x509_certificate(
        ssl.get_server_certificate((host, int(port)), timeout=10).encode()
    ).serial_number


def serial_of(tls: TlsFiles) -> int:
    assert tls.cert is not None
    return x509.load_pem_x509_certificate(tls.cert.read_bytes()).serial_number


async def test_who_knows_the_authority_is_served(authority: Authority) -> None:
    async with serving(authority.issue("server")) as server:
        assert await ask_once(server, TlsFiles(ca=authority.path)) == "fine"


async def test_certificate_of_another_authority_is_refused_and_told(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with serving(authority.issue("server")) as server:
        with pytest.raises(Unavailable, match="certificate there is refused: unable to get local issuer"):
            await ask_once(server, TlsFiles(ca=other.path))


async def test_certificate_that_has_expired_is_refused_and_told_at_both_ends(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    expired = authority.issue("server", has_expired=True)
    async with serving(expired) as server:
        assert f"clients will refuse the certificate in {expired.cert}: certificate has expired" in caplog.text
        with pytest.raises(Unavailable, match="refused: certificate has expired"):
            await ask_once(server, TlsFiles(ca=authority.path))


async def test_certificate_for_another_name_is_refused_unless_that_is_expected(authority: Authority) -> None:
    async with serving(authority.issue("server", "workers.example")) as server:
        with pytest.raises(Unavailable, match="not for this address"):
            await ask_once(server, TlsFiles(ca=authority.path))
        assert await ask_once(server, TlsFiles(ca=authority.path, peer_name="workers.example")) == "fine"


async def test_no_tls_where_it_is_asked_for(authority: Authority) -> None:
    async with serving(authority.issue("server")) as server:
        with pytest.raises(Unavailable, match="may ask for TLS"):
            await ask_once(server, None)


async def test_tls_where_there_is_none(authority: Authority) -> None:
    async with serving(None) as server:
        with pytest.raises(Unavailable, match="may speak no TLS"):
            await ask_once(server, TlsFiles(ca=authority.path))


async def test_only_who_has_a_certificate_of_the_authority_is_served(authority: Authority, tmp_path: Path) -> None:
    stranger = replace(Authority(tmp_path, "other").issue("stranger"), ca=authority.path)
    async with serving(replace(authority.issue("server"), require_client_cert=True)) as server:
        assert await ask_once(server, authority.issue("client")) == "fine"
        for refused in (TlsFiles(ca=authority.path), stranger):
            with pytest.raises(Unavailable, match="or for a client certificate"):
                await ask_once(server, refused)


@pytest.mark.usefixtures("seen_at_once")
async def test_new_connections_see_the_new_certificate(authority: Authority) -> None:
    first = authority.issue("server")
    before = serial_of(first)
    async with serving(first) as server:
        assert await in_thread(server) == before
        after = serial_of(authority.issue("server"))
        assert await in_thread(server) == after != before


async def in_thread(server: GrpcServer) -> int:
    return await asyncio.to_thread(serial_shown_at, server.address)


@pytest.mark.usefixtures("seen_at_once")
async def test_a_server_of_pythons_own_sees_it_too(authority: Authority) -> None:
    first = authority.issue("server")
    before = serial_of(first)

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, HOST, 0, ssl=server_context(first)) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        assert await asyncio.to_thread(serial_shown_at, address) == before
        after = serial_of(authority.issue("server"))
        assert await asyncio.to_thread(serial_shown_at, address) == after != before


async def test_a_server_of_pythons_own_asks_for_client_certificates(authority: Authority) -> None:
    num_greeted = 0

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_greeted
        num_greeted += 1
        writer.write(b"hello")
        writer.close()

    tls = replace(authority.issue("server"), require_client_cert=True)
    known = authority.issue("client")
    assert known.cert is not None
    anonymous, client = (ssl.create_default_context(cafile=authority.path) for _ in range(2))
    client.load_cert_chain(known.cert, known.key)
    async with await asyncio.start_server(greet, HOST, 0, ssl=server_context(tls)) as server:
        address = server.sockets[0].getsockname()

        async def read(context: ssl.SSLContext) -> bytes:
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            try:
                return await reader.read()
            finally:
                writer.close()

        assert await read(client) == b"hello"
        assert await read(anonymous) == b""  # refused, of which asyncio makes an end
    assert num_greeted == 1


@pytest.mark.usefixtures("seen_at_once")
async def test_files_that_are_broken_while_serving_change_nothing(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.issue("server")
    assert tls.key is not None
    before = serial_of(tls)
    async with serving(tls) as server:
        tls.key.write_text("half a ke")
        assert [await in_thread(server) for _ in range(2)] == [before, before]
        tls.key.unlink()
        assert await in_thread(server) == before
        after = serial_of(authority.issue("server"))
        assert await in_thread(server) == after
    assert caplog.text.count("does not hold a private key") == 1 and caplog.text.count("cannot be read") == 1
    assert "half a ke" not in caplog.text


@pytest.mark.usefixtures("seen_at_once")
async def test_a_channel_that_is_open_connects_anew_with_new_files(authority: Authority, tmp_path: Path) -> None:
    """The authority is replaced under a client that holds its channel for ever; what it still runs is not cut off."""
    server_files, trusted = authority.issue("server"), tmp_path / "trusted.pem"
    shutil.copy(authority.path, trusted)
    async with serving(server_files) as server:
        async with open_channel(server.address, Credentials(TlsFiles(ca=trusted))) as channel:
            assert await ask(channel) == "fine"
            running = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
            await running.read()
            successor = Authority(tmp_path, "successor")
            successor.issue("server")
            shutil.copy(successor.path, trusted)
            assert await ask(channel) == "fine"  # a connection that trusts the old authority would be refused
            message = await running.read()
            assert isinstance(message, inference_pb2.GenerateResponse)
            running.cancel()
        with pytest.raises(Unavailable, match="unable to get local issuer"):
            await ask_once(server, TlsFiles(ca=authority.path))


def test_files_that_cannot_be_used_are_named_with_the_reason(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("good"), authority.issue("other")
    assert good.cert and good.key and other.key
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN NOTHING-----\n")
    missing = tmp_path / "missing.pem"

    def problem(tls: TlsFiles) -> str:
        with pytest.raises((OSError, TlsFilesUnusable)) as caught:
            server_credentials(tls)
        return str(caught.value)

    assert problem(replace(good, cert=missing)) == f"{missing} cannot be read: No such file or directory"
    assert problem(replace(good, ca=missing)) == f"{missing} cannot be read: No such file or directory"
    assert problem(replace(good, cert=junk)) == f"{junk} does not hold a certificate in PEM form"
    assert problem(replace(good, key=junk)) == f"{junk} does not hold a private key, without a passphrase, in PEM form"
    assert problem(replace(good, key=other.key)) == f"{other.key} is not the key of the certificate in {good.cert}"
    assert problem(replace(good, ca=junk)) == f"{junk} holds no certificates in PEM form"


def test_halves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TlsFilesUnusable, match="a TLS certificate and no key"):
        TlsFiles(cert=tmp_path / "a.crt")
    with pytest.raises(TlsFilesUnusable, match="no CA to check them"):
        TlsFiles(tmp_path / "a.crt", tmp_path / "a.key", require_client_cert=True)


def test_keys_are_not_printed(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tls = authority.issue("server")
    assert "PRIVATE" not in repr(tls.watch().value) + caplog.text
