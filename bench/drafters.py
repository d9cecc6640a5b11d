"""The drafters that can be measured on a model, made as a worker makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from decode.draft import DraftShape
from decode.draft_head import shipped_head
from deploy.drafting import LOOKUP, DrafterPlan, head_plan, model_plan, ngram_plan, with_lookup
from model.cache_folder import default_cache
from model.checkpoint import model_digest
from model.demo_models import DENSE, MOE, build

DRAFTERS = ("ngram", "model", "eagle", "medusa", "eagle+ngram")
DRAFT_MODELS = {MOE: DENSE}


class NoSuchDrafter(ValueError):
    """This model has no drafter of that kind; says why."""


def plan_drafter(
    kind: str, model: str, folder: Path, *, heads: Mapping[str, Path], max_context_tokens: int, shape: DraftShape
) -> DrafterPlan:
    """`heads`: folders of draft heads by kind, instead of those that come with pdserve. `shape`: what EAGLE drafts.

    Raises:
        NoSuchDrafter, or another ValueError: there is one, but it does not fit the model.
    """
    if kind.endswith(LOOKUP):
        other = kind.removesuffix(LOOKUP)
        return with_lookup(
            plan_drafter(other, model, folder, heads=heads, max_context_tokens=max_context_tokens, shape=shape)
        )
    if kind == "ngram":
        return ngram_plan()
    if kind == "model":
        if model not in DRAFT_MODELS:
            raise NoSuchDrafter("there is no smaller model with its vocabulary at hand")
        return model_plan(build(DRAFT_MODELS[model], default_cache()), folder, max_context_tokens)
    where = heads.get(kind) or shipped_head(kind, model_digest(folder))
    if where is None:
        raise NoSuchDrafter(f"no {kind} head for it comes with pdserve; --head names the folder of another")
    return head_plan(kind, where, folder, shape)
