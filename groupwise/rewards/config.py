"""The `rewards` section: how reward functions are run and how their parts are weighted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from groupwise.settings.schema import Conflict, Strict, setting

START_LIMIT = 60.0


class InWorkers(Protocol):
    """A section whose work is done in worker processes, or in this one."""

    @property
    def workers(self) -> int: ...
    @property
    def start_limit(self) -> float: ...
    @property
    def in_process(self) -> bool: ...


def idle_in_process(section: InWorkers, does: str) -> Iterator[Conflict]:
    """Keys of worker processes that are set where `in_process`, which `does` it here, has none."""
    if section.in_process and section.workers > 1:
        yield Conflict(
            f"workers is {section.workers}, but in_process {does}; leave one out.",
            ("in_process", "workers"),
        )
    if section.in_process and section.start_limit != START_LIMIT:
        yield Conflict(
            f"start_limit is {section.start_limit:g}, but in_process starts no worker; leave one out.",
            ("in_process", "start_limit"),
        )


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

    def conflicts(self) -> Iterator[Conflict]:
        """Keys of workers where there are none."""
        return idle_in_process(self, "scores in one process")
