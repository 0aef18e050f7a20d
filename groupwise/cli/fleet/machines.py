"""`groupwise fleet vm`: the machines of a fleet; and `groupwise fleet project`: the projects to which jobs are charged."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from groupwise.cli.fleet.access import FleetOption, MachineArgument, fleet
from groupwise.cli.fleet.engine import EngineOptions
from groupwise.cli.fleet.prepare import prepare
from groupwise.cli.fleet.reach import SshOptions, Trust, ask_user
from groupwise.cli.options import AsJson, command
from groupwise.cli.output import say, write_json
from groupwise.cli.parsing import pairs, seconds
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.local import LocalFleet

machines = typer.Typer(
    name="vm",
    help="Machines: add, list, prepare, drain, mark-lost, remove, trust.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
projects = typer.Typer(
    name="project",
    help="Projects: list them, set their weights and quotas.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
TrustJump = Annotated[
    str | None,
    typer.Option(
        "--trust-jump", metavar="FINGERPRINT", help="Host key of the jump host, as SHA256:…."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """What jobs run with on a machine, and which jobs."""

    workdir: Annotated[
        str | None,
        typer.Option(
            metavar="D", help="Folder of the fleet there; at first groupwise-fleet in the home."
        ),
    ] = None
    python: Annotated[
        str | None,
        typer.Option(metavar="P", help="Interpreter of the environment that jobs run in."),
    ] = None
    label: Annotated[
        list[str],
        typer.Option(metavar="K=V", help="Label for `submit --vm-label`. May be repeated."),
    ] = field(default_factory=list[str])
    cpu_slots: Annotated[
        int | None,
        typer.Option(
            "--cpu-slots",
            metavar="N",
            min=0,
            max=1024,
            help="Most jobs without GPUs at the same time; at first 1 if there is no GPU, else none.",
        ),
    ] = None
    project: Annotated[
        list[str] | None,
        typer.Option(metavar="P", help="Only jobs of this project. May be repeated."),
    ] = None
    deadman: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds("--deadman", "off"),
            help="Jobs there end after silence of the fleet for this time, as 10min; at first off.",
        ),
    ] = None
    probe: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Command that lists the GPUs, in place of nvidia-smi."
        ),
    ] = None
    idle_memory_mb: Annotated[
        int | None,
        typer.Option(
            "--idle-memory-mb",
            metavar="MB",
            min=0,
            help="A GPU is idle if it uses no more memory than this; at first 500.",
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
        typer.Option(
            metavar="FINGERPRINT", help="Its host key, as SHA256:…; another one is refused."
        ),
    ] = None,
    trust_jump: TrustJump = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Trust the host keys that are shown, unasked.")
    ] = False,
    settings: MachineOptions,
    engine: Annotated[
        str | None,
        typer.Option(metavar="E", help="Engine that runs jobs on its own machines: slurm or ray."),
    ] = None,
    engine_options: EngineOptions,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Then do the same as `vm prepare`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a machine to the fleet.

    Its host key is read and shown; the machine is used once the key is trusted: by --trust, by --yes, or by your answer here.

    With --engine slurm it is a login node, from which jobs are submitted to Slurm; with --engine ray it reaches Ray's dashboard. Then
    without --host it is this machine.
    """
    from groupwise.cli.fleet.prepare import prepare_new, usual_plan

    _check_trust(trust, yes)
    _check_trust(trust_jump, yes, "--trust-jump")
    if prepare and settings.python is not None:
        raise UsageError(
            "--prepare and --python contradict each other: both say what jobs run with."
        )
    body = {
        "vm_id": vm,
        "labels": pairs("--label", settings.label),
        **settings.fields(),
        "deadman": settings.deadman or None,
        "engine": engine_options.of_new_machine(engine),
    }
    with fleet(fleet_at, make=True) as access:
        trust_by = Trust(trust, trust_jump, yes, ask_user())
        if access.is_local:
            location, trusted = _location(ssh, trust_by, may_be_here=engine is not None)
        else:
            location, trusted = _location_from_afar(vm, ssh, trust_by, prepare=prepare), False
        plan = usual_plan() if prepare else None
        machine = access.add_machine({**body, **location})
        if not as_json or prepare:
            untrusted = f"it is not used before `groupwise fleet vm trust {vm}`"
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


def _location(ssh: SshOptions, trust: Trust, *, may_be_here: bool) -> tuple[dict[str, Any], bool]:
    """The location fields of a new machine, and whether it is trusted. `may_be_here`: without options, it is this machine."""
    from groupwise.cli.fleet import reach

    if may_be_here and ssh == SshOptions() and trust == Trust(ask=trust.ask):
        return {"transport": "local"}, True
    address = ssh.of_new(trust)
    host_key = reach.host_key_of(address, trust)
    keys = {"host_key": host_key.pinned, "seen_host_key": host_key.shown}
    return {**address.as_fields(), **keys}, bool(host_key.pinned)


