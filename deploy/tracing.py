"""Whether spans are exported: the variable that OpenTelemetry has for it, or a flag that sets it for children too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def _kept_for_children(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if not value:
        return
    if not value.startswith(("http://", "https://")):
        raise click.BadParameter("it must begin with http:// or https://", context, parameter)
    os.environ[VARIABLE] = value


otlp_option = click.option(
    "--otlp-endpoint",
    envvar=VARIABLE,
    expose_value=False,
    callback=_kept_for_children,
    help="Send traces to this OpenTelemetry collector, over gRPC: http://127.0.0.1:4317.  [default: none are made]",
)


@contextmanager
def traced(service: str, instance: str) -> Iterator[None]:
    """Around a process's life."""
    endpoint = os.environ.get(VARIABLE)
    if not endpoint:
        yield
        return
    from protos.otlp import exported_to

    with exported_to(endpoint, service, instance):
        yield
