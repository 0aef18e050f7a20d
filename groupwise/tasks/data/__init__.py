"""Data, for code that keeps a replay buffer without a run: `groupwise.tasks.data.ReplayBuffer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.tasks.data.replay import ReplayBuffer

__all__ = ["ReplayBuffer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("groupwise.tasks.data.replay"), name)
    raise AttributeError(f"module 'groupwise.tasks.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
