"""Asks for Mooncake's rates, from `bench.handover_mooncake` under an interpreter that has its transfer engine.

The wheel `mooncake-transfer-engine-non-cuda` has one, for which the system's libibverbs must be there; over TCP it is
used without RDMA. It has no shared memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from model.kv_layout import KVLayout

_SCRIPT = Path(__file__).with_name("handover_mooncake.py")
_LIMIT_S = 300.0
_QUIET = {"GLOG_minloglevel": "2"}  # errors alone


class MooncakeUnusable(Exception):
    """The message says why, in the engine's or the interpreter's own words."""


def mooncake_rates(
    python: str, layout: KVLayout, num_blocks: int, counts: Sequence[int], num_rounds: int
) -> dict[int, float]:
    """Bytes per second by number of blocks that are written: medians.

    Raises:
        MooncakeUnusable: this interpreter cannot run it here.
    """
    plan = {
        "num_layers": layout.num_layers,
        "layer_block_bytes": layout.layer_block_bytes,
        "num_blocks": num_blocks,
        "counts": list(counts),
        "num_rounds": num_rounds,
    }
    command = [python, str(_SCRIPT), json.dumps(plan)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_LIMIT_S, env=_QUIET | os.environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MooncakeUnusable(str(error)) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise MooncakeUnusable(f"exit code {done.returncode}: {' / '.join(done.stderr.splitlines()[-3:])}")
    found = json.loads(lines[-1])
    if "error" in found:
        raise MooncakeUnusable(found["error"])
    seconds = {int(count): statistics.median(took_s) for count, took_s in found["seconds"].items()}
    return {count: count * layout.block_bytes / took_s for count, took_s in seconds.items()}
