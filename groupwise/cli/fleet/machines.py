"""`groupwise fleet vm`: the machines of a fleet; and `groupwise fleet project`: the projects to which jobs are charged."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from groupwise.cli.fleet.access import AsJson, FleetOption, MachineArgument, fleet
from groupwise.cli.fleet.engine import (
    AddressOption,
    EngineOption,
    GpusOption,
    MemoryOption,
    ModelOption,
    PartitionOption,
    ResourceOption,
    SbatchOption,
    SlotsOption,
    engine_words,
    new_engine,
)
from groupwise.cli.fleet.words import number, whole
from groupwise.cli.output import say
from groupwise.cli.printing import print_json
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.cli.fleet.reach import Trust, Way
    from groupwise.jobs.fleet.local import LocalFleet

machines = typer.Typer(
    name="vm",
    help="Machines: add, list, prepare, drain, lost, remove, trust.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
projects = typer.Typer(
    name="project",
    help="Projects: list them, set their weights and quotas.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SLOTS = whole("--cpu-slots", 4, least=0, most=1024)
PORT = whole("--port", 22, most=65535)
ProbeOption = Annotated[
    str | None,
    typer.Option(metavar="COMMAND", help="Asked for the GPUs in place of nvidia-smi."),
]
IdleOption = Annotated[
    int | None,
    typer.Option(
        "--idle-memory-mb",
        metavar="MB",
        help="A GPU that shows no more than this as used is idle; 500 at first.",
        parser=whole("--idle-memory-mb", 500, least=0, most=2**31 - 1),
    ),
]


FromConfig = Annotated[
    str | None,
    typer.Option(
        "--from-ssh-config",
        metavar="NAME",
        help="Host, user, port, key and jump host as `ssh NAME` has them now.",
    ),
]
TrustJump = Annotated[
    str | None,
    typer.Option(
        "--trust-jump",
        metavar="FINGERPRINT",
        help="The host key of the jump host, as SHA256:…",
    ),
]


ProjectOption = Annotated[
    list[str] | None,
    typer.Option("--project", metavar="P", help="Jobs of this project alone; may be repeated."),
]


@machines.command("add")
def add(
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address or name.")] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", help="Without it: 22.", parser=PORT),
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="U", help="As whom to log in.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="FILE", help="The private key, on this machine.")
    ] = None,
    from_ssh_config: FromConfig = None,
    trust: Annotated[
        str | None,
        typer.Option(
            metavar="FINGERPRINT", help="Its host key, as SHA256:…; another one is refused."
        ),
    ] = None,
    trust_jump: TrustJump = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Trust the host keys that are shown now, unasked.")
    ] = False,
    workdir: Annotated[
        str | None, typer.Option(metavar="D", help="Without it: groupwise-fleet in the home there.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="P", help="Interpreter of the environment that jobs run in."),
    ] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="For --vm-label.")] = None,
    cpu_slots: Annotated[
        int | None,
        typer.Option(
            "--cpu-slots",
            metavar="N",
            help="Jobs without GPUs at once; without it: 1 where there is no GPU, else none.",
            parser=SLOTS,
        ),
    ] = None,
    project: ProjectOption = None,
    deadman: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Silence of the fleet after which its jobs end, as 10min; off."
        ),
    ] = None,
    probe: ProbeOption = None,
    idle_memory_mb: IdleOption = None,
    engine: EngineOption = None,
    slots: SlotsOption = None,
    gpus_per_job: GpusOption = None,
    gpu_model: ModelOption = None,
    gpu_memory: MemoryOption = None,
    partition: PartitionOption = None,
    sbatch: SbatchOption = None,
    address: AddressOption = None,
    resource: ResourceOption = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Then do what `vm prepare` does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take a machine into the fleet.

    Its host key is read and shown; it is used once the key is trusted: by --trust, by --yes, or by your answer here.

    With --engine slurm it is a login node, from which jobs are given to Slurm, with --engine ray one that reaches Ray's dashboard;
    without --host this machine is.
    """
    from groupwise.cli.fleet.words import pairs

    _check_trust(trust, yes)
    _check_trust(trust_jump, yes, "--trust-jump")
    if prepare and python is not None:
        raise UsageError(
            "--prepare and --python contradict each other: both say what jobs run with."
        )
    what: dict[str, Any] = {
        "vm_id": vm,
        "workdir": workdir,
        "python": python,
        "labels": pairs("--label", label or ()),
        "cpu_slots": cpu_slots,
        "projects": project,
        "deadman": _deadman(deadman) or None,
        "probe": _command(probe),
        "idle_memory_mb": idle_memory_mb,
        "engine": new_engine(
            engine,
            engine_words(
                slots, gpus_per_job, gpu_model, gpu_memory, partition, sbatch, address, resource
            ),
        ),
    }
    with fleet(fleet_at, make=True) as access:
        from groupwise.cli.fleet import reach
        from groupwise.cli.fleet.prepare import prepare_new, usual_plan

        way = reach.Way(host, port, user, key, from_ssh_config)
        by = reach.Trust(trust, trust_jump, yes, _ask_user())
        if access.is_local:
            where, trusted = _location(way, by, may_be_here=engine is not None)
        else:
            where, trusted = _location_from_afar(vm, way, by, prepare=prepare), False
        plan = usual_plan() if prepare else None
        found = access.add_machine({**what, **where})
        if not as_json or prepare:
            untrusted = f"it is not used before `groupwise fleet vm trust {vm}`"
            then = "the poller looks at it in its next round" if trusted else untrusted
            say(f"{vm} is in the fleet; {then}")
        if plan is not None and access.is_local:
            again = f"`groupwise fleet vm prepare {vm}`"
            try:
                if trusted:
                    found["prepared"] = prepare_new(cast("LocalFleet", access), vm, plan)
                else:
                    problem = f"nothing is said to {vm} before it is trusted; once it is, {again}"
                    say(f"it is not prepared: {problem}")
                    found["prepared"] = {"vm_id": vm, "problem": problem}
            except KeyboardInterrupt:
                say(f"what has begun goes on there; {again} follows it to its end")
                raise
    if as_json:
        print_json(found)
    if "problem" in found.get("prepared", {}):
        raise typer.Exit(1)


