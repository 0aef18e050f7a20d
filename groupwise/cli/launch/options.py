"""Options that several commands of `groupwise launch` share, and the groups that they form.

Options that belong together are the parameters of one function at the end of this file (`common`, `environment`, `login`, `gang`,
`rental`). A command names its groups to `place_command`, and gets the value that each function makes of its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.launch.places import login_machine
from groupwise.cli.launch.words import JobCommand, job_command
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.machines.plans import Plan as EnvironmentPlan
    from groupwise.jobs.launch.places import JobBackend

Script = Annotated[
    str | None,
    typer.Option(
        "--script",
        metavar="PATH",
        help="In place of a command: this Python file of the project; all that stands behind the path is its own.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Of the job: submitted again under the same name, it is the same job. Without it: one that says what and when.",
    ),
]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus",
        "--gpus-per-node",
        metavar="N",
        min=0,
        help="So many GPUs of the machine, of each where there are several, for it alone.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes", metavar="N", min=1, help="Machines that it runs on at once, by torchrun."
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node",
        metavar="N",
        min=1,
        help="Processes on each of several machines; without it: one for each of --gpus, else one.",
    ),
]
MaxHours = Annotated[
    float,
    typer.Option("--max-hours", metavar="H", min=0.001, max=8760, help="After which it is ended."),
]
MaxPrice = Annotated[
    float | None,
    typer.Option(
        "--max-price", metavar="USD", min=0, help="An hour: a place that costs more is refused."
    ),
]
TerminateAfter = Annotated[
    bool,
    typer.Option(
        "--terminate-after",
        help="End what it ran on as soon as the results are here, if it succeeds.",
    ),
]
KeepOnFailure = Annotated[
    bool,
    typer.Option(
        "--keep-on-failure",
        help="Keep what it ran on until its deadline, although the job or its set-up has failed.",
    ),
]
EnvFile = Annotated[
    list[Path] | None,
    typer.Option(
        "--env-file",
        metavar="FILE",
        help="Variables for the job, NAME=VALUE, that are secret.",
    ),
]
Result = Annotated[
    list[str] | None,
    typer.Option(
        "--result",
        metavar="PATH",
        help="Fetch this file or folder of the project too; runs, results, generated and outputs are.",
    ),
]
Take = Annotated[
    list[str] | None,
    typer.Option(
        "--take",
        metavar="PATH",
        help="Take this file or folder along too, although git ignores it or a run made it.",
    ),
]
To = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", help="For what comes back; without it: launches/NAME."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")]
Detach = Annotated[
    bool, typer.Option("--detach", help="Leave once it is placed; `launch logs -f` watches it.")
]
NoPreflight = Annotated[
    bool, typer.Option("--no-preflight", help="Launch it without having tried it here.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Write the result as one JSON object; the log to stderr.")
]
JobName = Annotated[str, typer.Argument(metavar="NAME", help="Of the job.")]
KeyOfPlace = Annotated[
    str | None,
    typer.Option("--key", metavar="FILE", help="With --at: the private key, on this machine."),
]
TrustOfPlace = Annotated[
    str | None,
    typer.Option("--trust", metavar="FINGERPRINT", help="With --at: its host key, as SHA256:…."),
]
ProfileOfPlace = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="P",
        help="With --at aws:REGION or modal: of the credentials; without it: as usual.",
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Where it is, local, ssh:USER@HOST:PORT, slurm:USER@HOST:PORT, ray:USER@HOST:PORT, aws:REGION or modal, if it was launched "
        "from another machine.",
    ),
]

Host = Annotated[
    str | None,
    typer.Option(
        metavar="H",
        help="As `ssh H` has it: a name of the ssh config, or address. Without it: this machine.",
    ),
]
User = Annotated[str | None, typer.Option(metavar="U", help="As whom to log in.")]
Port = Annotated[int | None, typer.Option(metavar="N", min=1, max=65535)]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="The private key, on this machine.")]
TrustHost = Annotated[
    str | None,
    typer.Option(
        "--trust",
        metavar="FINGERPRINT",
        help="Its host key, as SHA256:…; without it: that of known_hosts, or your answer here.",
    ),
]
TrustJump = Annotated[
    str | None,
    typer.Option("--trust-jump", metavar="FINGERPRINT", help="The same of a jump host."),
]
Shared = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder that this machine and all nodes have; without it: the home folder.",
    ),
]
Python = Annotated[
    str | None,
    typer.Option(
        metavar="P",
        help="Interpreter there that has groupwise; without it: an environment is made of what is installed here.",
    ),
]
BasePython = Annotated[
    str | None,
    typer.Option(
        "--base-python",
        metavar="P",
        help="Interpreter there that makes it; without it: the version of here.",
    ),
]
Extra = Annotated[
    list[str] | None,
    typer.Option(metavar="E", help="Extra of groupwise for that; without it: train."),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="NAME", help="Also this package, in the release installed here."
    ),
]
Lock = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Releases, as pip freeze writes them; with hashes, too."),
]
Wheelhouse = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Install from its wheels alone; they are sent there."),
]
IndexUrl = Annotated[
    str | None,
    typer.Option("--index-url", metavar="URL", help="Where pip looks there, in place of PyPI."),
]


def place_command(
    **groups: Callable[..., Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate the function of a command that has the options of its groups, too. It gets the value that each group makes of its options,
    under the group's name."""

    def grouping(function: Callable[..., None]) -> Callable[..., None]:
        members = {group: _options(made) for group, made in groups.items()}

        def called(ctx: typer.Context, **values: Any) -> None:
            given = {"ctx": ctx, **values}
            made = {
                group: groups[group](**{each.name: given[each.name] for each in options})
                for group, options in members.items()
            }
            function(**{each.name: values[each.name] for each in own}, **made)

        own = [each for each in _options(function) if each.name not in groups]
        theirs = [each for options in members.values() for each in options if each.name != "ctx"]
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        options = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *theirs)]
        vars(called)["__signature__"] = inspect.Signature([context, *options])
        called.__annotations__ = {}
        called.__doc__ = function.__doc__
        return called

    return grouping


