"""The task that an environment of another library is: its examples come from the environment's process, and its rewards with its attempts.

`--task-module verifiers:wordle` loads `ExternalHooks("verifiers", "wordle")`; the config's section `task` is an `ExternalTaskConfig`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from groupwise.core.errors import EnvironmentWorkerError, TaskError, UsageError
from groupwise.core.interruption import run_to_end
from groupwise.tasks.external import installed
from groupwise.tasks.external.kinds import KINDS
from groupwise.tasks.external.process import CallFailed, ProcessLost, bridge_command, list_examples
from groupwise.tasks.external.protocol import Program

HELD_OUT_EVERY = 10
"""Every tenth example is held out if the environment does not say which."""


class ExternalTaskConfig(BaseModel):
    """The section `task` of an environment of another library."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the environment. verifiers 0.1.x: those of load_environment. verifiers 0.4: the block `env`.",
    )
    eval_args: dict[str, Any] | None = Field(
        default=None,
        description="Arguments of evaluation, whose examples are then all held out. null: the environment's own held-out "
        f"examples, or if it has none every {HELD_OUT_EVERY}th one, which is then not trained on.",
    )
    environment: str | None = Field(
        default=None,
        description="Name of the installed environment (groupwise environments list). null: the name after the colon; of textarena "
        "text-games, of openenv openenv.",
    )
    python: str | None = Field(
        default=None,
        description="A Python that has the library, in place of an installed environment.",
    )
    variables: dict[str, str] = Field(
        default_factory=dict,
        description="Variables of the environment's process, such as OPENAI_BASE_URL of a judge.",
    )
    max_examples: int = Field(
        default=10_000,
        description="Maximum number of examples read from a split; some splits are endless.",
        ge=1,
    )


class ExternalHooks:
    """The hooks of such a task."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name
        self._splits: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}

    def get_config_schema(self) -> type[BaseModel]:
        """See `Task.config_schema`."""
        return ExternalTaskConfig

    def get_program(self, config: Any) -> Program:
        """How to start the environment's process."""
        task = _section(config)
        if task.python is None:
            try:
                python = installed.require(
                    task.environment or KINDS[self._kind].environment or self._name, self._kind
                ).python
            except UsageError as error:
                raise TaskError(
                    f"{error} Or name a Python that has the library in task.python."
                ) from None
        else:
            python = Path(task.python).expanduser()
            if not python.is_file():
                raise TaskError(f"task.python is {task.python}, but there is no such file.")
        path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
        programs = {"VIRTUAL_ENV": str(python.parent.parent), "PATH": path}
        return Program(
            described=f"{self._kind}:{self._name}",
            command=bridge_command(str(python), KINDS[self._kind].script),
            name=self._name,
            args=task.args,
            eval_args=task.eval_args,
            variables={**programs, **task.variables},
        )

    def get_rl_dataset(self, config: Any) -> list[dict[str, Any]]:
        """The examples to train on."""
        return self._examples(config)[0]

    def get_eval_dataset(self, config: Any) -> list[dict[str, Any]]:
        """The held-out examples."""
        return self._examples(config)[1]

    def _examples(self, config: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Both splits, read by one process, once for each config."""
        program, task = self.get_program(config), _section(config)
        key = json.dumps([program.args, program.eval_args, task.max_examples], sort_keys=True)
        if key not in self._splits:
            start_limit = float(config["rollout"]["start_limit"])
            try:
                listed = run_to_end(list_examples(program, task.max_examples, start_limit))
            except (EnvironmentWorkerError, CallFailed, ProcessLost) as error:
                raise TaskError(
                    f"The examples of {program.described} cannot be listed: {error}"
                ) from error
            train, held_out = listed.train, listed.held_out
            if not held_out:
                held_out = train[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
                train = [row for n, row in enumerate(train, 1) if n % HELD_OUT_EVERY]
            self._splits[key] = ([_row(row) for row in train], [_row(row) for row in held_out])
        return self._splits[key]


def _section(config: Any) -> ExternalTaskConfig:
    return ExternalTaskConfig.model_validate_json(
        json.dumps(config.get("task") or {}, default=dict)
    )


def _row(example: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": example["prompt"], **example["columns"]}
