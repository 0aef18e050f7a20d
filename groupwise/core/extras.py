"""Packages that only some commands need: which extra of Groupwise brings them, and what to type if they are not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence

from groupwise.core.errors import UsageError

DISTRIBUTION = "groupwise"
_CPU_TORCH = (
    " Without a GPU, install the CPU build of torch first, which is much smaller: "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu"
)


def require(extra: str, *packages: str, reason: str) -> None:
    """Raise UsageError unless these packages can be imported.

    `extra`: one or several, as in `pip install 'groupwise[launch,aws]'`. `reason`: who needs them, as in "The dashboard needs".
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(not_installed(extra, missing, reason))


def not_installed(extra: str, packages: Sequence[str], reason: str) -> str:
    """What to tell a user who lacks these packages."""
    verb = "is" if len(packages) == 1 else "are"
    told = f"{reason} {' and '.join(packages)}, which {verb} not installed: pip install '{DISTRIBUTION}[{extra}]'."
    return told + _CPU_TORCH * ("train" in extra and importlib.util.find_spec("torch") is None)


def extra_of(package: str) -> str | None:
    """The extra that brings this package to users; None if none does."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:  # a copy of the source that was not installed
        return None
    for requirement in requirements:
        found = re.match(r"([\w.-]++)[^;]*+;.*extra == ['\"]([\w-]+)", requirement)
        if found and found[1].replace("-", "_") == package and found[2] != "dev":
            return found[2]
    return None
