"""The `rewards` section: how reward functions are run and how their parts are weighted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator

from groupwise.core.settings.schema import Conflict, Strict, refuse, setting

START_LIMIT = 60.0
DEFAULT_TASK_VARIABLE = "GROUPWISE_TASK"
"""The environment variable used if `rewards.default_task` is not set."""


class InWorkers(Protocol):
    """A section whose work is done in worker processes, or in this one."""

    @property
    def workers(self) -> int: ...
    @property
    def start_limit(self) -> float: ...
    @property
    def in_process(self) -> bool: ...


def idle_in_process(section: InWorkers, does: str) -> Iterator[Conflict]:
    """Keys of worker processes that are set although `in_process` runs the work here; `does` describes the work."""
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


def _checked_entries(entries: Sequence[Any] | None) -> Any:
    """Checks that each entry names a reward. The names are resolved when a run is prepared."""
    if entries is not None:
        refuse(
            [_entry_problem(entry) for entry in entries] or ["the list is empty; name a reward."]
        )
    return entries


def _entry_problem(entry: str | dict[str, Any]) -> str | None:
    section: dict[str, Any] = {"name": entry} if isinstance(entry, str) else entry
    name, weight = section.get("name"), section.get("weight", 1.0)
    if not isinstance(name, str) or not name:
        return (
            f"the entry {json.dumps(entry)} does not say which reward it is; write a name, or a section with `name:`, "
            "`weight:` and parameters."
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return f"the weight of {name} is {json.dumps(weight)}; expected a number."
    return None


def _names_with_weight(entries: Iterable[str | dict[str, Any]] | None) -> list[str]:
    """The names of entries that have a weight of their own."""
    sections = [entry for entry in entries or () if isinstance(entry, dict)]
    return [str(section["name"]) for section in sections if "weight" in section]


RewardEntries = Annotated[tuple[str | dict[str, Any], ...], AfterValidator(_checked_entries)]


class RewardsConfig(Strict):
    """Which rewards a rollout has, where the task's `get_reward_funcs` does not say it, and how they are run."""

    refused: ClassVar[Mapping[str, str]] = {
        "judge": "the judge is a reward like others: name it in rewards.reward_funcs, with its parameters",
        "rubric_in_prompt": "what a prompt shows is the task's: task.rubric_in_prompt of rubric_answers",
    }

    reward_funcs: RewardEntries | None = setting(
        None,
        "The rewards, instead of those of the task: names, `module:function`, `file.py:function`, or sections with `name`, `weight` "
        "and parameters.",
    )
    reward_weights: tuple[float, ...] | None = setting(
        None,
        "One weight for each reward function, in their order; null: the weights of the task or of `reward_funcs`, else 1.",
    )
    router: dict[str, RewardEntries] | None = setting(
        None,
        "For data of several tasks, in place of `reward_funcs`: a list of rewards for each label. A row's label is its column `task`, "
        "else its `dataset_name`, else `default_task`.",
        min_length=1,
    )
    default_task: str | None = setting(
        None,
        "Label of rows whose `task` is empty and whose `dataset_name` is not a label; null: the environment variable GROUPWISE_TASK, "
        "and if that is not set either, such rows are refused.",
        min_length=1,
    )
    answer_column: str | None = setting(
        None,
        "The column with the gold answer, for rewards that need one; null: the first of answer, reference, reference_response, gold, "
        "solution and label that is not empty in the row.",
        min_length=1,
    )
    time_limit: float = setting(
        30.0,
        "Seconds that a call of one reward function may take; after that the group's rollouts count as timed out and do not teach. "
        "compute_metrics has ten times as long.",
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
        "A call that exceeds the time limit is then left behind in its thread; several that hang stop the run.",
        on_resume="warn",
    )
    max_unscored_steps: int = setting(
        3,
        "Steps in a row without one scored group after which the run stops; one with fewer steps stops after its last.",
        on_resume="free",
        ge=1,
    )

    @property
    def names_rewards(self) -> bool:
        """True if the config itself names the rewards, so the task's own are not used."""
        return self.reward_funcs is not None or self.router is not None

    def conflicts(self) -> Iterator[Conflict]:
        """Two keys that answer the same question, and worker keys without workers."""
        if self.reward_funcs is not None and self.router is not None:
            yield Conflict(
                "reward_funcs and router both say which rewards there are. Leave one out; rewards for rows without a label stand "
                "under the label that default_task names.",
                ("reward_funcs", "router"),
            )
        elif self.reward_weights is not None:
            weights = self.reward_weights or ()
            if self.router is not None:
                yield Conflict(
                    "reward_weights has one list of weights, but router several of rewards. Write `weight:` in its entries instead.",
                    ("reward_weights", "router"),
                )
            elif weighted_names := _names_with_weight(self.reward_funcs):
                yield Conflict(
                    f"reward_weights and the entry {weighted_names[0]} of reward_funcs both give a weight. Leave one out.",
                    ("reward_weights", "reward_funcs"),
                )
            elif self.reward_funcs is not None and len(weights) != len(self.reward_funcs):
                yield Conflict(
                    f"reward_weights has {len(weights)}, but reward_funcs {len(self.reward_funcs)}. Give one weight for each.",
                    ("reward_weights", "reward_funcs"),
                )
        yield from idle_in_process(self, "scores in one process")
