"""The drafters that can be measured on a model, made as a worker makes them (see `deploy.drafting`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from decode.draft import DraftShape
from decode.draft_head import DraftHead, shipped_head
from decode.draft_model import DraftModelDrafter, check_shape
from decode.drafter import Drafter
from decode.eagle import EagleDrafter
from decode.medusa import MedusaDrafter
from decode.ngram import NgramDrafter
from decode.verification import Method
from decode.vocabulary import check_same_vocabulary
from deploy.drafting import LOOKUP, DrafterPlan, with_lookup
from model.cache_folder import default_cache
from model.checkpoint import map_weights, model_digest
from model.config import ModelConfig
from model.demo_models import DENSE, MOE, build
from model.tokenizer import Tokenizer
from model.torch_runner import TorchRunner

DRAFTERS = ("ngram", "model", "eagle", "medusa", "eagle+ngram")
DRAFT_MODELS = {MOE: DENSE}


class NoSuchDrafter(ValueError):
    """This model has no drafter of that kind; says why."""


def plan_drafter(
    kind: str, model: str, folder: Path, heads: Mapping[str, Path], max_context: int, shape: DraftShape
) -> DrafterPlan:
    """`heads`: folders of draft heads by kind, instead of those that come with pdserve.

    Raises:
        NoSuchDrafter, or another ValueError: there is one, but it does not fit the model.
    """
    if kind == "ngram":
        return DrafterPlan(kind, "", 0, lambda target, method: NgramDrafter())
    if kind.endswith(LOOKUP):
        return with_lookup(plan_drafter(kind.removesuffix(LOOKUP), model, folder, heads, max_context, shape))
    if kind == "model":
        return _draft_model(model, folder, max_context)
    return _draft_head(kind, folder, heads.get(kind), shape)


def _draft_head(kind: str, folder: Path, given: Path | None, shape: DraftShape) -> DrafterPlan:
    digest = model_digest(folder)
    where = given or shipped_head(kind, digest)
    if where is None:
        raise NoSuchDrafter(f"no {kind} head for it comes with pdserve; --head names the folder of another")
    head = DraftHead.load(where, kind, ModelConfig.from_folder(folder), digest)
    if kind == "medusa":
        return DrafterPlan(
            kind, head.name, MedusaDrafter.num_layers, lambda target, method: MedusaDrafter(target, head, method)
        )
    return DrafterPlan(
        kind, head.name, EagleDrafter.num_layers, lambda target, method: EagleDrafter(target, head, method, shape)
    )


def _draft_model(model: str, folder: Path, max_context: int) -> DrafterPlan:
    if model not in DRAFT_MODELS:
        raise NoSuchDrafter("there is no smaller model with its vocabulary at hand")
    draft_folder = build(DRAFT_MODELS[model], default_cache())
    draft = ModelConfig.from_folder(draft_folder)
    check_same_vocabulary(Tokenizer.load(draft_folder), Tokenizer.load(folder))
    check_shape(draft, ModelConfig.from_folder(folder), max_context)
    name = f"model:{model_digest(draft_folder)}"

    def make(target: TorchRunner, method: Method) -> Drafter:
        return DraftModelDrafter(target, draft, map_weights(draft_folder, draft), name, method)

    return DrafterPlan("model", name, draft.num_layers, make)
