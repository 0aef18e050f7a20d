"""The `rewards` section: how reward functions are run and how their parts are weighted."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from groupwise.settings import Strict, setting

START_LIMIT = 60.0


class RewardsConfig(Strict):
    """The functions themselves come from the task's `get_reward_funcs`."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {"reward_funcs", "answer_column", "default_task", "router", "judge", "rubric_in_prompt"}
    )

    reward_weights: tuple[float, ...] | None = setting(
        None,
        "One weight for each reward function, in their order; null takes those of the task, or 1.",
    )
    time_limit: float = setting(
        30.0,
        "Seconds that a call of one reward function may take; afterwards the group's rollouts count as timed out and do not "
        "teach. compute_metrics has ten times as long.",
        on_resume="free",
        gt=0,
    )
    start_limit: float = setting(
        START_LIMIT,
        "Seconds that a worker may take to start: to import the task file and get its reward functions.",
        on_resume="free",
        gt=0,
    )
    workers: int = setting(
        1,
        "Processes that score. 1 leaves the other core of a small machine to the sampler.",
        on_resume="free",
        ge=1,
    )
    in_process: bool = setting(
        False,
        "Score in this process, for functions that keep state or cannot be imported again. "
        "A call that exceeds the time limit then stops the run.",
        on_resume="warn",
    )
    max_unscored_steps: int = setting(
        3,
        "Steps in a row without one scored group after which the run stops.",
        on_resume="free",
        ge=1,
    )

    @model_validator(mode="after")
    def _one_process_has_no_workers(self) -> RewardsConfig:
        if self.in_process and self.workers > 1:
            raise ValueError(
                f"workers is {self.workers}, but in_process scores in one process; leave one out."
            )
        if self.in_process and self.start_limit != START_LIMIT:
            raise ValueError(
                f"start_limit is {self.start_limit:g}, but in_process starts no worker; leave one out."
            )
        return self
