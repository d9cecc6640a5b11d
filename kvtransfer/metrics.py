"""What Prometheus sees of hand-overs, and what people see of the last ones."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from kvtransfer.lately import RecentRate, RecentTimes
from kvtransfer.ticket import AS_IS

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

SENT_BYTES = Counter(
    "pdserve_kvtransfer_sent_bytes", "Bytes of KV written into other workers, by what it was coded in.", ["coding"]
)
RECEIVED_BYTES = Counter(
    "pdserve_kvtransfer_received_bytes",
    "Bytes of KV of committed hand-overs written into this worker, by what it was coded in.",
    ["coding"],
)
for _counter in (SENT_BYTES, RECEIVED_BYTES):
    _counter.labels(AS_IS)  # there from the start, as 0
UNCODED = Counter(
    "pdserve_kvtransfer_uncoded_handovers", "Sequences sent as they are to workers that do not take the coding wanted."
)
PACK_SECONDS = Counter("pdserve_kvtransfer_pack_seconds", "Time the transfer thread spent coding KV.")
UNPACK_SECONDS = Counter("pdserve_kvtransfer_unpack_seconds", "Time that received KV took to be unpacked.")
WRITE_SECONDS = Counter("pdserve_kvtransfer_write_seconds", "Time the transfer thread spent posting writes.")
WRITES = Counter("pdserve_kvtransfer_writes", "Writes posted to the transport.")
DESCRIPTORS = Counter("pdserve_kvtransfer_descriptors", "Pieces in the writes posted: a layer of a block each.")
MOVING_BYTES = Gauge("pdserve_kvtransfer_moving_bytes", "KV bytes of writes that were posted and have not ended.")
FAILED_WRITES = Counter("pdserve_kvtransfer_failed_writes", "Writes that failed or stalled.")
HANDOVERS = Counter("pdserve_kvtransfer_handovers", "Sequences sent to other workers, by how that ended.", ["outcome"])
EXPOSED_SECONDS = Histogram(
    "pdserve_kvtransfer_exposed_seconds", "From the end of prefill to the record accepted.", buckets=_SECONDS
)
TICKETS = Counter(
    "pdserve_kvtransfer_tickets",
    "Tickets granted or refused here, and how the granted ones ended.",
    ["outcome"],
)
LEASES_RENEWED = Counter("pdserve_kvtransfer_leases_renewed", "Times that a heartbeat renewed the lease of a ticket.")
LEASES_EXPIRED = Counter("pdserve_kvtransfer_leases_expired", "Leases that were not renewed in time.")
OLDEST_QUARANTINE = Gauge("pdserve_kvtransfer_oldest_quarantine_seconds", "Age of the oldest quarantine.")
IGNORED = Counter("pdserve_kvtransfer_ignored_messages", "Late, repeated or unknown messages.", ["message"])
FAULTS = Counter("pdserve_faults_injected", "Faults made to happen by a fault plan.", ["fault", "target"])
REJECTED = Counter(
    "pdserve_kvtransfer_rejected_records", "Records that were not accepted for what they say or brought.", ["reason"]
)
CHECKED_BYTES = Counter("pdserve_kvtransfer_checked_bytes", "KV bytes whose checksums were compared.")
CHECK_SECONDS = Counter("pdserve_kvtransfer_check_seconds", "Time that took.")
PEERS = Gauge("pdserve_kvtransfer_peers", "Decode workers this worker is connected to.")

RECEIVED_LATELY, EXPOSED_LATELY = RecentRate(), RecentTimes()


def observe_received(coding: str, num_bytes: int) -> None:
    RECEIVED_BYTES.labels(coding).inc(num_bytes)
    RECEIVED_LATELY.add(num_bytes)


def observe_exposed(seconds: float) -> None:
    EXPOSED_SECONDS.observe(seconds)
    EXPOSED_LATELY.add(seconds)


def total(counter: Counter, **labels: str) -> int:
    """Of all that has these labels, so far."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    counts = (each.value for each in samples if each.name.endswith("_total") and labels.items() <= each.labels.items())
    return round(sum(counts))
