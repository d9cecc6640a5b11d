"""What drafters keep of a sequence: taken over from others, in another dtype or on another device, or spoiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from decode.draft import Draft
from decode.draft_layer import LayerState
from decode.drafter import Drafter, Observed
from decode.medusa import MedusaDrafter
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from model.runner import Chunk, DraftingState, VerifiedDraft
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput
from tests.decode import test_speculative_runner as cases
from tests.decode.test_speculative_runner import BLOCK_SIZE, NUM_BLOCKS, NUM_DRAFT_LAYERS, drafters
from tests.model.pretended_cuda import pretended_cuda
from tests.model.tiny_models import build

KINDS = ("eagle", "medusa", "model")
PROMPT = [5, 9, 11, 4, 7, 30, 31, 8, 2, 19]  # two blocks and a half
SAMPLINGS = [
    SamplingParams(max_tokens=30, temperature=0.0),
    SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.2),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, top_k=30, seed=3),
    SamplingParams(max_tokens=30, temperature=1.1, presence_penalty=0.5, seed=4),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama", tmp_path, seed=1)
    return tmp_path


@pytest.fixture
def device_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with pretended_cuda(monkeypatch) as log:
        yield log


def load(folder: Path, kind: str, method: Method = Method.BLOCK, **options: str) -> SpeculativeRunner:
    target = TorchRunner.load(
        folder,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_draft_layers=NUM_DRAFT_LAYERS[kind],
        max_context_tokens=64,
        **options,  # type: ignore[arg-type]
    )
    cases.FOLDERS[id(target)] = folder
    return SpeculativeRunner(target, drafters()[kind](target, method), method)


def prefill(runner: SpeculativeRunner) -> list[DraftingState]:
    """One sequence for each of `SAMPLINGS`, in blocks of its own."""
    states = [DraftingState() for _ in SAMPLINGS]
    runner.execute(
        [
            Chunk(PROMPT, 0, blocks(place), sampling, PROMPT, len(PROMPT), drafting=state)
            for place, (sampling, state) in enumerate(zip(SAMPLINGS, states, strict=True))
        ]
    )
    return states


def blocks(place: int) -> range:
    return range(place * 8, place * 8 + 8)


def draft(runner: SpeculativeRunner, states: Sequence[DraftingState], num_steps: int = 3) -> tuple[int, int]:
    """Drafted and failed ones of some steps behind `PROMPT` and a first token."""
    histories = [[*PROMPT, 6] for _ in states]
    num_drafted = num_failed = 0
    for _ in range(num_steps):
        chunks = [
            Chunk(history[-1:], len(history) - 1, blocks(place), sampling, history, len(PROMPT), 3, state)
            for place, (history, sampling, state) in enumerate(zip(histories, SAMPLINGS, states, strict=True))
        ]
        output = runner.execute(chunks)
        num_failed += output.num_failed_drafts
        for history, outcome in zip(histories, output.sampled, strict=True):
            if isinstance(outcome, VerifiedDraft):
                num_drafted += outcome.num_drafted
                history += [token.token_id for token in outcome.tokens]
            else:
                history.append(outcome.token_id)  # type: ignore[union-attr]
    return num_drafted, num_failed


def taken_over(runner: SpeculativeRunner, states: Sequence[DraftingState]) -> list[DraftingState]:
    heirs = [DraftingState() for _ in states]
    for state, heir in zip(states, heirs, strict=True):
        runner.restore_drafting(heir, len(PROMPT), runner.export_drafting(state))
    return heirs


@pytest.mark.parametrize("kind", [*KINDS, "tree"])
@pytest.mark.parametrize("method", [Method.BLOCK, Method.TOKEN, Method.COUPLED])
def test_drafts_on_a_device(folder: Path, kind: str, method: Method, device_log: list[str]) -> None:
    runner = load(folder, kind, method, device="cuda")
    states = prefill(runner)
    heirs = taken_over(runner, states)
    assert draft(runner, heirs) == (len(SAMPLINGS) * 9, 0)


@pytest.mark.parametrize("kind", [*KINDS, "tree"])
def test_drafts_in_bfloat16(folder: Path, kind: str) -> None:
    """A state travels as float32."""
    runner = load(folder, kind, kernels="torch", dtype="bfloat16")
    heirs = taken_over(runner, prefill(runner))
    assert draft(runner, heirs) == (len(SAMPLINGS) * 9, 0)


@pytest.mark.parametrize("kind", ["eagle", "model"])
def test_draft_layers_are_told_when_the_device_has_stored_them(folder: Path, kind: str, device_log: list[str]) -> None:
    runner = load(folder, kind, device="cuda")
    chunk = Chunk(PROMPT, 0, blocks(0), SAMPLINGS[0], PROMPT, len(PROMPT))
    runner.execute([chunk], lambda layer: device_log.append(f"layer {layer} told"))
    told = [f"layer {layer} told" for layer in range(2, runner.layout.num_layers)]
    assert device_log[-len(told) - 2 :] == ["synchronize stream", *told, "synchronize stream"]
    assert device_log.index("layer 1 told") < device_log.index("synchronize stream")


class Spoiled(MedusaDrafter):
    """Has lost what it knew of sequences with these seeds."""

    seeds: tuple[int, ...] = ()

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        super().observe(observed, output)
        for seen in observed:
            if seen.chunk.sampling is not None and seen.chunk.sampling.seed in self.seeds:
                seen.chunk.drafting.value.fill_(math.nan)


@pytest.mark.parametrize("method", [Method.BLOCK, Method.TOKEN, Method.COUPLED])
@pytest.mark.parametrize("seeds", [(0,), (3,), (4,), (0, 3, 4)], ids=["greedy", "filtered", "drawn", "all"])
def test_logits_that_are_not_finite_end_drafting_for_their_sequence_alone(
    folder: Path, method: Method, seeds: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    runner = load(folder, "medusa", method)
    spoiled = Spoiled(runner._target, cases.random_head("medusa", runner._target), method)
    spoiled.seeds = seeds
    runner._drafter = spoiled
    states = prefill(runner)
    are_spoiled = [sampling.seed in seeds for sampling in SAMPLINGS]
    assert draft(runner, states) == (9 * are_spoiled.count(False), are_spoiled.count(True))
    assert [state.failed for state in states] == are_spoiled
    assert not caplog.records  # nothing was raised


def test_a_chain_that_breaks_off_is_no_draft(folder: Path) -> None:
    """Its first tokens would stand on their own; but what is drafted must not look at what the laws behind say."""
    runner = load(folder, "eagle")
    drafter, logits_of = runner._drafter, runner._drafter._run  # type: ignore[attr-defined]
    calls = []

    def run(slots: Sequence[Chunk], hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        logits, output = logits_of(slots, hidden)
        calls.append(len(slots))
        if len(calls) == 2:
            logits[2, 0] = math.inf
        return logits, output

    drafter._run = run  # type: ignore[attr-defined]
    states = prefill(runner)
    assert draft(runner, states, num_steps=1) == (9, 1)
    assert calls == [4, 4, 3]
    assert [state.failed for state in states] == [False, False, True, False]


def state_bytes(tensor: Tensor, name: str = "state") -> bytes:
    return save({name: tensor})


SPOIL: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("no safetensors", lambda state: b"nonsense", "cannot be read"),
    ("cut off", lambda state: state[:-1], "cannot be read"),
    ("claims to be huge", lambda state: (2**60).to_bytes(8, "little") + state[8:], "cannot be read"),
    ("another name", lambda state: state_bytes(torch.ones(1), "other"), "cannot be read"),
    ("half as wide", lambda state: state_bytes(read(state).half()), "is torch.float16; it must be torch.float32"),
    ("twice as wide", lambda state: state_bytes(read(state).double()), "is torch.float64; it must be"),
    ("integers", lambda state: state_bytes(read(state).long()), "is torch.int64; it must be"),
    ("NaN", lambda state: state_bytes(read(state) * math.nan), "is not finite"),
    ("infinite", lambda state: state_bytes(read(state) + math.inf), "is not finite"),
    ("nothing in it", lambda state: state_bytes(torch.ones(0)), "state has shape|cannot have KV of -1 tokens"),
    ("another shape", lambda state: state_bytes(torch.ones(3, 5)), "state has shape|cannot have KV of -1 tokens"),
]


def read(state: bytes) -> Tensor:
    from safetensors.torch import load as load_state

    return load_state(state)["state"]


@pytest.mark.parametrize(("spoil", "complaint"), [case[1:] for case in SPOIL], ids=[case[0] for case in SPOIL])
@pytest.mark.parametrize("kind", KINDS)
def test_states_that_no_such_drafter_wrote_are_refused(
    folder: Path, kind: str, spoil: Callable[[bytes], bytes], complaint: str
) -> None:
    runner = load(folder, kind)
    state = runner.export_drafting(prefill(runner)[0])
    heir = DraftingState()
    with pytest.raises(ValueError, match=complaint):
        runner.restore_drafting(heir, len(PROMPT), spoil(state))
    assert heir.value is None


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_cannot_be_had_is_none(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence goes on without drafts where it arrives: a request does not die of its drafter."""

    def broken(drafting: DraftingState) -> Tensor:
        raise MemoryError

    runner = load(folder, kind)
    state = prefill(runner)[0]
    assert runner.export_drafting(state)
    monkeypatch.setattr(runner._drafter, "export", broken)
    assert runner.export_drafting(state) == b""


