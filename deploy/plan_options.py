"""What can be said to `pdserve plan` of traffic, hardware, targets, formats and efficiency."""

from __future__ import annotations

from pathlib import Path

import click

from deploy.options import group_of

HARDWARE_NAMES = ("H100", "H200", "A100", "B200", "MI300X")  # router.hardware has them, which --help need not import
_ABOVE_0, _AT_LEAST_0 = click.FloatRange(0, min_open=True), click.FloatRange(0)
_SHARE = click.FloatRange(0, 1, min_open=True)

traffic_options = group_of(
    click.option(
        "--trace",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Requests that were recorded (Mooncake's JSON lines, Azure's or BurstGPT's CSV): what is not given below "
        "is taken from there.",
    ),
    click.option("--requests-per-min", type=_ABOVE_0, help="How many come, at the busiest."),
    click.option("--prompt-tokens", type=click.FloatRange(1), help="Of a prompt, on average."),
    click.option("--prompt-p90", type=click.FloatRange(1), help="90 % are below this.  [default: all alike]"),
    click.option("--answer-tokens", type=click.FloatRange(1), help="Of an answer, on average."),
    click.option("--answer-p90", type=click.FloatRange(1), help="90 % are below this.  [default: all alike]"),
    click.option(
        "--cache-hit-rate",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="Share of prompt tokens that prefix caches hold.",
    ),
    click.option(
        "--burstiness",
        type=_AT_LEAST_0,
        help="Of the time between requests, variance over squared mean. 1: Poisson. 0: a steady beat.  [default: 1, or "
        "the trace's]",
    ),
)

hardware_options = group_of(
    click.option(
        "--hardware", type=click.Choice(HARDWARE_NAMES), default="H100", show_default=True, help="Kind of GPU."
    ),
    click.option("--memory-gb", type=_ABOVE_0, help="Memory of a GPU, where --hardware has another."),
    click.option("--memory-tb-s", type=_ABOVE_0, help="Its bandwidth."),
    click.option("--bf16-tflops", type=_ABOVE_0, help="Its peak in 16 bits, without sparsity."),
    click.option("--fp8-tflops", type=_AT_LEAST_0, help="Its peak in FP8; 0: it has none."),
    click.option("--int8-tops", type=_AT_LEAST_0, help="Its peak in INT8; 0: it has none."),
    click.option("--domain-gb-s", type=_ABOVE_0, help="NVLink or Infinity Fabric of a GPU, one way."),
    click.option("--gpus-per-domain", type=click.IntRange(1), help="GPUs that these links join."),
    click.option("--network-gbit-s", type=_ABOVE_0, help="A GPU's share of the network, one way."),
)

target_options = group_of(
    click.option("--ttft-ms", type=_ABOVE_0, default=500.0, show_default=True, help="Until the first token, at most."),
    click.option("--tpot-ms", type=_ABOVE_0, default=50.0, show_default=True, help="For each token after it, at most."),
    click.option(
        "--percentile",
        type=click.FloatRange(50, 100, max_open=True),
        default=90.0,
        show_default=True,
        help="Share of requests, in %, that these hold for.",
    ),
    click.option(
        "--max-utilisation",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        default=0.85,
        show_default=True,
        help="No pool is busier, however short its queue.",
    ),
)

format_options = group_of(
    click.option(
        "--weights",
        type=click.Choice(("auto", "bf16", "fp8", "int8", "mxfp4")),
        default="auto",
        show_default=True,
        help="How weights are held. auto: as config.json says.",
    ),
    click.option(
        "--kv", type=click.Choice(("bf16", "fp8", "int8")), default="bf16", show_default=True, help="How KV is cached."
    ),
    click.option(
        "--wire",
        type=click.Choice(("bf16", "fp8", "int8")),
        default="bf16",
        show_default=True,
        help="How KV is sent, if it is cached in 16 bits.",
    ),
)

efficiency_options = group_of(
    click.option(
        "--prefill-efficiency",
        type=_SHARE,
        help="Share of its peak that a GPU computes in prefill.  [default: 0.5, with experts 0.25]",
    ),
    click.option("--decode-efficiency", type=_SHARE, help="The same in decode.  [default: 0.5]"),
    click.option("--memory-efficiency", type=_SHARE, help="Share of its bandwidth that it reads.  [default: 0.7]"),
    click.option(
        "--memory-share",
        type=_SHARE,
        default=0.9,
        show_default=True,
        help="Of memory, for weights and KV; the rest is for what is computed.",
    ),
    click.option(
        "--link-efficiency",
        type=_SHARE,
        default=0.7,
        show_default=True,
        help="Share of the network's speed that KV is sent at.",
    ),
)
