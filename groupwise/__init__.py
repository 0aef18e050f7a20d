"""Groupwise: reinforcement learning of language models with group-relative methods.

    import groupwise
    groupwise.rl("configs/quickstart.yaml", "examples/01_first_task/task.py")
    groupwise.evaluate("configs/quickstart.yaml", "examples/01_first_task/task.py", policy="quickstart")

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.api.client import AsyncTrainingClient, TrainingClient
    from groupwise.core.errors import (
        CallbackError,
        CheckpointError,
        ConfigError,
        EndpointError,
        EnvironmentWorkerError,
        GroupwiseError,
        ModelError,
        NonFiniteError,
        NothingScoredError,
        OutOfMemoryError,
        PolicyMismatchError,
        ResumeMismatchError,
        RewardWorkerError,
        RunError,
        RunInUseError,
        RunNotFoundError,
        SandboxError,
        StoreError,
        TaskError,
        UsageError,
        WorkerLostError,
    )
    from groupwise.core.types import Completion, Example, Group, RewardPart, Rollout, Segment
    from groupwise.runs.store import Store
    from groupwise.tasks.environment import Step
    from groupwise.tasks.rewards import get_reward_funcs
    from groupwise.tasks.rewards.registry import reward
    from groupwise.tasks.tools import TextCalls, Tools
    from groupwise.training.callbacks.base import Callback
    from groupwise.training.checks.check import check
    from groupwise.training.checks.doctor import doctor
    from groupwise.training.evaluation.evaluate import EvalResult, evaluate
    from groupwise.training.generation.generate import GenerateResult, generate
    from groupwise.training.loops.rl_start import RlResult, rl
    from groupwise.training.loops.sft_start import SftResult, sft

__version__ = "0.1.0"
__all__ = [
    "AsyncTrainingClient",
    "Callback",
    "CallbackError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "EndpointError",
    "EnvironmentWorkerError",
    "EvalResult",
    "Example",
    "GenerateResult",
    "Group",
    "GroupwiseError",
    "ModelError",
    "NonFiniteError",
    "NothingScoredError",
    "OutOfMemoryError",
    "PolicyMismatchError",
    "ResumeMismatchError",
    "RewardPart",
    "RewardWorkerError",
    "RlResult",
    "Rollout",
    "RunError",
    "RunInUseError",
    "RunNotFoundError",
    "SandboxError",
    "Segment",
    "SftResult",
    "Step",
    "Store",
    "StoreError",
    "TaskError",
    "TextCalls",
    "Tools",
    "TrainingClient",
    "UsageError",
    "WorkerLostError",
    "__version__",
    "check",
    "doctor",
    "evaluate",
    "generate",
    "get_reward_funcs",
    "reward",
    "rl",
    "sft",
]

_NAMES = {
    "groupwise.api.client": "AsyncTrainingClient TrainingClient",
    "groupwise.core.errors": (
        "CallbackError CheckpointError ConfigError EndpointError EnvironmentWorkerError "
        "GroupwiseError ModelError NonFiniteError NothingScoredError OutOfMemoryError "
        "PolicyMismatchError ResumeMismatchError RewardWorkerError RunError RunInUseError "
        "RunNotFoundError SandboxError StoreError TaskError UsageError WorkerLostError"
    ),
    "groupwise.core.types": "Completion Example Group RewardPart Rollout Segment",
    "groupwise.runs.store": "Store",
    "groupwise.tasks.environment": "Step",
    "groupwise.tasks.rewards": "get_reward_funcs",
    "groupwise.tasks.rewards.registry": "reward",
    "groupwise.tasks.tools": "TextCalls Tools",
    "groupwise.training.callbacks.base": "Callback",
    "groupwise.training.checks.check": "check",
    "groupwise.training.checks.doctor": "doctor",
    "groupwise.training.evaluation.evaluate": "EvalResult evaluate",
    "groupwise.training.generation.generate": "GenerateResult generate",
    "groupwise.training.loops.rl_start": "RlResult rl",
    "groupwise.training.loops.sft_start": "SftResult sft",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
