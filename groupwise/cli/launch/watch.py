"""Calls to the places of jobs, and watching a job until its results are fetched."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from groupwise.cli.installing import LaunchedLog
from groupwise.cli.output import CANCELLED_CODE, LogWriter, say, shell_code, write_json
from groupwise.cli.printing import command_to_show
from groupwise.core.errors import GroupwiseError
from groupwise.core.interruption import interrupting
from groupwise.core.terminal.quantities import counted
from groupwise.core.terminal.text import one_line
from groupwise.core.terminal.ticker import Ticker

if TYPE_CHECKING:
    from groupwise.jobs.clouds.backend import Backend, FetchedResults, Handle, Status
    from groupwise.jobs.launch.local_registry import Note
    from groupwise.jobs.launch.places import JobBackend
    from groupwise.jobs.launch.watching import Watch

STOP_GRACE = 60.0
"""Seconds between SIGTERM and SIGKILL for a job that is stopped."""
Result = TypeVar("Result")


def call_backend(place: JobBackend, question: Callable[[Backend], Awaitable[Result]]) -> Result:
    """Run one call to a place, with a backend that is closed afterwards."""
    from groupwise.jobs.launch.places import reach

    async def call() -> Result:
        backend = reach(place)
        try:
            return await question(backend)
        finally:
            await backend.close()

    return asyncio.run(call())


async def find(backend: Backend, name: str) -> Handle:
    """The job's newest attempt. Raises JobNotFound."""
    handle = await backend.find(name)
    if handle is None:
        from groupwise.jobs.clouds.backend import JobNotFound

        raise JobNotFound(
            f"there is no job called {name} at its place any more; `groupwise launch list` shows all jobs."
        )
    return handle


def report_rented(note: Note, suffix: str = "") -> None:
    """List the machines that are paid for because of this job, after a failure or if the job is not watched. `suffix`: text added to each
    line.
    """
    from groupwise.jobs.clouds.backend import CloudError, Renting
    from groupwise.jobs.launch.rentals import kept_message, machines_of_job

    async def list_rented(backend: Backend) -> None:
        if isinstance(backend, Renting):
            for machine in await machines_of_job(backend, note.name):
                say(
                    f"{kept_message(machine)}; `groupwise launch sweep --name {note.name}` ends it{suffix}"
                )

    try:
        call_backend(note.place, list_rented)
    except CloudError as error:
        say(f"whether anything is paid for {note.name} could not be found out: {error.message}")


@contextmanager
def while_placing(note: Note) -> Generator[None]:
    """While a job is being placed, SIGTERM and a closed terminal act like Ctrl-C. If placing fails, list the machines that are paid for."""
    with interrupting(signal.SIGTERM, signal.SIGHUP):
        try:
            yield
        except (KeyboardInterrupt, GroupwiseError):
            report_rented(note)
            raise


def watch(
    note: Note,
    to: Path | None,
    *,
    as_json: bool,
    stop: bool,
    start_attempt: Callable[[Backend], Awaitable[Handle]] | None = None,
) -> None:
    """Watch a job until it has ended, report the outcome, and exit with its exit code. `stop`: Ctrl-C ends the job.

    `start_attempt` starts another attempt; it is called once if the job's machine was taken away.
    """
    from groupwise.jobs.clouds.backend import Outcome
    from groupwise.jobs.hosts.failures import FailureClass
    from groupwise.jobs.launch.watching import Watch

    folder, log, ticker = folder_of(note, to), LogWriter(err=as_json), Ticker(every=None)
    shown_log = partial(LaunchedLog, log.write, ticker, f"groupwise launch logs {note.name}")
    shown = shown_log()
    watching = Watch(folder, shown.write, ticker.note)
    try:
        document = asyncio.run(_watch_to_end(watching, note, folder))
        if start_attempt is not None and document["failure"] == FailureClass.PREEMPTION:
            say(f"{note.name}: {document['reason']}; it restarts elsewhere, this once by itself")
            with while_placing(note):
                attempt = call_backend(note.place, start_attempt).attempt
            say(f"{note.name} continues: attempt {attempt}")
            shown.end()
            shown = shown_log()
            watching = Watch(folder, shown.write, ticker.note)
            document = asyncio.run(_watch_to_end(watching, note, folder))
    except KeyboardInterrupt:
        if not stop:
            say(f"{note.name} continues without being watched")
            raise
        document = _stop_and_fetch(watching, note, folder)
    finally:
        shown.end()
        log.end()
    if as_json:
        write_json(document)
    seconds = document["seconds"]
    duration = "" if seconds is None else f" after {seconds:.0f} s"
    say(f"{note.name} {document['state']}{duration}: {document['reason']}")
    others = "" if document["files"] else "; --output PATH names what to fetch"
    say(f"fetched {counted(len(document['files']), 'file')} to {folder}{others}")
    if document["cost"] is not None:
        say(f"it has cost about ${document['cost']:.2f}: {document['cost_counts']}")
    for run in document["runs"]:
        say(f"  the run {run['run']}: {folder / run['folder']}")
        if run.get("problem"):
            say(f"    {run['problem']}")
    for path, reason in document["left_out"].items():
        say(f"  {one_line(path)} did not: {reason}")
    if document["state"] == Outcome.SUCCEEDED:
        say_next(note, document, folder)
    codes = {Outcome.SUCCEEDED: 0, Outcome.CANCELLED: CANCELLED_CODE}
    raise typer.Exit(codes.get(document["state"], shell_code(document["exit_code"])))


