#!/usr/bin/env python3
"""Make the Ray present that the tests of `groupwise launch ray` talk to, in an environment of its own: 380 MB, half a minute.

It lies in the user's cache, by its release, and is found made by all later calls; one that was cut off leaves nothing that is taken for
whole. Nothing is started here: the tests start each head and node as children of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

RELEASE = "2.60.0"
PACKAGE = f"ray[default]=={RELEASE}"
"""With its dashboard, whose API jobs are given to."""


def main() -> int:
    """Make it, if it is not there."""
    folder = where()
    if folder.exists():
        return 0
    print(f"Making an environment with {PACKAGE} in {folder}")
    return 0 if made(folder) else 1


def where() -> Path:
    """Ray's, for this Python."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(cache, "groupwise", "real-ray", f"{RELEASE}-{python}")


def made(folder: Path) -> bool:
    """Beside its place, and moved there when it is whole. Its programs name an interpreter that is not there any more: none is used."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    try:
        venv.create(new, with_pip=True, symlinks=True)
        command = [str(new / "bin/python"), "-m", "pip", "install", "-qq", PACKAGE]
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
            print(f"{PACKAGE} cannot be installed: see above", file=sys.stderr)
            return False
        new.chmod(0o755)
        if not folder.exists():
            new.rename(folder)
        return True
    finally:
        shutil.rmtree(new, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
