"""Places a job: tries the command here, packs the project, shows the plan, submits the job, and watches it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from groupwise.cli.launch.job_command import JobCommand, new_name
from groupwise.cli.launch.options import DEFAULT_HOURS, GangOptions, LaunchOptions
from groupwise.cli.launch.places import check_name
from groupwise.cli.launch.watch import call_backend, folder_of, report_rented, watch, while_placing
from groupwise.cli.output import say, write_json
from groupwise.cli.printing import print_pairs
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.terminal.text import command_line

if TYPE_CHECKING:
    from groupwise.jobs.clouds.backend import Backend, Handle, Plan
    from groupwise.jobs.fleet.machines.plans import Plan as EnvironmentPlan
    from groupwise.jobs.hosts.files import BlobStore
    from groupwise.jobs.launch.install_plan import InstallPlan
    from groupwise.jobs.launch.local_registry import Note
    from groupwise.jobs.launch.packaging import LaunchRequest, PackedJob
    from groupwise.jobs.launch.places import JobBackend
    from groupwise.jobs.launch.preflight import DryRunReport

UNWATCHED = (
    ". It stays whatever becomes of the job, and what was not fetched by then is gone with it"
)


def launch(
    place: JobBackend,
    job: LaunchOptions,
    *,
    environment: EnvironmentPlan | None = None,
    place_options: Mapping[str, Any] | None = None,
    gang: GangOptions | None = None,
    gpus: int | None = None,
    hours: float | None = None,
) -> None:
    """Launch a job at a place, and watch it to its end unless it is detached or this is a dry run.

    `environment` is built at the place; None: the place has one. `place_options`: options that only this kind of place understands. `gpus`
    and `hours` replace those of the options, if the place has its own."""
    from groupwise.jobs.clouds.backend import MODEL_GB
    from groupwise.jobs.launch import local_registry, packaging
    from groupwise.jobs.launch.bundle import path_in_project
    from groupwise.jobs.launch.places import AWS, WITHOUT_GPU_MODELS

    command, gang = job.command, gang or GangOptions()
    project = job.project_dir or Path.cwd()
    if job.name is not None:
        check_name(job.name)
    if (model := job.gpu_model()) is not None and place.kind in WITHOUT_GPU_MODELS:
        raise UsageError(
            f"--gpus {job.gpus}: which GPUs a job gets here is decided by its machine, not by the model {model}: --gpus {job.gpu_count}."
        )
    gpus, hours = gpus or job.gpu_count, hours or job.hours or DEFAULT_HOURS
    processes = gang.processes(command, gpus)
    secrets = job.secrets()
    report = _try_here(job, project, gang, processes, place_options or {}, secrets)
    options = {**(place_options or {})}
    if place.kind == AWS and report.model_gb is not None:
        options[MODEL_GB] = report.model_gb
    store = packaging.local_store()
    name = job.name or new_name(command)
    request = packaging.LaunchRequest(
        name=name,
        project=project,
        command=command.line,
        gpus=gpus,
        nodes=gang.count,
        processes=processes,
        hours=hours,
        secrets=secrets,
        environment=environment,
        results=(*job.output, *report.results),
        take=tuple(path_in_project(project, name) or os.path.abspath(name) for name in job.file),
        exclude=tuple(job.exclude),
        needs=report.needs,
        is_remote=not place.is_here,
        root=place.root if place.root.startswith("/") else f"~/{place.root}",
        place_options=options,
        python=place.python,
        meets_at=place.meets_at,
    )
    packed = packaging.pack(request, store)
    _expect_script(command, packed)
    for line in packed.bundle.summary():
        say(line)
    plan = call_backend(place, lambda backend: backend.plan(packed.order))
    _refuse_price(plan, job.max_price)
    if job.dry_run:
        installs = environment and _install_plan(place, environment, request, packed)
        _show_plan(plan, packed, job, hours, installs)
        return
    say(f"{name}: {'; '.join(plan.steps)}")
    results = None if job.to is None else job.to.expanduser().absolute()
    note = local_registry.Note(name, place, request.project, results)
    handle = _submit_job(note, packed, store)
    if job.detach:
        _print_detached(note, handle, as_json=job.as_json)
        return
    say("Ctrl-C stops it and fetches what there is")

    async def start_attempt(backend: Backend) -> Handle:
        return await backend.resume(name, secrets, store)

    watch(
        note,
        job.to,
        as_json=job.as_json,
        stop=True,
        start_attempt=start_attempt if plan.paid else None,
    )


def _install_plan(
    place: JobBackend, environment: EnvironmentPlan, request: LaunchRequest, packed: PackedJob
) -> InstallPlan:
    from groupwise.jobs.launch.install_plan import install_plan

    return call_backend(
        place, lambda backend: install_plan(backend, environment, request.root, packed.bundle.size)
    )


def _print_detached(note: Note, handle: Handle, *, as_json: bool) -> None:
    """Print how to find a detached job again."""
    name = note.name
    say(
        f"`groupwise launch logs -f {name}` watches it, `groupwise launch fetch {name}` brings its results"
    )
    report_rented(note, UNWATCHED)
    if as_json:
        write_json({"name": name, "place": str(note.place), "attempt": handle.attempt})
    else:
        typer.echo(name)


def _submit_job(note: Note, packed: PackedJob, store: BlobStore) -> Handle:
    """Submit the job, or attach to it if it exists. The note is written first, so an interrupted launch leaves the job known here."""
    from groupwise.jobs.launch import local_registry, results

    name, existing = note.name, call_backend(note.place, lambda backend: backend.find(note.name))
    # Notes and results of two jobs with the same name would be mixed up.
    same_name = next(
        (known_note for known_note in local_registry.list_notes() if known_note.name == note.name),
        None,
    )
    if same_name is not None and not same_name.place.is_same(note.place):
        raise UsageError(
            f"{note.name} is a job on {same_name.place} already: give this one another name, or `groupwise launch remove {note.name}`."
        )
    aside = results.set_aside(folder_of(note, None)) if existing is None else None
    if aside is not None:
        say(f"what an earlier job called {name} brought back is in {aside} now")
    local_registry.write(note)
    try:
        with while_placing(note):
            handle = call_backend(note.place, lambda backend: backend.submit(packed.order, store))
    except KeyboardInterrupt:
        say(
            f"{name} may have been placed: `groupwise launch list` tells, `groupwise launch stop {name}` ends it"
        )
        raise
    except GroupwiseError:
        if existing is None and _left_no_trace(note):
            local_registry.remove(note)
        raise
    if existing is None:
        say(f"{name} is placed on {note.place}")
    else:
        say(
            f"{name} was there already, so that nothing new begins: this is its attempt {handle.attempt}. After a failure `groupwise "
            f"launch resume {name}` begins another one; `groupwise launch remove {name}` makes its name free"
        )
    return handle


def _left_no_trace(note: Note) -> bool:
    """True if its place certainly has no trace of the job, and no machine is paid for it."""
    from groupwise.jobs.clouds.backend import CloudError, Renting
    from groupwise.jobs.launch.rentals import machines_of_job

    async def has_no_trace(backend: Backend) -> bool:
        if await backend.find(note.name) is not None:
            return False
        return not (isinstance(backend, Renting) and await machines_of_job(backend, note.name))

    try:
        return call_backend(note.place, has_no_trace)
    except CloudError:
        return False


def _try_here(
    job: LaunchOptions,
    project: Path,
    gang: GangOptions,
    processes: int,
    place_options: Mapping[str, Any],
    secrets: Mapping[str, str],
) -> DryRunReport:
    """Try the command on this machine. Raises UsageError if it would fail."""
    from groupwise.core.hub_errors import TOKEN_ELSEWHERE
    from groupwise.jobs.clouds.modal.api import NAMED
    from groupwise.jobs.launch.preflight import (
        DryRunReport,
        first_rank_variables,
        results_of,
        try_command,
    )

    if job.command.verb is None:
        return DryRunReport((), "")
    if job.no_preflight:
        return DryRunReport(results_of(job.command.words), "")
    rank_variables = first_rank_variables(gang.count, processes) if gang.count > 1 else {}
    workspace_secrets: Mapping[str, Sequence[str]] = place_options.get(NAMED, {})
    hub_variables = (
        {TOKEN_ELSEWHERE: "1"}
        if any("HF_TOKEN" in variables for variables in workspace_secrets.values())
        else {}
    )
    report = try_command(job.command.words, project, {**secrets, **rank_variables, **hub_variables})
    say(f"tried here: {report.summary}")
    return report


def _expect_script(command: JobCommand, packed: PackedJob) -> None:
    """Raise UsageError if the script is not uploaded: otherwise the job would fail only at its place."""
    script = command.script
    if script is None or Path(script).as_posix() in packed.bundle.files:
        return
    path = Path(script)
    if path.is_absolute():
        reason = "it is named by its absolute path, and the job has a copy of the project: name it relative to the folder"
    elif ".." in path.parts:
        reason = f"it is outside of the project, {packed.bundle.root}"
    elif not (packed.bundle.root / path).is_file():
        reason = f"there is no such file in {packed.bundle.root}"
    else:
        reason = packed.bundle.left_out.get(path.as_posix(), "git ignores it")
    raise UsageError(f"--script {script} is not sent with the project: {reason}.")


def _refuse_price(plan: Plan, max_price: float | None) -> None:
    price = plan.price_per_hour
    if max_price is not None and price is None and plan.paid:
        raise UsageError(
            f"the price of {plan.where} for an hour is unknown, so that --max-price ${max_price:.2f} cannot be kept:"
            + "".join(f"\n  {step}" for step in plan.steps)
            + "\nWithout --max-price it is launched at whatever it costs."
        )
    if max_price is not None and price is not None and price > max_price:
        raise UsageError(
            f"{plan.where} costs ${price:.2f} an hour, and --max-price is ${max_price:.2f}."
        )


def _show_plan(
    plan: Plan, packed: PackedJob, job: LaunchOptions, hours: float, installs: InstallPlan | None
) -> None:
    """Print the plan of a dry run, for people or programs."""
    unknown = "an unknown price" if plan.paid else "nothing"
    price = unknown if plan.price_per_hour is None else f"${plan.price_per_hour:.2f} an hour"
    paid = hours if plan.paid_hours is None else plan.paid_hours
    max_cost = "" if plan.price_per_hour is None else f", at most ${plan.price_per_hour * paid:.2f}"
    if job.as_json:
        write_json(
            {
                "name": packed.order.name,
                "where": plan.where,
                "steps": list(plan.steps),
                "command": list(plan.command),
                "launcher": job.command.script,
                "arguments": list(job.command.words),
                "secrets": sorted(packed.order.secrets),
                "environment": None if installs is None else installs.document(),
                "project": {
                    "files": len(packed.bundle.files),
                    "bytes": packed.bundle.size,
                    "left_out": packed.bundle.left_out,
                },
                "results": list(packed.order.spec.artefacts),
                "max_hours": hours,
                "price_per_hour": plan.price_per_hour,
                "paid": plan.paid,
            }
        )
        return
    lines = [
        ("job", packed.order.name),
        ("where", plan.where),
        *(("then" if n else "first", step) for n, step in enumerate(plan.steps)),
        *(() if installs is None else installs.lines()),
        ("command", command_line(plan.command)),
        *([("script", str(job.command.script))] if job.command.script else []),
        ("arguments", command_line(job.command.words) or "none"),
        ("secrets", ", ".join(sorted(packed.order.secrets)) or "none"),
        ("results", ", ".join(packed.order.spec.artefacts)),
        ("ends", f"after {hours:g} h at the latest"),
        ("costs", f"{price}{max_cost}"),
    ]
    print_pairs(lines)
