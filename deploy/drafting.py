"""Which drafter a worker's flags ask for, and the runner with it: whatever does not fit the model is refused here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.worker_config import WorkerConfig
from model.cache_folder import default_cache
from model.checkpoint import model_digest
from model.config import ModelConfig
from model.model_source import ModelUnavailable, resolve_model
from model.runner import ModelRunner
from model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from decode.draft import DraftShape
    from decode.draft_head import DraftHead
    from decode.draft_planner import DraftPlanner
    from decode.drafter import Drafter
    from decode.verification import Method
    from model.torch_runner import TorchRunner

logger = logging.getLogger(__name__)

LOOKUP = "+ngram"  # behind the name of another drafter: prompt look-up where the text repeats itself
_FEATURE_BYTES = 4  # as it travels
_GENERATION_BYTES = 10  # of a block, at most
_OTHER_RECORD_BYTES = 1 << 16


Make = Callable[["TorchRunner", "Method"], "Drafter"]


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter before its target is there: what the cache has to have room for, and how to make it.

    `weights` take memory beside the target's, in the form that these have.
    """

    kind: str
    name: str
    num_layers: int
    make: Make
    weights: Sequence[Tensor] = ()


def choose_drafter(config: WorkerConfig, folder: Path) -> DrafterPlan | None:
    """None if nothing is drafted.

    Raises:
        ValueError: the drafter that was asked for is not there or does not fit the model; says why.
    """
    from decode.draft_head import shipped_head

    kind = config.drafter
    if kind in ("auto", "ngram", "none") and config.draft_model is not None:
        raise ValueError(f"--draft-model goes with --drafter eagle, medusa or model, not {kind}")
    if kind == "auto":
        kind = "eagle+ngram" if shipped_head("eagle", model_digest(folder)) is not None else "ngram"
        logger.info("drafting with %s", kind)
    kind, lookup, _ = kind.partition(LOOKUP)
    if config.draft_shape == "tree" and kind != "eagle":
        raise ValueError(f"--draft-shape tree goes with --drafter eagle, not {kind}, which cannot draft trees")
    if kind in ("ngram", "none"):
        return None if kind == "none" else ngram_plan()
    plan = _model(config, folder) if kind == "model" else _head(kind, config, folder)
    return with_lookup(plan) if lookup else plan


def with_lookup(plan: DrafterPlan) -> DrafterPlan:
    """The same drafter, behind prompt look-up."""
    return replace(plan, kind=plan.kind + LOOKUP, make=partial(_behind_lookup, plan.make))


def _behind_lookup(make: Make, target: TorchRunner, method: Method) -> Drafter:
    from decode.lookup_first import LookupFirst

    return LookupFirst(make(target, method))


def ngram_plan() -> DrafterPlan:
    from decode.ngram import NgramDrafter

    return DrafterPlan("ngram", "", 0, lambda target, method: NgramDrafter())


def head_plan(kind: str, where: Path, folder: Path, shape: DraftShape) -> DrafterPlan:
    """A draft head in `where` for the model in `folder`. Raises HeadUnusable."""
    from decode.draft_head import DraftHead
    from decode.eagle import EagleDrafter
    from decode.medusa import MedusaDrafter

    model = ModelConfig.from_folder(folder)
    head = DraftHead.load(where, kind, model, model_digest(folder))
    weights = head.placed(model)
    if kind == "medusa":
        return DrafterPlan(kind, head.name, MedusaDrafter.num_layers, partial(_medusa, head), weights)
    return DrafterPlan(kind, head.name, EagleDrafter.num_layers, partial(_eagle, head, shape), weights)


def _head(kind: str, config: WorkerConfig, folder: Path) -> DrafterPlan:
    from decode.draft import DraftShape
    from decode.draft_head import HeadCard, HeadUnusable, shipped_head

    where = Path(config.draft_model) if config.draft_model is not None else shipped_head(kind, model_digest(folder))
    if where is None:
        raise ValueError(
            f"--drafter {kind}: no {kind} head for {config.model} is at hand; name its folder with --draft-model, or "
            f"train one: python -m decode.train_head --kind {kind} --model {config.model}"
        )
    shape = DraftShape.TREE if config.draft_shape == "auto" else DraftShape(config.draft_shape)
    try:
        plan = head_plan(kind, where, folder, shape)
    except HeadUnusable as error:
        raise HeadUnusable(f"--drafter {kind}: {error}") from error
    if kind == "eagle":
        model = ModelConfig.from_folder(folder)
        _check_state_fits(len(HeadCard.read(where).taps) * model.hidden_size, config, model)
    return plan


