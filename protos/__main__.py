"""`python -m protos` writes the generated code anew; with `--check` it fails if what is checked in is stale."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(folder: Path) -> dict[str, str]:
    """Compiles every .proto into `folder`; returns the generated files by their path from the root.

    In a process of its own: once the compiler is loaded, importing nixl aborts the process.
    """
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python")]
    types = [f"--mypy_out=quiet:{folder}", f"--mypy_grpc_out=quiet,only_async:{folder}"]
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *_plugins("mypy", "mypy_grpc")]
    done = subprocess.run([*compiler, *outputs, *types, *sources], check=False)
    if done.returncode != 0:
        raise SystemExit(f"protoc ended with status {done.returncode}")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py*"))}


def _plugins(*names: str) -> list[str]:
    """From this interpreter's environment, whether or not that is active."""
    return [f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}" for name in names]


def stale_files(generated: dict[str, str]) -> list[str]:
    """Files that differ from what the .proto files say, are missing, or have no .proto any more."""
    present = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "protos").glob("*_pb2*.py*")}
    return sorted(name for name in generated.keys() | present.keys() if generated.get(name) != present.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m protos", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generated = generate(Path(folder))
    stale = stale_files(generated)
    if check and stale:
        raise SystemExit(f"stale: {', '.join(stale)}; run python -m protos")
    for name in () if check else stale:
        if name in generated:
            (ROOT / name).write_text(generated[name])
        else:
            (ROOT / name).unlink()
    print(f"{len(generated)} files are fresh" if check else f"{len(stale)} of {len(generated)} files written")


if __name__ == "__main__":
    main()
