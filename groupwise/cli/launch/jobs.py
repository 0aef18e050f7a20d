"""Jobs that were launched: `list`, `logs`, `fetch`, `stop`, `resume`, `remove`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.launch.options import (
    AsJson,
    At,
    Detach,
    EnvFile,
    JobName,
    KeyOfPlace,
    ProfileOfPlace,
    To,
    TrustOfPlace,
)
from groupwise.cli.launch.places import note_of
from groupwise.cli.launch.watch import (
    ask,
    concluded,
    find,
    folder_of,
    stop_job,
    tell_of_rented,
    watch,
    while_placing,
)
from groupwise.cli.launch.words import environment_of
from groupwise.cli.log_text import LogWriter
from groupwise.cli.output import say, write_json
from groupwise.cli.printing import print_table
from groupwise.core.errors import GroupwiseError, UsageError

if TYPE_CHECKING:
    from groupwise.jobs.clouds.backend import Backend, Handle
    from groupwise.jobs.launch.local_registry import Note


def list_jobs(as_json: AsJson = False) -> None:
    """Jobs that were launched from this machine, and how far they are."""
    from groupwise.jobs.launch import local_registry

    async def looked_at() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(_line(each) for each in local_registry.every())))

    lines = asyncio.run(looked_at())
    if as_json:
        write_json({"jobs": lines})
        return
    if not lines:
        say("nothing was launched from this machine yet")
        return
    print_table(
        [
            ("job", "place", "state", "step", "seconds", "project"),
            *(
                (
                    each["name"],
                    each["place"],
                    each["state"] + (f": {each['waits_for']}" if "waits_for" in each else ""),
                    "" if each["step"] is None else str(each["step"]),
                    "" if each["seconds"] is None else f"{each['seconds']:.0f}",
                    each["project"],
                )
                for each in lines
            ),
        ]
    )


async def _line(note: Note) -> dict[str, Any]:
    """A job's line of the list. If its place does not answer, the line says so, and the others are listed all the same."""
    from groupwise.jobs.clouds.backend import NotHere
    from groupwise.jobs.launch.places import reach

    line: dict[str, Any] = {
        "name": note.name,
        "place": note.place.kind,
        "project": str(note.project),
        "step": None,
        "seconds": None,
    }
    try:
        backend = reach(note.place)
        line["place"] = str(note.place)
    except (KeyError, TypeError) as error:
        return {**line, "state": "unknown", "problem": f"its note lacks {error}"}
    except (GroupwiseError, ImportError) as error:  # a package that its place needs is not there
        return {**line, "state": "unknown", "problem": str(error)}
    try:
        status = await backend.status(await find(backend, note.name))
    except NotHere:
        return {**line, "state": "gone"}
    except (GroupwiseError, ImportError) as error:
        return {**line, "state": "unknown", "problem": str(error)}
    finally:
        await backend.close()
    ending = status.ending
    state = status.phase if ending is None else ending.outcome
    seconds = None if ending is None else ending.seconds
    line |= {"state": str(state), "step": status.step, "seconds": seconds}
    if status.waits_for:
        line["waits_for"] = status.waits_for
    return line


def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it has ended, then fetch.")
    ] = False,
    at: At = None,
    key: KeyOfPlace = None,
    trust: TrustOfPlace = None,
    profile: ProfileOfPlace = None,
    to: To = None,
) -> None:
    """What it has written, and with -f what it writes.

    Followed to its end, its exit code is that of this command.
    """
    if to is not None and not follow:
        raise UsageError("--to is for -f, which brings the results; `launch fetch` does so too.")
    note = note_of(name, at, key, trust, profile)
    if follow:
        watch(note, to, as_json=False, stop=False)
    log = LogWriter()

    async def write(backend: Backend) -> None:
        from groupwise.jobs.launch.watching import PIECE

        handle, offset = await find(backend, name), 0
        while part := (await backend.log(handle, offset, PIECE)).data:
            log.write(part)
            offset += len(part)

    ask(note.place, write)
    log.end()


