"""`groupwise fleet vm prepare`: builds the environments that jobs of machines run in, several machines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.environment import EnvironmentOptions
from groupwise.cli.fleet.access import FleetOption, fleet_here
from groupwise.cli.installing import BuildLog
from groupwise.cli.options import AsJson, flag, option
from groupwise.cli.output import say, write_json
from groupwise.cli.parsing import pairs, seconds
from groupwise.cli.parsing import secret as secret_of
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.terminal.ticker import Ticker

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from groupwise.jobs.fleet.attempts.records import Machine
    from groupwise.jobs.fleet.local import LocalFleet
    from groupwise.jobs.fleet.machines.plans import Plan
    from groupwise.jobs.hosts.files import BlobStore

BUILD_LOGS = "prepare"
"""Folder in that of the fleet with the log of each machine's last build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions(EnvironmentOptions):
    """Here `--python` is an older spelling; everywhere else it is an interpreter that has groupwise."""

    base_python: Annotated[
        str | None,
        option(
            "P",
            "Interpreter there that makes the environment; default: of the version used here.",
            "--base-python",
            "--python",
        ),
    ] = None


def prepare(
    *,
    vms: Annotated[list[str], typer.Argument(metavar="VM...", help="Names of machines.")],
    fleet_at: FleetOption = None,
    packages: PrepareOptions,
    wheel: Annotated[
        list[Path] | None,
        option("FILE", "Also install this wheel, without its requirements. May be repeated."),
    ] = None,
    extra_index_url: Annotated[
        list[str] | None, option("URL", "A further package index. May be repeated.")
    ] = None,
    env: Annotated[
        list[str] | None, option("K=V", "Variable for pip, such as HTTPS_PROXY=…. May be repeated.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        option(
            "NAME[=env:X|file:P]",
            "Variable for pip with a secret value, such as PIP_INDEX_URL=env:X. May be repeated.",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        option(
            "TIME",
            "Give up after this time; default: 2h.",
            parser=seconds("--time-limit"),
            show_default=False,
        ),
    ] = 7200.0,
    prune: Annotated[
        bool, flag("Afterwards remove environments there that nothing uses.", "--prune")
    ] = False,
    dry_run: Annotated[
        bool, flag("Print the releases that would be installed; do nothing.", "--dry-run")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build a Python environment on machines, in which their jobs run from then on.

    It gets groupwise exactly as it is here, and the releases of its requirements that are installed here. Environments that are there
    already stay as they are. The machine needs Python 3.11 or newer with venv.
    """
    if as_json and dry_run:
        raise UsageError("--dry-run prints a lock for pip, which is not JSON: leave --json out.")
    with fleet_here(fleet_at) as fleet:
        names = list(dict.fromkeys(vms))
        machines = fleet.database.read(lambda session: _find_machines(session, names))
        plan = packages.plan(
            wheels=wheel or (),
            extra_index_urls=extra_index_url or (),
            environment=pairs("--env", env or ()),
            secrets=dict(secret_of(option_value) for option_value in secret or ()),
            time_seconds=time_limit,
        )
        if dry_run:
            # The lock goes to stdout, for pip; everything else to stderr.
            package_note = f"{plan.packed.file_name}, packed here"
            say(f"environment {plan.name}: {package_note}, and {_describe_plan(plan)}")
            typer.echo(plan.lock.text, nl=False)
            return
        try:
            results = asyncio.run(_prepare_all(fleet, machines, plan, prune=prune))
        except KeyboardInterrupt:
            say("what has started continues there; the same command follows it to its end")
            raise
    if as_json:
        write_json(results)
    raise typer.Exit(1 if any("problem" in result for result in results) else 0)


def _find_machines(session: Session, names: Sequence[str]) -> list[Machine]:
    """All of these machines. Raises an error for the first that cannot be used."""
    from groupwise.jobs.fleet.attempts import records
    from groupwise.jobs.fleet.machines.prepare import require_usable
    from groupwise.jobs.fleet.operations import find

    machines = [records.machine(find.active_machine(session, name)) for name in names]
    for machine in machines:
        require_usable(machine)
    return machines


def _describe_plan(plan: Plan) -> str:
    parts = [f"{len(plan.lock.lines)} releases" + (" with hashes" if plan.lock.hashed else "")]
    if plan.wheels:
        parts.append(f"{len(plan.wheels)} wheels")
    if plan.wheelhouse is not None:
        parts.append(f"all from {len(plan.wheelhouse)} wheels that are sent there")
    if plan.lock.left_to_pip:
        parts.append(f"not installed here, so chosen by pip: {', '.join(plan.lock.left_to_pip)}")
    return "; ".join(parts)


def prepare_new(fleet: LocalFleet, vm: str, plan: Plan) -> dict[str, Any]:
    """Prepare a machine that has just been added. The result contains a `problem` if that failed."""
    machines = fleet.database.read(lambda session: _find_machines(session, [vm]))
    return asyncio.run(_prepare_all(fleet, machines, plan, prune=False))[0]


async def _prepare_all(
    fleet: LocalFleet, machines: Sequence[Machine], plan: Plan, *, prune: bool
) -> list[dict[str, Any]]:
    """Prepare these machines concurrently; an error of one does not affect the others."""
    from groupwise.jobs.fleet.machines import prepare as preparing
    from groupwise.jobs.hosts.files import BlobStore

    say(f"environment {plan.name}: groupwise {plan.packed.version} and {_describe_plan(plan)}")
    store = BlobStore(fleet.place.blobs)

    async def one(machine: Machine, ticker: Ticker) -> dict[str, Any]:
        vm, say = machine.vm_id, ticker.note
        label = "" if len(machines) == 1 else f"{vm}: "
        log = BuildLog(ticker, fleet.place.folder / BUILD_LOGS / f"{vm}.log", label)
        try:
            environment = await preparing.prepare(machine, plan, store, log.add)
            await asyncio.to_thread(lambda: fleet.change_machine(vm, python=environment.python))
            release = f"Python {environment.version}, groupwise {environment.groupwise}"
            say(f"{vm} is prepared: its jobs run with {environment.python} ({release})")
            result: dict[str, Any] = {"vm_id": vm, "environment": plan.name, **asdict(environment)}
            if prune:
                result |= await _prune_one(fleet, machine, plan, store, say)
            return result
        except GroupwiseError as error:
            log.show_failure()
            say(f"groupwise: {error.message}")
            return {"vm_id": vm, "problem": error.message, "code": error.code}

    with Ticker(every=None) as ticker:
        try:
            return list(await asyncio.gather(*(one(machine, ticker) for machine in machines)))
        finally:
            ticker.clear()


async def _prune_one(
    fleet: LocalFleet, machine: Machine, plan: Plan, store: BlobStore, say: Callable[[str], None]
) -> dict[str, Any]:
    """Prune one machine. A launch in progress may still use the interpreter that the row named before; then nothing is removed."""
    from groupwise.jobs.fleet.machines import prepare as preparing

    vm = machine.vm_id
    epochs = await asyncio.to_thread(
        lambda: fleet.database.read(lambda session: preparing.starting_attempts(session, vm))
    )
    if epochs:
        say(f"{vm}: jobs are just beginning there, so no environment is removed; --prune once more")
        return asdict(preparing.Pruned([], [], []))

    async def keep() -> list[str]:
        return [
            plan.name,
            *await asyncio.to_thread(fleet.database.read, preparing.named_environments),
        ]

    pruned = await preparing.prune(machine, keep, store)
    used = f", {len(pruned.used)} still used" if pruned.used else ""
    recent = f", {len(pruned.recent)} kept as younger than an hour" if pruned.recent else ""
    say(f"{vm}: other environments: {len(pruned.removed)} removed{used}{recent}")
    return asdict(pruned)
