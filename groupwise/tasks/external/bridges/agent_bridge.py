"""Plays attempts by starting a program for each: an agent that asks the policy by OPENAI_BASE_URL, and knows nothing of us.

The program gets a folder of its own, with a copy of the agent's files, and the prompt on its standard input. It is killed with everything
that it started when it has ended, or is cancelled. What it leaves (its output, its exit code, files) is noted, for the reward
functions of the task.

Unlike other bridges this one runs in the Python of the run.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import groupwise_bridge

from groupwise.core.processes.process_tree import describe_exit
from groupwise.core.processes.program import POLL_SECONDS, ProcessGroup

MAX_OUTPUT = 1 << 20
"""Bytes of output, and of errors, of a program that runs; of more only the last are kept."""
MAX_FILES = 50
"""Collected files of one attempt."""


class Agent:
    """One program, started for each attempt."""

    def open(
        self, protocol: int, name: str, args: dict[str, Any], eval_args: dict[str, Any] | None
    ) -> dict[str, Any]:
        """See `groupwise_bridge.Adapter`; `args` are those of `groupwise.tasks.external.agent.AgentConfig`."""
        self._agent = args
        return {"library": name, "notes": []}

    def examples(self, split: str, offset: int, limit: int) -> dict[str, Any]:
        """None: the rows are the task's."""
        return {"examples": [], "more": False}

    async def rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        """Run the program to its end."""
        folder = Path(tempfile.mkdtemp(prefix="groupwise-agent-"))
        try:
            return await self._run(call, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self) -> None:
        """Nothing is kept between attempts."""

    async def _run(self, call: dict[str, Any], folder: Path) -> dict[str, Any]:
        work, prompt = folder / "work", _prompt_text(call["example"]["prompt"])
        if self._agent["files"]:
            await asyncio.to_thread(shutil.copytree, self._agent["files"], work)
        else:
            work.mkdir()
        standard_input, output, log = (folder / name for name in ("prompt", "output", "log"))
        standard_input.write_text(prompt)
        values = {**call["example"]["columns"], "prompt": prompt}
        program = ProcessGroup(
            [_filled(word, values) for word in self._agent["command"]],
            folder=work,
            log=log,
            environment={
                "OPENAI_BASE_URL": call["base_url"],
                "OPENAI_API_BASE": call["base_url"],
                "OPENAI_API_KEY": call["api_key"],
                **{name: _filled(text, values) for name, text in self._agent["env"].items()},
            },
            standard_input=standard_input,
            standard_output=output,
        )
        longest = self._agent["max_output_length"]
        most_bytes = max(MAX_OUTPUT, 8 * longest)  # half of it holds `longest` characters
        try:
            while not program.has_ended:
                program.trim_output(most_bytes)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            exit_code = program.end()
            program.trim_output(most_bytes)
        errors = _text(log)[-longest:]
        last_line = (errors.strip().splitlines() or [""])[-1]
        ending = describe_exit(exit_code)
        return {
            "metrics": {"exit_code": exit_code},
            "stopped": f"{ending}: {last_line}" if exit_code and last_line else ending,
            "notes": {
                "exit_code": exit_code,
                "output": _text(output)[-longest:],
                "errors": errors,
                "files": _collected(work, self._agent["collect"], longest),
            },
        }


def _prompt_text(prompt: Any) -> str:
    """A prompt as text: of a chat, what the user said last."""
    if isinstance(prompt, str):
        return prompt
    said = [message["content"] for message in prompt if message["role"] == "user"]
    content = said[-1] if said else ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _filled(text: str, values: dict[str, Any]) -> str:
    """A text with `{column}` replaced by the row's value; other braces stay as they are."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            return match[0]
        found = values[match[1]]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    return re.sub(r"\{(\w+)\}", value, text)


def _text(file: Path, most: int = -1) -> str:
    """The first `most` characters of a file; -1: all."""
    with file.open(encoding="utf-8", errors="replace") as reader:
        return reader.read(most)


def _collected(folder: Path, patterns: list[str], longest: int) -> dict[str, str]:
    """The first characters of the files that match, by their paths in the folder. Links, which may lead anywhere, are left out."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    found: dict[str, str] = {}
    for path in paths:
        is_inside = path.resolve().is_relative_to(folder.resolve())
        if path.is_file() and not path.is_symlink() and is_inside and len(found) < MAX_FILES:
            found[str(path.relative_to(folder))] = _text(path, longest)
    return found


if __name__ == "__main__":
    groupwise_bridge.serve(Agent())