def _location(way: Way, by: Trust, *, may_be_here: bool) -> tuple[dict[str, Any], bool]:
    """The fields that say where a new machine is, and whether it is trusted. `may_be_here`: without options it is this machine."""
    from groupwise.cli.fleet import reach

    if may_be_here and way == reach.Way() and by == reach.Trust(ask=by.ask):
        return {"transport": "local"}, True
    where = way.of_new(by)
    seen = reach.host_key_of(where, by)
    keys = {"host_key": seen.pinned, "seen_host_key": seen.shown}
    return {**where.as_fields(), **keys}, bool(seen.pinned)


def _location_from_afar(vm: str, way: Way, by: Trust, *, prepare: bool) -> dict[str, Any]:
    """The same fields for a fleet that runs elsewhere. Raises UsageError for options that only work on its own machine."""
    from groupwise.cli.fleet import reach

    if by.fingerprint is not None or by.of_jump is not None or by.unasked:
        raise UsageError(reach.NO_KEY_FROM_AFAR.format(vm=vm))
    if prepare:
        raise UsageError(reach.NO_PREPARING_FROM_AFAR.format(vm=vm))
    return way.of_new_from_afar().as_fields()


def _check_trust(trust: str | None, yes: bool, option: str = "--trust") -> None:
    if trust is not None and yes:
        raise UsageError(
            f"{option} and --yes contradict each other: one names the key, one takes any."
        )
    if trust is not None and not trust.startswith("SHA256:"):
        raise UsageError(
            f"{option} {trust}: a fingerprint begins with SHA256:, as `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints it there."
        )


def _ask_user() -> Callable[[str], bool] | None:
    """A function that asks the user; None if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return lambda question: typer.confirm(question, default=False, err=True)


@machines.command("list")
def list_command(
    fleet_at: FleetOption = None,
    removed: Annotated[
        bool, typer.Option("--removed", help="Also those that were removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the machines: what is free, what is wrong."""
    with fleet(fleet_at) as access:
        found = access.machines(removed=removed)
    if as_json:
        print_json(found)
    elif not found:
        say("no machines yet: `groupwise fleet vm add`")
    else:
        from groupwise.cli.fleet.printing import print_machines

        print_machines(found)


