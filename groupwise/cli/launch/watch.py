"""Asking places of jobs, and watching a job until its results are here."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from groupwise.cli.log_text import LogWriter
from groupwise.cli.output import say, write_json
from groupwise.core.errors import GroupwiseError
from groupwise.core.interruption import interrupting
from groupwise.core.terminal.text import one_line

if TYPE_CHECKING:
    from groupwise.jobs.clouds.backend import Backend, Fetched, Handle, Status
    from groupwise.jobs.launch.local_registry import Note
    from groupwise.jobs.launch.places import JobBackend
    from groupwise.jobs.launch.watching import Watch

CANCELLED_CODE = 130
"""What shells say of a program that was interrupted."""
STOP_GRACE = 60.0
Answer = TypeVar("Answer")


def ask(place: JobBackend, question: Callable[[Backend], Awaitable[Answer]]) -> Answer:
    """One question to a place."""
    from groupwise.jobs.launch.places import reach

    async def asked() -> Answer:
        backend = reach(place)
        try:
            return await question(backend)
        finally:
            await backend.close()

    return asyncio.run(asked())


async def find(backend: Backend, name: str) -> Handle:
    """Its newest attempt. Raises NotHere."""
    handle = await backend.find(name)
    if handle is None:
        from groupwise.jobs.clouds.backend import NotHere

        raise NotHere(
            f"there is no job called {name} any more where it was; `groupwise launch list` shows those that there are."
        )
    return handle


def tell_of_rented(note: Note, beside: str = "") -> None:
    """What is there for this job and costs money: after a failure all the same, or with nobody watching. `beside`: said after each."""
    from groupwise.jobs.clouds.backend import CloudError, Renting
    from groupwise.jobs.launch.rentals import of_job, stays

    async def told(backend: Backend) -> None:
        if isinstance(backend, Renting):
            for each in await of_job(backend, note.name):
                say(f"{stays(each)}; `groupwise launch sweep --name {note.name}` ends it{beside}")

    try:
        ask(note.place, told)
    except CloudError as error:
        say(f"whether anything is paid for {note.name} could not be found out: {error.message}")


@contextmanager
def while_placing(note: Note) -> Generator[None]:
    """Until a job is placed: SIGTERM and a terminal that is closed do what Ctrl-C does, and what is paid for all the same is told."""
    with interrupting(signal.SIGTERM, signal.SIGHUP):
        try:
            yield
        except (KeyboardInterrupt, GroupwiseError):
            tell_of_rented(note)
            raise


def watch(
    note: Note,
    to: Path | None,
    *,
    as_json: bool,
    stop: bool,
    again: Callable[[Backend], Awaitable[Handle]] | None = None,
) -> None:
    """Until it has ended; then its exit code is that of this command. `stop`: Ctrl-C ends it.

    `again` begins another attempt: where a machine was taken away from the job it is called, once.
    """
    from groupwise.jobs.hosts.failures import FailureClass
    from groupwise.jobs.launch.watching import Watch

    folder, log = folder_of(note, to), LogWriter(err=as_json)
    watching = Watch(folder, log.write, say)
    try:
        document = asyncio.run(_watched(watching, note, folder))
        if again is not None and document["failure"] == FailureClass.PREEMPTION:
            say(f"{note.name}: {document['reason']}; it goes on elsewhere, this once by itself")
            with while_placing(note):
                attempt = ask(note.place, again).attempt
            say(f"{note.name} goes on: attempt {attempt}")
            watching = Watch(folder, log.write, say)
            document = asyncio.run(_watched(watching, note, folder))
    except KeyboardInterrupt:
        if not stop:
            say(f"{note.name} goes on without being watched")
            raise
        document = _stopped(watching, note, folder)
    finally:
        log.end()
    _end(note, folder, document, as_json=as_json)


def _stopped(watching: Watch, note: Note, folder: Path) -> dict[str, Any]:
    """Ended, however long its place does not answer, and what it left; Ctrl-C once more and nobody waits for that."""
    from groupwise.jobs.launch.watching import patiently

    say(f"stopping {note.name}; Ctrl-C once more, and nobody waits for its end")
    told = False
    try:
        ask(note.place, lambda backend: patiently(lambda: stop_job(backend, note.name), say))
        told = True
        return asyncio.run(_watched(watching, note, folder))
    except KeyboardInterrupt:
        state = "was asked to end" if told else "STILL RUNS"
        say(f"{note.name} {state}; `groupwise launch stop {note.name}` ends it")
        tell_of_rented(note)
        raise


async def stop_job(backend: Backend, name: str) -> bool:
    """Ask it to end, and end it after a while; whether it had ended already."""
    handle = await find(backend, name)
    ended = (await backend.status(handle)).ending is not None
    await backend.cancel(handle, STOP_GRACE)
    return ended


async def _watched(watching: Watch, note: Note, folder: Path) -> dict[str, Any]:
    """Its result, written beside what it left."""
    from groupwise.jobs.launch import results
    from groupwise.jobs.launch.places import reach

    backend = reach(note.place)
    try:
        handle = await find(backend, note.name)
        results.prepare(folder)
        status, fetched = await watching.until_ended(backend, handle)
        return await concluded(backend, note, status, fetched, folder, handle)
    finally:
        await backend.close()


async def concluded(
    backend: Backend, note: Note, status: Status, fetched: Fetched, folder: Path, handle: Handle
) -> dict[str, Any]:
    """The result, written beside what was fetched; then what is paid for is ended, or told."""
    from groupwise.jobs.clouds.backend import CloudError
    from groupwise.jobs.launch import local_registry, rentals, results

    document = results.result(handle, str(note.place), status, fetched)
    results.write(folder, document)
    if status.ending is not None and folder != folder_of(note, None):
        local_registry.note_fetched(note, folder)
    try:
        cost = await rentals.cost_of(backend, handle)
        if cost:
            document = {**document, **cost}
            results.write(folder, document)
        await rentals.after(backend, handle, status, folder, say)
    except CloudError as error:  # the results are here, and shall not be lost over it
        say(
            f"what {note.name} ran on may still be paid for: {error.message} `groupwise launch fetch {note.name}` tries again, "
            f"`groupwise launch sweep --name {note.name}` ends it"
        )
    return document


def folder_of(note: Note, to: Path | None) -> Path:
    """Where its results go: `to`, else where it was said before, else a folder of the project that it was launched from."""
    from groupwise.jobs.launch.results import FOLDER

    if to is not None:
        return to.expanduser()
    return note.results or note.project / FOLDER / note.name


def _end(note: Note, folder: Path, document: Mapping[str, Any], *, as_json: bool) -> None:
    """Tell it, and leave with its exit code."""
    if as_json:
        write_json(document)
    seconds = document["seconds"]
    after = "" if seconds is None else f" after {seconds:.0f} s"
    say(f"{note.name} {document['state']}{after}: {document['reason']}")
    say(f"{len(document['files'])} files came back to {folder}")
    if document["cost"] is not None:
        say(f"it has cost about ${document['cost']:.2f}: {document['cost_counts']}")
    for run in document["runs"]:
        say(f"  the run {run['run']}: {folder / run['folder']}")
        if run.get("problem"):
            say(f"    {run['problem']}")
    for path, why in document["left_out"].items():
        say(f"  {one_line(path)} did not: {why}")
    raise typer.Exit(_exit_code(document))


def _exit_code(document: Mapping[str, Any]) -> int:
    """That of the command, as a shell has it."""
    from groupwise.jobs.clouds.backend import Outcome

    if document["state"] == Outcome.SUCCEEDED:
        return 0
    if document["state"] == Outcome.CANCELLED:
        return CANCELLED_CODE
    code = document["exit_code"]
    if not code:
        return 1
    return 128 - code if code < 0 else min(code, 255)
