"""In which codings KV may go from worker to worker, and how many bytes a block takes in each."""

from __future__ import annotations

from kvtransfer.eight_bit import Coding, EightBit
from kvtransfer.ticket import AS_IS, Ticket
from model.kv_layout import KVLayout


def codings(layout: KVLayout) -> tuple[str, ...]:
    """Those that make blocks smaller: what is packed has to fit where a block lies."""
    found = (coding for coding in Coding if EightBit(layout, coding).packed_bytes < layout.layer_block_bytes)
    return tuple(coding.value for coding in found)


def block_bytes(layout: KVLayout, coding: str) -> int:
    """Of one block with all its layers."""
    if coding == AS_IS:
        return layout.block_bytes
    return layout.num_layers * EightBit(layout, Coding(coding)).packed_bytes


def ticket_bytes(layout: KVLayout, ticket: Ticket) -> int:
    """What is written under it."""
    return len(ticket.block_ids) * block_bytes(layout, ticket.coding)
