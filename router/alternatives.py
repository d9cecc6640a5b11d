"""The same plan with weights, and then the KV cache too, in eight bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protos.errors import ServiceError
from router.deployment_plan import DeploymentPlan, Question, plan


@dataclass(frozen=True, slots=True)
class Alternative:
    weights: str
    kv: str
    plan: DeploymentPlan | None
    reason: str = ""  # why there is none


def alternatives(question: Question) -> tuple[Alternative, ...]:
    eight_bits = "fp8" if question.hardware.fp8_flops else "int8"
    asked = (question.weight_format, question.kv)
    known = dict.fromkeys((asked, ("bf16", "bf16"), (eight_bits, "bf16"), (eight_bits, eight_bits)))
    return tuple(_alternative(question, *formats) for formats in known)


def _alternative(question: Question, weights: str, kv: str) -> Alternative:
    try:
        return Alternative(weights, kv, plan(replace(question, weights=weights, kv=kv)))
    except ServiceError as error:
        return Alternative(weights, kv, None, error.message)
