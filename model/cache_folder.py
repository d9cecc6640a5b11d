"""Where on this machine pdserve keeps what it has made and can make again: the demo models, the compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    return Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve")
