from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from model.chat_template import ChatMessage, ChatRejected, NoChatTemplate
from model.tokenizer import Detokenizer, Tokenizer, TokenizerUnusable

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?  Indented\n\tcode = 12345;",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Ñandú.",
    "日本語のテキストと漢字、ひらがな。 中文也可以。",
    "emoji 🦊👩‍👩‍👧‍👦🏳️‍🌈 and symbols ∑∞≠",
]
TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8", exclude_categories=["Cs"]), st.sampled_from("🦊👩‍👧 語漢aé \n▁Ġ")),
    max_size=40,
)
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'tool' %}{{ raise_exception('no tools, ' + message.content) }}{% endif %}
<{{ message.role }}>{% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{% if loop.index == 9 %}{% break %}{% endif %}
{% endfor %}
{{ {'a': '<é>'} | tojson }}
{% if add_generation_prompt %}<assistant>{% endif %}
"""


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<note é>", special=False)])
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    """As Llama 2 and Mixtral: bytes for what is unknown, a space before the first word, a begin token."""
    words = ["▁", "▁The", "▁fox", "fox", "The", "é", "語", "a", "e", "o", "x", "▁▁"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = sentence_piece()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return backend


KINDS = {"byte level": byte_level, "sentence piece": sentence_piece, "metaspace": metaspace}


def write(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in ({"tokenizer_config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write(tmp_path_factory.mktemp("tokenizer"), KINDS[request.param]())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same files in transformers."""
    one = PreTrainedTokenizerFast.from_pretrained(tokenizer.folder)
    assert isinstance(one, PreTrainedTokenizerFast)
    return one


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [detokenizer.push(token_id) for token_id in token_ids]


@given(text=TEXTS)
def test_encode_and_decode_are_those_of_transformers(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.token_strings(ids) == reference.convert_ids_to_tokens(ids)


@given(text=TEXTS, specials=st.lists(st.integers(0, 50), max_size=3))
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str, specials: list[int]) -> None:
    ids = tokenizer.encode(text)
    for position in specials:
        ids.insert(min(position, len(ids)), tokenizer.eos_token_ids[0])
    detokenizer = Detokenizer(tokenizer, [])
    found = pieces(detokenizer, ids)
    assert "".join(found) + detokenizer.flush() == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@given(text=TEXTS, cut=st.integers(0, 60), seed=st.integers(0, 999))
def test_a_second_detokenizer_goes_on_with_the_same_pieces(
    tokenizer: Tokenizer, text: str, cut: int, seed: int
) -> None:
    """Also where the tokens are not text at all, and where the cut is inside a character."""
    noise = random.Random(seed).choices(range(tokenizer.vocab_size + 3), k=8)
    ids = tokenizer.encode(text) + noise
    cut = min(cut, len(ids))
    whole = pieces(Detokenizer(tokenizer, []), ids)
    assert whole[:cut] + pieces(Detokenizer(tokenizer, ids[:cut]), ids[cut:]) == whole


@given(text=TEXTS, prompt=TEXTS)
def test_text_after_a_prompt(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, before)
    found = "".join(pieces(detokenizer, ids)) + detokenizer.flush()
    assert tokenizer.decode(before) + found == tokenizer.decode(before + ids)


@given(noise=st.lists(st.integers(0, 400), max_size=30))
def test_bytes_that_are_no_text_become_the_same_replacement_characters(noise: list[int]) -> None:
    one = DEMO_LIKE
    detokenizer = Detokenizer(one, [])
    assert "".join(pieces(detokenizer, noise)) + detokenizer.flush() == one.decode(noise)


def test_a_character_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🐢")
    assert len(ids) >= 4
    found = pieces(Detokenizer(tokenizer, []), ids)
    assert found[-1] == "🐢"
    assert "".join(found[:-1]) == "x"
    unfinished = Detokenizer(tokenizer, ids[:-2])
    assert unfinished.push(ids[-2]) == ""
    assert unfinished.flush() == "\ufffd"


def test_what_a_token_costs_does_not_grow_with_the_text() -> None:
    """Looks at the last tokens only: an endless sequence of earlier ones is never walked."""

    class Watched(list[int]):
        looked_at = 0

        def __reversed__(self):  # type: ignore[no-untyped-def]
            for item in super().__reversed__():
                self.looked_at += 1
                yield item

    watched = Watched(DEMO_LIKE.encode("word " * 5000))
    Detokenizer(DEMO_LIKE, watched)
    assert 0 < watched.looked_at <= 3


MESSAGES = [ChatMessage("user", "  hi <b> & é\n"), ChatMessage("assistant", "語"), ChatMessage("user", "</s>")]


def test_chat_is_that_of_transformers(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    plain = [{"role": message.role, "content": message.content} for message in MESSAGES]
    expected = reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(MESSAGES) == expected
    assert expected.startswith("<s><user>hi <b> & é</s>")
    encoded = reference(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_chat(MESSAGES) == encoded


def test_the_template_has_the_last_word(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatRejected, match="no tools, please"):
        tokenizer.render_chat([ChatMessage("tool", "please")])


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[7].content }}", "{{ messages + 1 }}"],
)
def test_templates_are_kept_in_a_sandbox_and_their_errors_are_rejections(tmp_path: Path, template: str) -> None:
    config = {"chat_template": template}
    one = Tokenizer.load(write(tmp_path, byte_level(), tokenizer_config=config))
    with pytest.raises(ChatRejected):
        one.render_chat(MESSAGES)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    folder = write(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "default"
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%%') }} file")
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "% file"
    bare = Tokenizer.load(write(tmp_path / "bare", byte_level()))
    with pytest.raises(NoChatTemplate, match="bare has no chat template"):
        bare.render_chat(MESSAGES)


def test_end_tokens(tmp_path: Path) -> None:
    backend = byte_level()
    end = backend.token_to_id("</s>")
    assert Tokenizer.load(write(tmp_path / "a", backend)).eos_token_ids == (end,)
    spelt_out = write(tmp_path / "e", backend, tokenizer_config={"eos_token": {"content": "</s>", "lstrip": False}})
    assert Tokenizer.load(spelt_out).eos_token_ids == (end,)
    both = write(tmp_path / "b", backend, generation_config={"eos_token_id": [7, end]}, config={"eos_token_id": 9})
    assert Tokenizer.load(both).eos_token_ids == (7, end)
    only_config = write(tmp_path / "c", backend, tokenizer_config={}, config={"eos_token_id": 9})
    assert Tokenizer.load(only_config).eos_token_ids == (9,)
    assert Tokenizer.load(write(tmp_path / "d", backend, tokenizer_config={})).eos_token_ids == ()


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match=r"nowhere/tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    folder = write(tmp_path / "config", byte_level())
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(TokenizerUnusable, match=r"generation_config\.json does not hold a JSON object"):
        Tokenizer.load(folder)
    (folder / "generation_config.json").write_text("{]")
    with pytest.raises(TokenizerUnusable, match=r"generation_config\.json cannot be read"):
        Tokenizer.load(folder)
    broken = write(tmp_path / "template", byte_level(), tokenizer_config={"chat_template": "a\n{% if %}"})
    with pytest.raises(TokenizerUnusable, match=r"template is not valid: line 2"):
        Tokenizer.load(broken)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.CTC()])])
def test_a_decoder_that_cannot_go_token_by_token_is_refused(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(TokenizerUnusable, match="decoder"):
        Tokenizer.load(write(tmp_path, backend))


def _demo_like() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write(Path(folder), byte_level()))


DEMO_LIKE = _demo_like()
