"""How a tree grows: against laws written down, whose best nodes are found by looking at all of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decode.draft import Draft
from decode.draft_sampling import DraftSampling
from decode.tree import LEAST_GAIN, MOST_CHILDREN, grow_trees
from decode.verification import Method
from model.kernels.parts import KernelLikeliest, library
from model.likeliest import Likeliest, torch_likeliest
from model.runner import Chunk
from model.sampling import Row
from model.sampling_params import SamplingParams

HISTORY = [3, 1, 2]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LIKELIEST = [torch_likeliest, KernelLikeliest(library()[1])]
Path = tuple[int, ...]


class Laws:
    """A layer whose logits depend on the path alone. It keeps the path in its output, and what it was asked to run."""

    def __init__(self, vocab: int, sharpness: float, seed: int = 0) -> None:
        self.vocab, self.sharpness, self.seed = vocab, sharpness, seed
        self.calls: list[list[Chunk]] = []

    def law(self, path: Path) -> list[float]:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
        return (torch.randn(self.vocab, generator=generator) * self.sharpness).softmax(dim=-1).tolist()

    def run(self, slots: Sequence[Chunk], hidden: Sequence[Tensor], num_rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.calls.append(list(slots))
        logits, outputs = [], []
        for chunk, inputs, count in zip(slots, hidden, num_rows, strict=True):
            assert len(chunk.token_ids) == len(inputs) >= count
            for token, given in zip(chunk.token_ids[-count:], inputs[-count:], strict=True):
                path = [*given[given >= 0].int().tolist(), token] if chunk.parents is not None else []
                logits.append([math.log(chance) for chance in self.law(tuple(path))])
                outputs.append(path + [-1] * (20 - len(path)))
        return torch.tensor(logits), torch.tensor(outputs, dtype=torch.float32)

    def grow(self, num_tokens: int, sampling: SamplingParams = GREEDY, vocabulary: Tensor | None = None) -> Draft:
        chunk = Chunk(HISTORY[-1:], len(HISTORY) - 1, range(9), sampling, HISTORY, 1, num_tokens)
        choice = DraftSampling(10 if vocabulary is not None else self.vocab, vocabulary, Method.BLOCK)
        (draft,) = grow_trees([chunk], [chunk], [torch.full((1, 20), -1.0)], self.run, choice)
        return draft

    def chance(self, path: Path) -> float:
        return math.prod(self.law(path[:depth])[token] for depth, token in enumerate(path))

    def best(self, num_tokens: int) -> list[Path]:
        """One after another: the likeliest of those whose parent is in."""
        found: list[Path] = []
        heap: list[tuple[float, Path]] = [(-1.0, ())]
        while len(found) <= num_tokens:
            chance, path = heapq.heappop(heap)
            found.append(path)
            for token, part in enumerate(self.law(path)):
                heapq.heappush(heap, (chance * part, (*path, token)))
        return found[1:]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 8, 16, 40])
@pytest.mark.parametrize("sharpness", [1.0, 2.5, 5.0])
def test_nearly_the_best_tree_there_is(num_tokens: int, sharpness: float) -> None:
    """By what a tree is for: the tokens that stand, on average, if the draft's chances are right."""
    found = best = chain = 0.0
    for seed in range(8):
        laws = Laws(5, sharpness, seed)
        found += sum(map(laws.chance, laws.grow(num_tokens).paths()[1:]))
        best += sum(map(laws.chance, laws.best(num_tokens)))
        likeliest: Path = ()
        for _ in range(num_tokens):
            law = laws.law(likeliest)
            likeliest = (*likeliest, law.index(max(law)))
            chain += laws.chance(likeliest)
    assert 0.95 * best < found < best * (1 + 1e-5)
    if num_tokens == 1:
        assert found == pytest.approx(best)
    if sharpness == 1.0 and num_tokens >= 4:
        assert found > 1.2 * chain


@pytest.mark.parametrize("num_tokens", range(1, 17))
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 3.0, 8.0])
def test_a_tree_of_every_size(num_tokens: int, sharpness: float) -> None:
    laws = Laws(12, sharpness)
    draft = laws.grow(num_tokens)
    paths = draft.paths()[1:]
    assert len(set(paths)) == num_tokens
    chances = list(map(laws.chance, paths))
    assert chances == pytest.approx(sorted(chances, reverse=True))
    assert chances[0] == pytest.approx(max(laws.law(())))
    slots = [slot for (chunk,) in laws.calls[1:] for slot in range(chunk.start, chunk.start + len(chunk.token_ids))]
    assert slots == list(range(len(HISTORY), len(HISTORY) + len(slots)))  # one behind another, those of the draft only
    assert len(slots) < num_tokens
    assert len(laws.calls) <= num_tokens


