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
    from groupwise.callbacks.base import Callback
    from groupwise.checks.check import check
    from groupwise.checks.doctor import doctor
    from groupwise.evaluation.evaluate import EvalResult, evaluate
    from groupwise.generation.generate import GenerateResult, generate
    from groupwise.loops.rl_start import RlResult, rl
    from groupwise.loops.sft_start import SftResult, sft

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
    "Callback": "groupwise.callbacks.base",
    "EvalResult": "groupwise.evaluation.evaluate",
    "GenerateResult": "groupwise.generation.generate",
    "RlResult": "groupwise.loops.rl_start",
    "SftResult": "groupwise.loops.sft_start",
    "check": "groupwise.checks.check",
    "doctor": "groupwise.checks.doctor",
    "evaluate": "groupwise.evaluation.evaluate",
    "generate": "groupwise.generation.generate",
    "rl": "groupwise.loops.rl_start",
    "sft": "groupwise.loops.sft_start",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
