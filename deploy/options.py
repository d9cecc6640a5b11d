"""The flags that several commands share, each described once. Limits are checked where the value is used, not here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deploy.logs import FORMATS, LEVELS
from model.sampling_params import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from kvtransfer.faults import FaultPlan

F = TypeVar("F", bound=Callable[..., Any])

RUNNERS = ("torch", "timed")
ROLES = ("prefill", "decode", "both")
DRAFTERS = ("auto", "none", "ngram", "eagle", "eagle+ngram", "medusa", "medusa+ngram", "model", "model+ngram")
VERIFIED_KV = ("auto", "all", "sample", "off")
WIRE_KV = ("as-is", "int8", "fp8")
VERIFICATIONS = ("block", "token", "coupled")
DRAFT_LENGTHS = ("adaptive", "fixed")
DRAFT_SHAPES = ("auto", "chain", "tree")
PORT, COUNT = click.IntRange(0, 65535), click.IntRange(0)
DEFAULT_ROUTER = "127.0.0.1:8500"


def group_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator that adds the options in the order given."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def setting(*flag: str, **attributes: Any) -> Callable[[F], F]:
    """An option whose flag spells the field it sets, --block-size block_size, unless that is named beside it."""
    return click.option(*flag, show_default=True, **attributes)


class WorkerOption(click.Option):
    """How a worker works: `pdserve up` has it too, and passes it on to every worker it starts.

    `instead_of` names the field of an option that means the same otherwise: only one of the two may be given.
    """

    def __init__(self, *arguments: Any, instead_of: str = "", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self._instead_of = instead_of

    def handle_parse_result(
        self, context: click.Context, given: Mapping[str, Any], rest: list[str]
    ) -> tuple[Any, list[str]]:
        if self.name in given and self._instead_of in given:
            other = f"--{self._instead_of.replace('_', '-')}"
            raise click.UsageError(f"{self.opts[0]} and {other} set the same thing: give only one of them.", context)
        return super().handle_parse_result(context, given, rest)


def worker_setting(flag: str, **attributes: Any) -> Callable[[F], F]:
    return setting(flag, cls=WorkerOption, **attributes)


model_option = setting(
    "--model",
    default="demo-moe",
    envvar="PDSERVE_MODEL",
    help="demo-moe, demo-dense, a folder in Hugging Face's format, or a Hugging Face id.",
)


def _hosts_and_ports(context: click.Context, parameter: click.Parameter, value: str) -> str:
    return ",".join(_host_and_port(context, parameter, each.strip()) for each in value.split(","))


def _host_and_port(context: click.Context, parameter: click.Parameter, value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise click.BadParameter(f"{value!r} is not of the form HOST:PORT")
    return value


def _router_option(about: str) -> Callable[[F], F]:
    return click.option(
        "--router",
        "router_address",
        metavar="HOST:PORT,...",
        callback=_hosts_and_ports,
        default=DEFAULT_ROUTER,
        envvar="PDSERVE_ROUTER",
        show_default=True,
        show_envvar=True,
        help=about,
    )


router_option = _router_option("Where the router is. If one of several goes away, the next is asked.")
routers_option = _router_option("Where routers are. One of them tells of the others that share its --store.")
log_options = group_of(
    setting("--log-level", type=click.Choice(LEVELS), default="info", help="What is said on stderr."),
    setting("--log-format", type=click.Choice(FORMATS), default="text", help="json: an object a line, for collectors."),
)
port_option = setting("--port", type=PORT, default=8500, help="Port of the router; 0 takes any that is free.")
metrics_option = setting(
    "--metrics-port", type=PORT, default=0, help="Port of the Prometheus metrics; 0 takes any that is free."
)
host_option = setting("--host", default="127.0.0.1", help="Address to listen at.")

max_context_option = worker_setting(
    "--max-context",
    type=click.IntRange(2),
    metavar="TOKENS",
    help="Prompt and answer together, at most; a smaller KV cache will do then.  [default: the model's own]",
)


def _device(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", value):
        raise click.BadParameter(f"{value!r} is none of auto, cpu, cuda and cuda:N")
    return value


device_option = worker_setting(
    "--device",
    metavar="DEVICE",
    callback=_device,
    default="auto",
    help="cpu, cuda or cuda:N; auto: a GPU if there is one.",
)

worker_options = group_of(
    worker_setting(
        "--runner", type=click.Choice(RUNNERS), default="torch", help="timed computes nothing and takes its time."
    ),
    worker_setting("--kv-cache-gb", type=float, help="Memory of the KV cache.  [default: a share of what is free]"),
    worker_setting(
        "--num-blocks",
        type=int,
        instead_of="kv_cache_gb",
        help="Size of the KV cache in blocks, instead of --kv-cache-gb.",
    ),
    worker_setting("--block-size", type=int, default=16, help="Tokens in a block."),
    max_context_option,
    device_option,
    worker_setting(
        "--dtype", type=click.Choice(("auto", "float32", "bfloat16")), default="auto", help="auto: the model's own."
    ),
    worker_setting("--max-step-tokens", type=int, default=512, help="Tokens computed in one step, at most."),
    worker_setting("--max-running", type=int, default=64, help="Sequences that decode at once, at most."),
    worker_setting("--lease-s", type=float, default=5.0, help="How long a hand-over may go without a sign of life."),
    worker_setting(
        "--verify-kv",
        type=click.Choice(VERIFIED_KV),
        default="auto",
        help="Check received KV by checksums. sample: 1 block in 16. auto: all, if 1,000 tokens take 10 ms at most.",
    ),
    worker_setting(
        "--wire-kv",
        type=click.Choice(WIRE_KV),
        default="as-is",
        help="Send KV in eight bits per value: fewer bytes, and no longer exactly the KV that was computed.",
    ),
    worker_setting(
        "--drafter",
        type=click.Choice(DRAFTERS),
        default="auto",
        help="Who guesses tokens ahead; +ngram: prompt look-up first where the text repeats itself. "
        "auto: eagle+ngram if a head comes with the model, or else ngram.",
    ),
    worker_setting("--draft-model", help="For --drafter model: which. For eagle, medusa: the folder of another head."),
    worker_setting(
        "--verification",
        type=click.Choice(VERIFICATIONS),
        default="block",
        help="How a head's or model's chains are judged when sampling. block: most stand; coupled: the text is that "
        "without guesses.",
    ),
    worker_setting(
        "--max-draft-tokens",
        type=click.IntRange(0, MAX_DRAFT_TOKENS),
        default=7,
        help="Tokens guessed ahead in one step, at most.",
    ),
    worker_setting(
        "--draft-length",
        type=click.Choice(DRAFT_LENGTHS),
        default="adaptive",
        help="adaptive: guess as many as is fastest, or none. fixed: up to --max-draft-tokens, for measurements.",
    ),
    worker_setting(
        "--draft-shape",
        type=click.Choice(DRAFT_SHAPES),
        default="auto",
        help="tree: several guesses for a place, where the head is unsure. auto: tree with EAGLE, which alone can.",
    ),
    worker_setting(
        "--calibrate",
        type=click.Choice(("on", "off")),
        default="on",
        help="Measure some steps at the start, for a second or two: placement and planning begin with that.",
    ),
    worker_setting("--timing", type=click.Path(path_type=Path), help="Step times for --runner timed, a JSON file."),
)


def _fault_plan(context: click.Context, parameter: click.Parameter, value: str | None) -> FaultPlan | None:
    from kvtransfer.faults import FaultPlan, FaultPlanUnreadable

    try:
        return None if value is None else FaultPlan.parse(value)
    except FaultPlanUnreadable as error:
        raise click.BadParameter(str(error)) from None


faults_option = click.option(
    "--faults",
    metavar="PLAN",
    callback=_fault_plan,
    envvar="PDSERVE_FAULTS",
    show_envvar=True,
    help="For tests: faults to make happen, such as 'drop commit 3; kill at reserved 5'; none: ready to be told later.",
)
drain_option = setting("--drain-s", type=float, default=30.0, help="How long what runs may go on after SIGTERM.")
threads_option = click.option(
    "--num-threads", type=int, help="Compute threads.  [default: this machine's cores, shared out]"
)


def as_arguments(context: click.Context, is_wanted: Callable[[click.Parameter], bool]) -> list[str]:
    """The options of a command as they were given or by default, for a child process that has the same ones."""
    arguments: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if is_wanted(parameter) and value is not None:
            is_switch = isinstance(parameter, click.Option) and parameter.is_flag
            if is_switch:
                arguments += [(parameter.opts if value else parameter.secondary_opts)[0]]
            else:
                values = value if parameter.multiple else (value,)
                arguments += [text for each in values for text in (parameter.opts[0], str(each))]
    return arguments


def of_worker(context: click.Context) -> list[str]:
    """The arguments for every worker that a command starts."""
    return as_arguments(context, lambda option: isinstance(option, WorkerOption))
