"""The whole system on this machine: real processes, real gRPC, real NIXL."""

from __future__ import annotations

import pytest

from tests.cluster.tiny_model import TinyModel, build_tiny_moe


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(build_tiny_moe(tmp_path_factory.mktemp("tiny-moe")))
