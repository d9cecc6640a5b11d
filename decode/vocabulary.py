"""Whether two tokenizers mean the same by every token id. A drafter whose vocabulary differs is refused at start."""

from __future__ import annotations

from model.tokenizer import Tokenizer


class VocabularyMismatch(ValueError):
    """Names the first token id that the two do not agree on."""


def check_same_vocabulary(draft: Tokenizer, target: Tokenizer) -> None:
    """Entry by entry, added tokens included: sizes may agree where meanings do not.

    Raises:
        VocabularyMismatch
    """
    entries = zip(draft.entries(), target.entries(), strict=False)
    for token_id, (mine, theirs) in enumerate(entries):
        if mine != theirs:
            raise VocabularyMismatch(
                f"the vocabularies differ at token id {token_id}: {mine!r} in {draft.folder}, {theirs!r} in "
                f"{target.folder}; a draft model must have the target's tokens, every one"
            )
    if draft.vocab_size != target.vocab_size:
        first = min(draft.vocab_size, target.vocab_size)
        raise VocabularyMismatch(
            f"the vocabularies differ at token id {first}: {draft.folder} has {draft.vocab_size} tokens, "
            f"{target.folder} {target.vocab_size}"
        )
    mine_end, their_end = draft.eos_token_ids, target.eos_token_ids
    if mine_end != their_end:
        raise VocabularyMismatch(f"answers end at other token ids: {mine_end} in {draft.folder}, not {their_end}")
