"""The `data` section: what of the task's dataset is used, and in which order."""

from __future__ import annotations

from typing import ClassVar

from groupwise.settings.schema import Strict, setting


class DataConfig(Strict):
    """The dataset itself comes from the task's `get_rl_dataset`."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            "dataset_name",
            "dataset_config",
            "dataset_split",
            "dataset_mixture",
            "mixture",
            "prompt_column",
            "answer_column",
            "system_prompt",
            "columns",
            "strict",
            "easy_pool",
            "replay",
            "curriculum",
        }
    )

    max_prompt_length: int | None = setting(
        None,
        "Longest prompt in tokens; examples with longer ones are left out and counted. "
        "null: only the model's own limit.",
        ge=1,
    )
    shuffle: bool = setting(
        True, "Draw the examples of each epoch in an order of its own, from the seed."
    )
