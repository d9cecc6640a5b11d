"""Who may import whom, read from the source; and what importing a package costs, seen in a process of its own."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ALLOWED = {
    "protos": set[str](),
    "model": set[str](),
    "kvtransfer": {"protos", "model"},
    "prefill": {"protos", "model", "kvtransfer"},
    "decode": {"protos", "model", "kvtransfer"},
    "router": {"protos", "model"},
    "deploy": {"protos", "model", "kvtransfer", "prefill", "decode", "router"},
    "bench": {"protos", "model", "kvtransfer", "prefill", "decode", "router", "deploy"},
}
OURS = {*ALLOWED, "tests"}

FORBIDDEN_LIBRARIES = {
    "protos": {"torch", "nixl", "transformers", "tokenizers"},
    "model": {"grpc", "google", "nixl", "prometheus_client", "ray", "redis"},
    "kvtransfer": {"transformers", "tokenizers"},
    "router": {"torch", "nixl", "transformers"},
}

# Of model, the router and the hand-over see what needs no weights.
MODEL_SEEN_BY = {
    "router": {
        "block_pool",
        "cache_folder",
        "chat_template",
        "checkpoint",
        "config",
        "demo_models",
        "grammar",
        "kv_layout",
        "model_source",
        "sampling_params",
        "tokenizer",
    },
    "kvtransfer": {
        "block_codes",
        "block_pool",
        "block_sums",
        "grammar",
        "kv_cache",
        "kv_layout",
        "prompt_scores",
        "runner",
        "sampling_params",
        "sequence",
    },
}

ONLY_FILE = {
    "nixl": "kvtransfer/nixl_agent.py",
    "opentelemetry": "protos/otlp.py",
    "ray": None,
    "redis": "router/redis_store.py",
}

# The edges, where messages become our own dataclasses and back.
EDGES = {
    "decode/bundles.py",
    "decode/metrics.py",
    "decode/direct.py",
    "decode/service.py",
    "deploy/fault_seams.py",
    "deploy/inside.py",
    "deploy/reporter.py",
    "deploy/worker.py",
    "kvtransfer/decode_client.py",
    "kvtransfer/messages.py",
    "kvtransfer/sequence_messages.py",
    "prefill/metrics.py",
    "prefill/service.py",
    "router/answering.py",
    "router/attempt.py",
    "router/choices.py",
    "router/dashboard/asking.py",
    "router/echo.py",
    "router/kserve_messages.py",
    "router/kserve_service.py",
    "router/kserve_tensors.py",
    "router/bundle.py",
    "router/insights_service.py",
    "router/leg.py",
    "router/merging.py",
    "router/messages.py",
    "router/metrics.py",
    "router/move.py",
    "router/openai_requests.py",
    "router/openai_responses.py",
    "router/plan_messages.py",
    "router/plans_service.py",
    "router/pools_service.py",
    "router/progress.py",
    "router/relay.py",
    "router/request_summary.py",
    "router/server.py",
    "router/service.py",
    "router/step_messages.py",
    "router/timeline.py",
    "router/validation.py",
}

SUBFOLDERS = {"model/kernels", "router/dashboard"}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base", "types", "misc"}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_DOCSTRING_LINES = 7


def source_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names, `from a import b` as a.b; under TYPE_CHECKING and inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)}


ALL_FILES = [path for folder in ALLOWED for path in source_files(folder)]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_only_what_it_may(package: str) -> None:
    for path in source_files(package):
        forbidden = (imported_packages(path) & OURS) - ALLOWED[package] - {package}
        assert not forbidden, f"{relative(path)} imports {forbidden}"


@pytest.mark.parametrize("package", FORBIDDEN_LIBRARIES)
def test_keeps_away_from_libraries(package: str) -> None:
    for path in source_files(package):
        forbidden = imported_packages(path) & FORBIDDEN_LIBRARIES[package]
        assert forbidden <= {name for name in forbidden if ONLY_FILE.get(name) == relative(path)}, relative(path)


@pytest.mark.parametrize("package", MODEL_SEEN_BY)
def test_sees_of_model_what_it_needs(package: str) -> None:
    for path in source_files(package):
        seen = {name.split(".")[1] for name in imported_modules(path) if name.startswith("model.")}
        assert seen <= MODEL_SEEN_BY[package], f"{relative(path)} imports model.{seen - MODEL_SEEN_BY[package]}"


@pytest.mark.parametrize("library", ONLY_FILE)
def test_one_file_knows_the_library(library: str) -> None:
    importing = {relative(path) for path in ALL_FILES if library in imported_packages(path)}
    expected = ONLY_FILE[library]
    assert importing == ({expected} if expected else set())


def test_generated_code_stays_at_the_edges() -> None:
    importing = {
        relative(path)
        for path in ALL_FILES
        if any(part.endswith(("_pb2", "_pb2_grpc")) for name in imported_modules(path) for part in name.split("."))
    }
    assert {name for name in importing if not name.startswith(("protos/", "bench/"))} <= EDGES
    assert {name for name in EDGES if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("package", ALLOWED)
def test_comes_from_the_checkout(package: str) -> None:
    assert Path(str(importlib.import_module(package).__file__)) == ROOT / package / "__init__.py"


def modules_after(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that ran the statement."""
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_router_is_light() -> None:
    names = [path.relative_to(ROOT).with_suffix("") for path in source_files("router") if path.stem != "__main__"]
    assert "grpc" in (loaded := modules_after("\n".join(f"import {'.'.join(name.parts)}" for name in names)))
    assert not loaded & {"torch", "nixl", "transformers", "numpy"}


def test_command_line_starts_light() -> None:
    assert "click" in (loaded := modules_after("import deploy.cli"))
    assert not loaded & {"torch", "nixl", "transformers"}


def test_model_speaks_no_network() -> None:
    names = [path.relative_to(ROOT).with_suffix("") for path in source_files("model") if path.stem != "__main__"]
    assert "torch" in (loaded := modules_after("\n".join(f"import {'.'.join(name.parts)}" for name in names)))
    assert not loaded & {"grpc", "nixl", "prometheus_client"}


def test_packages_are_flat() -> None:
    folders = {relative(path.parent) for path in ALL_FILES} - ALLOWED.keys()
    assert folders <= SUBFOLDERS


def test_every_package_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(packages) == {relative(path.parent).replace("/", ".") for path in ALL_FILES}


@pytest.mark.parametrize("path", ALL_FILES, ids=relative)
def test_file_is_in_the_house_style(path: Path) -> None:
    assert path.stem not in BANNED_NAMES
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    assert docstring, "a module says in its docstring what it knows"
    assert len(docstring.splitlines()) <= MAX_DOCSTRING_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{node.name} has {num_lines} lines"
