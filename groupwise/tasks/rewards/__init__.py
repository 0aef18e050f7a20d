"""Rewards, for code that scores completions without a run: `groupwise.tasks.rewards.get_reward_funcs(names, config)`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.tasks.rewards.registry import get_reward_funcs

__all__ = ["get_reward_funcs"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("groupwise.tasks.rewards.registry"), name)
    raise AttributeError(f"module 'groupwise.tasks.rewards' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