def fetch(
    name: JobName,
    at: At = None,
    key: KeyOfPlace = None,
    trust: TrustOfPlace = None,
    profile: ProfileOfPlace = None,
    to: To = None,
    as_json: AsJson = False,
) -> None:
    """Bring its results here; while it runs, its checkpoints. Prints the folder."""
    from groupwise.jobs.launch import results

    note = note_of(name, at, key, trust, profile)
    folder = folder_of(note, to)

    async def fetched(backend: Backend) -> dict[str, Any]:
        handle = await find(backend, name)
        status = await backend.status(handle)
        results.prepare(folder)
        came = await backend.fetch(handle, folder)
        return await concluded(backend, note, status, came, folder, handle)

    document = ask(note.place, fetched)
    if as_json:
        write_json(document)
    else:
        typer.echo(str(folder))


def stop(
    name: JobName,
    at: At = None,
    key: KeyOfPlace = None,
    trust: TrustOfPlace = None,
    profile: ProfileOfPlace = None,
) -> None:
    """Ask it to end.

    It saves what it can, and is ended a minute later at the latest.
    """
    note = note_of(name, at, key, trust, profile)
    ended = ask(note.place, lambda backend: stop_job(backend, name))
    what = "had ended already" if ended else "was asked to end"
    say(f"{name} {what}; `groupwise launch fetch {name}` brings its results")
    tell_of_rented(note)


def resume(
    name: JobName,
    env_file: EnvFile = None,
    at: At = None,
    key: KeyOfPlace = None,
    trust: TrustOfPlace = None,
    profile: ProfileOfPlace = None,
    to: To = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Go on from its newest checkpoint.

    After a failure, a stop or a lost machine. The job is what it was. Values of its secrets are kept nowhere, so that --env-file is needed
    again where it had some.
    """
    from groupwise.jobs.launch import local_registry
    from groupwise.jobs.launch.packaging import files_here
    from groupwise.jobs.launch.places import RENTING

    note = note_of(name, at, key, trust, profile)
    secrets = environment_of(tuple(env_file or ()))
    store = files_here()

    async def again(backend: Backend) -> Handle:
        return await backend.resume(name, secrets, store)

    with while_placing(note):
        handle = ask(note.place, again)
    if not local_registry.is_of_another(note):
        local_registry.write(
            note if to is None else replace(note, results=to.expanduser().absolute())
        )
    say(f"{name} goes on: attempt {handle.attempt}")
    if detach:
        return
    say("Ctrl-C stops it and fetches what there is")
    rents = note.place.kind in RENTING
    watch(note, to, as_json=as_json, stop=True, again=again if rents else None)


def remove(
    name: JobName,
    at: At = None,
    key: KeyOfPlace = None,
    trust: TrustOfPlace = None,
    profile: ProfileOfPlace = None,
    discard: Annotated[
        bool, typer.Option("--discard", help="Also where its results were not fetched.")
    ] = False,
) -> None:
    """Remove a job that has ended from its place.

    Nothing of it is there afterwards; what was fetched stays here.
    """
    from groupwise.jobs.clouds.backend import NotHere
    from groupwise.jobs.launch import local_registry, results

    note = note_of(name, at, key, trust, profile)

    async def removed(backend: Backend) -> None:
        handle = await find(backend, name)
        folders = filter(None, (folder_of(note, None), note.fetched))
        if not discard and not any(results.is_all_of(each, handle) for each in folders):
            raise UsageError(
                f"what {name} has made is not all here, and would be lost. `groupwise launch fetch {name}` brings it; "
                "--discard does without."
            )
        await backend.cleanup(handle)

    try:
        ask(note.place, removed)
    except NotHere:
        say(f"{name} was gone already")
    local_registry.remove(note)
