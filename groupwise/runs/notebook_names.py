"""Names of settings in a notebook: errors and advice that a notebook shows name what its config can set.

Advice on a run is made of its record alone, here; errors are reworded by `groupwise.notebook.core.by_own_names`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FACTS = "notebook"
"""The fact about a run that holds `groupwise.notebook.identity.facts_of`; runs of a notebook have it."""
OWN_NAMES = {
    "run.name": "checkpoint_dir",
    "run.dir": "checkpoint_dir",
    "run.processes": "devices",
    "run.report_to": "report_to",
    "model.name": "model",
    "model.mesh": "devices",
    "lora.r": "lora_rank",
    "sampler.max_completion_length": "total_generation_steps",
    "data.max_prompt_length": "max_prompt_length",
    "algorithm.beta": "beta",
    "algorithm.epsilon": "epsilon",
    "training.prompts_per_step": "batch_size",
    "training.num_generations": "num_generations",
    "training.num_iterations": "num_iterations",
    "training.learning_rate": "learning_rate",
    "training.seed": "seed",
}
"""Keys of the core, with their names in a notebook's config."""
_NOT_HERE = (
    ", or set data.max_prompt_length=null to have none",
    " (rollout.max_rollout_length in environments)",
    "; in a terminal, --resume continues it from its last checkpoint",
)
"""Remedies that a notebook does not have; they are left out."""
_OVERRIDABLE = re.compile(
    r"(?<![\w.])(?:training|sampler|rewards|eval|algorithm|rollout)\.[a-z]\w*\b(?!\.\w|\()"
)
HOW_TO_OVERRIDE = 'Keys with a dot are set by overrides={"key": value} of the config.'


def is_of_notebook(facts: Mapping[str, Any]) -> bool:
    """True if these facts of a run say that a notebook made it."""
    return FACTS in facts


def own_names(text: str, given: str = "") -> str:
    """The text with the names of a notebook's config in place of the core's keys, except for keys that the user gave (`given`).

    If keys are left that only `overrides` sets, the text ends by saying so.
    """
    for remedy in _NOT_HERE:
        text = text.replace(remedy, "")
    for key, name in OWN_NAMES.items():
        if key not in given:
            text = re.sub(rf"\b{re.escape(key)}\b", name, text)
    if "overrides" in text or all(key in given for key in _OVERRIDABLE.findall(text)):
        return text
    separator = "\n" if "\n" in text else " "
    return f"{text}{separator}{HOW_TO_OVERRIDE}"