def test_states_that_reach_into_full_blocks_are_refused(folder: Path) -> None:
    """Those may be other sequences', too: their draft KV is there, and is not written again."""
    eagle, model = load(folder, "eagle"), load(folder, "model")
    num_features = read(eagle.export_drafting(prefill(eagle)[0])).shape[1]
    in_block = len(PROMPT) % BLOCK_SIZE
    for runner, right, wrong in (
        (eagle, torch.ones(in_block + 1, num_features), torch.ones(in_block + 2, num_features)),
        (model, torch.tensor([float(len(PROMPT) - in_block)]), torch.tensor([float(len(PROMPT) - in_block - 1)])),
        (model, torch.tensor([float(len(PROMPT))]), torch.tensor([float(len(PROMPT) + 1)])),
    ):
        runner.restore_drafting(DraftingState(), len(PROMPT), state_bytes(right))
        with pytest.raises(ValueError, match=r"it must be"):
            runner.restore_drafting(DraftingState(), len(PROMPT), state_bytes(wrong))


@pytest.mark.parametrize("kind", [*KINDS, "ngram"])
def test_who_gets_no_state_drafts_only_if_nothing_is_missing(folder: Path, kind: str) -> None:
    runner = load(folder, kind)
    state = DraftingState()
    runner.restore_drafting(state, len(PROMPT), b"")
    assert state.failed is (kind in ("eagle", "model"))