def say_next(note: Note, document: dict[str, Any], folder: Path) -> None:
    """Print the command that is useful after a fetch: to look at the first run, to clean up, or to follow a job that still runs."""
    if document["runs"]:
        line, _ = command_to_show(folder / document["runs"][0]["folder"])
    else:
        line = f"groupwise launch {'remove' if document['exit_known'] else 'logs -f'} {note.name}"
    say(f"next: {line}")


def _stop_and_fetch(watching: Watch, note: Note, folder: Path) -> dict[str, Any]:
    """Stop the job, retrying for as long as its place does not respond, and fetch its results. Another Ctrl-C exits without waiting."""
    from groupwise.jobs.launch.watching import with_retries

    say(f"stopping {note.name}; Ctrl-C once more to leave without waiting for its end")
    is_stopping = False
    try:
        call_backend(
            note.place, lambda backend: with_retries(lambda: stop_job(backend, note.name), say)
        )
        is_stopping = True
        return asyncio.run(_watch_to_end(watching, note, folder))
    except KeyboardInterrupt:
        state = "was asked to end" if is_stopping else "STILL RUNS"
        say(f"{note.name} {state}; `groupwise launch stop {note.name}` ends it")
        report_rented(note)
        raise


async def stop_job(backend: Backend, name: str) -> bool:
    """Ask the job to end, and kill it after STOP_GRACE seconds. Returns True if it had ended already."""
    handle = await find(backend, name)
    had_ended = (await backend.status(handle)).ending is not None
    await backend.cancel(handle, STOP_GRACE)
    return had_ended


async def _watch_to_end(watching: Watch, note: Note, folder: Path) -> dict[str, Any]:
    """Watch a job to its end. Returns its result, which is also written next to the fetched files."""
    from groupwise.jobs.launch import results
    from groupwise.jobs.launch.places import reach

    backend = reach(note.place)
    try:
        handle = await find(backend, note.name)
        results.prepare(folder)
        status, fetched = await watching.until_ended(backend, handle)
        return await conclude(backend, note, status, fetched, folder, handle)
    finally:
        await backend.close()


async def conclude(
    backend: Backend,
    note: Note,
    status: Status,
    fetched: FetchedResults,
    folder: Path,
    handle: Handle,
) -> dict[str, Any]:
    """Write the result next to the fetched files, then end the paid machine, or report that it stays."""
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
        await rentals.end_or_keep(backend, handle, status, folder, say)
    except CloudError as error:  # the results are here and must not be lost because of this
        say(
            f"what {note.name} ran on may still be paid for: {error.message} `groupwise launch fetch {note.name}` tries again, "
            f"`groupwise launch sweep --name {note.name}` ends it"
        )
    return document


def folder_of(note: Note, to: Path | None) -> Path:
    """The folder of a job's results: `to`, otherwise the one given at launch, otherwise one in the project that it was launched from."""
    from groupwise.jobs.launch.results import FOLDER

    if to is not None:
        return to.expanduser()
    return note.results or note.project / FOLDER / note.name
