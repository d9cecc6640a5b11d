from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deploy.cli import cli
from deploy.plan_options import HARDWARE_NAMES
from deploy.quantity import told
from router.hardware import HARDWARE
from tests.router import model_configs as configs

TRAFFIC = ("--requests-per-min", "3000", "--prompt-tokens", "1500", "--answer-tokens", "800")
CHAPTER = (*TRAFFIC, "--ttft-ms", "300", "--percentile", "99")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("LLAMA_3_70B", "LLAMA_3_8B", "MIXTRAL_8X7B", "DEEPSEEK_V3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(getattr(configs, name)))
    return tmp_path


def planned(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    result = planned(*arguments, "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert isinstance(made, dict)
    return made


def test_a_plan_says_what_it_takes_and_does_in_a_few_lines(folder: Path) -> None:
    result = planned(folder / "LLAMA_3_70B", *CHAPTER, "--gpus", 32, "--price", 3)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 140
    assert len(lines) < 35
    for told_line in (
        "Separate pools: 16 prefill, 3 decode.",
        "  There are 32 GPUs, and 56 are needed. Weights in fp8 and KV in fp8 take 28.",
    ):
        assert told_line in lines
    rows = [line.split() for line in lines]
    assert ["prefill", "16", "2", "32", "69%", "70.56", "GB", "-", "1.445", "GB"] in rows
    assert ["KV", "sent", "24.58", "GB/s"] in rows
    assert ["cost", "per", "million", "answer", "tokens", "$1.17"] in rows
    assert ["fp8", "fp8", "8", "x", "2", "3", "x", "4", "28", "30"] in rows


def test_every_figure_is_explained(folder: Path) -> None:
    result = planned(folder / "LLAMA_3_70B", *CHAPTER, "--explain")
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    at = lines.index("KV per token = 327.7 kB")
    assert lines[at + 1 : at + 3] == ["2 * layers * kv_heads * head_dim * bytes", "2 * 80 * 8 * 128 * 2"]
    assert "KV per second = 24.58 GB/s" in lines


def test_json_has_sizes_and_formulas(folder: Path) -> None:
    made = document(folder / "LLAMA_3_70B", *CHAPTER, "--gpus", 32)
    sizes = ("num_prefill", "gpus_per_prefill_worker", "num_decode", "gpus_per_decode_worker", "num_gpus")
    assert [made[name] for name in sizes] == [16, 2, 3, 8, 56]
    assert (made["disaggregate"], made["within_budget"], made["kv_hides"]) == (True, False, True)
    kv = {each["name"]: each for each in made["figures"]["KV on the links"]}
    assert kv["KV per second"]["value"] == pytest.approx(24.576e9)
    assert kv["KV per second"]["formula"] == "requests_per_s * request"
    assert kv["KV per second"]["given"] == {"requests_per_s": 50, "request": 491_520_000}
    assert made["alternatives"][-1] == {
        "weights": "fp8",
        "kv": "fp8",
        "num_gpus": 28,
        "num_prefill": 8,
        "num_decode": 3,
        "reason": "",
    }


def test_experts_have_their_places_and_guesses_their_gain(folder: Path) -> None:
    asked = ("--hardware", "H200", "--ttft-ms", 2000, "--acceptance", 0.8, "--draft-cost", 0.05)
    result = planned(folder / "DEEPSEEK_V3", *TRAFFIC, *asked, "--decode-gpus", 16)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["domain", "0:", "GPUs", "0-7", "experts", "0-127"] in rows
    assert ["domain", "1:", "GPUs", "8-15", "experts", "128-255"] in rows
    assert any(row[:2] == ["share", "sent"] and row[-1] == "0.5" for row in rows)
    assert ["256", "5", "3.69", "11.2", "ms", "2.19", "x", "2.95", "x"] in rows


def test_own_figures_stand_for_those_of_the_table(folder: Path) -> None:
    given = ("--memory-gb", 96, "--network-gbit-s", 200, "--gpus-per-domain", 4)
    own = document(folder / "MIXTRAL_8X7B", *TRAFFIC, *given)
    hardware = own["hardware"]
    assert (hardware["memory_bytes"], hardware["network_bytes_per_s"], hardware["gpus_per_domain"]) == (96e9, 25e9, 4)
    assert hardware["memory_bytes_per_s"] == HARDWARE["H100"].memory_bytes_per_s


def test_traffic_can_be_that_of_a_trace(folder: Path) -> None:
    """Four requests in Azure's format: gaps of 1, 1 and 4 s, a mean of 2; 200 tokens in and 10 out on average."""
    trace = folder / "trace.csv"
    rows = ("00:00:00,100,10", "00:00:01,300,10", "00:00:02,100,10", "00:00:06,300,10")
    lines = ("TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 {row}" for row in rows))
    trace.write_text("".join(f"{line}\n" for line in lines))
    waits = {each["name"]: each["given"] for each in _prefill(document(folder / "LLAMA_3_70B", "--trace", trace))}
    assert waits["prefill, servers busy"]["requests_per_s"] == 0.5
    assert waits["prefill, mean wait"]["arrivals"] == pytest.approx(0.5)
    faster = document(folder / "LLAMA_3_70B", "--trace", trace, "--requests-per-min", 600, "--burstiness", 2)
    waits = {each["name"]: each["given"] for each in _prefill(faster)}
    assert waits["prefill, servers busy"]["requests_per_s"] == 10
    assert waits["prefill, mean wait"]["arrivals"] == 2
    cached = {each["name"]: each["given"] for each in faster["figures"]["a prompt"]}["cached tokens of a prompt"]
    assert cached["prompt"] == 200


def _prefill(made: dict[str, Any]) -> list[dict[str, Any]]:
    figures = made["figures"]["prefill pool"]
    assert isinstance(figures, list)
    return figures


def test_efficiency_and_shares_can_be_given(folder: Path) -> None:
    usual = document(folder / "LLAMA_3_70B", *TRAFFIC)
    better = document(folder / "LLAMA_3_70B", *TRAFFIC, "--prefill-efficiency", 0.7, "--memory-efficiency", 0.9)
    assert better["num_prefill"] < usual["num_prefill"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing option '--requests-per-min'"),
        (TRAFFIC[:4], "Missing option '--answer-tokens'"),
        (("--trace", "nowhere.csv"), "No such file"),
        ((*TRAFFIC[:4], "--answer-p90", "9"), "--answer-p90 needs --answer-tokens"),
        ((*TRAFFIC, "--hardware", "H900"), "'H900' is not one of"),
        ((*TRAFFIC, "--cache-hit-rate", "1"), "1.0 is not in the range 0<=x<1"),
        ((*TRAFFIC, "--draft-cost", "0.1"), "--draft and --draft-cost need --acceptance"),
        ((*TRAFFIC, "--prompt-p90", "9000"), "--prompt-tokens, 90th percentile, is 9000"),
        ((*TRAFFIC, "--decode-gpus", "1"), "does not fit: 141.1 GB of weights per GPU on 1 GPU"),
        ((*TRAFFIC, "--hardware", "A100", "--weights", "fp8"), "weights in fp8: A100 computes none"),
    ],
)
def test_what_cannot_be_planned_is_told(folder: Path, arguments: tuple[str, ...], complaint: str) -> None:
    result = planned(folder / "LLAMA_3_70B", *arguments)
    assert result.exit_code in (1, 2)
    assert complaint in result.output
    assert "Traceback" not in result.output


def test_a_draft_model_and_its_cost_are_one_too_many(folder: Path) -> None:
    draft = ("--acceptance", 0.8, "--draft", folder / "LLAMA_3_8B", "--draft-cost", 0.1)
    assert "--draft-cost is for guessing without a model" in planned(folder / "LLAMA_3_70B", *TRAFFIC, *draft).output


def test_a_folder_without_config_is_told(tmp_path: Path) -> None:
    assert "config.json cannot be read: No such file" in planned(tmp_path, *TRAFFIC).output


def test_help_names_the_hardware_there_is() -> None:
    assert tuple(HARDWARE) == HARDWARE_NAMES
    assert all(name == hardware.name and hardware.source for name, hardware in HARDWARE.items())


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (491_520_000, "B", "491.5 MB"),
        (24.576e9, "B/s", "24.58 GB/s"),
        (0.0214, "s", "21.4 ms"),
        (33.2e-6, "s", "33.2 us"),
        (0, "s", "0 ms"),
        (2.08e14, "FLOP", "208 TFLOP"),
        (70_553_706_496, "", "70,553,706,496"),
        (0.8333, "", "0.833"),
        (256, "", "256"),
        (1.1667, "$", "$1.167"),
    ],
)
def test_quantities_as_people_read_them(value: float, unit: str, text: str) -> None:
    assert told(value, unit) == text
