"""How a sender gets to know a decode worker: what must be so before the first ticket is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtransfer.agent import PeerUnreachable, TransferAgent
from kvtransfer.decode_client import DecodeClient
from kvtransfer.errors import LayoutMismatch, StalePeer, TransferFailed
from kvtransfer.peer import Peer, PeerOptions
from kvtransfer.ticket import HandoverTarget, SenderIdentity
from kvtransfer.transfer_thread import TransferThread
from model.kv_layout import KVLayout


async def connect_peer(
    client: DecodeClient,
    target: HandoverTarget,
    *,
    identity: SenderIdentity,
    layout: KVLayout,
    thread: TransferThread,
    agent: TransferAgent,
    options: PeerOptions,
    replaces: Peer | None,
    lost: Callable[[Peer], None],
) -> Peer:
    """Describe, compare, connect, attach. The client belongs to the peer that is returned; the one replaced is lost.

    Raises:
        LayoutMismatch: the caches cannot exchange blocks. StalePeer: another process start answered.
        TransferFailed: the transport cannot reach it.
    """
    description = await client.describe(layout, options.call_timeout_s)
    if (difference := layout.difference(description.layout)) is not None:
        raise LayoutMismatch(f"decode worker {target.worker_id!r} has another KV layout: {difference}")
    if description.epoch != target.epoch:
        raise StalePeer(f"decode worker {target.worker_id!r} has restarted: {description.epoch}, not {target.epoch}")
    if replaces is not None:
        replaces.lose(StalePeer(f"decode worker {target.worker_id!r} has restarted"))
    try:
        await thread.run(
            lambda: agent.connect(description.agent_name, description.agent_metadata, description.device_id)
        )
    except PeerUnreachable as error:
        raise TransferFailed(f"decode worker {target.worker_id!r} cannot be written to: {error}") from error
    peer = Peer(client, description, identity=identity, thread=thread, agent=agent, options=options, lost=lost)
    try:
        async with asyncio.timeout(options.call_timeout_s):
            await peer.attached()
    except BaseException as error:
        await peer.close()
        if isinstance(error, TimeoutError):
            raise TransferFailed(f"decode worker {target.worker_id!r} did not answer the first heartbeat") from None
        raise
    return peer
