"""`groupwise fleet vm`: the machines of a fleet; and `groupwise fleet project`: the projects to which jobs are charged."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from groupwise.cli.fleet.access import FleetOption, MachineArgument, fleet
from groupwise.cli.fleet.engine import EngineOptions
from groupwise.cli.fleet.machine_address import SshOptions, Trust, ask_user, observe_new
from groupwise.cli.fleet.prepare import prepare
from groupwise.cli.options import AsJson, WrappingGroup, command, flag, option
from groupwise.cli.output import say, write_json
from groupwise.cli.parsing import pairs, seconds
from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient
    from groupwise.jobs.fleet.local import LocalFleet
    from groupwise.jobs.hosts.answers import Observation

machines = typer.Typer(
    name="vm",
    cls=WrappingGroup,
    help="Machines: add, list, show, set, trust, prepare, drain, remove.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
projects = typer.Typer(
    name="project",
    cls=WrappingGroup,
    help="Projects: list them, set their weights and quotas.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
LOCATION = ("transport", "ip_address", "port", "user", "ssh_key_path", "jump", "host_key")
"""Fields that say where a machine is, and how it is logged in to."""
YesOption = Annotated[bool, flag("Do not ask.", "--yes", "-y")]
TrustJump = Annotated[
    str | None,
    option("FINGERPRINT", "Fingerprint of the jump host's key, SHA256:….", "--trust-jump"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """What jobs run with on a machine, and which jobs."""

    workdir: Annotated[
        str | None, option("D", "Folder of the fleet there. For a new machine: ~/groupwise-fleet.")
    ] = None
    python: Annotated[
        str | None, option("P", "Python that jobs there run with, such as /opt/env/bin/python.")
    ] = None
    label: Annotated[
        list[str], option("K=V", "Label for `submit --vm-label`. May be repeated.")
    ] = field(default_factory=list[str])
    cpu_slots: Annotated[
        int | None,
        option(
            "N",
            "Maximum number of jobs without GPUs at the same time. For a new machine: 1.",
            min=0,
            max=1024,
        ),
    ] = None
    project: Annotated[
        list[str] | None, option("P", "Run only jobs of this project there. May be repeated.")
    ] = None
    deadman: Annotated[
        float | None,
        option(
            "TIME",
            "End the jobs there after this time without contact to the fleet, such as 10min; off: never. For a new machine: off.",
            parser=seconds("--deadman", "off"),
        ),
    ] = None
    probe: Annotated[
        str | None, option("COMMAND", "Command that lists the GPUs, in place of nvidia-smi.")
    ] = None
    idle_memory_mb: Annotated[
        int | None,
        option(
            "MB",
            "A GPU with no more memory in use than this counts as idle. For a new machine: 500.",
            min=0,
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """The options as fields of a machine's document, without its labels. Raises UsageError."""
        try:
            # It is never run by a shell.
            probe = None if self.probe is None else shlex.split(self.probe)
        except ValueError as error:
            raise UsageError(f"--probe {self.probe}: {error}.") from None
        if probe == []:
            raise UsageError(
                '--probe is empty: a command is expected, as --probe "sudo -n nvidia-smi".'
            )
        return {
            "workdir": self.workdir,
            "python": self.python,
            "cpu_slots": self.cpu_slots,
            "projects": self.project,
            "deadman": self.deadman,
            "probe": probe,
            "idle_memory_mb": self.idle_memory_mb,
        }


