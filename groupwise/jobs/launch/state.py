"""Where this machine keeps what it knows of launched jobs."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder(kind: str) -> Path:
    """`$XDG_STATE_HOME/groupwise/<kind>`, by default below `~/.local/state` (XDG Base Directory Specification)."""
    root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(root) / "groupwise" / kind
