from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.tiny_model import build_tiny_moe


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_moe(tmp_path_factory.mktemp("tiny-model"))
