"""The pages for people name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.cli import cli
from model import sampling_params
from protos import inference_pb2, insights_pb2
from router import validation
from router.request import DEFAULT_PRIORITY

ROOT = Path(__file__).resolve().parents[2]
METRIC_FILES = [*ROOT.glob("*/metrics.py"), ROOT / "deploy" / "worker_metrics.py"]


def test_operations_lists_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    listed = set(re.findall(r"`(pdserve_\w+?)(?:_total)?[`{]", page))
    exported = {
        name.removesuffix("_total")
        for path in METRIC_FILES
        for name in re.findall(r'(?:Counter|Gauge|Histogram|Family)\(\s*"(pdserve_\w+)"', path.read_text())
    }
    assert len(exported) > 30
    assert listed == exported


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def test_grpc_page_tells_every_field_of_a_request_with_its_limits() -> None:
    page = (ROOT / "docs" / "grpc.md").read_text()
    requests = (inference_pb2.GenerateRequest, inference_pb2.ChatRequest, inference_pb2.SamplingParams)
    fields = {field.name for request in requests for field in request.DESCRIPTOR.fields}
    assert fields <= set(re.findall(r"`(\w+)`", page))
    rows = {name: row for row in re.findall(r"^\| .*$", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    for name, limits in {
        "request_id": (validation.MAX_REQUEST_ID_CHARACTERS,),
        "session_id": (validation.MAX_SESSION_ID_CHARACTERS,),
        "messages": (validation.MAX_MESSAGES,),
        "n": (validation.MAX_CHOICES,),
        "priority": (validation.MAX_PRIORITY, DEFAULT_PRIORITY),
        "temperature": (sampling_params.MAX_TEMPERATURE,),
        "logit_bias": (sampling_params.MAX_LOGIT_BIASES, sampling_params.MAX_LOGIT_BIAS),
        "stop_token_ids": (sampling_params.MAX_STOP_TOKEN_IDS,),
        "stop": (sampling_params.MAX_STOP_TEXTS, sampling_params.MAX_STOP_TEXT_BYTES),
        "logprobs": (sampling_params.MAX_LOGPROBS,),
        "prompt_logprobs": (sampling_params.MAX_LOGPROBS, validation.MAX_PROMPT_SCORES),
        "max_draft_tokens": (sampling_params.MAX_DRAFT_TOKENS,),
    }.items():
        told = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", rows[name])}
        assert set(limits) <= told, name


def test_grpc_page_tells_every_field_of_insights() -> None:
    told = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "grpc.md").read_text().partition("## Looking inside")[2]))
    messages = insights_pb2.DESCRIPTOR.message_types_by_name.values()
    answers = [message for message in messages if not message.name.endswith("Response")]
    missing = {
        f"{message.name}.{field.name}" for message in answers for field in message.fields if field.name not in told
    }
    assert not missing
    methods = {method.name for method in insights_pb2.DESCRIPTOR.services_by_name["Insights"].methods}
    assert methods <= told


@pytest.mark.parametrize("page", PAGES)
def test_files_named_exist(page: str) -> None:
    named = set(re.findall(r"[`(]((?:\w+/)+\w[\w-]*\.(?:py|proto|md))[`)]", (ROOT / page).read_text()))
    assert not {name for name in named if not (ROOT / name).exists()}


def test_readme_tells_every_command() -> None:
    """Those for keys are told where security is."""
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "security.md").read_text()
    told = set(re.findall(r"`pdserve (\w+)", pages))
    assert told | {"demo"} >= set(cli.commands)
