"""The folder for files that can be downloaded or made again: models, paid verdicts, problems, Tunix's environment."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`$XDG_CACHE_HOME/groupwise/<kind>`, by default below `~/.cache` (XDG Base Directory Specification)."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "groupwise" / kind
