"""An agent of the user's own: any program that speaks the protocol of OpenAI, started once for each attempt, unchanged.

    data: {dataset_name: questions.jsonl}
    rewards: {reward_funcs: [rewards.py:right]}
    rollout: {type: external, max_turns: 8}
    task:
      agent:
        command: [python, agent.py, "{question}"]
        files: my_agent/                 # a copy of this folder is the program's working folder
        collect: [answer.txt]            # what reward functions read after it has ended

`bridges/agent_bridge.py` runs the program. Reward functions get the conversation as `completions`, and what the program left as
`rollout_notes`: `output`, `errors`, `exit_code` and `files`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from groupwise.core.errors import TaskError
from groupwise.core.settings.schema import Strict, setting
from groupwise.tasks.external.process import bridge_command
from groupwise.tasks.external.protocol import Program


class AgentConfig(Strict):
    """The section `task.agent`."""

    command: tuple[str, ...] = setting(
        ...,
        "The program and its arguments. `{column}` becomes the row's value of that column, `{prompt}` the prompt as text.",
        min_length=1,
    )
    files: str | None = setting(
        None,
        "A folder; each attempt's program runs in a copy of it. null: it runs in an empty folder.",
    )
    env: dict[str, str] = setting(
        {},
        "Variables for the program, with `{column}` as in `command`, besides those of the run, OPENAI_BASE_URL and OPENAI_API_KEY.",
    )
    collect: tuple[str, ...] = setting(
        (),
        "Files that are kept for reward functions when the program has ended: patterns such as answer.txt or out/*.py.",
    )
    max_output_length: int = setting(
        10_000,
        "Maximum number of characters kept of its output, of its errors (the last ones), and of each file (the first ones).",
        ge=1,
    )


def agent_program(agent: AgentConfig) -> Program:
    """How to start the process that starts the agent's program. Raises TaskError if the program or the folder is not there."""
    files = Path(agent.files).expanduser().resolve() if agent.files is not None else None
    if files is not None and not files.is_dir():
        raise TaskError(f"task.agent.files is {agent.files}, but there is no such folder.")
    program = agent.command[0]
    place = files / program if files is not None and "/" in program else program
    if "{" not in program and shutil.which(place) is None:
        raise TaskError(
            f"task.agent.command: there is no program {program}. Give one that is on the PATH, an absolute path, or one of "
            "task.agent.files, as in ./agent.sh."
        )
    return Program(
        described=f"agent {program}",
        command=bridge_command(sys.executable, "agent_bridge.py"),
        name=program,
        args={**agent.model_dump(mode="json"), "files": None if files is None else str(files)},
    )
