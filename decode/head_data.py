"""What a draft head sees of its target, for every token of the generations: computed once, kept on disk.

Letters: T tokens of a generation, K hidden size of the target, F features of a token (taps * K).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decode.generations import Generation
from model.runner import Chunk
from model.torch_runner import TorchRunner

MAX_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Example:
    token_ids: Tensor  # [T] int64
    features: Tensor  # [T, F] bfloat16
    hidden: Tensor  # [T, K] bfloat16: what the target's own head reads
    first_answer: int  # index of the first token that the target wrote


class HeadData:
    """`rows` holds features, then hidden, of all tokens one after another: [all tokens, F + K] bfloat16."""

    def __init__(self, folder: Path, generations: Sequence[Generation], hidden_size: int, num_taps: int) -> None:
        self._generations = generations
        self._num_features = num_taps * hidden_size
        self._starts = np.concatenate(([0], np.cumsum([len(g.token_ids) for g in generations])))
        shape = (int(self._starts[-1]), self._num_features + hidden_size)
        self._path = folder / "features.bin"
        self._rows = np.memmap(self._path, np.int16, "r+" if self._path.exists() else "w+", shape=shape)

    def __len__(self) -> int:
        return len(self._generations)

    def length(self, index: int) -> int:
        return len(self._generations[index].token_ids)

    def digest(self, indexes: Iterable[int]) -> str:
        """Of the tokens of these generations, and which of them are answers."""
        tokens = [(self._generations[index].num_prompt_tokens, self._generations[index].token_ids) for index in indexes]
        return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Example:
        generation = self._generations[index]
        rows = torch.from_numpy(np.array(self._rows[self._starts[index] : self._starts[index + 1]]))
        features, hidden = rows.view(torch.bfloat16).split(
            (self._num_features, rows.shape[1] - self._num_features), dim=1
        )
        return Example(torch.tensor(generation.token_ids), features, hidden, generation.num_prompt_tokens)

    def compute(self, runner: TorchRunner, taps: Sequence[int], progress: Callable[[int], None]) -> None:
        """Runs the target over all generations; goes on where an earlier run stopped, if that ran over the same."""
        done = self._path.with_suffix(".json")
        first, said = self._done(done)
        for group in self._groups(first):
            start, end = self._starts[group.start], self._starts[group.stop]
            self._rows[start:end] = self._rows_of(group, runner, taps).view(torch.int16).numpy()
            self._rows.flush()
            self._digest(group, said)
            done.write_text(json.dumps({"num_generations": group.stop, "digest": said.hexdigest()}))
            progress(group.stop)

    def _done(self, path: Path) -> tuple[int, hashlib._Hash]:
        """How many generations an earlier run did, and the digest of these. 0 if they were others."""
        found = json.loads(path.read_text()) if path.exists() else {"num_generations": 0}
        said = self._digest(range(min(found["num_generations"], len(self))), hashlib.sha256())
        if found["num_generations"] <= len(self) and found.get("digest", said.hexdigest()) == said.hexdigest():
            return found["num_generations"], said
        return 0, hashlib.sha256()

    def _digest(self, group: range, said: hashlib._Hash) -> hashlib._Hash:
        for index in group:
            said.update(repr(tuple(self._generations[index].token_ids)).encode())
        return said

    def _groups(self, first: int) -> Iterator[range]:
        """Generations that fit one step together."""
        start = first
        while start < len(self):
            stop = start + 1
            while stop < len(self) and self._starts[stop + 1] - self._starts[start] <= MAX_STEP_TOKENS:
                stop += 1
            yield range(start, stop)
            start = stop

    def _rows_of(self, group: range, runner: TorchRunner, taps: Sequence[int]) -> Tensor:
        """[tokens of the group, F + K] bfloat16. The target's output is tapped: logits of all tokens would take as
        long as most of its layers."""
        chunks = self._chunks(group, runner)
        output = runner.forward(chunks, num_rows=[0] * len(chunks), taps=(*taps, runner.config.num_layers))
        assert output.features is not None
        features, last = output.features.split((self._num_features, runner.config.hidden_size), dim=1)
        return torch.cat([features, runner.model.norm(last.contiguous())], dim=1).bfloat16()

    def _chunks(self, group: range, runner: TorchRunner) -> list[Chunk]:
        chunks, first = [], 0
        for index in group:
            token_ids = self._generations[index].token_ids
            num_blocks = runner.layout.num_blocks(len(token_ids))
            chunks.append(Chunk(token_ids, 0, range(first, first + num_blocks)))
            first += num_blocks
        return chunks
