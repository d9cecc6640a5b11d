"""`pdserve up`: a cluster on this machine from its first process to its last, told on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import click
from rich.console import Console

from deploy import options, router_options, security_options
from deploy.local import ClusterConfig, LocalCluster
from deploy.local_page import PageConfig
from deploy.progress import ConsoleProgress
from deploy.signals import ended_by_signals
from protos.client import PdserveClient
from protos.security import Security


def cluster_config(context: click.Context, settings: Mapping[str, Any]) -> ClusterConfig:
    """From the options of `pdserve up`: one prefill and one decode worker, unless something else was asked for."""
    default = 0 if settings["num_colocated"] else 1
    counts = {name: settings[name] for name in ("num_prefill", "num_decode") if settings[name] is not None}
    drain = options.as_arguments(context, lambda option: option.name == "drain_s")
    keys_file = settings["keys_file"]
    security = security_options.taken_from(dict(settings))
    security.check(settings["host"], asks_for_keys=keys_file is not None)
    of_worker = security_options.as_arguments(security_options.taken_from(dict(settings), is_worker=True))
    return ClusterConfig(
        **{"num_prefill": default, "num_decode": default, **counts},
        num_colocated=settings["num_colocated"],
        model=settings["model"],
        host=settings["host"],
        port=settings["port"],
        http_port=settings["http_port"],
        page=_page(settings["dashboard_port"], security),
        num_threads=settings["num_threads"],
        plan=settings["plan"],
        spill=settings["spill"],
        router_arguments=[
            *router_options.of_router(context),
            *drain,
            *security_options.as_arguments(security),
            *([] if settings["kserve"] else ["--no-kserve"]),
            *(["--direct"] if settings["direct"] else []),
            *(["--keys-file", str(keys_file)] if keys_file else []),
        ],
        worker_arguments=[*options.of_worker(context), *drain, *of_worker],
        flags_of_callers=security_options.of_callers(security, asks_for_keys=keys_file is not None),
        connect=partial(PdserveClient, tls=security.tls, secret=security.secret(), insecure=security.insecure),
        stop_grace_s=settings["drain_s"] + 10,
    )


def _page(port: int | None, security: Security) -> PageConfig | None:
    if port is None:
        return None
    return PageConfig(port, security_options.as_page_arguments(security), is_encrypted=security.tls is not None)


async def run_up(config: ClusterConfig, console: Console) -> None:
    prepare_model(config.model)
    cluster = LocalCluster(config, ConsoleProgress(console))
    with ended_by_signals(again=cluster.kill_all):
        async with cluster:
            console.print(how_to_call(cluster), soft_wrap=True, markup=False)
            await cluster.supervise()
    console.print("Stopped.")


def prepare_model(name: str) -> None:
    """Has a demo model built, or one from a hub downloaded, before processes would do so where nobody sees it.

    Raises ModelUnavailable.
    """
    from model.cache_folder import default_cache
    from model.model_source import resolve_model

    resolve_model(name, default_cache())


def how_to_call(cluster: LocalCluster) -> str:
    address = cluster.router_address
    flags = [] if address == options.DEFAULT_ROUTER else ["--router", address]
    router = "".join(f" {text}" for text in (*flags, *cluster.config.flags_of_callers))
    return f"""
{cluster.config.model} is served at {address}. In another terminal:

  pdserve chat{router}
  pdserve generate "Once upon a time"{router}
  pdserve status{router}
{_how_to_watch(cluster)}{_how_to_curl(cluster.http_address)}
Ctrl-C stops it. What the processes say is in {cluster.log_folder}.
"""


def _how_to_watch(cluster: LocalCluster) -> str:
    """Nothing without a dashboard."""
    if cluster.page is None:
        return ""
    return f"""
The dashboard, on which pools are watched and tuned: {cluster.page.url}
"""


def _how_to_curl(http_address: str) -> str:
    """Nothing without HTTP."""
    if not http_address:
        return ""
    question = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    return f"""
Clients of OpenAI's API take http://{http_address}/v1 as their base URL:

  curl http://{http_address}/v1/chat/completions -H 'Content-Type: application/json' -d '{question}'
"""
