"""What a hand-over takes: bytes over a sender's and a receiver's link, one after another, while they are computed."""

from __future__ import annotations

from router.simulated_worker import SimulatedWorker


def sent_at(sender: SimulatedWorker, receiver: SimulatedWorker, num_bytes: float, now: float) -> float:
    """When bytes that are there by now have arrived. Both links are taken until then."""
    return _taken(sender, receiver, num_bytes, now, now)


def streamed_at(
    sender: SimulatedWorker, receiver: SimulatedWorker, num_bytes: float, began_at: float, now: float
) -> float:
    """The same of what a step has just computed, layer by layer since it began: no layer leaves before it is there."""
    num_layers = sender.layout.num_layers
    first_at = began_at + (now - began_at) / num_layers
    return _taken(sender, receiver, num_bytes, first_at, now)


def _taken(
    sender: SimulatedWorker, receiver: SimulatedWorker, num_bytes: float, first_at: float, last_at: float
) -> float:
    bytes_per_s = min(sender.spec.link_bytes_per_s, receiver.spec.link_bytes_per_s)
    starts_at = max(sender.sent_until, receiver.received_until, first_at)
    last_layer_s = num_bytes / sender.layout.num_layers / bytes_per_s if first_at < last_at else 0.0
    until = max(starts_at + num_bytes / bytes_per_s, last_at + last_layer_s)
    sender.meter.transferred(num_bytes, num_bytes / bytes_per_s)
    sender.sent_until = receiver.received_until = until
    return until