def test_features_of_a_long_prompt_are_not_kept(folder: Path) -> None:
    runner = load(folder, "eagle")
    state = DraftingState()
    prompt = [3 + index % 40 for index in range(31)]
    runner.execute([Chunk(prompt, 0, blocks(0), SAMPLINGS[0], prompt, len(prompt), drafting=state)])
    kept = state.value
    assert isinstance(kept, LayerState) and len(kept.pending) == len(kept.pending[0]) == 1
    assert kept.pending[0].untyped_storage().nbytes() == kept.pending[0].nbytes


def test_medusa_heads_may_have_output_rows_of_their_own(folder: Path) -> None:
    """Those of the draft vocabulary: the target's own, here, so that the drafts are the same."""
    runner = load(folder, "medusa")
    target = runner._target
    head = cases.random_head("medusa", target)
    assert head.vocabulary is not None
    rows = target.model.head_weight[head.vocabulary].clone()
    object.__setattr__(head, "weights", {**head.weights, "lm_head.weight": rows})
    own: Drafter = MedusaDrafter(target, head, Method.BLOCK)
    states = prefill(runner)
    chunks = [
        Chunk([6], len(PROMPT), blocks(place), sampling, [*PROMPT, 6], len(PROMPT), 3, state)
        for place, (sampling, state) in enumerate(zip(SAMPLINGS, states, strict=True))
    ]
    found, expected = own.propose(chunks), runner._drafter.propose(chunks)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert all(isinstance(each, Draft) and len(each.token_ids) == 3 for each in found)
