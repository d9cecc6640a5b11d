"""Which drafted tokens stand. What is emitted has the law of plain sampling, whatever was drafted and however badly.

A deterministic draft is compared with the tokens that plain sampling draws, by the noise of each position: it stands
where they are equal, which for draft x has chance p(x), and no rule has more; so the output is plain sampling's, token
for token. The same goes for every draft at temperature 0 and under COUPLED. Letters: R rows, K drafts, V vocabulary.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft import Draft
from decode.rejection import block_decisions, leftover, token_decisions
from model.logprobs import token_logprobs
from model.randomness import Purpose, seed_tensor, uniforms
from model.runner import Chunk, SampledToken
from model.sampling import Row, choose, draw, largest, processed_scores


class Method(enum.StrEnum):
    """How the drafts of a sampling request are judged where their probabilities are known."""

    TOKEN = "token"
    BLOCK = "block"  # accepts at least as many, on average
    COUPLED = "coupled"  # drafts were drawn with the noise of plain sampling, and stand where it draws the same


@dataclass(frozen=True, slots=True)
class Verdict:
    """The drafts that stand and one token more. `token_ids[j]` was chosen by row `rows[j]` of the sequence's own.

    Row 0 is behind the last token that was known, row m + 1 behind draft m.
    """

    token_ids: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.rows) - 1

    @property
    def nodes(self) -> tuple[int, ...]:
        """The drafts that stand, by their places in the draft."""
        return tuple(row - 1 for row in self.rows[1:])


@dataclass(frozen=True, slots=True)
class _Case:
    """A sequence of the batch, and the first of its rows."""

    chunk: Chunk
    draft: Draft
    first_row: int

    @property
    def span(self) -> range:
        return range(self.first_row, self.first_row + self.draft.num_rows)

    @property
    def root(self) -> Row:
        return Row.behind(self.chunk)

    @property
    def rows(self) -> list[Row]:
        return [Row.behind(self.chunk, path) for path in self.draft.paths()]

    def is_judged(self, method: Method) -> bool:
        """By chances. Otherwise its drafts are compared."""
        if method is Method.COUPLED or self.root.sampling.is_greedy:
            return False
        return self.draft.probabilities is not None and len(self.draft.token_ids) > 0


def verify(logits: Tensor, chunks: Sequence[Chunk], drafts: Sequence[Draft], method: Method) -> list[Verdict | None]:
    """A verdict for each sequence, None where the logits behind its last token are not finite. No sequence's verdict
    depends on another's.

    `logits` [R, V] hold `drafts[i].num_rows` rows of each sequence in turn. A batch that is all plain greedy costs one
    maximum; dense probabilities are made only for sequences that are judged by chances, as none is whose drafts' own
    logits are not all finite: these drafts are compared.
    """
    cases = _cases(chunks, drafts)
    highest, likeliest = largest(logits)
    is_finite = torch.isfinite(highest).tolist()  # a maximum carries NaN along
    known = {index: case for index, case in enumerate(cases) if is_finite[case.first_row]}
    judged = {
        index: case
        for index, case in known.items()
        if case.is_judged(method) and all(is_finite[row] for row in case.span)
    }
    compared = {index: case for index, case in known.items() if index not in judged}
    verdicts: dict[int, Verdict] = {}
    if compared:
        targets = _plain_tokens(logits, likeliest, compared.values(), is_finite)
        verdicts |= {index: follow(case.draft, [targets[row] for row in case.span]) for index, case in compared.items()}
    if judged:
        verdicts |= zip(judged, _judge(logits, list(judged.values()), method), strict=True)
    return [verdicts.get(index) for index in range(len(cases))]


def follow(draft: Draft, targets: Sequence[int | None]) -> Verdict:
    """Down from the root, to the draft that is what the row before it wants, for as long as there is one.

    `targets` [K + 1], by row; a draft whose own row has none, its logits not being finite, does not stand. If they are
    drawn from the rows' laws, this is the rule for a deterministic tree "take child x with chance p(x), else set p(x)
    to 0, renormalise and try the next; draw from the rest when none is left".

    Raises:
        ValueError: the first row has none.
    """
    parents = range(-1, len(draft.token_ids) - 1) if draft.parents is None else draft.parents
    children = {edge: node + 1 for node, edge in enumerate(zip(parents, draft.token_ids, strict=True))}
    rows: list[int] = []
    tokens: list[int] = []
    row: int | None = 0
    while row is not None and (token := targets[row]) is not None:
        rows.append(row)
        tokens.append(token)
        row = children.get((row - 1, token))
    if not rows:
        raise ValueError("the row behind the last token wants nothing")
    return Verdict(tuple(tokens), tuple(rows))


def emitted(
    logits: Tensor, chunks: Sequence[Chunk], drafts: Sequence[Draft], verdicts: Sequence[Verdict | None]
) -> list[tuple[SampledToken, ...]]:
    """The tokens of each verdict with the logprobs that were asked for, () where there is no verdict."""
    pairs = list(zip(_cases(chunks, drafts), verdicts, strict=True))
    tokens = [0] * len(logits)
    counts: list[int | None] = [None] * len(logits)
    for case, verdict in pairs:
        for row, token_id in zip(verdict.rows, verdict.token_ids, strict=True) if verdict is not None else ():
            tokens[case.first_row + row] = token_id
            counts[case.first_row + row] = case.root.sampling.num_logprobs
    logprobs = token_logprobs(logits, torch.tensor(tokens, device=logits.device), counts)
    return [
        tuple(SampledToken(tokens[case.first_row + row], logprobs.get(case.first_row + row)) for row in verdict.rows)
        if verdict is not None
        else ()
        for case, verdict in pairs
    ]


def _cases(chunks: Sequence[Chunk], drafts: Sequence[Draft]) -> list[_Case]:
    first_rows = itertools.accumulate((draft.num_rows for draft in drafts), initial=0)  # and where the last one ends
    pairs = zip(chunks, drafts, strict=True)
    return [_Case(chunk, draft, first) for (chunk, draft), first in zip(pairs, first_rows, strict=False)]


def _plain_tokens(
    logits: Tensor, likeliest: Tensor, cases: Iterable[_Case], is_finite: Sequence[bool]
) -> list[int | None]:
    """[R]: what plain sampling draws where a row of these cases is finite, None where it is not; of other rows the
    likeliest. Overwrites `likeliest` [R]."""
    special = [case for case in cases if not case.root.is_plain_greedy]
    pairs = [pair for case in special for pair in zip(case.span, case.rows, strict=True) if is_finite[pair[0]]]
    if pairs:
        indexes = [index for index, _ in pairs]
        likeliest[indexes] = choose(logits[indexes].float(), [row for _, row in pairs])
    return [token if finite else None for token, finite in zip(likeliest.tolist(), is_finite, strict=True)]


def _judge(logits: Tensor, cases: Sequence[_Case], method: Method) -> list[Verdict]:
    """By chances and VERDICT noise, which belongs to the position where the draft begins: each step has its own.

    What was drawn for a draft that fell must not be used again: under BLOCK it decided about those that stand, too.
    """
    indexes = [index for case in cases for index in case.span]
    rows = [row for case in cases for row in case.rows]
    laws = processed_scores(logits if len(indexes) == len(logits) else logits[indexes], rows).softmax(dim=-1)
    drafts = [case.draft for case in cases]
    decide = block_decisions if method is Method.BLOCK else token_decisions
    decisions = decide(laws, drafts, _verdict_noise(cases, laws.device))
    parts = laws.split([draft.num_rows for draft in drafts])
    left = torch.stack([leftover(*of_case) for of_case in zip(parts, drafts, decisions, strict=True)])
    kept = [
        tuple(case.draft.token_ids[: decision.num_accepted]) for case, decision in zip(cases, decisions, strict=True)
    ]
    ends = [Row.behind(case.chunk, token_ids) for case, token_ids in zip(cases, kept, strict=True)]
    last = draw(left.log_(), ends).tolist()
    return [
        Verdict((*token_ids, end), tuple(range(len(token_ids) + 1))) for token_ids, end in zip(kept, last, strict=True)
    ]


def _verdict_noise(cases: Sequence[_Case], device: torch.device) -> list[list[float]]:
    roots = [case.root for case in cases]
    seeds = seed_tensor([root.sampling.seed for root in roots], device)
    positions = torch.tensor([root.position for root in roots], device=device)
    indexes = torch.arange(max(len(case.draft.token_ids) for case in cases), device=device)
    noise: list[list[float]] = uniforms(seeds, positions, Purpose.VERDICT, indexes).tolist()
    return noise
