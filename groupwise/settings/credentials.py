"""Keys that look like credentials. Configs are stored with their runs and shared, so secrets never stand in one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from groupwise.settings.schema import KeyPath
from groupwise.settings.tree import Tree

_SECRET = re.compile(
    r"^token$|(^|_)(api_?key|passwd|password|secret|secret_key)$"
    r"|(^|_)(access|api|auth|bearer|hf|hub|wandb)_token$",
    re.IGNORECASE,
)


def is_secret(key: str) -> bool:
    """Whether the value of such a key is a credential, which no message may show."""
    return _SECRET.search(key) is not None


def secrets_in(tree: Tree, at: KeyPath) -> list[str]:
    """A problem for each key below `at` that looks like a credential: configs are stored and shared, secrets are not."""
    return _secrets(tree, tree.value(at), at)


def _secrets(tree: Tree, section: Any, at: KeyPath) -> list[str]:
    if isinstance(section, list):
        return [found for item in cast("list[Any]", section) for found in _secrets(tree, item, at)]
    if not isinstance(section, Mapping):
        return []
    problems: list[str] = []
    for key, value in cast("Mapping[str, Any]", section).items():
        path = (*at, key)
        if is_secret(key) and isinstance(value, str):
            problems.append(f"{tree.origin(path)}: {explain_secret(path)}")
        problems += _secrets(tree, value, path)
    return problems


def explain_secret(path: KeyPath) -> str:
    """What to do instead of writing a credential into a config."""
    return (
        f"{'.'.join(path)} looks like a secret; secrets never stand in a config, which is stored with the run. "
        "Set it as an environment variable and read it from there."
    )
