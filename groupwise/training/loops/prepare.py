"""The parts of a training run that are known before a model is loaded, common to reinforcement learning and supervised training.

`rl_prepare` and `sft_prepare` add the parts of their commands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupwise.core.types import Example
from groupwise.engine.backends.tinker.saved import FILE, NOT_EXACT, starting_state
from groupwise.engine.models.chat_template import missing_turn_warning
from groupwise.engine.models.plan import ModelPlan
from groupwise.tasks.contract import Task
from groupwise.tasks.data.order import Order, restrict_shares
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rollouts.prompts import odd_prompts
from groupwise.training.callbacks.registry import Named
from groupwise.training.config import Loaded, LoadedConfig, resolved_values
from groupwise.training.loops.training import SharedConfig
from groupwise.training.placement import Layout, oversubscription_warning

if TYPE_CHECKING:
    from groupwise.training.placement import AnyConfig

ROWS_READ = "rows_read"
"""The run's fact with the number of rows that it reads from a stream of unknown length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is checked but not built."""

    loaded: LoadedConfig
    task: Task
    tokenizer: Any
    max_steps: int
    layout: Layout
    facts: dict[str, Any]
    """Fingerprints of everything that the config only names: the task, its files, the data as token ids, the base model, the held-out
    prompts. Also the number of rows that were read of a stream.
    """
    callbacks: tuple[Named, ...] = ()
    """The callbacks of the config. A task's own callbacks are created later, when the run's folder is known."""

    @property
    def config(self) -> SharedConfig:
        return self.loaded.config

    @property
    def run_name(self) -> str:
        return self.loaded.run_name


# --- the initial weights of a run -----------------------------------------------------------------


def check_start(loaded: LoadedConfig) -> None:
    """Raise `ModelError` if the run cannot start from its adapter. The message names the adapter by the option that the user gave."""
    model, lora = loaded.config.model, loaded.config.lora
    if model.adapter is None:
        return
    if model.backend == "tinker":
        starting_state(model)
        return
    from groupwise.engine.models.adapters import check_adapter

    in_config = loaded.tree.value(("model", "adapter")) == model.adapter
    check_adapter(model, lora, "model.adapter" if in_config else "--init-from")


def starting_from(loaded: Loaded, folder: Path) -> Loaded:
    """The config of a run that starts from the weights in a folder: an adapter, or a whole model."""
    key = key_of_weights(folder)
    reset_keys = {"adapter_revision": None} if key == "adapter" else {}
    model = loaded.config.model.model_copy(update={**reset_keys, key: str(folder)})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


def key_of_weights(folder: Path) -> Literal["adapter", "name"]:
    """The key of the `model` section for such weights: `adapter` for an adapter, `name` for a whole model."""
    names = ("adapter_config.json", FILE)
    return "adapter" if any((folder / name).is_file() for name in names) else "name"


# --- facts and plan ------------------------------------------------------------------------------


def task_facts(task: Task, rubric: Rubric | None = None) -> dict[str, Any]:
    """The task's name, its own facts, and a fingerprint of the files that contain its hooks and rewards."""
    names = dict.fromkeys((*task.files, *(rubric.files if rubric else ())))
    files = [file for file in map(Path, names) if file.is_file()]
    texts = [file.read_text(errors="replace") for file in files]
    return {**task.facts, "task": task.name, "task_file": digest(*texts) if texts else ""}


def row_counts(task: Task) -> dict[str, dict[str, dict[str, int]]]:
    """The number of rows of each hook that were left out or changed, by reason."""
    return {
        "rows_left_out": {k: dict(a.left_out) for k, a in task.accounts.items() if a.left_out},
        "rows_changed": {k: dict(a.changed) for k, a in task.accounts.items() if a.changed},
    }


def order_of(task: Task, hook: str, rows: Sequence[int], config: AnyConfig) -> Order:
    """The order in which a run draws the remaining rows of a hook; `rows` are their indices among all rows of the hook."""
    shares = restrict_shares(task.shares.get(hook, ()), rows)
    return Order(len(rows), config.training.seed, shuffle=config.data.shuffle, shares=shares)


def draws_per_epoch(order: Order, examples: int) -> dict[str, int]:
    """The plan's entry with the number of draws per epoch, if an epoch does not draw each example once."""
    return {} if order.length == examples else {"examples_drawn_in_an_epoch": order.length}


def digest(*parts: Any) -> str:
    """A fingerprint of plain values: 16 hex digits of a SHA-256."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def prompt_warnings(prepared: Prepared, examples: Sequence[Example]) -> list[str]:
    """Warnings about prompts that may not be as their author intended, and about text that was removed from them."""
    strip_warnings = [
        f"{count} prompts of {hook}: {change}"
        for hook, account in prepared.task.accounts.items()
        for change, count in account.changed.items()
        if "data.strip_tags" in change
    ]
    turn_warning = missing_turn_warning(prepared.tokenizer, examples[0].prompt)
    return [
        *([NOT_EXACT] if prepared.loaded.config.model.backend == "tinker" else []),
        *filter(None, [turn_warning]),
        *strip_warnings,
        *odd_prompts(prepared.tokenizer, examples),
    ]


def plan_of(
    prepared: Prepared,
    sizes: ModelPlan | None,
    *,
    counts: Mapping[str, Any],
    first_examples: Mapping[str, Any],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The output of a dry run: the resolved config, and the plan with the amount of work (`counts`) and first examples (`first_examples`).

    `sizes` is None if a service has the model.

    A warning about too many threads is added to `warnings`.
    """
    settings = resolved_values(prepared.config)
    thread_warning = oversubscription_warning(
        prepared.layout, elsewhere=prepared.config.run.server is not None
    )
    return {
        "config": {**settings, "run": {**settings["run"], "name": prepared.run_name}},
        "plan": {
            "task": prepared.task.described,
            **counts,
            **row_counts(prepared.task),
            **(
                {
                    "parameters": sizes.parameters,
                    "parameters_trained": sizes.trained_parameters,
                    "parameters_active": sizes.active_parameters,
                    "memory_mib": {
                        **{key: round(value) for key, value in asdict(sizes.memory).items()},
                        "total": round(sizes.memory.total),
                    },
                }
                if sizes is not None
                else {}
            ),
            "layout": asdict(prepared.layout),
            "warnings": [*filter(None, [thread_warning]), *warnings],
            **first_examples,
        },
    }
