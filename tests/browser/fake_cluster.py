"""A cluster that exists only as messages: workers, plans, traffic and requests that hang together, by a seed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TypeAlias

from google.protobuf import timestamp_pb2

from protos import inference_pb2, insights_pb2, plans_pb2, workers_pb2

Role: TypeAlias = workers_pb2.Role.ValueType

PREFILL, DECODE, BOTH = workers_pb2.ROLE_PREFILL, workers_pb2.ROLE_DECODE, workers_pb2.ROLE_BOTH
NUM_LAYERS, NUM_EXPERTS = 24, 8


def stamp(ago_s: float = 0.0) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(time.time() - ago_s), nanos=0)


@dataclass
class FakeCluster:
    """`num_both` workers do both. The first decode worker runs hot, and one of its layers leans on one expert."""

    num_prefill: int = 2
    num_decode: int = 5
    num_both: int = 1
    seed: int = 7
    roles: dict[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for name, number, role in (
            ("prefill", self.num_prefill, PREFILL),
            ("decode", self.num_decode, DECODE),
            ("worker", self.num_both, BOTH),
        ):
            self.roles |= {f"{name}-{i}": role for i in range(number)}
        self.load_factor = 1.0
        self.states: dict[str, workers_pb2.WorkerState.ValueType] = {}
        self.classes: list[insights_pb2.ClassTraffic] = []  # of SLOs

    def counts(self) -> tuple[int, int, int]:
        """Prefill and decode, with those that do both in each, and these alone."""
        roles = list(self.roles.values())
        both = roles.count(BOTH)
        return roles.count(PREFILL) + both, roles.count(DECODE) + both, both

    def status(self) -> workers_pb2.Status:
        workers = [self._worker(name, role) for name, role in self.roles.items()]
        return workers_pb2.Status(
            workers=workers,
            num_requests_in_flight=sum(worker.num_requests for worker in workers),
            model_name="demo-moe",
            uptime_s=86_400.0,
            metrics_address="127.0.0.1:9100",
            num_requests_waiting=round(3 * self.load_factor),
        )

    def _worker(self, name: str, role: Role) -> workers_pb2.WorkerStatus:
        draw, number = random.Random(f"{self.seed} {name}"), 2048
        decodes = role in (DECODE, BOTH)
        running = min(64, round(draw.randint(8, 40) * self.load_factor)) if decodes else 0
        used = min(number, round(draw.uniform(0.2, 0.7) * number * self.load_factor))
        hello = workers_pb2.WorkerHello(
            worker_id=name,
            epoch="e1",
            address=f"10.0.{draw.randint(0, 3)}.{draw.randint(2, 250)}:8501",
            role=role,
            flippable=not name.endswith("-9"),
            model_name="demo-moe",
            num_blocks=number,
            runner="torch",
            kernels="cpu/onednn",
            max_context_tokens=8192,
            drafter="eagle+ngram" if decodes else "none",
            max_running=64,
        )
        load = workers_pb2.WorkerLoad(
            state=self.states.get(name, workers_pb2.WORKER_STATE_READY),
            queued_prefill_tokens=0 if role == DECODE else round(draw.randint(200, 4000) * self.load_factor),
            num_waiting=draw.randint(0, 3),
            num_running=running,
            num_free_blocks=number - used,
            num_used_blocks=used,
            num_quarantined_blocks=4 if name == "decode-1" else 0,
            prefill_tokens_per_s=0.0 if role == DECODE else draw.uniform(900, 1500),
            decode_step_s=draw.uniform(0.018, 0.042) if decodes else 0.0,
            decode_batch=float(running),
            tokens_per_step=draw.uniform(1.4, 2.6) if decodes else 0.0,
        )
        return workers_pb2.WorkerStatus(
            hello=hello,
            load=load,
            role=role,
            reported_ago_s=draw.uniform(0.05, 0.9),
            num_requests=running + load.num_waiting,
            num_known_blocks=used,
        )

    def ratios(self) -> list[plans_pb2.RatioForecast]:
        """Each pool serves up to its size; what is asked for is shared by both. Best a little above where it starts."""
        total = len(self.roles)
        ratios = [_forecast(p, total - p, self.load_factor) for p in range(1, total)]
        for ratio in ratios:
            for each in self.classes:
                ratio.classes.add(slo_class=each.slo_class, attainment=ratio.attainment * each.attainment)
        return ratios

    def slo_classes(self) -> list[plans_pb2.SloClass]:
        """Beside the default one, which is the first."""
        return [
            plans_pb2.SloClass(name=each.slo_class, slo=plans_pb2.Slo(ttft_s=30.0, tpot_s=0.5, percentile=each.share))
            for each in self.classes[1:]
        ]

    def traffic(self, window_s: float) -> insights_pb2.Traffic:
        draw = random.Random(self.seed)
        rate = 2.4 * len(self.roles) * self.load_factor
        slices = [
            insights_pb2.TrafficSlice(
                at=stamp(window_s * (59 - i) / 60),
                requests_per_s=rate * draw.uniform(0.8, 1.15),
                output_tokens_per_s=rate * 180 * draw.uniform(0.8, 1.15),
                ttft_p90_s=0.34 * draw.uniform(0.8, 1.5),
                tpot_p90_s=0.031 * draw.uniform(0.9, 1.2),
                refused_per_s=0.4 if i in (31, 32) else 0.0,
            )
            for i in range(60)
        ]
        return insights_pb2.Traffic(
            window_s=window_s,
            ttft_s=insights_pb2.Percentiles(count=5400, p50=0.182, p90=0.341, p99=0.902),
            tpot_s=insights_pb2.Percentiles(count=5400, p50=0.0214, p90=0.0312, p99=0.0633),
            requests_per_s=rate,
            prompt_tokens_per_s=rate * 950,
            output_tokens_per_s=rate * 180,
            cached_share=0.37,
            attainment=0.934,
            num_failed=2,
            num_refused=11,
            slices=slices,
            classes=self.classes,
        )

    def requests(self) -> list[insights_pb2.RequestSummary]:
        draw = random.Random(self.seed)
        prefill = [name for name, role in self.roles.items() if role != DECODE]
        decode = [name for name, role in self.roles.items() if role != PREFILL]
        return [_request(i, draw, draw.choice(prefill), draw.choice(decode)) for i in range(80)]

    def insights(self, worker_id: str) -> insights_pb2.WorkerInsights:
        draw = random.Random(f"{self.seed} {worker_id}")
        decodes = self.roles[worker_id] != PREFILL
        return insights_pb2.WorkerInsights(
            worker_id=worker_id,
            drafts=_drafts(draw) if decodes else [],
            experts=[_experts(draw, layer, hot=worker_id == "decode-0") for layer in range(NUM_LAYERS)],
            transfers=_transfers(draw, decodes, worker_id == "decode-1"),
            draft_reason="3: 1.62x of a plain step at batch 18" if decodes else "",
            uptime_s=draw.uniform(3600, 90_000),
        )


def _forecast(num_prefill: int, num_decode: int, load_factor: float) -> plans_pb2.RatioForecast:
    total = num_prefill + num_decode
    asked = 2.4 * total * load_factor
    goodput = min(asked, 4.6 * num_prefill, 5.4 * num_decode)
    share = min(1.0, goodput / asked)
    return plans_pb2.RatioForecast(
        num_prefill=num_prefill,
        num_decode=num_decode,
        ttft_s=0.2 + 0.8 * (1 - share) ** 2 if 4.6 * num_prefill > asked * 0.7 else float("inf"),
        tpot_s=0.02 + 0.05 * (1 - share) if 5.4 * num_decode > asked * 0.5 else float("inf"),
        goodput=goodput * (0.97 if share == 1.0 else 0.8),
        attainment=share * 0.97,
    )


def _request(number: int, draw: random.Random, prefill: str, decode: str) -> insights_pb2.RequestSummary:
    state = "decode" if number < 6 else "prefill" if number < 8 else "failed" if number == 20 else "done"
    queue, compute, hand_over = draw.uniform(0.01, 0.25), draw.uniform(0.08, 0.9), draw.uniform(0.004, 0.03)
    write = draw.uniform(0.8, 7.0)
    stages, start = [], 0.0
    for name, worker, took in (
        ("tokenize", "", 0.002),
        ("wait", "", draw.uniform(0.1, 0.6) if number % 9 == 0 else 0.0),
        ("queue", prefill, queue),
        ("prefill", prefill, compute),
        ("handover", prefill, 0.0 if state == "prefill" else hand_over),
        ("decode", decode, 0.0 if state == "prefill" else write),
    ):
        if took:
            stages.append(inference_pb2.Stage(name=name, worker_id=worker, start_s=start, duration_s=took))
            start += took
    tokens = 0 if state == "prefill" else draw.randint(40, 400)
    return insights_pb2.RequestSummary(
        request_id=f"{draw.getrandbits(48):012x}",
        received_at=stamp(number * 0.7 + start),
        state=state,
        error="WORKER_LOST" if state == "failed" else "",
        prefill_worker=prefill,
        decode_worker=decode,
        num_prompt_tokens=(prompt := draw.randint(60, 3000)),
        num_cached_tokens=draw.choice((0, prompt // 16 * 8)),
        num_output_tokens=tokens,
        timeline=inference_pb2.Timeline(
            stages=stages, ttft_s=start - write, tpot_s=write / max(1, tokens), total_s=start
        ),
        num_retries=1 if number == 20 else 0,
        num_moves=1 if number % 15 == 0 else 0,
        tenant=draw.choice(("search", "support", "")),
    )


def _drafts(draw: random.Random) -> list[insights_pb2.DraftInsights]:
    first = draw.uniform(0.6, 0.85)
    eagle = insights_pb2.DraftInsights(
        source="eagle",
        acceptance=[first * 0.86**i for i in range(7)],
        lengths=[draw.randint(*bounds) for bounds in ((20, 60), (80, 200), (300, 500), (500, 900), (200, 400))],
        tokens_per_step=draw.uniform(1.8, 2.8),
        speedup=draw.uniform(1.2, 1.9),
        drafted_tokens=draw.randint(100_000, 400_000),
        accepted_tokens=draw.randint(60_000, 99_000),
    )
    ngram = insights_pb2.DraftInsights(
        source="ngram",
        acceptance=[0.42 * 0.8**i for i in range(4)],
        lengths=[400, 90, 60, 30],
        tokens_per_step=1.2,
        speedup=0.0,
        drafted_tokens=20_000,
        accepted_tokens=6_000,
    )
    return [eagle, ngram]


def _experts(draw: random.Random, layer: int, *, hot: bool) -> insights_pb2.ExpertLoad:
    shares = [draw.uniform(0.7, 1.3) for _ in range(NUM_EXPERTS)]
    if hot and layer == 11:
        shares[5] = 3.4
    total = sum(shares)
    shares = [share / total for share in shares]
    return insights_pb2.ExpertLoad(layer=layer, shares=shares, imbalance=max(shares) * NUM_EXPERTS)


def _transfers(draw: random.Random, decodes: bool, has_quarantine: bool) -> insights_pb2.TransferInsights:
    rate = draw.uniform(80e6, 400e6)
    return insights_pb2.TransferInsights(
        sent_bytes_per_s=draw.uniform(0, 4e6) if decodes else rate,
        received_bytes_per_s=rate if decodes else 0.0,
        exposed_p50_s=draw.uniform(0.002, 0.006),
        exposed_p90_s=draw.uniform(0.007, 0.02),
        num_leases=draw.randint(0, 6) if decodes else 0,
        num_expired_leases=2 if has_quarantine else 0,
        num_quarantined_blocks=4 if has_quarantine else 0,
        oldest_quarantine_s=12.5 if has_quarantine else 0.0,
        num_failed_writes=1 if has_quarantine else 0,
        num_rejected=0,
        num_handovers=draw.randint(2000, 9000),
    )
