"""The commands of `groupwise launch` on jobs: list, show, logs, fetch, stop, resume, remove."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.launch.options import Detach, Env, EnvFile, To
from groupwise.cli.launch.places import LaunchedJob
from groupwise.cli.launch.watch import (
    call_backend,
    conclude,
    find,
    folder_of,
    report_rented,
    say_next,
    stop_job,
    watch,
    while_placing,
)
from groupwise.cli.options import AsJson, Follow, flag
from groupwise.cli.output import LogWriter, say, write_json
from groupwise.cli.parsing import variables
from groupwise.cli.printing import print_pairs, print_table
from groupwise.core.errors import GroupwiseError, UsageError

if TYPE_CHECKING:
    from groupwise.jobs.clouds.backend import Backend, Handle
    from groupwise.jobs.launch.local_registry import Note


def list_jobs(as_json: AsJson = False) -> None:
    """List the jobs that were launched from this machine, with their progress."""
    from groupwise.jobs.launch import local_registry

    async def load_rows() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(_job_row(note) for note in local_registry.list_notes())))

    rows = asyncio.run(load_rows())
    if as_json:
        write_json({"jobs": rows})
        return
    if not rows:
        say("nothing was launched from this machine yet")
        return
    print_table(
        [
            ("job", "place", "state", "step", "seconds", "project"),
            *(
                (
                    row["name"],
                    row["place"],
                    row["state"] + (f": {row['waits_for']}" if "waits_for" in row else ""),
                    "" if row["step"] is None else str(row["step"]),
                    "" if row["seconds"] is None else f"{row['seconds']:.0f}",
                    row["project"],
                )
                for row in rows
            ),
        ]
    )


async def _job_row(note: Note) -> dict[str, Any]:
    """A job's line of the list. If its place does not respond, the line says so, and the other jobs are still listed."""
    from groupwise.jobs.clouds.backend import JobNotFound
    from groupwise.jobs.launch.places import reach

    row: dict[str, Any] = {
        "name": note.name,
        "place": note.place.kind,
        "project": str(note.project),
        "step": None,
        "seconds": None,
    }
    try:
        backend = reach(note.place)
        row["place"] = str(note.place)
    except (KeyError, TypeError) as error:
        return {**row, "state": "unknown", "problem": f"its note lacks {error}"}
    except (GroupwiseError, ImportError) as error:
        # ImportError: a package that the place needs is not installed.
        return {**row, "state": "unknown", "problem": str(error)}
    try:
        status = await backend.status(await find(backend, note.name))
    except JobNotFound:
        return {**row, "state": "gone"}
    except (GroupwiseError, ImportError) as error:
        return {**row, "state": "unknown", "problem": str(error)}
    finally:
        await backend.close()
    ending = status.ending
    state = status.phase if ending is None else ending.outcome
    seconds = None if ending is None else ending.seconds
    row |= {"state": str(state), "step": status.step, "seconds": seconds}
    if status.waits_for:
        row["waits_for"] = status.waits_for
    return row


def show(job: LaunchedJob, as_json: AsJson = False) -> None:
    """Show one job: where it runs, and its progress."""
    row = asyncio.run(_job_row(job.note()))
    if as_json:
        write_json(row)
    else:
        print_pairs([(name.replace("_", " "), value) for name, value in row.items()])


def logs(*, job: LaunchedJob, follow: Follow = False, to: To = None) -> None:
    """Print what a job has written; with -f, until its end.

    After -f has followed the job to its end, the results are fetched, and the exit code is the job's.
    """
    if to is not None and not follow:
        raise UsageError("--to is for -f, which fetches the results; `launch fetch` does so too.")
    note = job.note()
    if follow:
        watch(note, to, as_json=False, stop=False)
    log = LogWriter()

    async def write(backend: Backend) -> None:
        from groupwise.jobs.launch.watching import PIECE

        handle, offset = await find(backend, job.name), 0
        while part := (await backend.log(handle, offset, PIECE)).data:
            log.write(part)
            offset += len(part)

    call_backend(note.place, write)
    log.end()


def fetch(*, job: LaunchedJob, to: To = None, as_json: AsJson = False) -> None:
    """Fetch a job's results, or while it runs, its checkpoints; prints the folder."""
    from groupwise.jobs.launch import results

    note = job.note()
    folder = folder_of(note, to)

    async def fetched(backend: Backend) -> dict[str, Any]:
        handle = await find(backend, job.name)
        status = await backend.status(handle)
        results.prepare(folder)
        received = await backend.fetch(handle, folder)
        return await conclude(backend, note, status, received, folder, handle)

    document = call_backend(note.place, fetched)
    if as_json:
        write_json(document)
    else:
        typer.echo(str(folder))
        say_next(note, document, folder)


def stop(job: LaunchedJob) -> None:
    """Stop a job.

    It gets SIGTERM, and a minute to write its checkpoint, then SIGKILL.
    """
    note = job.note()
    had_ended = call_backend(note.place, lambda backend: stop_job(backend, job.name))
    outcome = "had ended already" if had_ended else "was asked to end"
    say(f"{job.name} {outcome}; `groupwise launch fetch {job.name}` brings its results")
    report_rented(note)


def resume(
    *,
    job: LaunchedJob,
    env: Env = None,
    env_file: EnvFile = None,
    to: To = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Run a job again from its newest checkpoint.

    Use this after a failure, a stop or a lost machine. Everything about the job stays the same. The values of its secrets are stored
    nowhere: if it has some, give --env and --env-file again.
    """
    from groupwise.jobs.launch import local_registry
    from groupwise.jobs.launch.packaging import local_store
    from groupwise.jobs.launch.places import RENTING_KINDS

    note = job.note()
    secrets = variables(env or (), env_file or ())
    store = local_store()

    async def start_attempt(backend: Backend) -> Handle:
        return await backend.resume(job.name, secrets, store)

    with while_placing(note):
        handle = call_backend(note.place, start_attempt)
    if not local_registry.is_of_another(note):
        local_registry.write(
            note if to is None else replace(note, results=to.expanduser().absolute())
        )
    say(f"{job.name} continues: attempt {handle.attempt}")
    if detach:
        return
    say("Ctrl-C stops it and fetches what there is")
    rents = note.place.kind in RENTING_KINDS
    watch(note, to, as_json=as_json, stop=True, start_attempt=start_attempt if rents else None)


def remove(
    *,
    job: LaunchedJob,
    discard: Annotated[
        bool, flag("Remove the job even if its results were not fetched.", "--discard")
    ] = False,
) -> None:
    """Remove a job that has ended from the machine where it ran.

    Nothing of it remains there; what was fetched stays here.
    """
    from groupwise.jobs.clouds.backend import JobNotFound
    from groupwise.jobs.launch import local_registry, results

    note = job.note()

    async def removed(backend: Backend) -> None:
        handle = await find(backend, job.name)
        folders = filter(None, (folder_of(note, None), note.fetched))
        if not discard and not any(results.is_all_of(folder, handle) for folder in folders):
            raise UsageError(
                f"the results of {job.name} are not all here, and would be lost. `groupwise launch fetch {job.name}` brings them; "
                "--discard gives them up."
            )
        await backend.cleanup(handle)

    try:
        call_backend(note.place, removed)
    except JobNotFound:
        say(f"{job.name} was gone already")
    local_registry.remove(note)
