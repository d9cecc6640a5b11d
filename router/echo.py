"""The prompt as a part of the answer: messages of the router's own, before the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from model.tokenizer import Detokenizer
from protos import inference_pb2 as pb
from router.card import TextTokenizer

MAX_TOKENS = 2048  # of one message


async def echoed(
    answer: AsyncGenerator[bytes, None], token_ids: Sequence[int], tokenizer: TextTokenizer
) -> AsyncGenerator[bytes, None]:
    """An answer with its prompt before it, told once there is an answer: a refusal stays the first thing that comes."""
    async with aclosing(answer):
        is_told = False
        async for raw in answer:
            if not is_told:
                is_told = True
                detokenizer = Detokenizer(tokenizer, ())
                for start in range(0, len(token_ids), MAX_TOKENS):
                    part, is_last = token_ids[start : start + MAX_TOKENS], start + MAX_TOKENS >= len(token_ids)
                    text = await asyncio.to_thread(_text, detokenizer, part, is_last)
                    yield pb.GenerateResponse(prompt=pb.PromptChunk(token_ids=part, text=text)).SerializeToString()
            yield raw


def _text(detokenizer: Detokenizer, token_ids: Sequence[int], is_last: bool) -> str:
    """In whole characters: one that a part ends in is told with the next."""
    text = "".join(map(detokenizer.push, token_ids))
    return text + detokenizer.flush() if is_last else text
