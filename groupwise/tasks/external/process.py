"""One process of an environment: started, called, and killed with everything that it started.

It is called through lines of JSON on a Unix socket (decision 0075), many calls at once. A process that ends, or that writes what cannot be
read, is lost: calls under way then raise ProcessLost, and the owner starts another.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import EnvironmentWorkerError
from groupwise.core.plugins import printable
from groupwise.core.processes.process_tree import PLAIN, describe_exit
from groupwise.core.processes.program import ProcessGroup
from groupwise.tasks.external.protocol import PROTOCOL, Program, readable

PREFIX = "groupwise-environment-"
MAX_ADDRESS = 103
"""Bytes of the path of a Unix socket (macOS; Linux takes 107)."""
MAX_LINE = 1 << 28
"""Bytes of one answer."""
NICENESS = 5
"""Added to the niceness of the run, so that sampling and learning come first."""
LOOK_EVERY = 0.05
"""Seconds between two checks whether a starting process is alive."""
LAST_WORDS = 1.0
"""Seconds for a process whose socket has closed to end by itself, so that its own exit code is reported."""
MAX_LOG = 1 << 20
"""Bytes of its output; of more only the last are kept, so that an environment that prints without end does not fill the disk."""
TRIM_EVERY = 0.5
"""Seconds between two checks of the length of its output."""
PAGE = 1000
"""Examples of one call."""


class ProcessLost(Exception):
    """The process ended, was killed, or wrote what cannot be read."""


class CallFailed(Exception):
    """The environment answered a call with an error; the message is the environment's."""


