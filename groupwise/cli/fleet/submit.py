"""`groupwise fleet submit`: makes a job of the command line, and prints only its id on standard output.

Files of this machine are sent with the job: those of `--project-dir`, of `--file`, and of `--dataset` and `--reward-function` if they name
one. Everything else is passed on and checked at admission, the same way as for the API and for a row written by hand.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet.access import FleetOption, fleet
from groupwise.cli.fleet.local_files import LocalFiles, at, attach_files
from groupwise.cli.options import AsJson, Exclude, ProjectDir, flag, option
from groupwise.cli.output import say, write_json
from groupwise.cli.parsing import (
    expect_one_model,
    gpus_of_model,
    hyperparams,
    json_object,
    megabytes,
    pairs,
    seconds,
    secret,
    variables,
)
from groupwise.cli.printing import print_pairs
from groupwise.core.errors import UsageError
from groupwise.core.terminal.text import command_line, one_line

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient
    from groupwise.jobs.fleet.queue.resources import Resources


def _retry_policy(text: str) -> dict[str, Any]:
    """Parse --retries: the number of retries for failures that may be the job's own fault, or `none`."""
    if text.strip().lower() == "none":
        return {"once": True}
    digits = text.strip()
    if digits.isdecimal() and len(digits) <= 3 and int(digits) <= 100:
        return {"charged": int(digits)}
    raise UsageError(f"--retries {text}: a whole number is expected, 0 to 100, or none.")


