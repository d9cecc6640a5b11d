"""`pdserve plan`: how many workers a forecast takes, and what they would do, without any of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.options import group_of
from deploy.plan_options import efficiency_options, format_options, hardware_options, target_options, traffic_options

if TYPE_CHECKING:
    from router.deployment_plan import Draft, Question
    from router.forecast import Forecast
    from router.hardware import Hardware
    from router.model_shape import ModelShape
    from router.roofline import Efficiency

_COUNT, _ABOVE_0 = click.IntRange(1), click.FloatRange(0, min_open=True)

_draft_options = group_of(
    click.option(
        "--acceptance",
        type=click.FloatRange(0, 1, max_open=True),
        help="Plan with guessing ahead: the chance that a guess stands if those before it do.",
    ),
    click.option(
        "--draft",
        "draft_path",
        type=click.Path(path_type=Path),
        metavar="CONFIG",
        help="config.json, or its folder, of the small model that guesses.  [default: what guesses weighs nothing]",
    ),
    click.option(
        "--draft-cost",
        type=click.FloatRange(0),
        help="Time of one guess, in plain steps, of a head or of look-up.  [default: 0]",
    ),
    click.option("--max-draft-tokens", type=_COUNT, default=7, show_default=True, help="Guesses of a step, at most."),
)


@click.command()
@click.argument("model", type=click.Path(path_type=Path), metavar="CONFIG")
@hardware_options
@traffic_options
@target_options
@format_options
@_draft_options
@efficiency_options
@click.option("--gpus", "num_gpus", type=_COUNT, help="GPUs that there are.  [default: as many as it takes]")
@click.option("--prefill-gpus", type=_COUNT, help="GPUs of one prefill worker.  [default: fewest GPUs in all]")
@click.option("--decode-gpus", type=_COUNT, help="GPUs of one decode worker.  [default: fewest GPUs in all]")
@click.option("--price", type=_ABOVE_0, help="Of one GPU for one hour, in $.")
@click.option("--explain", is_flag=True, help="Show how every figure comes about.")
@click.option("--json", "as_json", is_flag=True, help="Write all figures, with their formulas, as JSON.")
def plan(model: Path, explain: bool, as_json: bool, **settings: Any) -> None:
    """Plan pools for the model of CONFIG, a config.json or its folder, from a forecast of traffic.

    Nothing is loaded or started. docs/planning.md has every formula.
    """
    from rich.console import Console

    from deploy.plan_view import plan_document, print_explanation, print_plan
    from router.alternatives import alternatives
    from router.deployment_plan import plan as made

    question = _question(model, settings)
    planned = made(question)
    if as_json:
        click.echo(json.dumps(plan_document(planned, alternatives(question)), indent=2, allow_nan=False))
        return
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    print_plan(planned, alternatives(question), out)
    if explain:
        print_explanation(planned, out)


def _question(path: Path, settings: dict[str, Any]) -> Question:
    from router.deployment_plan import Question
    from router.model_config import read_model_shape
    from router.targets import Targets

    shape = read_model_shape(path)
    return Question(
        shape=shape,
        hardware=_hardware(settings),
        forecast=_forecast(settings),
        targets=Targets(
            ttft_s=settings["ttft_ms"] / 1000,
            tpot_s=settings["tpot_ms"] / 1000,
            percentile=settings["percentile"] / 100,
            max_utilisation=settings["max_utilisation"],
        ),
        draft=_draft(settings),
        efficiency=_efficiency(shape, settings),
        **{
            name: settings[name]
            for name in ("weights", "kv", "wire", "prefill_gpus", "decode_gpus", "num_gpus", "price")
        },
        memory_share=settings["memory_share"],
        link_efficiency=settings["link_efficiency"],
    )


def _forecast(settings: dict[str, Any]) -> Forecast:
    """What was given, and of a trace what was not."""
    from router.forecast import Forecast, Lengths

    recorded = None if settings["trace"] is None else _recorded(settings["trace"])

    def lengths(of: str) -> Lengths:
        mean, p90 = settings[f"{of}_tokens"], settings[f"{of}_p90"]
        if mean is not None:
            return Lengths.of(f"--{of}-tokens", mean, p90)
        if p90 is not None:
            raise click.UsageError(f"--{of}-p90 needs --{of}-tokens, the mean")
        if recorded is None:
            raise click.UsageError(f"Missing option '--{of}-tokens', or a --trace to take it from")
        return recorded.prompt if of == "prompt" else recorded.answer

    per_min, burstiness = settings["requests_per_min"], settings["burstiness"]
    if per_min is None and recorded is None:
        raise click.UsageError("Missing option '--requests-per-min', or a --trace to take it from")
    if burstiness is None:
        burstiness = 1.0 if recorded is None else recorded.arrival_variability
    return Forecast(
        requests_per_s=recorded.requests_per_s if per_min is None and recorded else per_min / 60,
        prompt=lengths("prompt"),
        answer=lengths("answer"),
        cache_hit_rate=settings["cache_hit_rate"],
        arrival_variability=burstiness,
    )


def _recorded(path: Path) -> Forecast:
    from router.forecast import Forecast
    from router.traces import TraceOptions, read_trace

    requests = list(read_trace(path, TraceOptions(seed=0)))
    return Forecast.of_requests(
        [request.at_s for request in requests],
        [request.num_prompt_tokens for request in requests],
        [request.num_output_tokens for request in requests],
    )


def _hardware(settings: dict[str, Any]) -> Hardware:
    """That of the table, with what was given instead of its figures."""
    from router.hardware import HARDWARE

    scales = {
        "memory_gb": ("memory_bytes", 1e9),
        "memory_tb_s": ("memory_bytes_per_s", 1e12),
        "bf16_tflops": ("bf16_flops", 1e12),
        "fp8_tflops": ("fp8_flops", 1e12),
        "int8_tops": ("int8_flops", 1e12),
        "domain_gb_s": ("domain_bytes_per_s", 1e9),
        "gpus_per_domain": ("gpus_per_domain", 1),
        "network_gbit_s": ("network_bytes_per_s", 1e9 / 8),
    }
    hardware = HARDWARE[settings["hardware"]]
    own = {field: settings[name] * scale for name, (field, scale) in scales.items() if settings[name] is not None}
    return replace(hardware, **own, name=f"{hardware.name} with other figures", source="given") if own else hardware


def _draft(settings: dict[str, Any]) -> Draft | None:
    from router.deployment_plan import Draft
    from router.model_config import read_model_shape

    path, cost = settings["draft_path"], settings["draft_cost"]
    if settings["acceptance"] is None:
        if path is not None or cost is not None:
            raise click.UsageError("--draft and --draft-cost need --acceptance: how often guesses stand")
        return None
    if path is not None and cost is not None:
        raise click.UsageError("--draft-cost is for guessing without a model; with --draft the cost is computed")
    shape = None if path is None else read_model_shape(path)
    return Draft(settings["acceptance"], cost or 0.0, shape, settings["max_draft_tokens"])


def _efficiency(shape: ModelShape, settings: dict[str, Any]) -> Efficiency:
    """The usual one of such a model, with what was given instead."""
    from router.roofline import usual_efficiency

    given = {name: settings[f"{name}_efficiency"] for name in ("prefill", "decode", "memory")}
    return replace(usual_efficiency(shape), **{name: share for name, share in given.items() if share is not None})
