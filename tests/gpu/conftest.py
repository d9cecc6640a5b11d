"""Everything here needs a CUDA device: `pytest -m gpu` on a machine that has one.

Written on a machine without one: NOTHING in this folder has been run on a GPU yet. What could be checked there was: the
same parity and sampling checks with tensors that pretend (tests/model/test_pretended_cuda.py), and this folder's tests
with "cpu" in the place of "cuda", except for those of test_order.py, which are about queued work.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _needs_a_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