def _options(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [*inspect.signature(function, eval_str=True).parameters.values()]


@dataclass(frozen=True, slots=True)
class Gang:
    """The number of machines that a job runs on at once."""

    nodes: int | None
    processes: int | None
    """Processes on each machine; None: as many as it has GPUs, one without any."""

    @property
    def is_several(self) -> bool:
        """True if there are several machines."""
        return (self.nodes or 1) > 1

    def of(self, nodes: int) -> Gang:
        """The gang if so many machines are named. Raises UsageError if --nodes is another number."""
        if self.nodes not in (None, nodes):
            raise UsageError(
                f"--nodes is {self.nodes}, and --host names {nodes} machine{'s' * (nodes > 1)}: give each its own --host."
            )
        return Gang(nodes, self.processes)


ALONE = Gang(1, None)


def gang(nodes: Nodes = None, nproc_per_node: Processes = None) -> Gang:
    """The options of places that have several machines for a job."""
    return Gang(nodes, nproc_per_node)


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options that all places have."""

    command: JobCommand
    name: str | None
    gpus: int
    max_hours: float
    max_price: float | None
    env_files: tuple[Path, ...]
    take: tuple[str, ...]
    results: tuple[str, ...]
    to: Path | None
    dry_run: bool
    detach: bool
    preflight: bool
    as_json: bool
    environment: EnvironmentPlan | None = field(default=None)
    """The environment to be made there; None: the place has one."""
    asks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that only this kind of place understands."""
    gang: Gang = field(default=ALONE)


def common(
    ctx: typer.Context,
    script: Script = None,
    name: Name = None,
    gpus: Gpus = 0,
    max_hours: MaxHours = 24.0,
    max_price: MaxPrice = None,
    env_file: EnvFile = None,
    take: Take = None,
    result: Result = None,
    to: To = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    no_preflight: NoPreflight = False,
    as_json: AsJson = False,
) -> CommonOptions:
    """The options of every place."""
    return CommonOptions(
        job_command(ctx, script),
        name,
        gpus,
        max_hours,
        max_price,
        tuple(env_file or ()),
        tuple(take or ()),
        tuple(result or ()),
        to,
        dry_run,
        detach,
        not no_preflight,
        as_json,
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages that the job runs with."""

    python: str | None
    base_python: str | None
    extra: tuple[str, ...]
    also: tuple[str, ...]
    lock: Path | None
    wheelhouse: Path | None
    index_url: str | None

    @property
    def is_made(self) -> bool:
        """True if an option says how the environment is to be made."""
        options = (self.base_python, self.extra, self.also, self.lock, self.wheelhouse)
        return any((*options, self.index_url))

    def plan(self) -> EnvironmentPlan | None:
        """The environment to be made there; None: `python` has it. Raises UsageError."""
        from groupwise.jobs.fleet.machines.plans import PrepareOptions, plan_of

        if self.python is None:
            return plan_of(
                PrepareOptions(
                    extras=self.extra,
                    also=self.also,
                    lock=self.lock,
                    wheelhouse=self.wheelhouse,
                    python=self.base_python,
                    index_url=self.index_url,
                )
            )
        if self.is_made:
            raise UsageError(
                "--python names an environment that is there; --base-python, --extra, --with, --lock, --wheelhouse and --index-url are for "
                "one that is made."
            )
        return None


def environment(
    python: Python = None,
    base_python: BasePython = None,
    extra: Extra = None,
    also: With = None,
    lock: Lock = None,
    wheelhouse: Wheelhouse = None,
    index_url: IndexUrl = None,
) -> Environment:
    """The options of places that have other packages than this machine."""
    return Environment(
        python,
        base_python,
        tuple(extra or ()),
        tuple(also or ()),
        lock,
        wheelhouse,
        index_url,
    )


@dataclass(frozen=True, slots=True)
class Login:
    """The machine from which a cluster is given its jobs."""

    host: str | None
    """None: this machine."""
    user: str | None
    port: int | None
    key: str | None
    trust: str | None
    trust_jump: str | None
    shared: str | None
    """The folder that it and all nodes share; None: its home folder."""

    def plan(self, packages: Environment) -> EnvironmentPlan | None:
        """The environment to be made there; None: there is one, as on this machine. Raises UsageError."""
        return packages.plan() if self.host is not None or packages.is_made else None

    def machine(self, packages: Environment) -> JobBackend:
        """The machine itself. Raises UsageError."""
        return login_machine(
            self.host, self.user, self.port, self.key, self.trust, self.trust_jump, packages.python
        )


def login(
    host: Host = None,
    user: User = None,
    port: Port = None,
    key: Key = None,
    trust: TrustHost = None,
    trust_jump: TrustJump = None,
    shared: Shared = None,
) -> Login:
    """The options of clusters."""
    return Login(host, user, port, key, trust, trust_jump, shared)


def rental(
    terminate_after: TerminateAfter = False, keep_on_failure: KeepOnFailure = False
) -> dict[str, Any]:
    """The options of paid places that were given, as `Order.asks` holds them."""
    from groupwise.jobs.clouds.backend import KEEP_ON_FAILURE, TERMINATE_AFTER

    asks = {TERMINATE_AFTER: terminate_after, KEEP_ON_FAILURE: keep_on_failure}
    return {name: True for name, given in asks.items() if given}
