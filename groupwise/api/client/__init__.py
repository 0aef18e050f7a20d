"""Clients of the training server: `from groupwise.api.client import TrainingClient, train`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.api.client.async_training_client import AsyncTrainingClient
    from groupwise.api.client.loop import train
    from groupwise.api.client.request_bodies import rewards_for
    from groupwise.api.client.training_client import TrainingClient

__all__ = ["AsyncTrainingClient", "TrainingClient", "rewards_for", "train"]

_MODULES = {
    "AsyncTrainingClient": "async_training_client",
    "TrainingClient": "training_client",
    "rewards_for": "request_bodies",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"groupwise.api.client.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'groupwise.api.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
