"""Remake constraints.txt: `.venv/bin/python scripts/lock.py`, and nothing else.

uv resolves pyproject.toml with all extras but those in APART for every platform and Python at once. Two things are then left out: the CUDA
packages (a CPU machine must never download them; the CUDA build of torch pins its own) and hashes, which make `pip install -e`
fail. torch stands at the release that `tool.groupwise.bootstrap` names.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"

CUDA_ONLY = re.compile(r"(nvidia-|cuda-|triton\b)")
HEADER = """\
# Made by `.venv/bin/python scripts/lock.py`: every release that the tests ran with, for all platforms. Do not edit.
# Used as `pip install -c constraints.txt -e '.[train,dev]'`. CUDA's own packages are not here: torch pins them.
"""


APART = {"unsloth"}
"""Extras that go with older releases than the others."""


def main() -> int:
    """Resolve, filter, write."""
    lines = [line for line in resolve().splitlines() if not CUDA_ONLY.match(line)]
    CONSTRAINTS.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{CONSTRAINTS.name}: {len(lines)} releases")
    return 0


def resolve() -> str:
    """What `uv pip compile` prints, one line for each release."""
    project = tomllib.loads(PYPROJECT.read_text())
    torch = project["tool"]["groupwise"]["bootstrap"]["torch"]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        pins.write_text(f"torch=={torch}\n")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
        for extra in sorted(project["project"]["optional-dependencies"].keys() - APART):
            command += ["--extra", extra]
        command += ["--python-version", "3.11", "--upgrade", "--no-header"]
        command += ["--no-annotate", "--no-config", "--constraint", str(pins), PYPROJECT.name]
        return subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout


if __name__ == "__main__":
    sys.exit(main())
