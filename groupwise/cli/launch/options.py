"""Options that several commands of `groupwise launch` share. Each class is one group of options (see `groupwise.cli.options`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.launch.job_command import JobCommand, job_command
from groupwise.cli.options import AsJson, DryRun, Exclude, ProjectDir, flag, option
from groupwise.cli.parsing import expect_one_model, gpus_of_model, seconds, variables
from groupwise.core.errors import UsageError

SHARED = ("rl", "sft")
"""Commands of groupwise whose work several machines share."""
DEFAULT_HOURS = 24.0
SHORTEST_SECONDS, LONGEST_SECONDS = 3.6, 8760 * 3600.0

Env = Annotated[
    list[str] | None,
    option(
        "NAME=VALUE",
        "Secret variable; it overrides --env-file. May be repeated.",
        "--env",
    ),
]
EnvFile = Annotated[
    list[Path] | None,
    option(
        "FILE",
        "File with secret variables for the job, NAME=VALUE in each line. May be repeated.",
        "--env-file",
    ),
]
To = Annotated[
    Path | None, option("DIR", "Folder for the results; default: launches/NAME.", "--to")
]
Detach = Annotated[
    bool, flag("Return as soon as the job is placed; `launch logs -f` follows it.", "--detach")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """What is to be run, and for how long."""

    ctx: typer.Context
    script: Annotated[
        str | None,
        option(
            "PATH",
            "Python file of the project to run, as `-- python PATH`; all words after the path are its arguments.",
        ),
    ] = None
    name: Annotated[
        str | None,
        option(
            "N",
            "Name of the job. Launching under an existing name attaches to that job. Default: made of the command and the time.",
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        option(
            "TIME",
            "End the job after this time, e.g. 2h or 90min; default: 24h.",
            parser=seconds("--time-limit"),
        ),
    ] = None
    max_hours: Annotated[float | None, typer.Option("--max-hours", hidden=True)] = None
    env: Env = None
    env_file: EnvFile = None

    @property
    def command(self) -> JobCommand:
        """The command to run. Raises UsageError if there is none."""
        return job_command(self.ctx)

    @property
    def hours(self) -> float | None:
        """The time limit in hours; None: no limit. Raises UsageError."""
        limit = self.max_hours and self.max_hours * 3600
        if self.max_hours is not None and self.time_limit is not None:
            raise UsageError("--max-hours and --time-limit are the same limit: give one of them.")
        if self.time_limit is not None:
            limit = self.time_limit
        if limit is not None and not SHORTEST_SECONDS <= limit <= LONGEST_SECONDS:
            raise UsageError(
                f"--time-limit: {limit:g} s; {SHORTEST_SECONDS:g} s to a year is expected."
            )
        return None if limit is None else limit / 3600

    def secrets(self) -> dict[str, str]:
        """The variables of --env and --env-file."""
        return variables(self.env or (), self.env_file or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(CommandOptions):
    """The options of every place."""

    gpus: Annotated[
        str,
        option(
            "N",
            "GPUs on each machine, for this job alone; A100:2 also names their model, for Slurm, Ray and Modal.",
            "--gpus",
            "--gpus-per-node",
        ),
    ] = "0"
    max_price: Annotated[
        float | None,
        option("USD", "Highest price per hour; a place that costs more is refused.", min=0),
    ] = None
    file: Annotated[
        list[str],
        option(
            "PATH",
            "Extra file or folder of the project to upload, even if git ignores it or a run wrote it. May be repeated.",
            "--file",
            "--take",
        ),
    ] = field(default_factory=list[str])
    project_dir: ProjectDir = None
    exclude: Exclude = field(default_factory=list[str])
    output: Annotated[
        list[str],
        option(
            "PATH",
            "File or folder to fetch besides runs, results, generated and outputs. May be repeated.",
            "--output",
            "--result",
        ),
    ] = field(default_factory=list[str])
    to: To = None
    dry_run: DryRun = False
    detach: Detach = False
    no_preflight: Annotated[
        bool,
        flag(
            "Skip the dry run here that checks the command before it is launched.", "--no-preflight"
        ),
    ] = False
    as_json: AsJson = False

    @property
    def gpu_count(self) -> int:
        """The number of GPUs on each machine. Raises UsageError if --gpus is neither a number nor a model with one."""
        if self.gpus.isdecimal() and len(self.gpus) <= 6:
            return int(self.gpus)
        if (of_model := gpus_of_model(self.gpus)) is not None:
            return of_model[1]
        raise UsageError(
            f"--gpus {self.gpus}: a number is expected, as 2, or a model with a number, as A100:2."
        )

    def gpu_model(self, option: str | None = None) -> str | None:
        """The model of GPU that --gpus names, or `option`, the value of --gpu-model. Raises UsageError for both."""
        if (of_model := gpus_of_model(self.gpus)) is None:
            return option
        expect_one_model(self.gpus, option)
        return of_model[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GangOptions:
    """The machines that a job runs on at once."""

    machines: Annotated[
        int | None,
        option(
            "N",
            "Number of machines that the job runs on at the same time, with torchrun.",
            "--machines",
            "--nodes",
            min=1,
        ),
    ] = None
    nproc_per_node: Annotated[
        int | None,
        option(
            "N",
            "Processes on each of several machines; default: one for each GPU of --gpus, else one.",
            min=1,
        ),
    ] = None

    @property
    def count(self) -> int:
        """The number of machines."""
        return self.machines or 1

    def processes(self, command: JobCommand, gpus: int) -> int:
        """The number of processes on each machine.

        Raises UsageError for a command that several machines cannot share, and for an option that has no effect.
        """
        if self.count == 1:
            if self.nproc_per_node is not None:
                raise UsageError(
                    "--nproc-per-node is for several machines (--machines). On one machine the command starts its own processes: "
                    "distributed.learners=N behind the verb."
                )
            return 1
        verb = command.verb
        if verb is not None and verb not in SHARED:
            raise UsageError(
                f"--machines {self.count}: `groupwise {verb}` runs on one machine; {' and '.join(SHARED)} share their work among several."
            )
        return self.nproc_per_node or max(1, gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalOptions:
    """What becomes of a machine that is paid for."""

    terminate_after: Annotated[
        bool,
        flag(
            "End the machine as soon as the results are here, if the job succeeds.",
            "--terminate-after",
        ),
    ] = False
    keep_on_failure: Annotated[
        bool,
        flag(
            "Keep the machine until its deadline even if the job or its set-up fails.",
            "--keep-on-failure",
        ),
    ] = False

    def place_options(self) -> dict[str, Any]:
        """The given options, in the form of `Order.place_options`."""
        from groupwise.jobs.clouds.backend import KEEP_ON_FAILURE, TERMINATE_AFTER

        options = {TERMINATE_AFTER: self.terminate_after, KEEP_ON_FAILURE: self.keep_on_failure}
        return {name: True for name, is_set in options.items() if is_set}
