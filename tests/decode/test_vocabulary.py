"""A drafter must mean the same by every token id as its target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models

from decode.vocabulary import VocabularyMismatch, check_same_vocabulary
from model.tokenizer import Tokenizer

WORDS = {"a": 0, "b": 1, "c": 2, "d": 3}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Tokenizer]:
    def write(name: str, words: dict[str, int], *added: AddedToken, eos: int = 0) -> Tokenizer:
        folder = tmp_path / name
        folder.mkdir()
        backend = tokenizers.Tokenizer(models.WordLevel(dict(words), unk_token="a"))
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_tokens(list(added))
        backend.save(str(folder / "tokenizer.json"))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        return Tokenizer.load(folder)

    return write


def test_equal_vocabularies_pass(write: Callable[..., Tokenizer]) -> None:
    end = AddedToken("<end>", special=True)
    check_same_vocabulary(write("draft", WORDS, end), write("target", WORDS, end))


def test_first_differing_id_is_named(write: Callable[..., Tokenizer]) -> None:
    swapped = {"a": 0, "b": 2, "c": 1, "d": 3}
    with pytest.raises(VocabularyMismatch, match=r"token id 1: \('c', False\) in .*draft, \('b', False\) in .*target"):
        check_same_vocabulary(write("draft", swapped), write("target", WORDS))


def test_added_tokens_count(write: Callable[..., Tokenizer]) -> None:
    draft, target = write("draft", WORDS, AddedToken("<x>")), write("target", WORDS, AddedToken("<y>"))
    with pytest.raises(VocabularyMismatch, match=r"token id 4: .*<x>.*<y>"):
        check_same_vocabulary(draft, target)


def test_a_token_that_is_special_in_one_only(write: Callable[..., Tokenizer]) -> None:
    draft, target = write("draft", WORDS, AddedToken("<x>")), write("target", WORDS, AddedToken("<x>", special=True))
    with pytest.raises(VocabularyMismatch, match="token id 4"):
        check_same_vocabulary(draft, target)


def test_a_longer_vocabulary(write: Callable[..., Tokenizer]) -> None:
    with pytest.raises(VocabularyMismatch, match=r"token id 4: .*draft has 4 tokens, .*target 5"):
        check_same_vocabulary(write("draft", WORDS), write("target", WORDS, AddedToken("<x>")))


def test_other_end_tokens(write: Callable[..., Tokenizer]) -> None:
    with pytest.raises(VocabularyMismatch, match=r"end at other token ids: \(1,\) in .*draft, not \(0,\)"):
        check_same_vocabulary(write("draft", WORDS, eos=1), write("target", WORDS))