def _location_from_afar(vm: str, ssh: SshOptions, trust: Trust, *, prepare: bool) -> dict[str, Any]:
    """The location fields of a new machine, for a fleet that runs elsewhere. Raises UsageError for options that only work where it runs."""
    from groupwise.cli.fleet import reach

    if trust.fingerprint is not None or trust.of_jump is not None or trust.unasked:
        raise UsageError(reach.NO_KEY_FROM_AFAR.format(vm=vm))
    if prepare:
        raise UsageError(reach.NO_PREPARING_FROM_AFAR.format(vm=vm))
    return ssh.of_new_from_afar().as_fields()


def _check_trust(trust: str | None, yes: bool, option: str = "--trust") -> None:
    if trust is not None and yes:
        raise UsageError(
            f"{option} and --yes contradict each other: one names the key, one takes any."
        )
    if trust is not None and not trust.startswith("SHA256:"):
        raise UsageError(
            f"{option} {trust}: a fingerprint begins with SHA256:, as `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints it there."
        )


@command(machines, "list")
def list_command(
    fleet_at: FleetOption = None,
    removed: Annotated[
        bool, typer.Option("--removed", help="Also list machines that were removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the machines: what is free, what is wrong."""
    with fleet(fleet_at) as access:
        rows = access.machines(removed=removed)
    if as_json:
        write_json(rows)
    elif not rows:
        say("no machines yet: `groupwise fleet vm add`")
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
def drain(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Place no new jobs there; those that run go on."""
    _change_machine("drain", vm, fleet_at, as_json)


@command(machines, "undrain")
def undrain(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Place jobs there again."""
    _change_machine("undrain", vm, fleet_at, as_json)


@command(machines, "cordon")
def cordon(
    vm: MachineArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; stored in the events.")],
    fleet_at: FleetOption = None,
    as_json: AsJson = False,
) -> None:
    """Place no new jobs there, and say why."""
    _change_machine("cordon", vm, fleet_at, as_json, reason)


@command(machines, "uncordon")
def uncordon(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Place jobs there again, and forget its failed launches."""
    _change_machine("uncordon", vm, fleet_at, as_json)


@command(machines, "mark-lost", "lost")
def lost(
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Say that a machine will never come back.

    Its attempts end, and its jobs run elsewhere. Only for a machine that is gone: one that is merely silent may still be running them.
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
            metavar="[FINGERPRINT]", help="Fingerprint of its own key.", show_default=False
        ),
    ] = None,
    fleet_at: FleetOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Trust the key that it shows, unasked.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Trust the host key that a machine shows."""
    _check_trust(fingerprint, yes)
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
    """Give a GPU to jobs again that had been faulty."""
    _change_machine("clear_quarantine", vm, fleet_at, as_json, gpu)


def _change_machine(
    verb: str, vm: str, fleet_at: str | None, as_json: bool, *arguments: Any
) -> None:
    with fleet(fleet_at) as access:
        result: dict[str, Any] = getattr(access, verb)(vm, *arguments)
    if as_json:
        write_json(result)
        return
    state = result.get("state") or ("removed" if not result["active"] else "in the fleet")
    say(f"{vm} is {state}")
    for attempt in result.get("attempts", ()):
        say(f"  given up: {attempt['job_id']} (epoch {attempt['epoch']})")


@command(machines, "set")
def set_machine(
    *,
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    ssh: SshOptions,
    trust_jump: TrustJump = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Trust the jump host's key, unasked.")
    ] = False,
    settings: MachineOptions,
    any_project: Annotated[
        bool, typer.Option("--any-project", help="Jobs of any project, again.")
    ] = False,
    unlabel: Annotated[
        list[str] | None, typer.Option(metavar="K", help="Remove this label. May be repeated.")
    ] = None,
    engine_options: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Change how a machine is reached, or what jobs run with.

    What is not given stays as it is. --user and --workdir change only while nothing runs there; --deadman is for jobs that begin
    afterwards; the path of --key is one of the machine where the fleet runs.
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
        trust_by = Trust(of_jump=trust_jump, unasked=yes, ask=ask_user())
        changes = {
            **(ssh.of_known(trust_by) if access.is_local else ssh.of_known_from_afar(trust_by)),
            **settings.fields(),
            "labels": labels or None,
            "engine": engine_options.settings() or None,
        }
        if any_project:
            changes["projects"] = []
        machine = access.change_machine(vm, **changes)
    if as_json:
        write_json(machine)
        return
    say(f"{vm}: {_settings_line(machine)}")


def _settings_line(machine: dict[str, Any]) -> str:
    """The settings of a machine in one line. Uncommon settings are shown only if they are set."""
    from groupwise.cli.fleet.printing import engine_line

    slots = "1 without GPUs" if machine["cpu_slots"] is None else machine["cpu_slots"]
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
        float | None,
        typer.Option(
            metavar="X",
            help="2 gets twice as much of a busy fleet as 1.",
        ),
    ] = None,
    max_gpus: Annotated[
        str | None,
        typer.Option(
            "--max-gpus",
            metavar="N",
            help="Most GPUs of its running jobs together; none: no limit.",
        ),
    ] = None,
    max_waiting: Annotated[
        str | None,
        typer.Option(
            "--max-waiting", metavar="N", help="Most jobs that have not begun; none: no limit."
        ),
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
