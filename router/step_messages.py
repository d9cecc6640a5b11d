"""Measured steps and step-time models as they cross processes. What workers say is checked here: one of them must not
spoil what all of a kind are taken to be.
"""

from __future__ import annotations

from collections.abc import Sequence

from protos import plans_pb2, workers_pb2
from protos.errors import InvalidArgument
from router.fleet_models import KindModel
from router.measured_steps import MOST_AT_ONCE, DecodeSteps, PrefillSteps, Steps, why_not


def steps_from_message(report: workers_pb2.StepsReport, field: str) -> list[Steps]:
    """Raises InvalidArgument for what cannot have been measured, and for more than is told in one report."""
    for name, number in (("prefill", len(report.prefill)), ("decode", len(report.decode))):
        if number > MOST_AT_ONCE:
            raise InvalidArgument(f"{field}.{name} has {number} entries; it may have {MOST_AT_ONCE}", field=field)
    steps: list[Steps] = [PrefillSteps(each.num_tokens, each.num_pairs, each.step_s) for each in report.prefill]
    steps += [
        DecodeSteps(each.num_sequences, each.num_context_tokens, each.step_s, each.tokens_per_step)
        for each in report.decode
    ]
    for each in steps:
        if problem := why_not(each):
            raise InvalidArgument(f"{field}: {problem}", field=field)
    return steps


def steps_message(steps: Sequence[Steps]) -> workers_pb2.StepsReport:
    report = workers_pb2.StepsReport()
    for each in steps:
        if isinstance(each, PrefillSteps):
            report.prefill.add(num_tokens=each.num_tokens, num_pairs=each.num_pairs, step_s=each.step_s)
        else:
            report.decode.add(
                num_sequences=each.num_sequences,
                num_context_tokens=each.num_context_tokens,
                step_s=each.step_s,
                tokens_per_step=each.tokens_per_step,
            )
    return report


def step_times_message(model: KindModel) -> plans_pb2.StepTimes:
    costs = model.costs
    return plans_pb2.StepTimes(
        kind=model.kind,
        prefill_base_s=costs.prefill_base_s,
        prefill_token_s=costs.prefill_token_s,
        prefill_pair_s=costs.prefill_pair_s,
        decode_base_s=costs.decode_base_s,
        decode_sequence_s=costs.decode_sequence_s,
        decode_context_token_s=costs.decode_context_token_s,
        decode_expert_s=costs.decode_expert_s,
        tokens_per_step=costs.tokens_per_step,
        prefill_confidence=model.prefill_confidence,
        decode_confidence=model.decode_confidence,
        num_workers=model.num_workers,
    )
