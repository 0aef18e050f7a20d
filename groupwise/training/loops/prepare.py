"""The parts of a training run that are known before a model is loaded, for rewards and teachers alike.

`rl_prepare` and `sft_prepare` find it out, each for its command; what they share is here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from groupwise.core.types import Example
from groupwise.engine.models.chat_template import unannounced
from groupwise.engine.models.plan import ModelPlan
from groupwise.tasks.contract import Task
from groupwise.tasks.data.order import Order, among
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rollouts.prompts import odd_prompts
from groupwise.training.callbacks.registry import Named
from groupwise.training.config import Loaded, LoadedConfig, resolved
from groupwise.training.loops.training import TrainedBy
from groupwise.training.placement import AnyConfig, Layout, crowding

ROWS_READ = "rows_read"
"""The fact about a run that says how many rows of a stream without a length it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is checked but not built."""

    loaded: LoadedConfig
    task: Task
    tokenizer: Any
    max_steps: int
    layout: Layout
    facts: dict[str, Any]
    """Fingerprints of what the config only names: task, its file, the data as token ids, the base model, what held-out examples
    ask; how many rows of a stream were read."""
    callbacks: tuple[Named, ...] = ()
    """The callbacks of the config; a task's own are made when the run's folder is known."""

    @property
    def config(self) -> TrainedBy:
        return self.loaded.config

    @property
    def run_name(self) -> str:
        return self.loaded.run_name


# --- the weights that a run starts from ----------------------------------------------------------


def check_start(loaded: LoadedConfig) -> None:
    """Raise `ModelError` if the run cannot start from its adapter, called as the user gave it."""
    model, lora = loaded.config.model, loaded.config.lora
    if model.adapter is None:
        return
    from groupwise.engine.models.adapters import check_adapter

    in_config = loaded.tree.value(("model", "adapter")) == model.adapter
    check_adapter(model, lora, "model.adapter" if in_config else "--init-from")


def starting_from(loaded: Loaded, folder: Path) -> Loaded:
    """The config of a run that begins with the weights in a folder: an adapter, or a whole model."""
    key = key_of_weights(folder)
    of_another = {"adapter_revision": None} if key == "adapter" else {}
    model = loaded.config.model.model_copy(update={**of_another, key: str(folder)})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


def key_of_weights(folder: Path) -> Literal["adapter", "name"]:
    """The key of the `model` section that names such weights: those of an adapter, or a whole model."""
    return "adapter" if (folder / "adapter_config.json").is_file() else "name"


# --- facts and plan ------------------------------------------------------------------------------


def task_facts(task: Task, rubric: Rubric | None = None) -> dict[str, Any]:
    """The task's name, a fingerprint of the files that its hooks and its rewards stand in, and what it says of itself."""
    names = dict.fromkeys((*task.files, *(rubric.files if rubric else ())))
    files = [file for file in map(Path, names) if file.is_file()]
    texts = [file.read_text(errors="replace") for file in files]
    return {**task.facts, "task": task.name, "task_file": digest(*texts) if texts else ""}


def rows_told(task: Task) -> dict[str, dict[str, dict[str, int]]]:
    """Counts of rows that were left out or changed, with the reason, by hook."""
    return {
        "rows_left_out": {k: dict(a.left_out) for k, a in task.accounts.items() if a.left_out},
        "rows_changed": {k: dict(a.changed) for k, a in task.accounts.items() if a.changed},
    }


def order_of(task: Task, hook: str, rows: Sequence[int], config: AnyConfig) -> Order:
    """The order in which a run draws what is left of a hook's rows, given by their places among these."""
    shares = among(task.shares.get(hook, ()), rows)
    return Order(len(rows), config.training.seed, shuffle=config.data.shuffle, shares=shares)


def drawn_in_an_epoch(order: Order, examples: int) -> dict[str, int]:
    """A plan's entry for epochs that do not draw each example once."""
    return {} if order.length == examples else {"examples_drawn_in_an_epoch": order.length}


def digest(*parts: Any) -> str:
    """A short fingerprint of plain values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def prompt_warnings(prepared: Prepared, examples: Sequence[Example]) -> list[str]:
    """Warnings about prompts that may not be what their author means, and about text that was taken out of them."""
    stripped = [
        f"{count} prompts of {hook}: {what}"
        for hook, account in prepared.task.accounts.items()
        for what, count in account.changed.items()
        if "data.strip_tags" in what
    ]
    unheard = unannounced(prepared.tokenizer, examples[0].prompt)
    return [*filter(None, [unheard]), *stripped, *odd_prompts(prepared.tokenizer, examples)]


def plan_of(
    prepared: Prepared,
    sizes: ModelPlan,
    *,
    counts: Mapping[str, Any],
    shown: Mapping[str, Any],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The output of a dry run: the resolved config and the plan, with the amount of work (`counts`) and its beginning (`shown`).

    Too many threads are warned of beside `warnings`.
    """
    settings = resolved(prepared.config)
    crowded = crowding(prepared.layout, elsewhere=prepared.config.run.server is not None)
    return {
        "config": {**settings, "run": {**settings["run"], "name": prepared.run_name}},
        "plan": {
            "task": prepared.task.described,
            **counts,
            **rows_told(prepared.task),
            "parameters": sizes.parameters,
            "parameters_trained": sizes.trained_parameters,
            "memory_mib": {
                **{key: round(value) for key, value in asdict(sizes.memory).items()},
                "total": round(sizes.memory.total),
            },
            "layout": asdict(prepared.layout),
            "warnings": [*filter(None, [crowded]), *warnings],
            **shown,
        },
    }
