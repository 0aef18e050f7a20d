"""Packages that only some commands need: which extra of Groupwise brings them, and what to type if they are not installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from groupwise.core.errors import UsageError

DISTRIBUTION = "groupwise"
CPU_TORCH = "torch --index-url https://download.pytorch.org/whl/cpu"


def require_packages(subject: str, extra: str, *packages: str, advice: str = "") -> None:
    """Raise UsageError unless the packages are installed that `subject` needs.

    `extra` of groupwise brings them: one or several, as in `pip install 'groupwise[launch,aws]'`.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(not_installed(subject, extra, *missing) + advice)


def not_installed(subject: str, extra: str, *packages: str) -> str:
    """The message for a user who lacks these packages: how to install the extra that brings them."""
    verb = "is" if len(packages) == 1 else "are"
    *others, last = packages
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{subject} needs {names}, which {verb} not installed: {how_to_install(extra)}"


def how_to_install(extra: str) -> str:
    """The command that installs this extra; for `train` also the one for the CPU build of torch, if no torch is installed."""
    advice = f"{install_command(extra)}."
    if "train" in extra and importlib.util.find_spec("torch") is None:
        advice += f" Without a GPU, install the CPU build of torch first, which is much smaller: {_pip_install()} {CPU_TORCH}"
    return advice


def install_command(extra: str) -> str:
    """The command that adds what an extra brings to this environment."""
    return f"{_pip_install()} '{DISTRIBUTION}[{extra}]'"


def _pip_install() -> str:
    """How packages are added here: by pip, but pipx hides its environments from it, uv makes some without it, and in a notebook it is a
    magic."""
    if "ipykernel" in sys.modules:
        return "%pip install"
    environment = Path(sys.prefix)
    if (environment / "pipx_metadata.json").is_file():
        return f"pipx runpip {DISTRIBUTION} install"
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {environment}"
    return "pip install"


def extra_of(package: str) -> str | None:
    """The extra that brings this package to users; None if none does."""
    from importlib import metadata

    try:
        requirements = metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:  # a copy of the source that was not installed
        return None
    for requirement in requirements:
        found = re.match(r"([\w.-]++)[^;]*+;.*extra == ['\"]([\w-]+)", requirement)
        if found and found[1].replace("-", "_") == package and found[2] != "dev":
            return found[2]
    return None