def _set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are set."""
    return {
        key: value
        for key, value in values.items()
        if value is not None and value is not False and value not in ([], {})
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOptions:
    """A job of a kind, in place of a command."""

    kind: Annotated[
        str | None, option("K", "Kind of job: GRPO, SFT or EVAL. Without it ARGUMENTS are run.")
    ] = None
    model: Annotated[str | None, option("M", "Hub id, or path on the machine.")] = None
    dataset: Annotated[
        str | None,
        option(
            "D", "A local file, which is sent with the job; a hub id; or a path on the machine."
        ),
    ] = None
    reward_function: Annotated[
        list[str], option("R", "Name, module:function or file.py:function. May be repeated.")
    ] = field(default_factory=list[str])
    preprocessing_pipeline: Annotated[
        str | None, option("P", "How rows are prepared: generic, deepseek or file.py:function.")
    ] = None
    max_steps: Annotated[int | None, option("N", "Steps to train; default: 500.", min=1)] = None
    learning_rate: Annotated[float | None, option("X", "Learning rate; default: 5e-6.")] = None
    batch_size: Annotated[int | None, option("N", "Prompts of a step; default: 1.", min=1)] = None
    num_generations: Annotated[
        int | None, option("N", "Completions of each prompt; default: 4.", min=1)
    ] = None
    max_prompt_length: Annotated[
        int | None,
        option("N", "Maximum length of a prompt in tokens, for GRPO; default: 256.", min=1),
    ] = None
    max_completion_length: Annotated[
        int | None,
        option("N", "Maximum length of a completion in tokens, for GRPO; default: 128.", min=1),
    ] = None
    output_dir: Annotated[
        str | None, option("D", "Folder for what the training writes; default: outputs.")
    ] = None
    use_unsloth: Annotated[
        bool, flag("Load and compute the model with Unsloth, on the machine.", "--use-unsloth")
    ] = False
    hyperparams: Annotated[
        list[str], option("K=V", "Further settings; or a JSON object. May be repeated.")
    ] = field(default_factory=list[str])

    def columns(self, arguments: Sequence[str], *, required: bool) -> dict[str, Any]:
        """The columns of the job. Raises UsageError if there is both a command and a kind, or neither although one is `required`."""
        from groupwise.jobs.launch.train_grpo import KEYS

        options = _set_values(asdict(self))
        training = [
            name.replace("_", "-") for name in options if name not in ("kind", "output_dir")
        ]
        if required and not options and not arguments:
            raise UsageError(
                "there is nothing to run: give a command, `groupwise fleet submit --file train.py -- python train.py`, or a kind of job, "
                "`groupwise fleet submit --kind GRPO --model M --dataset D --reward-function R`."
            )
        if arguments and training:
            raise UsageError(
                f"--{training[0]} is for jobs of a kind (--kind GRPO), but a command is given too: `{shlex.join(arguments)[:80]}`. "
                "Leave one of the two out. Put the command's own options after it."
            )
        if training and self.kind is None:
            raise UsageError(
                f"--{training[0]} is for a job of a kind, but --kind is missing: add --kind GRPO."
            )
        if self.reward_function:
            options["reward_function"] = ",".join(self.reward_function)
        settings = hyperparams(self.hyperparams)
        for field_name in ("max_prompt_length", "max_completion_length"):
            if field_name in options:  # a flag of `groupwise-train-grpo` without a column
                key, option_name = KEYS[field_name], f"--{field_name.replace('_', '-')}"
                if self.kind != "GRPO":
                    raise UsageError(
                        f"{option_name} is for --kind GRPO. Another kind may have it as a setting: "
                        f"--hyperparams {key}={options[field_name]}."
                    )
                if field_name in settings or key in settings:
                    raise UsageError(
                        f"{field_name} is given twice, as {option_name} and in --hyperparams."
                    )
                settings[field_name] = options.pop(field_name)
        return {"job_type": options.pop("kind", None), **options, "hyperparams": settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceOptions:
    """What each machine must have; the names of the fields are those of `resources.parse`."""

    gpus: Annotated[
        str | None,
        option(
            "N",
            "Number of GPUs, or which GPUs: 2, A100:2, VM:0,1, GPU-uuid or MIG-3g.20gb; default: 0 for a command, 1 for --kind "
            "if the fleet has a GPU.",
            "--gpus",
            "--gpu",
        ),
    ] = None
    gpu_model: Annotated[
        str | None,
        option(
            "TEXT",
            "Words of the GPU's name, e.g. A100, A100-80GB or MIG-3g.20gb. If the fleet lacks that model, the job waits for it.",
        ),
    ] = None
    gpu_memory: Annotated[
        int | None,
        option("SIZE", "Minimum memory of a GPU, e.g. 40GB.", parser=megabytes("--gpu-memory")),
    ] = None
    share: Annotated[
        int | None,
        option(
            "MB",
            "Run on a share of one GPU: reserve this much of its memory.",
            "--share-mb",
            parser=megabytes("--share-mb"),
        ),
    ] = None
    machines: Annotated[
        int, option("N", "Machines that the job runs on at the same time.", min=1, max=1024)
    ] = 1
    vm: Annotated[str | None, option("VM", "Run on this machine only.")] = None
    labels: Annotated[
        list[str], option("K=V", "Run on a machine with this label. May be repeated.", "--vm-label")
    ] = field(default_factory=list[str])
    cpus: Annotated[
        int | None, option("N", "CPU cores.", "--cpus", "--cpu", min=1, max=100_000)
    ] = None
    ram: Annotated[
        int | None,
        option(
            "SIZE", "Main memory, e.g. 64GB.", "--memory", "--ram", parser=megabytes("--memory")
        ),
    ] = None
    disk: Annotated[
        int | None,
        option(
            "SIZE", "Free disk space when the job starts, e.g. 200GB.", parser=megabytes("--disk")
        ),
    ] = None

    def resources(self, access: FleetClient) -> Resources:
        """The resources that the options ask for; `--gpus A100:2` is a model unless a machine has that name. Raises UsageError."""
        from groupwise.jobs.fleet.queue.resources import parse

        options, gpus = asdict(self), self.gpus or ""
        of_model = gpus_of_model(gpus)
        machines = access.machines() if of_model else []
        if of_model and all(machine["vm_id"] != of_model[0] for machine in machines):
            expect_one_model(gpus, self.gpu_model)
            self._expect_known_model(*of_model, machines)
            say(
                f"--gpus {gpus}: {of_model[1]} of the model {of_model[0]}, since no machine has this name"
            )
            options |= {"gpus": str(of_model[1]), "gpu_model": of_model[0]}
        return parse(**options)

    def _expect_known_model(
        self, model: str, count: int, machines: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise UsageError for a model that no GPU of the fleet has: it may be a misspelt machine, and the job would wait for ever."""
        from groupwise.jobs.fleet.queue.resources import fits_model

        names = [machine["vm_id"] for machine in machines]
        known: set[tuple[str | None, int | None]] = {
            (gpu["model"], gpu["memory_mb"]) for machine in machines for gpu in machine["gpus"]
        }
        engines = [machine["engine"] for machine in machines if machine["engine"]]
        known |= {(engine.get("gpu_model"), engine.get("gpu_memory_mb")) for engine in engines}
        if not any(fits_model(model, *gpu) for gpu in known):
            models = sorted({name for name, _ in known if name})
            near = difflib.get_close_matches(model, [*names, *models], n=3)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"machines: {', '.join(names) or 'none'}; models: {', '.join(models) or 'none'}."
            )
            raise UsageError(
                f"--gpus {self.gpus}: no machine is called {model}, and no GPU of the fleet has the model {model}; {hint} "
                f"To wait for a GPU that is to be added: --gpus {count} --gpu-model {model}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How the job is treated, which files are sent with it, and which are fetched."""

    time_limit: Annotated[
        float | None,
        option(
            "TIME", "End the job after this time, e.g. 2h or 90min.", parser=seconds("--time-limit")
        ),
    ] = None
    grace: Annotated[
        float | None,
        option(
            "TIME",
            "Time between SIGTERM and SIGKILL when the job is ended; default: 30s.",
            parser=seconds("--grace"),
        ),
    ] = None
    priority: Annotated[
        int | None,
        option(
            "N",
            "A higher number starts earlier; 1 is worth an hour in the queue.",
            min=-1000,
            max=1000,
        ),
    ] = None
    name: Annotated[str | None, option("N", "Name of the job.")] = None
    label: Annotated[list[str], option("K=V", "Label to find the job by. May be repeated.")] = (
        field(default_factory=list[str])
    )
    retries: Annotated[
        dict[str, Any] | None,
        option(
            "N|none",
            "Retries after failures that may be the job's own fault; default: 2. With `none` it runs once, even if its machine is lost.",
            parser=_retry_policy,
        ),
    ] = None
    allow_smaller_batch: Annotated[
        bool,
        flag(
            "Retry if the GPU's memory was too small; jobs of a kind then take a smaller batch.",
            "--allow-smaller-batch",
        ),
    ] = False
    after: Annotated[
        list[str],
        option(
            "JOB[:ok]",
            "Start once this job has ended, or with :ok, has completed. May be repeated.",
        ),
    ] = field(default_factory=list[str])
    hold: Annotated[
        bool, flag("Submit the job on hold: it starts after `fleet release`.", "--hold")
    ] = False
    env: Annotated[
        list[str],
        option("K=V", "Environment variable of the job; it overrides --env-file. May be repeated."),
    ] = field(default_factory=list[str])
    env_file: Annotated[
        list[Path],
        option(
            "FILE",
            "File with environment variables, NAME=VALUE in each line. Values are stored with the job: name secrets by --secret. "
            "May be repeated.",
        ),
    ] = field(default_factory=list[Path])
    secret: Annotated[
        list[str],
        option(
            "NAME[=env:X|file:P]",
            "Secret variable: the dispatcher reads its value when the job starts, and stores it nowhere. May be repeated.",
        ),
    ] = field(default_factory=list[str])
    project_dir: ProjectDir = None
    exclude: Exclude = field(default_factory=list[str])
    output: Annotated[
        list[str],
        option(
            "PATH",
            "File or folder to fetch at the end; default: outputs. May be repeated.",
            "--output",
            "--artefact",
        ),
    ] = field(default_factory=list[str])
    output_limit: Annotated[
        int | None,
        option(
            "SIZE",
            "Limit for the size of all outputs together; default: 20GB.",
            "--output-limit",
            "--artefact-limit",
            parser=megabytes("--output-limit"),
        ),
    ] = None
    output_files: Annotated[
        int | None,
        option(
            "N",
            "Largest number of files in the outputs; default: 100000.",
            "--output-files",
            "--artefact-files",
            min=1,
        ),
    ] = None
    checkpoint: Annotated[
        list[str],
        option(
            "PATH",
            "Folder whose subfolders are checkpoints, copied while the job runs; default: its outputs. May be repeated.",
        ),
    ] = field(default_factory=list[str])
    webhook: Annotated[str | None, option("URL", "Address to notify when the job has ended.")] = (
        None
    )

    def document(self) -> dict[str, Any]:
        """The fields of a `JobRequest`."""
        limits = {
            "time_seconds": self.time_limit,
            "grace_seconds": self.grace,
            "artefact_mb": self.output_limit,
            "artefact_files": self.output_files,
        }
        return {
            "priority": self.priority,
            "name": self.name,
            "labels": pairs("--label", self.label),
            "retry": self.retries,
            "after": self.after,
            "hold": self.hold,
            "environment": variables(self.env, self.env_file),
            "secrets": dict(secret(option_value) for option_value in self.secret),
            "artefacts": self.output,
            "checkpoints": self.checkpoint,
            "allow_smaller_batch": self.allow_smaller_batch,
            "webhook": self.webhook,
            "limits": {name: value for name, value in limits.items() if value is not None},
        }


def submit(
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] ARGUMENTS...",
            help="Program and arguments, run without a shell.",
            show_default=False,
        ),
    ] = None,
    fleet_at: FleetOption = None,
    kind: KindOptions,
    needs: ResourceOptions,
    job: JobOptions,
    project: Annotated[str | None, option("P", "Project that the job is charged to.")] = None,
    array: Annotated[
        Path | None,
        option(
            "FILE", "Submit a job for each line: words to add to the command, or a JSON object."
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        option(
            "LOCAL[:REMOTE]",
            "File or folder to upload with the job, hidden files included; links are refused. DIR:. is only "
            "its contents. May be repeated.",
        ),
    ] = None,
    idempotency_key: Annotated[
        str | None, option("TEXT", "Submitting again with the same key returns the existing job.")
    ] = None,
    wait: Annotated[
        bool, flag("Wait for the job's end, and exit with its exit code.", "--wait")
    ] = False,
    dry_run: Annotated[
        bool, flag("Show what the job would be, and where it could run.", "--dry-run")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job; prints its id.

    \b
        groupwise fleet submit --gpus 2 --project-dir . -- python train.py

    \b
        groupwise fleet submit --kind GRPO --model M --dataset sums.jsonl \\
            --reward-function correctness

    The working folder of a job holds only the files that are sent with it. What it leaves in `outputs` is fetched.
    """
    from groupwise.api.schemas.fleet import expect_few

    request = {
        **kind.columns(arguments or (), required=array is None),
        **job.document(),
        "arguments": arguments,
    }
    if wait and (job.hold or dry_run):
        raise UsageError(
            f"--wait and {'--hold' if job.hold else '--dry-run'} contradict each other."
        )
    with fleet(fleet_at, make=not dry_run) as access:
        base = _set_values({**request, "resources": needs.resources(access).as_json()})
        jobs = {"": base} if array is None else _read_array(array, base)
        expect_few(len(jobs))
        attach_files(access, jobs, LocalFiles(file or (), job.project_dir, job.exclude), dry_run)
        if dry_run:
            _print_plans(access, jobs, project, as_json)
        else:
            ids = _submit_jobs(access, jobs, project, idempotency_key, wait, as_json)
            if not as_json:
                option = "" if fleet_at is None else f" --fleet {shlex.quote(fleet_at)}"
                one = f"groupwise fleet {'release' if job.hold else 'logs -f'} {ids[0]}{option}"
                say(f"next: {one if len(ids) == 1 else f'groupwise fleet list{option}'}")


def _read_array(file: Path, base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The job of each line of a file, by its place (`--array FILE:LINE`); the line overrides the options.

    Its name, unless one is given: the words of the line, or FILE:LINE for a JSON object.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--array {file} cannot be read: {error}") from None
    jobs: dict[str, dict[str, Any]] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        location, name = f"--array {file}:{line_number}", f"{file.name}:{line_number}"
        if line.lstrip().startswith("{"):
            line_fields = json_object(location, line)
            # Objects (environment, hyperparams, labels …) are merged by key, everything else is replaced.
            for key, value in line_fields.items():
                base_value: Any = base.get(key)
                if isinstance(base_value, dict) and isinstance(value, dict):
                    line_fields[key] = base_value | value
            jobs[location] = {**base, **line_fields}
        else:
            try:
                arguments = shlex.split(line)
            except ValueError as error:
                raise UsageError(
                    f"{location}: {error}: quotes are closed on the same line."
                ) from None
            jobs[location] = {**base, "arguments": [*base.get("arguments", ()), *arguments]}
            name = one_line(line.strip())[:256]
        # Without a name, a list of the jobs would not tell them apart.
        jobs[location].setdefault("name", name)
        if not any(jobs[location].get(key) for key in ("arguments", "job_type", "model")):
            raise UsageError(
                f"{location}: there is nothing to run: give `arguments` or a `job_type` in the line, or a command behind the options."
            )
    if not jobs:
        raise UsageError(f"--array {file} has no line: each makes a job.")
    return jobs


def _submit_jobs(
    access: FleetClient,
    jobs: Mapping[str, dict[str, Any]],
    project: str | None,
    idempotency_key: str | None,
    wait: bool,
    as_json: bool,
) -> list[str]:
    """Submit the jobs (`JobRequest`s by the place where each was read), and print their ids, which it returns if it does not wait."""
    from groupwise.api.schemas.problems import Refusal
    from groupwise.cli.fleet.follow import exit_code_of, until_ended

    try:
        accepted = access.submit_all(
            [*jobs.values()], project=project, idempotency_key=idempotency_key
        )
    except Refusal as refusal:
        # If one of several jobs is refused, name its line in the array.
        field, _, index = refusal.errors[0].field.partition(".") if refusal.errors else ("", "", "")
        if field != "jobs" or not index.isdecimal() or int(index) >= len(jobs):
            raise
        message = refusal.errors[0].message
        raise UsageError(at([*jobs][int(index)], message)) from refusal
    ids = [job["job_id"] for job in accepted]
    for note in dict.fromkeys(note for job in accepted for note in job["notes"]):
        say(note)
    if as_json and not wait:
        write_json(accepted[0] if len(accepted) == 1 else accepted)
    elif not as_json:
        for job_id in ids:
            typer.echo(job_id)
    if wait:
        try:
            final_jobs = until_ended(access, ids)
        except KeyboardInterrupt:
            say(
                f"no longer waiting; what was submitted continues: `groupwise fleet stop {' '.join(ids[:3])}` ends it"
            )
            raise
        if as_json:
            write_json(final_jobs[0] if len(final_jobs) == 1 else final_jobs)
        raise typer.Exit(exit_code_of(final_jobs))
    return ids


def _print_plans(
    access: FleetClient, jobs: Mapping[str, dict[str, Any]], project: str | None, as_json: bool
) -> None:
    """For `--dry-run`: print the jobs and the machines where they could run."""
    from groupwise.api.schemas.problems import Refusal
    from groupwise.cli.fleet.printing import needs_text

    plans: list[dict[str, Any]] = []
    for location, document in jobs.items():
        try:
            plans.append(access.plan(document, project=project))
        except Refusal as refusal:
            if refusal.code != "invalid_request" or not location:
                raise
            raise UsageError(at(location, refusal.message)) from refusal
    if as_json:
        write_json(plans[0] if len(plans) == 1 else plans)
        return
    for plan in plans:
        for note in plan["notes"]:
            say(note)
        print_pairs(
            [
                ("command", command_line(plan["arguments"])),
                ("needs", needs_text(plan["resources"])),
                ("files", len(plan["files"]) or None),
                ("could run now on", ", ".join(plan["where"])),
                *(("would wait" if n == 0 else "", text) for n, text in enumerate(plan["waits"])),
            ]
        )
