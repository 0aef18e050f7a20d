"""The `run` section: where a run is written, how often, and what of it is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import field_validator

from groupwise.settings.schema import Conflict, Strict, setting

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""What a run may be called: it is a folder, and is addressed `run@step`."""


RESERVED = frozenset({"base"})
"""Names that mean something else where a run may be named."""


class RunSection(Strict):
    """The run directory is `dir/name`."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            "report_to",
            "hub",
            "wandb_entity",
            "wandb_project",
            "wandb_group",
            "log_unique_prompts",
            "num_completions_to_print",
        }
    )

    name: str | None = setting(
        None, "Name of the run; null takes the config file's name.", on_resume="free"
    )
    dir: str = setting(
        "runs", "Folder that holds the runs, on a local disk.", on_resume="free", min_length=1
    )
    save_steps: int = setting(
        10, "Steps between checkpoints; a crash costs at most so many.", on_resume="free", ge=1
    )
    save_total_limit: int | None = setting(
        2, "Checkpoints kept, the newest ones; null keeps all.", on_resume="free", ge=1
    )
    logging_steps: int = setting(
        1, "Steps between lines of progress; every step is recorded.", on_resume="free", ge=1
    )
    keep_tokens: bool = setting(
        True,
        "Store token ids and log-probabilities of every rollout beside its text; costs disk.",
        on_resume="free",
    )
    threads: int | None = setting(
        None,
        "CPU threads for torch, of all processes together; null uses one for each core. Other numbers change the last bits.",
        on_resume="warn",
        ge=1,
    )
    processes: int | None = setting(
        None,
        "Processes that sample and learn side by side, the threads divided among them, with one copy of the model's weights; 1 "
        "does it in the process that runs the loop. null chooses for the machine: one thread each on a CPU, but 1 on a GPU, for "
        "small models and for full fine-tuning. Other numbers change the last bits.",
        on_resume="warn",
        ge=1,
    )
    profile: int | tuple[int, ...] | None = setting(
        None,
        "Steps whose work is traced, by index from 0: one or a list. profile/step-N.json shows it in "
        "Perfetto, profile/step-N.txt says what took longest. Such a step is slower.",
        on_resume="free",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Threads that are too few to be divided among the processes."""
        if self.threads is not None and (self.processes or 1) > self.threads:
            yield Conflict(
                f"processes is {self.processes}, but threads is {self.threads}: the threads are those of all processes together, and "
                f"each process needs one. Set threads to {self.processes} or more, or leave one of the two out.",
                ("threads", "processes"),
            )

    @property
    def profiled_steps(self) -> frozenset[int]:
        """The steps that `profile` names."""
        return frozenset((self.profile,) if isinstance(self.profile, int) else self.profile or ())

    @field_validator("profile")
    @classmethod
    def _names_steps(cls, given: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        steps = (given,) if isinstance(given, int) else given or ()
        if any(step < 0 for step in steps):
            raise ValueError(f"profile has {min(steps)}; steps are counted from 0.")
        return given

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str | None) -> str | None:
        if name is not None and not RUN_NAME.fullmatch(name):
            raise ValueError(
                f'"{name}" cannot name a run; use letters, digits, `.`, `_` and `-`, '
                "beginning with a letter or digit."
            )
        if name in RESERVED:
            raise ValueError(
                f'"{name}" cannot name a run; it names the model itself, as in `--policy {name}`.'
            )
        return name
