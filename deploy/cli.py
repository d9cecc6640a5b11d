"""The command line: one small function per command. Imports what is heavy inside them, so that --help is quick."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from deploy import asking_options, door_options, options, security_options
from deploy.dashboard_command import dashboard
from deploy.decision_command import decisions
from deploy.insight_commands import requests, traffic
from deploy.key_commands import key
from deploy.logs import configure_logging
from deploy.model_commands import model
from deploy.plan_command import plan
from deploy.policy_options import policy_options, take_policies
from deploy.pools_command import pools
from deploy.process import follow_parent
from deploy.store_options import store_options
from deploy.tracing import otlp_option, traced

if TYPE_CHECKING:
    from deploy.conversation import Asking
    from deploy.security_options import Connect
    from protos.values import Sampling

_FILE_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120  # of tables in a pipe or a file
out, err = Console(highlight=False, width=_FILE_WIDTH), Console(stderr=True, highlight=False)

_FORESEEN = (
    ("deploy.process", "ProcessEnded"),
    ("model.model_source", "ModelUnavailable"),
    ("model.tokenizer", "TokenizerUnusable"),
    ("protos.errors", "ServiceError"),
)


class Commands(click.Group):
    """Turns what goes wrong below into one sentence on stderr and exit code 1; --debug shows where it came from."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # whoever reads what we print has enough, as `| head` does: click ends without a word
            raise
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
        except Exception as error:
            if context.params["debug"] or not _is_foreseen(error):
                raise
            raise click.ClickException(str(error) or type(error).__name__) from error

    def list_commands(self, context: click.Context) -> list[str]:
        """In the order of this file."""
        return list(self.commands)


def _is_foreseen(error: Exception) -> bool:
    """Whether its message says what is wrong and what would be right. What was raised has been imported already."""
    kinds = [(ValueError, OSError), *(getattr(sys.modules.get(module), name, ()) for module, name in _FORESEEN)]
    return isinstance(error, tuple(kinds))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(package_name="pdserve")
def cli(debug: bool) -> None:
    """Serves language models with prefill and decode on separate workers."""


@cli.command()
@options.model_option
@click.option("--once", is_flag=True, help="Answer one prompt and end.")
@click.option("--prompt", default="What is the capital of France?", show_default=True, help="The prompt for --once.")
@door_options.http_port_option("off")
@options.threads_option
@options.max_context_option
@options.device_option
@click.pass_context
def demo(context: click.Context, /, once: bool, prompt: str, **settings: Any) -> None:
    """Talk to a small chat model on this machine."""
    from deploy.demo import run_demo
    from deploy.local import ClusterConfig

    shared = {name: settings[name] for name in ("model", "http_port", "num_threads")}
    config = ClusterConfig(**shared, worker_arguments=options.of_worker(context))
    if run_demo(config, prompt if once else None, out, err):
        raise click.exceptions.Exit(1)


@cli.command()
@options.model_option
@click.option(
    "--prefill", "num_prefill", type=options.COUNT, help="Prefill workers.  [default: 1, or 0 with --colocated]"
)
@click.option("--decode", "num_decode", type=options.COUNT, help="Decode workers.  [default: 1, or 0 with --colocated]")
@click.option("--colocated", "num_colocated", type=options.COUNT, default=0, help="Workers that do both.")
@options.host_option
@options.port_option
@door_options.door_options
@door_options.dashboard_port_option
@options.threads_option
@options.worker_options
@policy_options
@options.drain_option
@security_options.router_options
@otlp_option
@click.pass_context
def up(context: click.Context, /, **settings: Any) -> None:
    """Start a router and workers on this machine. Ctrl-C lets them finish and ends them all."""
    from deploy.up import cluster_config, run_up

    asyncio.run(run_up(cluster_config(context, settings), err))


@cli.command()
@options.model_option
@options.routers_option
@click.option("--role", type=click.Choice(options.ROLES), default="both", show_default=True, help="Where it starts.")
@options.host_option
@click.option("--port", type=options.PORT, default=0, show_default=True, help="0 takes any that is free.")
@click.option("--worker-id", default="", help="Unique at the router.  [default: from host name and process id]")
@options.metrics_option
@options.threads_option
@options.worker_options
@options.faults_option
@options.drain_option
@security_options.serving_options
@options.log_options
@otlp_option
def worker(log_level: str, log_format: str, **settings: Any) -> None:
    """Run one worker in the foreground. SIGTERM or Ctrl-C lets it finish what it has."""
    follow_parent()
    configure_logging(settings["worker_id"] or "worker", log_level, log_format)
    security = security_options.taken_from(settings, is_worker=True)
    from deploy.worker import serve_worker
    from deploy.worker_config import WorkerConfig

    with traced("pdserve-worker", settings["worker_id"] or f"{os.getpid()}"):
        asyncio.run(serve_worker(WorkerConfig(**settings, security=security)))