@command(machines, "add")
def add(
    *,
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    ssh: SshOptions,
    trust: Annotated[
        str | None,
        option("FINGERPRINT", "Fingerprint of its host key, SHA256:…; another key is refused."),
    ] = None,
    trust_jump: TrustJump = None,
    yes: Annotated[
        bool, flag("Trust the host keys that are shown without asking.", "--yes", "-y")
    ] = False,
    settings: MachineOptions,
    engine: Annotated[
        str | None, option("E", "Scheduler that places its jobs on a cluster: slurm or ray.")
    ] = None,
    engine_options: EngineOptions,
    prepare: Annotated[
        bool, flag("Prepare it as well, as `vm prepare` does.", "--prepare")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a machine to the fleet.

        groupwise fleet vm add gpu-1 --host ubuntu@10.0.0.11

    The command shows the machine's host key. Jobs run there once that key is trusted: because it is in your known_hosts, because you give
    --trust or --yes, or because you answer yes. The command then logs in and prints what it finds; if it cannot log in, the machine is
    not added. A removed machine keeps its settings if it is added again, and without --host its address.

    With --engine slurm the machine is a login node of Slurm, with --engine ray one that reaches Ray's dashboard. Then, without --host, it
    is this machine.
    """
    from groupwise.cli.environment import EnvironmentOptions
    from groupwise.cli.fleet.prepare import prepare_new

    _check_trust(trust, yes)
    _check_trust(trust_jump, yes, "--trust-jump")
    if prepare and settings.python is not None:
        raise UsageError(
            "--prepare and --python contradict each other: both say what jobs run with."
        )
    given = {"labels": pairs("--label", settings.label), **settings.fields()}
    engine_settings = engine_options.of_new_machine(engine)
    with fleet(fleet_at, make=True) as access:
        trust_by = Trust(trust, trust_jump, yes, ask_user())
        removed = _removed_machine(access, vm) if access.is_local and engine is None else None
        body = {
            "vm_id": vm,
            **(given if removed is None else _with_earlier_settings(given, removed)),
            "engine": engine_settings,
        }
        body["deadman"] = body["deadman"] or None
        if access.is_local:
            location, trusted = _location(removed, vm, ssh, trust_by, has_engine=engine is not None)
        else:
            location, trusted = _location_from_afar(vm, ssh, trust_by, prepare=prepare), False
        plan = EnvironmentOptions().plan() if prepare else None
        document = {**body, **location}
        seen = observe_new(document) if trusted and location["transport"] != "local" else None
        machine = access.add_machine(document)
        if seen is not None:
            machine = _record_first_look(cast("LocalFleet", access), vm, *seen)
        elif not as_json or prepare:
            untrusted = (
                f"it gets jobs after `groupwise fleet vm trust {vm}`, which also tries its login"
            )
            next_step = "the poller looks at it in its next round" if trusted else untrusted
            say(f"{vm} is in the fleet; {next_step}")
        if plan is not None and access.is_local:
            prepare_command = f"`groupwise fleet vm prepare {vm}`"
            try:
                if trusted:
                    machine["prepared"] = prepare_new(cast("LocalFleet", access), vm, plan)
                else:
                    problem = (
                        f"{vm} is not contacted before it is trusted; once it is, {prepare_command}"
                    )
                    say(f"it is not prepared: {problem}")
                    machine["prepared"] = {"vm_id": vm, "problem": problem}
            except KeyboardInterrupt:
                say(f"what has started continues there; {prepare_command} follows it to its end")
                raise
    if as_json:
        write_json(machine)
    if "problem" in machine.get("prepared", {}):
        raise typer.Exit(1)


def _record_first_look(
    access: LocalFleet, vm: str, seen: Observation, python_problem: str | None
) -> dict[str, Any]:
    """Store the first observation of a machine, as the poller stores the next ones, and say what is there."""
    from groupwise.jobs.fleet.machines import observation
    from groupwise.jobs.fleet.store.database import database_time

    access.database.run(lambda s: observation.apply(s, vm, database_time(s), seen))
    machine = access.machine(vm)
    models = Counter(gpu["model"] or "GPU of unknown model" for gpu in machine["gpus"])
    gpus = ", ".join(f"{count} x {model}" for model, count in models.items())
    if machine["engine"] is not None:
        gpus = "its scheduler answers for the GPUs"
    elif not gpus:
        gpus = f"no GPU (nvidia-smi: {seen.probe.status})"
    ram_gb, disk_gb = ((megabytes or 0) / 1000 for megabytes in (seen.ram_mb, seen.disk_free_mb))
    say(
        f"{vm} is in the fleet: {gpus}, {counted(seen.cpus or 0, 'CPU')}, {ram_gb:.0f} GB of memory, {disk_gb:.0f} GB of disk free"
    )
    for trouble in filter(None, [machine["problem"], *(gpu["detail"] for gpu in machine["gpus"])]):
        say(f"  but: {trouble}")
    _say_python_problem(machine, python_problem)
    return machine


def _removed_machine(access: FleetClient, vm: str) -> dict[str, Any] | None:
    """The machine that had this name and its own GPUs or slots, if it was removed."""
    rows = (row for row in access.machines(removed=True) if not row["active"])
    return next((row for row in rows if row["vm_id"] == vm and row["engine"] is None), None)


def _with_earlier_settings(given: dict[str, Any], removed: dict[str, Any]) -> dict[str, Any]:
    """The settings of a removed machine that is added again: the given ones, else those that it had."""
    settings = {name: removed[name] if value is None else value for name, value in given.items()}
    return settings | {"labels": {**removed["labels"], **given["labels"]}}


def _location(
    removed: dict[str, Any] | None, vm: str, ssh: SshOptions, trust: Trust, *, has_engine: bool
) -> tuple[dict[str, Any], bool]:
    """The location fields of a new machine, and whether it is trusted. Without options, it is this machine if it has an engine, else the
    removed machine of this name."""
    from groupwise.cli.fleet import machine_address

    if ssh == SshOptions() and trust == Trust(ask=trust.ask):
        if has_engine:
            return {"transport": "local"}, True
        if removed is not None:
            if removed["host_key"] is not None:
                say(f"{vm} has the host key {removed['fingerprint']} that was trusted before")
            location = {name: removed[name] for name in LOCATION}
            return location, removed["transport"] == "local" or bool(removed["host_key"])
    address = ssh.of_new(trust)
    host_key = machine_address.host_key_of(address, trust)
    keys = {"host_key": host_key.pinned, "seen_host_key": host_key.shown}
    return {"transport": "ssh", **address.as_fields(), **keys}, bool(host_key.pinned)


def _location_from_afar(vm: str, ssh: SshOptions, trust: Trust, *, prepare: bool) -> dict[str, Any]:
    """The location fields of a new machine, for a fleet that runs elsewhere. Raises UsageError for options that only work where it runs."""
    from groupwise.cli.fleet import machine_address

    if trust.fingerprint is not None or trust.of_jump is not None or trust.assume_yes:
        raise UsageError(machine_address.NO_KEY_FROM_AFAR.format(vm=vm))
    if prepare:
        raise UsageError(machine_address.NO_PREPARING_FROM_AFAR.format(vm=vm))
    return ssh.of_new_from_afar().as_fields()


def _check_trust(trust: str | None, yes: bool, option: str = "--trust") -> None:
    from groupwise.api.schemas.fleet import FINGERPRINT

    if trust is not None and yes:
        raise UsageError(
            f"{option} and --yes contradict each other: one names the key, one takes any."
        )
    if trust is not None and re.fullmatch(FINGERPRINT, trust) is None:
        raise UsageError(
            f"{option} {trust}: a fingerprint is SHA256: and 43 characters, as `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` "
            "prints it on that machine."
        )


@command(machines, "list")
def list_command(
    fleet_at: FleetOption = None,
    removed: Annotated[bool, flag("Also list machines that were removed.", "--removed")] = False,
    as_json: AsJson = False,
) -> None:
    """List the machines: what is free, what is wrong."""
    with fleet(fleet_at) as access:
        rows = access.machines(removed=removed)
        were_removed = not rows and bool(access.machines(removed=True))
    if as_json:
        write_json(rows)
    elif not rows:
        say("no machines: add one with `groupwise fleet vm add`")
        if were_removed:
            say("those that were removed: `groupwise fleet vm list --removed`")
    else:
        from groupwise.cli.fleet.printing import print_machines

        print_machines(rows)


@command(machines, "show")
def show(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Show one machine: its GPUs, who holds them, its history."""
    with fleet(fleet_at) as access:
        machine = access.machine(vm)
    if as_json:
        write_json(machine)
        return
    from groupwise.cli.fleet.printing import print_machine

    print_machine(machine, time.time())


@command(machines, "drain")
def drain(
    vm: MachineArgument,
    reason: Annotated[str | None, option("TEXT", "Why; shown with the machine.")] = None,
    fleet_at: FleetOption = None,
    as_json: AsJson = False,
) -> None:
    """Place no new jobs there; those that run continue."""
    _change_machine("drain", vm, fleet_at, as_json, reason)


@command(machines, "undrain")
def undrain(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Place jobs there again, and forget its failed launches."""
    _change_machine("undrain", vm, fleet_at, as_json)


@command(machines, "mark-lost", "lost")
def lost(
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Say that a machine will never come back.

    Its attempts end, and its jobs run elsewhere. Only for a machine that is gone: one that is merely silent may still be running them.
    If it does come back, the fleet ends what still runs there, and then it takes jobs again.
    """
    if not yes:
        ask = ask_user()
        if ask is None:
            raise UsageError(
                f"`vm mark-lost {vm}` gives up all that runs there; say --yes if there is no terminal."
            )
        if not ask(f"Is {vm} gone for good? Its jobs start again elsewhere."):
            raise typer.Exit(1)
    _change_machine("lost", vm, fleet_at, as_json)


@command(machines, "remove")
def remove(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Remove a machine from the fleet; nothing may run there."""
    _change_machine("remove", vm, fleet_at, as_json)


@command(machines, "trust")
def trust(
    vm: MachineArgument,
    fingerprint: Annotated[
        str | None,
        typer.Argument(
            metavar="[FINGERPRINT]",
            help="What `ssh-keygen -lf` prints there for its key, SHA256:…. Another key is refused; without it you are asked.",
            show_default=False,
        ),
    ] = None,
    fleet_at: FleetOption = None,
    yes: Annotated[
        bool, flag("Trust the key that it shows without asking.", "--yes", "-y")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Trust the host key that a machine shows, and try its login."""
    _check_trust(fingerprint, yes, "FINGERPRINT")
    if fingerprint is None and not yes:
        with fleet(fleet_at) as access:
            machine = access.machine(vm)
        # If the machine has shown no key yet, `trust` explains why.
        if (fingerprint := machine["seen_fingerprint"]) is not None:
            ask = ask_user()
            if ask is None:
                raise UsageError(
                    f"{vm} shows the host key {fingerprint}. Compare it with the machine's own (`ssh-keygen -lf "
                    f"/etc/ssh/ssh_host_ed25519_key.pub` there), then `groupwise fleet vm trust {vm} {fingerprint}`."
                )
            if machine["fingerprint"] is not None:
                say(f"{vm} had the host key {machine['fingerprint']} before.")
            if not ask(f"{vm} shows the host key {fingerprint}. Is that the machine's own?"):
                raise typer.Exit(1)
    _change_machine("trust", vm, fleet_at, as_json, fingerprint)


@command(machines, "clear-quarantine")
def clear_quarantine(
    vm: MachineArgument,
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="Index or UUID of the GPU.")],
    fleet_at: FleetOption = None,
    as_json: AsJson = False,
) -> None:
    """End the quarantine of a GPU: jobs may use it again."""
    _change_machine("clear_quarantine", vm, fleet_at, as_json, gpu)


def _change_machine(
    operation: str, vm: str, fleet_at: str | None, as_json: bool, *arguments: Any
) -> None:
    with fleet(fleet_at) as access:
        result: dict[str, Any] = getattr(access, operation)(vm, *arguments)
    if as_json:
        write_json(result)
    else:
        if operation == "trust":
            say(f"{vm} is trusted, and looked at in the next round of the fleet")
        elif result["active"]:
            say(f"{vm} is {result.get('state') or 'in the fleet'}")
        else:
            say(f"{vm} is removed; `groupwise fleet vm add {vm}` adds it again")
        for job_id in result.get("waiting_jobs", ()):
            say(f"  waits for it: {job_id}")
        for attempt in result.get("attempts", ()):
            say(f"  given up: {attempt['job_id']} (attempt {attempt['epoch']})")
    if operation == "trust" and access.is_local and result["host_key"]:
        _try_login(result, f"Its key is trusted; `groupwise fleet vm set {vm}` changes the login.")


@command(machines, "set")
def set_machine(
    *,
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    ssh: SshOptions,
    trust_jump: TrustJump = None,
    yes: Annotated[bool, flag("Trust the jump host's key without asking.", "--yes", "-y")] = False,
    settings: MachineOptions,
    any_project: Annotated[bool, flag("Jobs of any project, again.", "--any-project")] = False,
    unlabel: Annotated[list[str] | None, option("K", "Remove this label. May be repeated.")] = None,
    engine_options: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Change how a machine is reached, or what jobs run with.

    Options that you leave out change nothing. --user and --workdir change only while nothing runs there; --deadman is for jobs that begin
    afterwards; the file of --key is on the machine where the fleet runs.
    """

    labels: dict[str, str | None] = dict(pairs("--label", settings.label))
    for name in unlabel or ():
        if name in labels:
            raise UsageError(f"--label {name}=… and --unlabel {name} contradict each other.")
        labels[name] = None
    if settings.project and any_project:
        raise UsageError("--project and --any-project contradict each other.")
    _check_trust(trust_jump, yes, "--trust-jump")
    with fleet(fleet_at) as access:
        trust_by = Trust(of_jump=trust_jump, assume_yes=yes, ask=ask_user())
        changes = {
            **ssh.of_known(trust_by, is_local=access.is_local),
            **settings.fields(),
            "labels": labels or None,
            "engine": engine_options.settings() or None,
        }
        if any_project:
            changes["projects"] = []
        machine = access.change_machine(vm, **changes)
    if as_json:
        write_json(machine)
    else:
        say(f"{vm}: {_settings_line(machine)}")
    if access.is_local and machine["host_key"] and any(changes.get(name) for name in LOCATION):
        _try_login(machine, "It was changed: jobs there continue; set it again if this is wrong.")


def _try_login(machine: dict[str, Any], consequence: str) -> None:
    """Log in to a machine of the fleet, and say what is wrong; what is there is stored by the poller. `consequence`: of a failure."""
    login = {name: machine[name] for name in ("vm_id", *LOCATION, "workdir", "python")}
    try:
        _, python_problem = observe_new(login, consequence)
    except UsageError as problem:
        say(f"  but: {problem}")
    else:
        _say_python_problem(machine, python_problem)


def _say_python_problem(machine: dict[str, Any], problem: str | None) -> None:
    if problem is not None:
        say(
            f"  but: its jobs' interpreter {machine['python']} does not run there: {problem} (vm set --python, or vm prepare)"
        )


def _settings_line(machine: dict[str, Any]) -> str:
    """The settings of a machine in one line. Uncommon settings are shown only if they are set."""
    from groupwise.cli.fleet.printing import engine_line

    slots = 1 if machine["cpu_slots"] is None else machine["cpu_slots"]
    parts = [
        f"folder {machine['workdir']}",
        f"python {machine['python']}",
        f"CPU slots {slots}" if machine["engine"] is None else str(engine_line(machine)),
    ]
    if machine["user"] is not None:
        parts.insert(0, f"{machine['user']}@{machine['ip_address']}:{machine['port']}")
    optional_settings = {
        "labels": " ".join(f"{name}={value}" for name, value in sorted(machine["labels"].items())),
        "jobs of": ", ".join(machine["projects"] or ()),
        "deadman": machine["deadman"] and f"{machine['deadman']:g} s",
        "probe": machine["probe"] and shlex.join(machine["probe"]),
    }
    return ", ".join(
        [*parts, *(f"{name} {value}" for name, value in optional_settings.items() if value)]
    )


command(machines, "prepare")(prepare)


# Projects


@command(projects, "list")
def list_projects(fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """List projects: weights, quotas, what waits and runs."""
    with fleet(fleet_at) as access:
        rows = access.projects()
    if as_json:
        write_json(rows)
    elif not rows:
        say("no projects yet: `groupwise fleet submit --project NAME` makes one")
    else:
        from groupwise.cli.fleet.printing import print_projects

        print_projects(rows)


@command(projects, "set")
def set_project(
    name: Annotated[
        str, typer.Argument(metavar="PROJECT", help="Name of the project; a new one is made.")
    ],
    fleet_at: FleetOption = None,
    weight: Annotated[
        float | None, option("X", "2 gets twice as much of a busy fleet as 1.")
    ] = None,
    max_gpus: Annotated[
        str | None, option("N", "Maximum number of GPUs of all its running jobs; none: no limit.")
    ] = None,
    max_waiting: Annotated[
        str | None, option("N", "Maximum number of waiting jobs; none: no limit.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set weight and quotas of a project."""
    changes: dict[str, float | None] = {} if weight is None else {"weight": weight}
    if max_gpus is not None:
        changes["max_gpus"] = _parse_quota("--max-gpus", max_gpus)
    if max_waiting is not None:
        changes["max_waiting"] = _parse_quota("--max-waiting", max_waiting)
    if not changes:
        raise UsageError("nothing to change: give --weight, --max-gpus or --max-waiting.")
    with fleet(fleet_at, make=True) as access:
        project = access.change_project(name, **changes)
    if as_json:
        write_json(project)
    else:
        limits = ", ".join(f"{k} {v}" for k, v in project.items() if k != "name" and v is not None)
        say(f"project {name}: {limits}")


def _parse_quota(option: str, value: str) -> int | None:
    if value == "none":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise UsageError(
            f"{option} {value[:80]}: a whole number is expected, as {option} 8, or none for no limit."
        )
    return int(value)
