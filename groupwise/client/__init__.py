"""Clients of the training server: `from groupwise.client import TrainingClient, train`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.client.async_training_client import AsyncTrainingClient
    from groupwise.client.calls import rewards_for
    from groupwise.client.loop import train
    from groupwise.client.training_client import TrainingClient

__all__ = ["AsyncTrainingClient", "TrainingClient", "rewards_for", "train"]

_ROOMS = {
    "AsyncTrainingClient": "async_training_client",
    "TrainingClient": "training_client",
    "rewards_for": "calls",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f"groupwise.client.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'groupwise.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