class EnvironmentProcess:
    """A process of an environment."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._folder = _folder_for_socket()
        self._group: ProcessGroup | None = None
        self._server: asyncio.Server | None = None
        self._connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost: str | None = None
        self.opened: dict[str, Any] = {}
        """The answer to `open`."""

    @property
    def is_lost(self) -> bool:
        """True if it takes no more calls."""
        return self._lost is not None

    async def start(self, limit: float) -> None:
        """Start it and load the environment. Raises EnvironmentWorkerError if that fails or takes longer than `limit` seconds."""
        address = str(self._folder / "socket")
        self._connected = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._accept, address, limit=MAX_LINE)
        variables = {**PLAIN, "PYTHONPATH": "", **self._program.variables}
        self._group = ProcessGroup(
            [*self._program.command, address],
            folder=Path.cwd(),
            log=self._folder / "log",
            environment=variables,
            niceness=NICENESS,
        )
        self._trimming = asyncio.ensure_future(self._trim())
        try:
            async with asyncio.timeout(limit):
                while not self._connected.done():
                    if self._group.has_ended:
                        raise ProcessLost(self._ending())
                    await asyncio.wait((self._connected,), timeout=LOOK_EVERY)
                reader, self._writer = self._connected.result()
                self._reading = asyncio.ensure_future(self._read(reader))
                opening = {
                    "protocol": PROTOCOL,
                    "name": self._program.name,
                    "args": self._program.args,
                    "eval_args": self._program.eval_args,
                }
                self.opened = cast("dict[str, Any]", await self.call("open", opening))
        except (TimeoutError, ProcessLost, CallFailed) as error:
            reason = (
                f"it was not ready within {limit:g} s; raise rollout.start_limit if it loads much"
                if isinstance(error, TimeoutError)
                else str(error)
            )
            last_output = self.last_output() if isinstance(error, TimeoutError) else ""
            await self.close()
            raise EnvironmentWorkerError(
                f"The environment {self._program.described} cannot be started: {reason}{last_output}"
            ) from None

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        """The result of a call. Raises CallFailed or ProcessLost. Cancelling it does not end the work; call `cancel` for that."""
        if self._lost is not None or self._writer is None:
            raise ProcessLost(self._lost or "it has not been started")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "method": method, "params": params}, default=str)
        try:
            self._writer.write(line.encode() + b"\n")
            with suppress(ConnectionError):  # the reader notices it, too, and says why
                await self._writer.drain()
            return await answer
        finally:
            self._answers.pop(number, None)

    async def examples(self, split: str, limit: int | None) -> list[dict[str, Any]]:
        """Examples of a split, at most `limit`."""
        found: list[dict[str, Any]] = []
        while limit is None or len(found) < limit:
            page = PAGE if limit is None else min(PAGE, limit - len(found))
            params = {"split": split, "offset": len(found), "limit": page}
            answer = cast("dict[str, Any]", await self.call("examples", params))
            found += answer["examples"]
            if not answer.get("more") or not answer["examples"]:
                break
        return found

    @property
    def scores_groups(self) -> bool:
        """True if it scores the attempts of a group together, by `score`."""
        return self.opened.get("scores_groups") is True

    async def score(self, rollouts: Sequence[str]) -> list[Any]:
        """Its answers for attempts of a group. Raises CallFailed or ProcessLost."""
        result = await self.call("score", {"rollouts": list(rollouts)})
        answers = (
            cast("dict[str, Any]", result).get("answers") if isinstance(result, dict) else None
        )
        if not isinstance(answers, list) or len(cast("list[Any]", answers)) != len(rollouts):
            raise CallFailed(f"it answered {len(rollouts)} attempts by {result!r:.80}")
        return cast("list[Any]", answers)

    def kill(self, why: str) -> None:
        """Kill it with everything that it started; calls under way raise ProcessLost."""
        self._lose(why)
        if self._group is not None:
            self._group.end()

    async def close(self) -> None:
        """End it, and remove its files."""
        self.kill("the run has ended it")
        tasks = [task for task in (self._reading, self._trimming) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def last_output(self) -> str:
        """The last lines that it wrote, for a message."""
        text = self._group.last_output() if self._group is not None else ""
        return f"\nIts last output:\n{printable(text)}" if text else ""

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connected.done():
            writer.close()  # another process; the first one is the bridge
        else:
            self._connected.set_result((reader, writer))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand the answers to their calls until the process is lost."""
        try:
            while line := await reader.readline():
                message = cast("dict[str, Any]", json.loads(line))
                answer = self._answers.get(message["id"])
                if answer is None or answer.done():
                    continue  # the call is no longer awaited
                if (error := message.get("error")) is not None:
                    answer.set_exception(CallFailed(readable(error["message"])))
                else:
                    answer.set_result(message["result"])
        except (ValueError, LookupError, TypeError, RecursionError, OSError) as error:
            self.kill(f"it wrote what cannot be read: {error!r:.200}")
        else:
            assert self._group is not None, "it was started before it connected"
            for _ in range(int(LAST_WORDS / LOOK_EVERY)):
                if self._group.has_ended:
                    break
                await asyncio.sleep(LOOK_EVERY)
            self._lose(self._ending())

    async def _trim(self) -> None:
        """Keep its output short until it is closed."""
        assert self._group is not None, "its output is trimmed once it was started"
        while True:
            self._group.trim_output(MAX_LOG)
            await asyncio.sleep(TRIM_EVERY)

    def _ending(self) -> str:
        """How the process ended, for messages. Kills what is left of it."""
        assert self._group is not None, "only a started process ends"
        code = self._group.end()
        return f"its process has ended ({describe_exit(code)}){self.last_output()}"

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ProcessLost(self._lost))


def _folder_for_socket() -> Path:
    """A new folder for the socket and the log: below /tmp if the folder for temporary files has too long a path, as on some clusters."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(folder / "socket")) > MAX_ADDRESS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    return folder


@dataclass(frozen=True, slots=True)
class Listed:
    """What an environment has to play."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    """Empty if the environment does not say which are."""
    opened: dict[str, Any]
    """Its answer to `open`."""


async def list_examples(program: Program, limit: int | None, start_limit: float) -> Listed:
    """List at most `limit` examples of each split, in a process that ends afterwards.

    Raises EnvironmentWorkerError, CallFailed or ProcessLost.
    """
    process = EnvironmentProcess(program)
    try:
        await process.start(start_limit)
        train = await process.examples("train", limit)
        return Listed(train, await process.examples("eval", limit), process.opened)
    finally:
        await process.close()


def bridge_command(python: str, script: str) -> tuple[str, ...]:
    """The command line of a bridge of ours in an environment's Python."""
    return (python, str(Path(__file__).parent / "bridges" / script))
