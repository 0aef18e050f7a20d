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
    from groupwise.training.callbacks.base import Callback
    from groupwise.training.checks.check import check
    from groupwise.training.checks.doctor import doctor
    from groupwise.training.evaluation.evaluate import EvalResult, evaluate
    from groupwise.training.generation.generate import GenerateResult, generate
    from groupwise.training.loops.rl_start import RlResult, rl
    from groupwise.training.loops.sft_start import SftResult, sft

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "EvalResult",
    "GenerateResult",
    "RlResult",
    "SftResult",
    "__version__",
    "check",
    "doctor",
    "evaluate",
    "generate",
    "rl",
    "sft",
]

_HOMES = {
    "Callback": "groupwise.training.callbacks.base",
    "EvalResult": "groupwise.training.evaluation.evaluate",
    "GenerateResult": "groupwise.training.generation.generate",
    "RlResult": "groupwise.training.loops.rl_start",
    "SftResult": "groupwise.training.loops.sft_start",
    "check": "groupwise.training.checks.check",
    "doctor": "groupwise.training.checks.doctor",
    "evaluate": "groupwise.training.evaluation.evaluate",
    "generate": "groupwise.training.generation.generate",
    "rl": "groupwise.training.loops.rl_start",
    "sft": "groupwise.training.loops.sft_start",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
