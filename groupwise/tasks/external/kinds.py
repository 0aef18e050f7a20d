"""The kinds of environments that play by themselves, by the word before the colon in `--task-module KIND:NAME`.

A kind is a bridge: a script for the environment's own Python, which adapts one library to the calls of decision 0075.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvironmentKind:
    """One kind of environment."""

    script: str
    """Its bridge, a file of `bridges/`."""
    library: str
    """The package that an environment of this kind needs."""
    home: str
    """Where users can find such environments, for error messages."""
    environment: str | None = None
    """The installed environment, if the task does not name one; None: that of the name after the colon."""
    programs: tuple[str, ...] = ()
    """Further packages whose programs it runs."""


KINDS = {
    "verifiers": EnvironmentKind(
        "verifiers_bridge.py",
        "verifiers",
        "https://app.primeintellect.ai/dashboard/environments",
        programs=("uv",),  # runs the programs of harnesses
    ),
    "textarena": EnvironmentKind(
        "textarena_bridge.py",
        "textarena",
        "https://github.com/LeonGuertler/TextArena",
        environment="text-games",
    ),
    "openenv": EnvironmentKind(
        "openenv_bridge.py",
        "openenv",
        "https://github.com/meta-pytorch/OpenEnv",
        environment="openenv",
    ),
}


def split_spec(spec: object) -> tuple[str, str] | None:
    """Kind and name of a spec such as `verifiers:wordle`; None for every other one."""
    if not isinstance(spec, str):
        return None
    kind, colon, name = spec.partition(":")
    return (kind, name) if colon and kind in KINDS else None
