"""A whole plan: pools of prefill and of decode workers for a forecast, pools of workers that do both beside them, and
which of the two is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from protos.errors import FailedPrecondition
from router.advice import Advice, advise
from router.capacity import fewest_gpus
from router.colocated_pool import ColocatedPool, size_colocated
from router.decode_pool import DecodePool, size_decode
from router.drafting_gain import Drafting
from router.figure import Figure, figure
from router.forecast import Forecast
from router.gpu_layout import GpuLayout, layouts_of, possible_layouts
from router.hardware import Hardware
from router.kv_traffic import LINK_EFFICIENCY, KvTraffic, kv_traffic
from router.memory_plan import MEMORY_SHARE, Holding, plan_memory
from router.model_shape import ModelShape
from router.precision import KV_BYTES, WEIGHT_FORMATS
from router.prefill_pool import PrefillPool, size_prefill
from router.roofline import DENSE_EFFICIENCY, Efficiency, Roofline, usual_efficiency
from router.targets import Targets
from router.worker_kind import StepTokens, Unreachable, WorkerKind


@dataclass(frozen=True, slots=True)
class Draft:
    """`cost`: of a draft, in plain steps; not asked for with a `model`."""

    acceptance: float
    cost: float = 0.0
    model: ModelShape | None = None
    max_tokens: int = 7


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned for. `weights`: in which the model is held, or as its config.json says; `wire`: of the hand-over.
    Numbers of GPUs per worker are searched for where they are not given."""

    shape: ModelShape
    hardware: Hardware
    forecast: Forecast
    targets: Targets = field(default_factory=Targets)
    weights: str = "auto"
    kv: str = "bf16"
    wire: str = "bf16"
    draft: Draft | None = None
    prefill_gpus: int | None = None
    decode_gpus: int | None = None
    num_gpus: int | None = None  # that there are
    price: float | None = None  # of a GPU for an hour
    efficiency: Efficiency | None = None
    memory_share: float = MEMORY_SHARE
    link_efficiency: float = LINK_EFFICIENCY
    step_tokens: StepTokens = field(default_factory=StepTokens)

    @property
    def weight_format(self) -> str:
        if self.weights != "auto":
            return self.weights
        if self.shape.stored not in WEIGHT_FORMATS:
            raise FailedPrecondition(
                f"the weights are stored in {self.shape.stored!r}, which planning does not know; say what they will be "
                f"held in: {', '.join(WEIGHT_FORMATS)}",
                field="weights",
            )
        return self.shape.stored

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The model, and the one that drafts for it, in the format it is stored in."""
        target = Holding(self.shape, WEIGHT_FORMATS[self.weight_format], KV_BYTES[self.kv])
        if self.draft is None or self.draft.model is None:
            return (target,)
        stored = self.draft.model.stored
        if stored not in WEIGHT_FORMATS:
            raise FailedPrecondition(
                f"the draft model's weights are stored in {stored!r}; planning knows {', '.join(WEIGHT_FORMATS)}",
                field="draft",
            )
        return target, Holding(self.draft.model, WEIGHT_FORMATS[stored], KV_BYTES[self.kv])


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    question: Question
    prefill: PrefillPool
    decode: DecodePool
    colocated: ColocatedPool | None
    no_colocated: str  # why there is none
    traffic: KvTraffic
    advice: Advice

    @property
    def num_gpus(self) -> int:
        return self.prefill.num_gpus + self.decode.num_gpus

    @property
    def num_chosen_gpus(self) -> int:
        """Of two pools or of one, as is advised."""
        return self.num_gpus if self.advice.disaggregate or self.colocated is None else self.colocated.num_gpus

    @property
    def is_within_budget(self) -> bool:
        return self.question.num_gpus is None or self.num_chosen_gpus <= self.question.num_gpus

    @property
    def cost(self) -> tuple[Figure, ...]:
        """Per million tokens: of answers alone, and of prompts too. None without a price."""
        question = self.question
        if question.price is None:
            return ()
        forecast, answer = question.forecast, question.forecast.answer.mean
        return tuple(
            figure(
                f"cost per million {what}",
                "$",
                "gpus * price / (3600 * requests_per_s * tokens) * 1000000",
                gpus=self.num_chosen_gpus,
                price=question.price,
                requests_per_s=forecast.requests_per_s,
                tokens=tokens,
            )
            for what, tokens in (("answer tokens", answer), ("tokens", answer + forecast.prompt.mean))
        )


def plan(question: Question) -> DeploymentPlan:
    """
    Raises:
        FailedPrecondition: no pool keeps to the targets, or the model fits no worker; the message says what would do.
        InvalidArgument
    """
    try:
        decode = fewest_gpus(worker_kinds(question, question.decode_gpus), size_decode)
    except Unreachable as error:
        raise FailedPrecondition(f"no decode pool is possible: {error}", field="decode") from error
    wait_s = decode.wait.percentile.value
    try:
        prefill = fewest_gpus(
            worker_kinds(question, question.prefill_gpus), lambda kind: size_prefill(kind, decode_wait_s=wait_s)
        )
    except Unreachable as error:
        raise FailedPrecondition(f"no prefill pool is possible: {error}", field="prefill") from error
    colocated, reason = None, ""
    try:
        colocated = fewest_gpus(worker_kinds(question, None), size_colocated)
    except Unreachable as error:
        reason = str(error)
    traffic = kv_traffic(prefill, question.holdings, question.hardware, question.wire, question.link_efficiency)
    return DeploymentPlan(
        question=question,
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        no_colocated=reason,
        traffic=traffic,
        advice=advise(question.forecast, prefill, decode, colocated, reason),
    )


def worker_kinds(question: Question, num_gpus: int | None) -> tuple[WorkerKind, ...]:
    """All that hold the model with some KV beside it, fewest GPUs first.

    Raises:
        FailedPrecondition: there are none.
    """
    layouts = _layouts(question, num_gpus)
    kinds = tuple(kind for layout in layouts if (kind := _worker_kind(question, layout)).memory.fits)
    if kinds:
        return kinds
    _refuse_too_large(question, layouts[-1])
    return ()


def _layouts(question: Question, num_gpus: int | None) -> tuple[GpuLayout, ...]:
    if num_gpus is None:
        return possible_layouts(question.shape, question.hardware)
    layouts = layouts_of(question.shape, question.hardware, num_gpus)
    if not layouts:
        heads = question.shape.attention.num_heads
        raise FailedPrecondition(
            f"{num_gpus} GPUs cannot share {question.shape.name}: up to {question.hardware.gpus_per_domain} may, a "
            f"number that divides its {heads} heads",
            field="gpus",
        )
    return layouts


def _worker_kind(question: Question, layout: GpuLayout) -> WorkerKind:
    holdings, hardware, forecast = question.holdings, question.hardware, question.forecast
    target, draft = holdings[0], holdings[1] if len(holdings) > 1 else None
    memory = plan_memory(target, draft, layout, hardware, question.memory_share)
    context = figure(
        "context in the middle of an answer",
        "",
        "prompt + answer / 2",
        prompt=forecast.prompt.mean,
        answer=forecast.answer.mean,
    )
    efficiency = question.efficiency or usual_efficiency(question.shape)
    drafting = None
    if question.draft is not None:
        model = None if draft is None else Roofline(draft, layout, hardware, DENSE_EFFICIENCY)
        drafting = Drafting(question.draft.acceptance, question.draft.cost, model, question.draft.max_tokens)
    return WorkerKind(
        roofline=Roofline(target, layout, hardware, efficiency),
        memory=memory,
        sequence=memory.sequence("KV of a sequence in the middle of its answer", holdings, context.value),
        context=context,
        forecast=forecast,
        targets=question.targets,
        drafting=drafting,
        step_tokens=question.step_tokens,
    )


def _refuse_too_large(question: Question, layout: GpuLayout) -> None:
    """
    Raises:
        FailedPrecondition: always; with what would fit.
    """
    memory, hardware = _worker_kind(question, layout).memory, question.hardware
    held = memory.weights.value + (memory.draft.value if memory.draft else 0.0)
    usable = hardware.memory_bytes * question.memory_share
    message = (
        f"{question.shape.name} in {question.weight_format} does not fit: {held / 1e9:.1f} GB of weights per GPU on "
        f"{layout}, and {usable / 1e9:.1f} GB usable of {hardware.name}'s {hardware.memory_bytes / 1e9:.0f} GB"
    )
    raise FailedPrecondition(f"{message}; {_what_would_fit(question, held)}", field="model")


def _what_would_fit(question: Question, held: float) -> str:
    needed = f"a GPU with {held / question.memory_share / 1e9:.0f} GB and room for KV would do"
    smaller = WEIGHT_FORMATS["fp8" if question.hardware.fp8_flops else "int8"].name
    if question.weight_format == "bf16":
        fewer = replace(question, weights=smaller)
        for layout in possible_layouts(question.shape, question.hardware):
            if _worker_kind(fewer, layout).memory.fits:
                return f"in {smaller} it fits {layout}; {needed}"
    return needed
