"""The other end of `bench.handover`: a decode worker's cache, pool and services, without the model that would decode.

Started by it as a process of its own. Says where it is in one line of JSON; then, for each line of its stdin, for how
many seconds it has checked what it received; and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import torch
from prometheus_client import REGISTRY

from decode.service import DecodeService
from deploy.verification import verification
from kvtransfer.geometry import CacheSpan
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.sender import Sender
from kvtransfer.ticket import PeerDescription, SenderIdentity
from model.block_pool import BlockPool
from model.block_sums import BlockSums
from model.config import ModelConfig
from model.kv_cache import PagedKVCache
from model.kv_layout import KVLayout
from model.runner import NoDrafting
from model.tokenizer import Tokenizer
from protos import decode_pb2_grpc
from protos.serve import GrpcServer

LEASE_S = 3.0  # nobody claims what arrives: its blocks come back after so long


async def serve(folder: Path, layout: KVLayout, num_blocks: int, verify_kv: str) -> None:
    cache = PagedKVCache(layout, num_blocks, torch.device("cpu"))
    cache.memory.zero_()  # a cache that has been in use: its pages are there
    epoch = f"decode-{os.getpid()}"
    agent = NixlAgent(epoch, cache.address, num_blocks * layout.block_bytes)
    description = PeerDescription(epoch, agent.name, agent.metadata(), layout, num_blocks, cache.address, -1)
    pool, span = BlockPool(num_blocks), CacheSpan(layout, cache.address, num_blocks)
    sender = Sender(agent, pool, span, SenderIdentity(epoch, epoch))
    checks = verification(verify_kv, BlockSums(cache.memory), layout, num_blocks)
    service = DecodeService(
        pool=pool,
        description=description,
        sender=sender,
        tokenizer=Tokenizer.load(folder),
        vocab_size=ModelConfig.from_folder(folder).vocab_size,
        states=NoDrafting(),
        max_running=1,
        lease_s=LEASE_S,
        wake=lambda: None,
        verification=checks,
    )
    server = GrpcServer("127.0.0.1", 0)
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, service)
    await server.start()
    timer = asyncio.create_task(service.receiver.run())
    hello = {
        "address": server.address,
        "epoch": epoch,
        "base_address": cache.address,
        "checked_share": checks.share if checks is not None else 0.0,
    }
    print(json.dumps(hello), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(REGISTRY.get_sample_value("pdserve_kvtransfer_check_seconds_total"), flush=True)
    timer.cancel()
    await asyncio.wait([timer])
    await server.stop()
    service.close()
    await sender.close()
    agent.close()


if __name__ == "__main__":
    _, model_folder, layout_json, block_count, mode = sys.argv
    asyncio.run(serve(Path(model_folder), KVLayout(**json.loads(layout_json)), int(block_count), mode))
