"""`pdserve model`: builds the demo models."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def model() -> None:
    """Build the demo models."""


@model.command()
@click.argument("names", nargs=-1, metavar="[demo-dense|demo-moe]...")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Cache folder.  [env: PDSERVE_CACHE; default: ~/.cache/pdserve]"
)
def build(names: tuple[str, ...], cache: Path | None) -> None:
    """Build demo models into the cache folder, unless they are there; print their folders."""
    from model.cache_folder import default_cache
    from model.demo_models import DEMO_MODELS
    from model.model_source import resolve_model

    if unknown := set(names) - set(DEMO_MODELS):
        raise click.UsageError(f"unknown: {', '.join(sorted(unknown))}; there are {' and '.join(DEMO_MODELS)}")
    for name in names or DEMO_MODELS:
        click.echo(str(resolve_model(name, cache or default_cache())))
