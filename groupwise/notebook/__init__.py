"""GRPO in a notebook: set values, call five functions, look at results.

from groupwise.notebook import TrainingConfig, prepare_session, train_grpo, export_checkpoint, quick_test

config = TrainingConfig(dataset="arithmetic", num_batches=60)
session = prepare_session(config)
trainer_state = train_grpo(config, session)
export_checkpoint(config, trainer_state)
quick_test(config, session)
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.core.accelerators import accelerator
    from groupwise.notebook.config import ColabTrainingConfig, TrainingConfig
    from groupwise.notebook.connection import Connection, connect
    from groupwise.notebook.datasets import format_prompt, prepare_datasets, register_dataset
    from groupwise.notebook.evaluation import evaluate
    from groupwise.notebook.export import export_checkpoint
    from groupwise.notebook.hyperparameter_search import search
    from groupwise.notebook.quick import quick_test, run_full_pipeline
    from groupwise.notebook.rewards import create_reward_functions, register_reward
    from groupwise.notebook.rubrics import Criterion, Rubric, RubricSet, load_rubrics
    from groupwise.notebook.search_space import Between
    from groupwise.notebook.session import (
        ColabSession,
        Session,
        prepare_colab_session,
        prepare_session,
    )
    from groupwise.notebook.study import Search
    from groupwise.notebook.training import TrainerState, train_grpo

__all__ = [
    "Between",
    "ColabSession",
    "ColabTrainingConfig",
    "Connection",
    "Criterion",
    "Rubric",
    "RubricSet",
    "Search",
    "Session",
    "TrainerState",
    "TrainingConfig",
    "accelerator",
    "connect",
    "create_reward_functions",
    "evaluate",
    "export_checkpoint",
    "format_prompt",
    "load_rubrics",
    "prepare_colab_session",
    "prepare_datasets",
    "prepare_session",
    "quick_test",
    "register_dataset",
    "register_reward",
    "run_full_pipeline",
    "search",
    "train_grpo",
]

# tqdm warns on import if ipywidgets is missing; its bars (of downloads) are text then.
warnings.filterwarnings("ignore", message="IProgress not found")

_MODULES = {
    "Between": "search_space",
    "ColabSession": "session",
    "ColabTrainingConfig": "config",
    "Connection": "connection",
    "Criterion": "rubrics",
    "Rubric": "rubrics",
    "RubricSet": "rubrics",
    "Search": "study",
    "Session": "session",
    "TrainerState": "training",
    "TrainingConfig": "config",
    "accelerator": "config",
    "connect": "connection",
    "create_reward_functions": "rewards",
    "evaluate": "evaluation",
    "export_checkpoint": "export",
    "format_prompt": "datasets",
    "load_rubrics": "rubrics",
    "prepare_colab_session": "session",
    "prepare_datasets": "datasets",
    "prepare_session": "session",
    "quick_test": "quick",
    "register_dataset": "datasets",
    "register_reward": "rewards",
    "run_full_pipeline": "quick",
    "search": "hyperparameter_search",
    "train_grpo": "training",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"groupwise.notebook.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'groupwise.notebook' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