@machines.command("show")
def show(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Show one machine: its GPUs, who holds them, its history."""
    with fleet(fleet_at) as access:
        found = access.machine(vm)
    if as_json:
        print_json(found)
        return
    from groupwise.cli.fleet.printing import print_machine

    print_machine(found, time.time())


@machines.command("drain")
def drain(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Place nothing new there; what runs goes on."""
    _change("drain", vm, fleet_at, as_json)


@machines.command("undrain")
def undrain(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Place work there again."""
    _change("undrain", vm, fleet_at, as_json)


@machines.command("cordon")
def cordon(
    vm: MachineArgument,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="The reason, which the events keep.")],
    fleet_at: FleetOption = None,
    as_json: AsJson = False,
) -> None:
    """Place nothing new there, and say why."""
    _change("cordon", vm, fleet_at, as_json, reason)


@machines.command("uncordon")
def uncordon(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Place work there again, and forget its failed launches."""
    _change("uncordon", vm, fleet_at, as_json)


@machines.command("mark-lost")
def lost(
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say that a machine will never come back.

    Its attempts end, and its jobs are run elsewhere. Only for a machine that is gone: one that is merely silent may still be running them.
    """
    if not yes:
        asks = _ask_user()
        if asks is None:
            raise UsageError(
                f"`vm mark-lost {vm}` gives up all that runs there; say --yes if there is no terminal."
            )
        if not asks(f"Is {vm} gone for good? Its jobs start again elsewhere."):
            raise typer.Exit(1)
    _change("lost", vm, fleet_at, as_json)


@machines.command("remove")
def remove(vm: MachineArgument, fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """Take a machine out of the fleet; nothing may run there."""
    _change("remove", vm, fleet_at, as_json)


@machines.command("trust")
def trust(
    vm: MachineArgument,
    fingerprint: Annotated[
        str | None,
        typer.Argument(
            metavar="[FINGERPRINT]", help="Of the key that it is to have.", show_default=False
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
            found = access.machine(vm)
        # If it has shown none, `trust` says why.
        if (fingerprint := found["seen_fingerprint"]) is not None:
            asks = _ask_user()
            if asks is None:
                raise UsageError(
                    f"{vm} shows the host key {fingerprint}. Compare it with the machine's own (`ssh-keygen -lf "
                    f"/etc/ssh/ssh_host_ed25519_key.pub` there), then `groupwise fleet vm trust {vm} {fingerprint}`."
                )
            if found["fingerprint"] is not None:
                say(f"{vm} had the host key {found['fingerprint']} before.")
            if not asks(f"{vm} shows the host key {fingerprint}. Is that the machine's own?"):
                raise typer.Exit(1)
    _change("trust", vm, fleet_at, as_json, fingerprint)


@machines.command("clear-quarantine")
def clear_quarantine(
    vm: MachineArgument,
    gpu: Annotated[str, typer.Argument(metavar="GPU", help="Its index or UUID.")],
    fleet_at: FleetOption = None,
    as_json: AsJson = False,
) -> None:
    """Let jobs have a GPU again that had been faulty."""
    _change("clear_quarantine", vm, fleet_at, as_json, gpu)


def _change(verb: str, vm: str, fleet_at: str | None, as_json: bool, *more: Any) -> None:
    with fleet(fleet_at) as access:
        found: dict[str, Any] = getattr(access, verb)(vm, *more)
    if as_json:
        print_json(found)
        return
    state = found.get("state") or ("removed" if not found["active"] else "in the fleet")
    say(f"{vm} is {state}")
    for attempt in found.get("attempts", ()):
        say(f"  given up: {attempt['job_id']} (epoch {attempt['epoch']})")


@machines.command("set")
def set_machine(
    vm: MachineArgument,
    fleet_at: FleetOption = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address or name.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="Of SSH.", parser=PORT)] = None,
    user: Annotated[
        str | None, typer.Option(metavar="U", help="As whom to log in; nothing may run there.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The private key, where the fleet runs."),
    ] = None,
    from_ssh_config: FromConfig = None,
    trust_jump: TrustJump = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Trust the jump host's key, unasked.")
    ] = False,
    workdir: Annotated[
        str | None, typer.Option(metavar="D", help="Its folder there; nothing may run there.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="P", help="Interpreter of the environment that jobs run in."),
    ] = None,
    cpu_slots: Annotated[
        int | None,
        typer.Option("--cpu-slots", metavar="N", help="Jobs without GPUs at once.", parser=SLOTS),
    ] = None,
    project: ProjectOption = None,
    any_project: Annotated[
        bool, typer.Option("--any-project", help="Of any project, again.")
    ] = False,
    label: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="For --vm-label; the others stay.")
    ] = None,
    unlabel: Annotated[
        list[str] | None, typer.Option(metavar="K", help="Take this label away.")
    ] = None,
    deadman: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="For jobs that begin from now on, as 10min, or off."),
    ] = None,
    probe: ProbeOption = None,
    idle_memory_mb: IdleOption = None,
    slots: SlotsOption = None,
    gpus_per_job: GpusOption = None,
    gpu_model: ModelOption = None,
    gpu_memory: MemoryOption = None,
    partition: PartitionOption = None,
    sbatch: SbatchOption = None,
    address: AddressOption = None,
    resource: ResourceOption = None,
    as_json: AsJson = False,
) -> None:
    """Change how a machine is reached, or what jobs run with."""
    labels = _labels(label or (), unlabel or ())
    if project and any_project:
        raise UsageError("--project and --any-project contradict each other.")
    _check_trust(trust_jump, yes, "--trust-jump")
    with fleet(fleet_at) as access:
        from groupwise.cli.fleet import reach

        way = reach.Way(host, port, user, key, from_ssh_config)
        by = reach.Trust(of_jump=trust_jump, unasked=yes, ask=_ask_user())
        found = access.change_machine(
            vm,
            **(way.of_known(by) if access.is_local else way.of_known_from_afar(by)),
            workdir=workdir,
            python=python,
            cpu_slots=cpu_slots,
            projects=[] if any_project else project,
            labels=labels or None,
            deadman=_deadman(deadman),
            probe=_command(probe),
            idle_memory_mb=idle_memory_mb,
            engine=engine_words(
                slots, gpus_per_job, gpu_model, gpu_memory, partition, sbatch, address, resource
            )
            or None,
        )
    if as_json:
        print_json(found)
        return
    say(f"{vm}: {_settings(found)}")


def _settings(found: dict[str, Any]) -> str:
    """The settings of a machine in one line; those that most machines do not have only if they are set."""
    from groupwise.cli.fleet.printing import engine_line

    slots = "1 without GPUs" if found["cpu_slots"] is None else found["cpu_slots"]
    parts = [
        f"folder {found['workdir']}",
        f"python {found['python']}",
        f"CPU slots {slots}" if found["engine"] is None else str(engine_line(found)),
    ]
    if found["user"] is not None:
        parts.insert(0, f"{found['user']}@{found['ip_address']}:{found['port']}")
    rare = {
        "labels": " ".join(f"{name}={value}" for name, value in sorted(found["labels"].items())),
        "jobs of": ", ".join(found["projects"] or ()),
        "deadman": found["deadman"] and f"{found['deadman']:g} s",
        "probe": found["probe"] and shlex.join(found["probe"]),
    }
    return ", ".join([*parts, *(f"{name} {value}" for name, value in rare.items() if value)])


def _labels(given: Sequence[str], taken: Sequence[str]) -> dict[str, str | None]:
    from groupwise.cli.fleet.words import pairs

    found: dict[str, str | None] = dict(pairs("--label", given))
    for name in taken:
        if name in found:
            raise UsageError(f"--label {name}=… and --unlabel {name} contradict each other.")
        found[name] = None
    return found


def _deadman(given: str | None) -> float | None:
    """Parse --deadman: seconds, 0 for `off`."""
    from groupwise.cli.fleet.words import seconds_of

    if given is None:
        return None
    return 0.0 if given.strip().lower() == "off" else seconds_of("--deadman", given)


def _command(given: str | None) -> list[str] | None:
    """Split --probe into words as a shell would; no shell ever runs it."""
    if given is None:
        return None
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise UsageError(f"--probe {given}: {error}.") from None
    if not words:
        raise UsageError('--probe is empty: a command is wanted, as --probe "sudo -n nvidia-smi".')
    return words


# Projects


@projects.command("list")
def list_projects(fleet_at: FleetOption = None, as_json: AsJson = False) -> None:
    """List projects: weights, quotas, what waits and runs."""
    with fleet(fleet_at) as access:
        found = access.projects()
    if as_json:
        print_json(found)
    elif not found:
        say("no projects yet: `groupwise fleet submit --project NAME` makes one")
    else:
        from groupwise.cli.fleet.printing import print_projects

        print_projects(found)


@projects.command("set")
def set_project(
    name: Annotated[str, typer.Argument(metavar="PROJECT", help="Made if it is not there yet.")],
    fleet_at: FleetOption = None,
    weight: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="2 gets twice as much of a busy fleet as 1.",
            parser=number("--weight", "2"),
        ),
    ] = None,
    max_gpus: Annotated[
        str | None,
        typer.Option("--max-gpus", metavar="N", help="Of its running jobs together; none: any."),
    ] = None,
    max_waiting: Annotated[
        str | None,
        typer.Option("--max-waiting", metavar="N", help="Jobs that have not begun; none: any."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set weight and quotas of a project."""
    wanted: dict[str, float | None] = {} if weight is None else {"weight": weight}
    if max_gpus is not None:
        wanted["max_gpus"] = _quota("--max-gpus", max_gpus)
    if max_waiting is not None:
        wanted["max_waiting"] = _quota("--max-waiting", max_waiting)
    if not wanted:
        raise UsageError("nothing to change: give --weight, --max-gpus or --max-waiting.")
    with fleet(fleet_at, make=True) as access:
        found = access.change_project(name, **wanted)
    if as_json:
        print_json(found)
    else:
        limits = ", ".join(f"{k} {v}" for k, v in found.items() if k != "name" and v is not None)
        say(f"project {name}: {limits}")


def _quota(option: str, word: str) -> int | None:
    if word == "none":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", word):
        raise UsageError(
            f"{option} {word[:80]}: a whole number is wanted, as {option} 8, or none for no limit."
        )
    return int(word)
