"""The tiny random model of the benchmarks, and the plain loop that says what it answers.

The loop is transformers' own: one forward over all tokens for each new one, in float32, on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.tiny_moe import CHAT_TEMPLATE, EOS, MAX_CONTEXT, VOCAB_SIZE, build_tiny_moe

__all__ = ["CHAT_TEMPLATE", "EOS", "MAX_CONTEXT", "VOCAB_SIZE", "TinyModel", "build_tiny_moe"]


@dataclass(frozen=True)
class TinyModel:
    folder: Path

    @cached_property
    def _model(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return model

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What a plain loop answers with: one forward over all tokens for each new one."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(self._logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def assert_greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """That a plain loop gives this answer, by one forward over all of it: each token is the likeliest after those
        before, which by induction is what the loop would have taken."""
        likeliest = self._logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert list(answer) == likeliest

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [answer, vocabulary] of the model's own distribution before each token of the answer."""
        return self._logits([*prompt, *answer])[len(prompt) - 1 : -1].log_softmax(-1)

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the workers have the cores
        try:
            logits: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
            return logits
        finally:
            torch.set_num_threads(num_threads)
