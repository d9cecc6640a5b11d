"""The same plan with the KV cache, the weights or both in eight bits."""

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
    weights = question.weight_format
    formats = [(weights, question.kv), (weights, eight_bits)]
    if weights == "bf16":
        formats += [(eight_bits, question.kv), (eight_bits, eight_bits)]
    return tuple(_alternative(question, *each) for each in dict.fromkeys(formats))


def _alternative(question: Question, weights: str, kv: str) -> Alternative:
    try:
        return Alternative(weights, kv, plan(replace(question, weights=weights, kv=kv)))
    except ServiceError as error:
        return Alternative(weights, kv, None, error.message)
