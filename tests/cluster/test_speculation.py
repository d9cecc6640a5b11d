"""Drafting through the whole system: it changes how fast tokens come, never which, with every drafter.

All clusters draft the same number in every step, so that nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import pytest_asyncio

from deploy.local import ClusterConfig, LocalCluster
from kvtransfer.errors import LayoutMismatch
from model.checkpoint import model_digest
from model.tokenizer import Detokenizer, Tokenizer
from protos import decode_pb2, decode_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.client import PdserveClient
from protos.errors import InvalidArgument
from protos.values import Sampling, Summary
from tests.cluster.asking import Answered, ask, assert_at_rest
from tests.cluster.draft_heads import write_head
from tests.cluster.test_parity import assert_scored
from tests.cluster.tiny_model import EOS, MAX_CONTEXT, VOCAB_SIZE, TinyModel
from tests.model.test_answer_text import brute_force

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_DRAFTS = 4
DRAFTERS = ("ngram", "medusa", "eagle", "model")
HAS_HEIR = ("eagle",)  # a second decode worker, so that a resumed answer is handed over once more
# What has been said is said again, so that also a random drafter, which has penalties of its own, is right at times.
GREEDY = Sampling(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=0.3)


@dataclass(frozen=True)
class Drafting:
    drafter: str
    arguments: tuple[str, ...]
    cluster: LocalCluster
    client: PdserveClient

    async def hand_over(self) -> None:
        await self._set_roles({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"})

    async def colocate(self) -> None:
        """On decode-0: whoever prefills keeps the sequence, if it may decode."""
        await self._set_roles({"decode-0": "both", "prefill-0": "decode", "decode-1": "decode"})

    async def ask_all(self, requests: Sequence[tuple[list[int], Sampling]], at_once: int = 99) -> list[Answered]:
        slots = asyncio.Semaphore(at_once)

        async def ask_one(prompt: list[int], sampling: Sampling) -> Answered:
            async with slots:
                return await ask(self.client, prompt, sampling)

        return await asyncio.gather(*(ask_one(prompt, sampling) for prompt, sampling in requests))

    async def _set_roles(self, roles: dict[str, str]) -> None:
        for name, role in roles.items():
            if name in self.cluster.config.worker_roles:
                await self.client.set_role(name, role)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=DRAFTERS)
async def drafting(
    request: pytest.FixtureRequest, tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Drafting]:
    """Sampled requests of ngram are verified as by default: its drafts are compared all the same."""
    drafter = request.param
    arguments: tuple[str, ...] = ("--drafter", drafter)
    if drafter != "ngram":
        arguments += ("--verification", "coupled", "--draft-model")
    if drafter in ("eagle", "medusa"):
        arguments += (str(write_head(tmp_path_factory.mktemp("head"), drafter, tiny_moe.folder)),)
    elif drafter == "model":
        arguments += (str(tiny_moe.folder),)
    config = ClusterConfig(
        model=str(tiny_moe.folder),
        num_decode=2 if drafter in HAS_HEIR else 1,
        num_threads=1,
        worker_arguments=(
            *("--dtype", "float32", "--num-blocks", "100", *arguments),
            *("--draft-length", "fixed", "--max-draft-tokens", str(NUM_DRAFTS)),
        ),
    )
    async with LocalCluster(config) as cluster, PdserveClient(cluster.router_address) as client:
        yield Drafting(drafter, arguments, cluster, client)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _at_rest(drafting: Drafting) -> AsyncIterator[None]:
    await drafting.hand_over()
    yield
    await assert_at_rest(drafting.cluster)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """By drafter."""
    return {}


def prompts(num: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice(lengths))] for _ in range(num)]


def repetitive(num: int) -> list[list[int]]:
    """Of which look-up finds something; their ends lie on, before and behind block boundaries."""
    rng = random.Random(num)
    phrases = [[rng.randrange(3, VOCAB_SIZE) for _ in range(4)] for _ in range(num)]
    return [(phrase * 20)[: 12 + index] for index, phrase in enumerate(phrases)]


def off(sampling: Sampling) -> Sampling:
    return replace(sampling, max_draft_tokens=0)


def drafted(answers: Sequence[Answered]) -> int:
    return sum(answered.usage.drafted_tokens for answered in answers)


def accepted(answers: Sequence[Answered]) -> int:
    return sum(answered.usage.accepted_tokens for answered in answers)


@pytest.mark.parametrize("is_colocated", [False, True], ids=["handed over", "colocated"])
async def test_stop_texts_cut_the_answer_where_a_plain_one_has_them(drafting: Drafting, is_colocated: bool) -> None:
    """Pieces of what is said without, across the borders of tokens, of drafts and of the hand-over."""
    if is_colocated:
        await drafting.colocate()
    tokenizer = Tokenizer.load(Path(drafting.cluster.config.model))
    plain = [(prompt, replace(off(GREEDY), max_tokens=40)) for prompt in repetitive(12)]
    requests, expected = [], []
    rng = random.Random(int(is_colocated))
    for (prompt, sampling), whole in zip(plain, await drafting.ask_all(plain), strict=True):
        detokenizer = Detokenizer(tokenizer, prompt)
        pieces = [*map(detokenizer.push, whole.token_ids), detokenizer.flush()]
        assert "".join(pieces) == whole.text
        begin = rng.randrange(len(whole.text) - 8)
        stop = [whole.text[begin : begin + rng.choice((1, 2, 3, 6))], "nowhere in it"]
        requests.append((prompt, replace(sampling, max_draft_tokens=None, stop=stop)))
        expected.append((*brute_force(pieces, stop), whole.token_ids))
    answers = await drafting.ask_all(requests)
    for (text, num_tokens, token_ids), answered in zip(expected, answers, strict=True):
        assert (answered.text, answered.finish_reason) == (text, "stop")
        assert answered.token_ids == token_ids[:num_tokens]
        assert answered.usage.output_tokens == num_tokens
        assert answered.usage.accepted_tokens <= min(answered.usage.drafted_tokens, len(answered.token_ids))
    assert drafted(answers) > 0


@pytest.mark.parametrize("is_colocated", [False, True], ids=["handed over", "colocated"])
async def test_greedy_tokens_are_those_of_a_plain_loop(
    drafting: Drafting, tiny_moe: TinyModel, is_colocated: bool
) -> None:
    """Answers of every length, so that max_tokens ends them at every place of a draft."""
    if is_colocated:
        await drafting.colocate()
    asked = [*repetitive(24), *prompts(16, [1, 15, 16, 17, 31, 32, 33, 100, 250], seed=int(is_colocated))]
    requests = [(prompt, Sampling(temperature=0, max_tokens=1 + index % 23)) for index, prompt in enumerate(asked)]
    answers = await drafting.ask_all(requests, at_once=12)
    for (prompt, sampling), answered in zip(requests, answers, strict=True):
        usage = answered.usage
        tiny_moe.assert_greedy(prompt, answered.token_ids)
        assert len(answered.token_ids) == sampling.max_tokens or answered.token_ids[-1] == EOS
        assert usage.accepted_tokens <= usage.drafted_tokens
        if len(answered.token_ids) > 1:
            assert usage.disaggregated is not is_colocated
            here = usage.decode_computed_tokens if is_colocated else usage.decode_received_tokens
            assert here + usage.decode_cached_tokens == len(prompt)
    assert drafted(answers) > 0
    if drafting.drafter == "model":  # it is the target itself; near-ties apart, it guesses what it will say
        assert accepted(answers) >= 0.98 * drafted(answers) > 250


@pytest.mark.parametrize("is_colocated", [False, True], ids=["handed over", "colocated"])
async def test_prompt_is_scored_beside_drafting(drafting: Drafting, tiny_moe: TinyModel, is_colocated: bool) -> None:
    """While another one drafts; twice, so that the prefix cache has it."""
    if is_colocated:
        await drafting.colocate()
    prompt = prompts(1, [70], seed=8)[0]
    expected = tiny_moe.logprobs(prompt[:1], prompt[1:])
    drafts = asyncio.create_task(drafting.ask_all([(each, GREEDY) for each in repetitive(4)]))
    for _ in range(2):
        sampling = Sampling(temperature=0, max_tokens=8, prompt_logprobs=3, ignore_eos=True)
        *chunks, summary = [part async for part in drafting.client.generate(prompt, sampling=sampling)]
        assert isinstance(summary, Summary)
        assert (summary.usage.prefill_computed_tokens, summary.usage.disaggregated) == (70, not is_colocated)
        assert_scored(chunks, prompt, expected)
    assert drafted(await drafts) > 0


@pytest.mark.parametrize("is_colocated", [False, True], ids=["handed over", "colocated"])
async def test_answers_match_their_grammar_and_greedy_ones_are_as_without_drafts(
    drafting: Drafting, is_colocated: bool
) -> None:
    """After the hand-over the grammar is followed from the tokens; a draft that breaks it is not accepted."""
    if is_colocated:
        await drafting.colocate()
    schema = {"type": "array", "items": {"enum": ["yes", "no", 12]}, "minItems": 3, "maxItems": 6}
    pattern = "(ab|cd|[0-9]{2}){4,9}!"
    base = Sampling(temperature=0, max_tokens=100)
    kinds = [
        replace(base, regex=pattern),
        replace(base, json_schema=json.dumps(schema)),
        replace(base, lark=f"start: /{pattern}/"),
    ]
    asked = [[3 + token_id % 90 for token_id in prompt] for prompt in repetitive(9)]  # no half of a character before it
    greedy = [(prompt, kinds[index % 3]) for index, prompt in enumerate(asked)]
    drawn = [
        (prompt, replace(sampling, temperature=1.5, seed=index)) for index, (prompt, sampling) in enumerate(greedy)
    ]
    answers = await drafting.ask_all([*greedy, *drawn])
    plain = await drafting.ask_all([(prompt, off(sampling)) for prompt, sampling in greedy])
    assert [answered.token_ids for answered in answers[: len(greedy)]] == [answered.token_ids for answered in plain]
    for (_, sampling), answered in zip([*greedy, *drawn], answers, strict=True):
        assert answered.finish_reason == "stop" and answered.token_ids[-1] == EOS
        if sampling.json_schema is None:
            assert re.fullmatch(pattern, answered.text)
        else:
            found = json.loads(answered.text)
            assert 3 <= len(found) <= 6 and set(found) <= {"yes", "no", 12}
    assert len({answered.text for answered in answers[len(greedy) :]}) > 3  # it is drawn, not forced
    assert drafted(answers) > 0


async def test_grammars_that_cannot_be_followed_are_refused(drafting: Drafting) -> None:
    refused = {
        "regex": [Sampling(regex="[a"), Sampling(regex="")],
        "json_schema": [Sampling(json_schema='{"type": "none"}')],
        "lark": [Sampling(lark="start: nowhere")],
    }
    for name, samplings in refused.items():
        for sampling in samplings:
            with pytest.raises(InvalidArgument, match=f"sampling.{name}") as caught:
                await ask(drafting.client, [5, 6], sampling)
            assert caught.value.field == f"sampling.{name}"
    for wrong in (Sampling(regex="a", ignore_eos=True), Sampling(regex="a", min_tokens=2, max_tokens=3)):
        with pytest.raises(InvalidArgument, match="with regex it must be"):
            await ask(drafting.client, [5, 6], wrong)


async def test_stop_ids_end_an_answer_within_a_draft(drafting: Drafting, tiny_moe: TinyModel) -> None:
    prompt = prompts(1, [20], seed=3)[0]
    plain = tiny_moe.greedy(prompt, 20)
    places = [place for place in range(2, 16) if plain[place] not in plain[:place]]
    requests = [
        (prompt, Sampling(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[plain[place]], logprobs=1))
        for place in places
    ]
    answers = await drafting.ask_all(requests, at_once=4)
    logprobs = tiny_moe.logprobs(prompt, plain)
    assert len(places) > 8
    for place, answered in zip(places, answers, strict=True):
        assert (answered.token_ids, answered.finish_reason) == (plain[: place + 1], "stop")
        assert answered.usage.output_tokens == place + 1
        assert [each.token_id for each in answered.logprobs] == answered.token_ids
        for index, each in enumerate(answered.logprobs):
            assert each.logprob == pytest.approx(float(logprobs[index, each.token_id]), abs=1e-3)


async def test_an_answer_may_fill_the_context(drafting: Drafting, tiny_moe: TinyModel) -> None:
    """Nothing is drafted for positions that the model does not have."""
    prompt = prompts(1, [MAX_CONTEXT - 19], seed=4)[0]
    answered = await ask(drafting.client, prompt, Sampling(temperature=0, ignore_eos=True))
    assert (len(answered.token_ids), answered.finish_reason) == (19, "length")
    tiny_moe.assert_greedy(prompt, answered.token_ids)
    most = [min(NUM_DRAFTS, 19 - known - 1) for known in range(1, 19)]  # where each step emits one token
    assert answered.usage.drafted_tokens <= sum(most)


async def test_same_text_with_drafting_on_and_off_and_across_drafters(
    drafting: Drafting, texts: dict[str, list[str]]
) -> None:
    """Greedy, sampled and undrafted requests in one batch."""
    plain = Sampling(max_tokens=30, ignore_eos=True)
    kinds = [
        replace(plain, temperature=0),
        replace(plain, temperature=0.8, top_p=0.9, seed=5),
        replace(plain, temperature=1.3, top_k=12, min_p=0.02, seed=6, presence_penalty=0.5),
        replace(GREEDY, max_tokens=30),
        replace(GREEDY, max_tokens=30, logit_bias={40 + token_id: (-1) ** token_id * 4.0 for token_id in range(80)}),
        replace(plain, temperature=0.7, seed=7, repetition_penalty=0.3, frequency_penalty=-1),
    ]
    requests = [(prompt, kinds[index % len(kinds)]) for index, prompt in enumerate(repetitive(18))]
    undrafted = [(prompt, off(sampling)) for prompt, sampling in requests]
    answers = await drafting.ask_all([*requests, *undrafted], at_once=12)
    on, without = answers[: len(requests)], answers[len(requests) :]
    assert [answered.token_ids for answered in on] == [answered.token_ids for answered in without]
    assert drafted(without) == 0
    assert drafted(on) >= accepted(on) > 0
    texts[drafting.drafter] = [answered.text for answered in on]
    assert all(theirs == texts[drafting.drafter] for theirs in texts.values())


async def test_metrics_count_what_usage_tells(drafting: Drafting) -> None:
    before = await scrape(drafting)
    answers = await drafting.ask_all([(prompt, GREEDY) for prompt in repetitive(8)])
    after = await scrape(drafting)
    counted = {name: after[name] - before.get(name, 0.0) for name in after}
    drafted_by_position, judged_by_position, accepted_by_position = (
        [counted.get(f'pdserve_draft_{kind}_tokens_total{{position="{1 + place}"}}', 0) for place in range(NUM_DRAFTS)]
        for kind in ("drafted", "judged", "accepted")
    )
    assert sum(drafted_by_position) == drafted(answers) > 0
    assert sum(accepted_by_position) == accepted(answers)
    assert judged_by_position[0] == drafted_by_position[0]
    for place in range(1, NUM_DRAFTS):
        if drafting.drafter == "eagle":  # all nodes of a tree are judged
            assert judged_by_position[place] == drafted_by_position[place]
        else:
            assert judged_by_position[place] <= accepted_by_position[place - 1]
    assert counted["pdserve_draft_emitted_tokens_total"] >= accepted(answers)
    assert counted["pdserve_draft_failures_total"] == 0
    assert counted["pdserve_draft_length_count"] == sum(answered.usage.num_steps for answered in answers)


async def scrape(drafting: Drafting) -> dict[str, float]:
    """Of decode-0, by name and labels."""
    address = (await drafting.cluster.workers())["decode-0"].metrics_address

    def read() -> str:
        with urlopen(f"http://{address}/metrics", timeout=10) as page:
            text: str = page.read().decode()
            return text

    lines = (await asyncio.to_thread(read)).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def flood(drafting: Drafting) -> list[Answered]:
    """More than the cache holds: every block is used anew."""
    requests = [
        (prompt, Sampling(temperature=0, max_tokens=150, ignore_eos=True)) for prompt in prompts(16, [40], seed=9)
    ]
    answers = await drafting.ask_all(requests)
    assert all(len(answered.token_ids) == 150 for answered in answers)
    return answers


async def test_preempted_sequences_go_on_exactly(drafting: Drafting, tiny_moe: TinyModel) -> None:
    answers = await flood(drafting)
    assert sum(answered.usage.num_preemptions for answered in answers) > 0
    assert sum(answered.usage.decode_recomputed_tokens for answered in answers) > 0
    for prompt, answered in zip(prompts(16, [40], seed=9), answers, strict=True):
        tiny_moe.assert_greedy(prompt, answered.token_ids)
    if drafting.drafter == "model":  # also what it knew of them is computed again
        assert accepted(answers) >= 0.98 * drafted(answers) > 1000


async def test_drafts_after_a_hand_over_are_as_good_as_on_one_worker(drafting: Drafting) -> None:
    if drafting.drafter == "ngram":
        pytest.skip("it keeps nothing that could be lost")
    num_prompts = 40 if drafting.drafter == "medusa" else 80
    requests = [(prompt, GREEDY) for prompt in prompts(num_prompts, range(5, 60), seed=10)]
    handed_over = await drafting.ask_all(requests, at_once=10)
    assert sum(answered.usage.decode_received_tokens for answered in handed_over) > 20 * num_prompts
    await flood(drafting)
    await drafting.colocate()
    colocated = await drafting.ask_all(requests, at_once=10)
    assert all(answered.usage.decode_computed_tokens == answered.usage.prompt_tokens for answered in colocated)
    rates = [accepted(answers) / drafted(answers) for answers in (handed_over, colocated)]
    assert rates[0] == pytest.approx(rates[1], abs=0.02)
    assert [each.token_ids for each in handed_over] == [each.token_ids for each in colocated]
    fates = [
        [(each.usage.drafted_tokens, each.usage.accepted_tokens) for each in of] for of in (handed_over, colocated)
    ]
    assert sum(one == other for one, other in zip(*fates, strict=True)) >= num_prompts - 2
    assert drafted(handed_over) > 300 and accepted(handed_over) > 10
    if drafting.drafter == "model":
        assert min(rates) > 0.98


async def test_worker_with_another_drafter_is_refused(drafting: Drafting, tiny_moe: TinyModel) -> None:
    """Before a block is asked for. Who guesses without KV of its own hands over to one that does not guess at all."""
    plain = decode_pb2.KVLayout(
        model_digest=model_digest(tiny_moe.folder),
        dtype="float32",
        num_layers=3,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
    )
    address = (await drafting.cluster.workers())["decode-0"].address
    async with open_channel(address) as channel:
        describe = decode_pb2_grpc.DecodeStub(channel).Describe
        if drafting.drafter == "ngram":
            assert (await describe(decode_pb2.DescribeRequest(layout=plain))).layout == plain
        else:
            refusal = f"the two KV layouts differ: drafter is '' there and '{drafting.drafter}:"
            with pytest.raises(LayoutMismatch, match=refusal), service_errors():
                await describe(decode_pb2.DescribeRequest(layout=plain))


async def test_moved_while_it_drafts(drafting: Drafting) -> None:
    """The prefill worker, of the same drafter, becomes a decode worker as the other one is drained."""
    sampling = replace(GREEDY, max_tokens=160, stop=["\ufffd" * 40 + "never"])  # of which something is held back
    asked = repetitive(6)
    stayed = await drafting.ask_all([(prompt, sampling) for prompt in asked])
    num_begun = 0

    async def drain_once_all_have_begun() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == len(asked):
            await drafting.client.set_role("prefill-0", "both")
            await drafting.client.set_draining("decode-0", True)

    asking = [ask(drafting.client, p, sampling, at_token=20, then=drain_once_all_have_begun) for p in asked]
    answers = await asyncio.gather(*asking)
    await drafting.client.set_draining("decode-0", False)
    assert [answered.token_ids for answered in answers] == [answered.token_ids for answered in stayed]
    assert [answered.text for answered in answers] == [answered.text for answered in stayed]
    moved = [index for index, answered in enumerate(answers) if answered.usage.num_moves]
    assert len(moved) >= 3
    assert sum(answered.usage.num_resumes for answered in answers) == 0
    for index in moved:  # it drafts on there; where it waited for its move it did not
        usage, other = answers[index].usage, stayed[index].usage
        assert usage.drafted_tokens > 0.6 * other.drafted_tokens
        assert usage.accepted_tokens > 0.6 * other.accepted_tokens


async def test_killed_decode_worker_takes_no_answer_with_it(drafting: Drafting, tiny_moe: TinyModel) -> None:
    """Last: the worker does not come back. Until the answer has begun there is no other that could take it."""
    cluster, client = drafting.cluster, drafting.client
    heir, role = ("decode-1", "decode") if drafting.drafter in HAS_HEIR else ("prefill-0", "both")

    async def kill() -> None:
        os.kill(cluster.pid("decode-0"), signal.SIGSTOP)  # it must not come to the answer's end meanwhile
        await client.set_role(heir, role)
        await cluster.kill("decode-0")

    prompt = repetitive(9)[-1]
    sampling = Sampling(temperature=0.9, seed=4, max_tokens=400, ignore_eos=True, repetition_penalty=0.3)
    expected = await ask(client, prompt, off(sampling))
    answered = await ask(client, prompt, sampling, at_token=50, then=kill)
    usage = answered.usage
    assert usage.num_resumes == 1
    assert answered.text == expected.text
    assert usage.disaggregated is (drafting.drafter in HAS_HEIR)
    assert usage.drafted_tokens >= usage.accepted_tokens > 0  # of the last attempt
    if drafting.drafter == "model":
        assert usage.accepted_tokens >= 0.98 * usage.drafted_tokens