def _eagle(head: DraftHead, shape: DraftShape, target: TorchRunner, method: Method) -> Drafter:
    from decode.eagle import EagleDrafter

    return EagleDrafter(target, head, method, shape)


def _medusa(head: DraftHead, target: TorchRunner, method: Method) -> Drafter:
    from decode.medusa import MedusaDrafter

    return MedusaDrafter(target, head, method)


def _check_state_fits(num_features: int, config: WorkerConfig, model: ModelConfig) -> None:
    """The features of a block go into the message that ends a hand-over, whose size has a limit."""
    from protos.channel import MAX_MESSAGE_BYTES

    num_blocks = -(-(config.max_context or model.max_position_embeddings) // config.block_size)
    room = MAX_MESSAGE_BYTES - num_blocks * _GENERATION_BYTES - _OTHER_RECORD_BYTES
    if config.block_size * num_features * _FEATURE_BYTES > room:
        raise ValueError(
            f"--drafter eagle hands over up to {config.block_size} x {num_features} features of a sequence at "
            f"--block-size {config.block_size}, {config.block_size * num_features * _FEATURE_BYTES} bytes, which the "
            f"message has no room for: --block-size must be at most {room // (num_features * _FEATURE_BYTES)}"
        )


def _model(config: WorkerConfig, folder: Path) -> DrafterPlan:
    if config.draft_model is None:
        raise ValueError("--drafter model needs --draft-model: a folder, a demo model or a Hugging Face id")
    try:
        draft_folder = resolve_model(config.draft_model, default_cache())
    except ModelUnavailable as error:
        raise ValueError(f"--draft-model: {error}") from error
    return model_plan(draft_folder, folder, config.max_context)


def model_plan(draft_folder: Path, folder: Path, max_context_tokens: int | None) -> DrafterPlan:
    """A small model for the one in `folder`. Raises ValueError if it does not fit."""
    from decode.draft_model import DraftModelDrafter, check_shape
    from decode.vocabulary import check_same_vocabulary
    from model.checkpoint import map_weights

    draft = ModelConfig.from_folder(draft_folder)
    check_same_vocabulary(Tokenizer.load(draft_folder), Tokenizer.load(folder))
    check_shape(draft, ModelConfig.from_folder(folder), max_context_tokens)
    name, weights = f"model:{model_digest(draft_folder)}", map_weights(draft_folder, draft)

    def make(target: TorchRunner, method: Method) -> Drafter:
        return DraftModelDrafter(target, draft, weights, name, method)

    return DrafterPlan("model", name, draft.num_layers, make, list(weights.values()))


def draft_planner(
    config: WorkerConfig, runner: ModelRunner, model: ModelConfig, max_context_tokens: int
) -> DraftPlanner:
    """Says how much to draft on this runner."""
    from decode import metrics
    from decode.coverage import ExpertCoverage, Routing
    from decode.draft_planner import AdaptiveDrafts, FixedDrafts, NoDrafts
    from decode.draft_policy import DraftPolicy
    from decode.speculative_runner import SpeculativeRunner

    if not isinstance(runner, SpeculativeRunner) or config.max_draft_tokens == 0:
        return NoDrafts()
    if config.draft_length == "fixed":
        return FixedDrafts(config.max_draft_tokens, max_context_tokens, runner.outlook, runner.drafter)
    routing = Routing.of(model)
    coverage = None if routing is None else ExpertCoverage(routing)
    policy = DraftPolicy(config.max_draft_tokens, coverage)
    planner = AdaptiveDrafts(policy, config.max_draft_tokens, max_context_tokens, runner.outlook, runner.drafter)
    metrics.watch_drafting(
        planner.meter,
        lambda position: float(policy.acceptance.pool_rates[position]),
        config.max_draft_tokens,
        coverage,
    )
    return planner