@cli.command()
@options.model_option
@options.host_option
@options.port_option
@door_options.door_options
@options.metrics_option
@policy_options
@options.drain_option
@store_options
@security_options.router_options
@options.log_options
@otlp_option
def router(log_level: str, log_format: str, **settings: Any) -> None:
    """Run the router in the foreground. SIGTERM or Ctrl-C lets it finish what it has."""
    follow_parent()
    configure_logging("router", log_level, log_format)
    security = security_options.taken_from(settings)
    import uvloop  # takes about a quarter off what a streamed token costs the router

    from router.config import RouterConfig
    from router.server import serve_router

    config = RouterConfig(**take_policies(settings), **settings, security=security)
    with traced("pdserve-router", f"{config.host}:{config.port}"):
        uvloop.run(serve_router(config))


@cli.command()
@click.argument("prompt")
@security_options.router_access
@asking_options.sampling_options()
@asking_options.reading_options
def generate(prompt: str, **settings: Any) -> None:
    """Let the model continue PROMPT."""
    from deploy.conversation import generate_once

    asyncio.run(generate_once(_asking(**settings), prompt))


@cli.command()
@click.argument("prompt", required=False)
@security_options.router_access
@asking_options.sampling_options(temperature="0", max_tokens="400", repetition_penalty="1.05")
@asking_options.reading_options
def chat(prompt: str | None, **settings: Any) -> None:
    """Talk to the model, or ask it PROMPT once. Input that is no terminal's is read line by line, a prompt each."""
    from deploy.conversation import CHAT_SAMPLING, Conversation, talk

    conversation = Conversation(_asking(defaults=CHAT_SAMPLING, **settings))
    with asyncio.Runner() as runner:
        if prompt is None:
            num_failed = talk(conversation, runner.run, err)
        else:
            runner.run(conversation.say(prompt))
            num_failed = 0
    if num_failed:
        raise click.exceptions.Exit(1)


def _asking(
    router_address: str,
    connect: Connect,
    deadline_s: float | None,
    direct: bool,
    quiet: bool,
    defaults: Sampling | None = None,
    **sampling: Any,
) -> Asking:
    """`defaults` hold where an option was not given."""
    from deploy.conversation import Asking
    from protos.values import Sampling

    given = {name: value for name, value in sampling.items() if value not in (None, ())}
    return Asking(
        router_address,
        replace(defaults or Sampling(), **given),
        may_shorten="max_tokens" not in given,
        deadline_s=deadline_s,
        out=out,
        about=None if quiet else err,
        connect=partial(connect, direct=direct),
    )


@cli.command()
@security_options.router_access
def status(router_address: str, connect: Connect) -> None:
    """List the workers: roles, queues, blocks."""
    from deploy.status_view import print_status

    asyncio.run(print_status(router_address, out, connect))


@cli.command()
@click.argument("worker_id", metavar="WORKER")
@click.argument("role", type=click.Choice(options.ROLES))
@security_options.router_access
def role(worker_id: str, role: str, router_address: str, connect: Connect) -> None:
    """Use WORKER for prefill, decode or both."""
    from deploy.status_view import change_role

    asyncio.run(change_role(router_address, worker_id, role, out, connect))


@cli.command()
@click.argument("worker_id", metavar="WORKER")
@click.option("--undo", is_flag=True, help="Give it new requests again.")
@click.option("--wait-s", type=click.FloatRange(0), default=120.0, show_default=True, help="How long to wait for that.")
@security_options.router_access
def drain(worker_id: str, undo: bool, wait_s: float, router_address: str, connect: Connect) -> None:
    """Empty WORKER: what it answers goes on on others, without a break.

    Ends with 1 if requests are still there after --wait-s. It stays drained until --undo or its restart.
    """
    from deploy.drain_view import drain_worker, undo_drain

    if undo:
        asyncio.run(undo_drain(router_address, worker_id, out, connect))
    elif not asyncio.run(drain_worker(router_address, worker_id, wait_s, out, err, connect)):
        raise click.exceptions.Exit(1)


cli.add_command(pools)
cli.add_command(dashboard)
cli.add_command(decisions)
cli.add_command(requests)
cli.add_command(traffic)
cli.add_command(model)
cli.add_command(plan)
cli.add_command(key)


def main() -> None:
    cli(prog_name="pdserve")


if __name__ == "__main__":
    main()