def test_a_draft_that_is_sure_goes_deep_and_one_that_is_not_goes_wide() -> None:
    def depth(draft: Draft) -> int:
        return max(map(len, draft.paths()))

    assert depth(Laws(12, 12.0, seed=1).grow(6)) >= 4
    flat = Laws(12, 0.0)
    assert depth(flat.grow(6)) == 1
    assert len(flat.calls) == 1  # nothing behind could be likelier than what there is
    assert len(flat.grow(16).token_ids) == 16
    assert flat.grow(16).parents.count(-1) == MOST_CHILDREN  # type: ignore[union-attr]


def test_a_round_that_can_bring_next_to_nothing_is_not_run() -> None:
    """All that could get children is less likely together than LEAST_GAIN."""
    unsure = Laws(200, 0.1)
    assert len(unsure.grow(MOST_CHILDREN + 4).token_ids) == MOST_CHILDREN
    assert sum(unsure.chance(path) for path in unsure.best(MOST_CHILDREN)) < LEAST_GAIN
    assert len(unsure.calls) == 1


def test_what_a_request_cannot_draw_is_not_drafted() -> None:
    laws = Laws(12, 1.0)
    filtered = laws.grow(16, SamplingParams(max_tokens=8, temperature=0.7, top_k=2))
    for path in filtered.paths()[1:]:
        law = laws.law(path[:-1])
        assert path[-1] in sorted(range(12), key=lambda token: -law[token])[:2]
    forbidden = laws.law(()).index(max(laws.law(())))
    young = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(forbidden,), min_tokens=5)
    assert forbidden not in laws.grow(16, young).token_ids  # of all five paths none is long enough to end


def test_chances_are_those_of_the_request() -> None:
    """At temperature 1/2 they are squared."""
    sampling = DraftSampling(2, None, Method.TOKEN)
    chunk = Chunk(HISTORY[-1:], 2, range(2), SamplingParams(max_tokens=8, temperature=0.5), HISTORY, 1, 2)

    (found,) = sampling.likeliest(torch.tensor([[0.6, 0.4]]).log(), [Row.behind(chunk)], 5)
    assert found is not None
    assert [token for token, _ in found] == [0, 1]
    assert [math.exp(chance) for _, chance in found] == pytest.approx([0.36 / 0.52, 0.16 / 0.52])


def test_a_reduced_vocabulary_is_drafted_by_its_token_ids() -> None:
    vocabulary = torch.tensor([1, 4, 5, 8, 9])
    for params in (GREEDY, SamplingParams(max_tokens=8, temperature=1.0, seed=1)):
        sampling = DraftSampling(10, vocabulary, Method.BLOCK)
        chunk = Chunk(HISTORY[-1:], 2, range(2), params, HISTORY, 1, 2)

        (found,) = sampling.likeliest(torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]]), [Row.behind(chunk)], 3)
        assert found is not None
        assert [token for token, _ in found] == [4, 8, 5]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=8, temperature=1.0, top_k=4, seed=1)])
@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_end_drafting_for_their_sequence_alone(
    params: SamplingParams, spoilt: float
) -> None:
    laws = Laws(6, 1.0)

    def run(slots: Sequence[Chunk], hidden: Sequence[Tensor], num_rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, outputs = laws.run(slots, hidden, num_rows)
        if len(laws.calls) == 2:
            logits[0, slice(None) if spoilt == -math.inf else 3] = spoilt
        return logits, outputs

    chunks = [Chunk(HISTORY[-1:], 2, range(9), params, HISTORY, 1, 5) for _ in range(2)]
    start = [torch.full((1, 20), -1.0)] * 2
    drafts = grow_trees(chunks, chunks, start, run, DraftSampling(6, None, Method.BLOCK))
    assert [len(draft.token_ids) for draft in drafts] == [0, 5]
    assert [chunk.drafting.failed for chunk in chunks] == [True, False]
    assert drafts[1].paths() == Laws(6, 1.0).grow(5, params).paths()


@pytest.mark.parametrize("find", LIKELIEST)
def test_filters_look_at_the_draft_vocabulary_and_may_leave_nothing_of_it(find: Likeliest) -> None:
    """That is no failure: there is nothing to draft."""
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    one = SamplingParams(max_tokens=8, temperature=1.0, top_k=1, seed=1)
    young = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(3,), min_tokens=5)

    def drafted(vocabulary: list[int], params: SamplingParams) -> list[tuple[int, float]] | None:
        chunk = Chunk(HISTORY[-1:], 2, range(2), params, HISTORY, 1, 2)
        sampling = DraftSampling(6, torch.tensor(vocabulary), Method.BLOCK, find)
        (found,) = sampling.likeliest(logits[:, : len(vocabulary)], [Row.behind(chunk)], 3)
        return found

    assert (drafted([1, 3, 5], one) or [])[0] == (5, 0.0)
    assert drafted([3], young) == []
