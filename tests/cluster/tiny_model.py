"""A tiny random model on disk, as Hugging Face writes it, and the plain loop that says what it answers.

The loop is transformers' own: one forward over all tokens for each new one, in float32, on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 320
EOS = 2
MAX_CONTEXT = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tiny_moe(folder: Path) -> Path:
    """Mixtral: 3 layers, 4 experts of which 2 are active, 4 query heads over 2 KV heads, byte-level tokenizer."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.3,  # spread logits, so that greedy choices are not near-ties
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        sliding_window=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


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
