"""`groupwise fleet submit`: makes a job of the command line, and prints only its id on standard output.

Files of this machine travel with the job: those of `--file`, and of `--dataset` and `--reward_function` if they name one. Everything else
is passed on and checked at admission, the same way as for the API and for a row written by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet.access import AsJson, FleetOption, fleet
from groupwise.cli.fleet.take_along import at, take_along
from groupwise.cli.fleet.words import NONE, number, whole, whole_or_none
from groupwise.cli.output import say
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient

MOST = 2**31 - 1
"""The largest number that an integer column holds."""
LONGEST_GRACE = 86_400.0
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[--] ARGUMENTS...",
        help="The command: a program and its arguments, never a line for a shell.",
        show_default=False,
    ),
]


def submit(
    arguments: Arguments = None,
    fleet_at: FleetOption = None,
    # the kind of job
    kind: Annotated[
        str | None,
        typer.Option(metavar="K", help="GRPO, SFT, EVAL …; without it, ARGUMENTS are the job."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="Hub id, or path on the machine.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="D", help="A local file, which travels; a hub id; a path there."),
    ] = None,
    reward_function: Annotated[
        list[str] | None,
        typer.Option(
            "--reward_function", metavar="R", help="Name, module:function or file.py:function."
        ),
    ] = None,
    preprocessing_pipeline: Annotated[
        str | None,
        typer.Option("--preprocessing_pipeline", metavar="P", help="generic, deepseek …"),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max_steps",
            metavar="N",
            help="Without it: 500.",
            parser=whole("--max_steps", 500, most=MOST),
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning_rate",
            metavar="X",
            help="Without it: 5e-6.",
            parser=number("--learning_rate", "5e-6"),
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch_size",
            metavar="N",
            help="Prompts; without it: 1.",
            parser=whole("--batch_size", 4, most=MOST),
        ),
    ] = None,
    num_generations: Annotated[
        int | None,
        typer.Option(
            "--num_generations",
            metavar="N",
            help="Without it: 4.",
            parser=whole("--num_generations", 8, most=MOST),
        ),
    ] = None,
    max_prompt_length: Annotated[
        int | None,
        typer.Option(
            "--max_prompt_length",
            metavar="N",
            help="Tokens, of GRPO; without it: 256.",
            parser=whole("--max_prompt_length", 256, most=MOST),
        ),
    ] = None,
    max_completion_length: Annotated[
        int | None,
        typer.Option(
            "--max_completion_length",
            metavar="N",
            help="Tokens, of GRPO; without it: 128.",
            parser=whole("--max_completion_length", 128, most=MOST),
        ),
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option("--output_dir", metavar="D", help="Without it: outputs.")
    ] = None,
    use_unsloth: Annotated[
        bool,
        typer.Option(
            "--use_unsloth", help="Have Unsloth, on the machine, load and compute the model."
        ),
    ] = False,
    hyperparams: Annotated[
        list[str] | None,
        typer.Option("--hyperparams", metavar="K=V", help="Further settings; or a JSON object."),
    ] = None,
    # what it needs
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", "--gpu", metavar="N", help="How many, or which: 2, VM:0,1 or GPU-uuid."
        ),
    ] = None,
    gpu_model: Annotated[
        str | None, typer.Option("--gpu-model", metavar="TEXT", help="Part of its name: A100.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="At least: 40GB.")
    ] = None,
    share_mb: Annotated[
        str | None,
        typer.Option(
            "--share-mb", metavar="MB", help="So much memory of a GPU that others use too."
        ),
    ] = None,
    machines: Annotated[
        int,
        typer.Option(
            "--machines",
            metavar="N",
            help="A gang: so many at once, or none.",
            parser=whole("--machines", 4, most=1024),
        ),
    ] = 1,
    vm: Annotated[str | None, typer.Option("--vm", metavar="VM", help="This machine only.")] = None,
    vm_label: Annotated[
        list[str] | None, typer.Option("--vm-label", metavar="K=V", help="That its machine has.")
    ] = None,
    cpu: Annotated[
        int | None,
        typer.Option(
            "--cpu", metavar="N", help="CPU cores.", parser=whole("--cpu", 8, most=100_000)
        ),
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="64GB.")] = None,
    disk: Annotated[
        str | None, typer.Option("--disk", metavar="SIZE", help="Free at start.")
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", metavar="TIME", help="2h, 90min.")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace", metavar="TIME", help="Between TERM and KILL at its end; without it: 30s."
        ),
    ] = None,
    # how it is treated
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            metavar="N",
            help="Each step: an hour of waiting.",
            parser=whole("--priority", 2, least=-1000, most=1000),
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", metavar="P", help="Who it counts for.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="N", help="For people.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="To find it by.")
    ] = None,
    retries: Annotated[
        str | None,
        typer.Option(
            "--retries",
            metavar="N|none",
            help="After failures that may be its own fault; without it: 2. none: it runs once, even where a machine was lost.",
            parser=whole_or_none("--retries", 2, least=0, most=100),
        ),
    ] = None,
    allow_smaller_batch: Annotated[
        bool,
        typer.Option(
            "--allow-smaller-batch",
            help="Where the GPU's memory was too small, try again: a training kind does with a smaller batch.",
        ),
    ] = False,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="JOB[:ok]", help="Not before this one has ended."),
    ] = None,
    array: Annotated[
        Path | None,
        typer.Option(
            "--array", metavar="FILE", help="A job for each line: words to add, or a JSON object."
        ),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Wait until it is released.")] = False,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="Set a variable for it.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME[=env:X|file:P]",
            help="A variable whose value the dispatcher has, and which is never written down.",
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            metavar="LOCAL[:REMOTE]",
            help="A file, or a folder with all below it, hidden ones too, but links are refused; DIR:. is what is in it alone.",
        ),
    ] = None,
    artefact: Annotated[
        list[str] | None,
        typer.Option(
            "--artefact", metavar="PATH", help="To fetch at the end; without it: outputs."
        ),
    ] = None,
    artefact_limit: Annotated[
        str | None,
        typer.Option("--artefact-limit", metavar="SIZE", help="Of all of them; without it: 20GB."),
    ] = None,
    artefact_files: Annotated[
        int | None,
        typer.Option(
            "--artefact-files",
            metavar="N",
            help="So many files at most; without it: 100000.",
            parser=whole("--artefact-files", 200_000, most=1_000_000),
        ),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            help="Where its checkpoints lie, a folder each, to be mirrored as it runs; without it: in its artefacts.",
        ),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option("--webhook", metavar="URL", help="Told when it has ended.")
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", metavar="TEXT", help="Submitted twice, it is one job."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it has ended; exits with its exit code.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would be, and where it could run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job; prints its id.

        groupwise fleet submit --gpus 2 --file train.py -- python train.py --lr 1e-5

        groupwise fleet submit --kind GRPO --model M --dataset sums.jsonl --reward_function correctness

    The working folder of a job is empty but for the files that it takes along. What it leaves in `outputs` is fetched.
    """
    from groupwise.cli.fleet import words

    columns: dict[str, Any] = {
        "job_type": kind,
        "model": model,
        "dataset": dataset,
        "reward_function": ",".join(reward_function) if reward_function else None,
        "preprocessing_pipeline": preprocessing_pipeline,
        "max_steps": max_steps,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "num_generations": num_generations,
        "output_dir": output_dir,
        "use_unsloth": use_unsloth or None,
        "hyperparams": words.hyperparams(hyperparams or ()) or None,
    }
    lengths = {
        "max_prompt_length": max_prompt_length,
        "max_completion_length": max_completion_length,
    }
    _expect_one_kind({**columns, **lengths}, arguments or [], some=array is None)
    _add_lengths(columns, lengths)
    retry = None
    if retries is not None:
        retry = {"once": True} if retries == NONE else {"charged": retries}
    policy: dict[str, Any] = {
        "priority": priority,
        "name": name,
        "labels": words.pairs("--label", label or ()),
        "retry": retry,
        "after": list(after or ()),
        "hold": hold,
        "environment": words.pairs("--env", env or ()),
        "secrets": dict(words.secret(word) for word in secret or ()),
        "artefacts": artefact,
        "checkpoints": checkpoint,
        "allow_smaller_batch": allow_smaller_batch,
        "webhook": webhook,
        "limits": _limits(time_limit, grace, artefact_limit, artefact_files),
    }
    if wait and (hold or dry_run):
        raise UsageError(f"--wait and {'--hold' if hold else '--dry-run'} contradict each other.")
    from groupwise.api.schemas.fleet import expect_few
    from groupwise.jobs.fleet.queue import resources

    needs = resources.parse(
        gpus=gpus,
        vm=vm,
        gpu_model=gpu_model,
        gpu_memory=gpu_memory,
        share=share_mb,
        machines=machines,
        cpus=cpu,
        ram=ram,
        disk=disk,
        labels=vm_label or (),
    )
    with fleet(fleet_at, make=not dry_run) as access:
        request = {**columns, **policy, "resources": needs.as_json(), "arguments": arguments or []}
        base = {key: value for key, value in request.items() if value not in (None, [], {}, False)}
        read = {"": base} if array is None else _array(array, base)
        expect_few(len(read))
        take_along(access, read, file or (), dry_run)
        if dry_run:
            _print_plans(access, read, project, as_json)
        else:
            _submit(access, read, project, idempotency_key, wait, as_json)


def _expect_one_kind(columns: Mapping[str, Any], arguments: Sequence[str], *, some: bool) -> None:
    """Raise UsageError unless it is a command or a kind of job. `some`: one must be given; else the lines of an array may give it."""
    given = [name for name, value in columns.items() if value is not None]
    training = [name for name in given if name not in ("job_type", "output_dir")]
    kind = columns["job_type"]
    if some and not given and not arguments:
        raise UsageError(
            "there is nothing to run: give a command, `groupwise fleet submit --file train.py -- python train.py`, or a kind of job, "
            "`groupwise fleet submit --kind GRPO --model M --dataset D --reward_function R`."
        )
    if arguments and training:
        raise UsageError(
            f"--{training[0]} is for jobs of a kind (--kind GRPO), but a command is given too: `{shlex.join(arguments)[:80]}`. "
            "Leave one of the two out. Options of the command itself stand behind it."
        )
    if training and kind is None:
        raise UsageError(
            f"--{training[0]} says something of a kind of job, but not which: add --kind GRPO."
        )


def _add_lengths(columns: dict[str, Any], lengths: Mapping[str, int | None]) -> None:
    """Add the flags of `groupwise-train-grpo` that are not columns to the settings of the kind."""
    from groupwise.jobs.launch.train_grpo import KEYS

    settings: dict[str, Any] = columns["hyperparams"] or {}
    for flag, value in lengths.items():
        if value is None:
            continue
        key = KEYS[flag]
        if columns["job_type"] != "GRPO":
            raise UsageError(
                f"--{flag} is a flag of --kind GRPO. Of another kind it is a setting, if it has it: --hyperparams {key}={value}."
            )
        if flag in settings or key in settings:
            raise UsageError(f"{flag} is given twice, as --{flag} and in --hyperparams.")
        settings = {**settings, flag: value}
    columns["hyperparams"] = settings or None


def _limits(
    time_limit: str | None, grace: str | None, size: str | None, files: int | None
) -> dict[str, Any]:
    from groupwise.cli.fleet.words import seconds_of
    from groupwise.jobs.fleet.queue.resources import megabytes

    found: dict[str, Any] = {} if files is None else {"artefact_files": files}
    if time_limit is not None:
        found["time_seconds"] = seconds_of("--time-limit", time_limit)
    if grace is not None:
        found["grace_seconds"] = seconds_of("--grace", grace)
        if found["grace_seconds"] > LONGEST_GRACE:
            raise UsageError(f"--grace {grace}: at most a day.")
    if size is not None:
        found["artefact_mb"] = megabytes("--artefact-limit", size)
    return found


# Arrays


def _array(file: Path, base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The job of each line of a file, by its place; the line overrides the options."""
    from groupwise.cli.fleet.words import json_object

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--array {file} cannot be read: {error}") from None
    found: dict[str, dict[str, Any]] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"--array {file}:{line_number}"
        if line.lstrip().startswith("{"):
            found[where] = _merged(base, json_object(where, line))
        else:
            try:
                words = shlex.split(line)
            except ValueError as error:
                raise UsageError(f"{where}: {error}: quotes are closed on the same line.") from None
            found[where] = {**base, "arguments": [*base.get("arguments", ()), *words]}
        if not any(found[where].get(key) for key in ("arguments", "job_type", "model")):
            raise UsageError(
                f"{where}: there is nothing to run: give `arguments` or a `job_type` in the line, or a command behind the options."
            )
    if not found:
        raise UsageError(f"--array {file} has no line: each makes a job.")
    return found


def _merged(base: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a line merged into the base: objects (environment, hyperparams, labels …) by key, everything else whole."""
    result = dict(base)
    for key, value in line.items():
        before: Any = result.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        result[key] = before | value if both else value
    return result


# Submitting


def _submit(
    access: FleetClient,
    read: Mapping[str, dict[str, Any]],
    project: str | None,
    idempotency_key: str | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit the jobs, which are `JobRequest`s by the place where each was read, and print their ids."""
    from groupwise.api.schemas.problems import Refusal
    from groupwise.cli.fleet.follow import exit_code_of, until_ended
    from groupwise.cli.printing import print_json

    try:
        accepted = access.submit_all(
            [*read.values()], project=project, idempotency_key=idempotency_key
        )
    except Refusal as refused:
        # If one of several is refused, name the line of the array.
        word, _, number = refused.errors[0].field.partition(".") if refused.errors else ("", "", "")
        if word != "jobs" or not number.isdecimal() or int(number) >= len(read):
            raise
        message = refused.errors[0].message
        raise UsageError(at([*read][int(number)], message)) from refused
    ids = [each["job_id"] for each in accepted]
    for note in dict.fromkeys(note for each in accepted for note in each["notes"]):
        say(note)
    if as_json and not wait:
        print_json(accepted[0] if len(accepted) == 1 else accepted)
    elif not as_json:
        for job_id in ids:
            typer.echo(job_id)
    if wait:
        ended = until_ended(access, ids)
        if as_json:
            print_json(ended[0] if len(ended) == 1 else ended)
        raise typer.Exit(exit_code_of(ended))


def _print_plans(
    access: FleetClient, read: Mapping[str, dict[str, Any]], project: str | None, as_json: bool
) -> None:
    """Print what the jobs would be and where they could run, for `--dry-run`."""
    from groupwise.api.schemas.problems import Refusal
    from groupwise.cli.printing import print_json, print_pairs

    plans: list[dict[str, Any]] = []
    for place, document in read.items():
        try:
            plans.append(access.plan(document, project=project))
        except Refusal as refused:
            if refused.code != "invalid_request" or not place:
                raise
            raise UsageError(at(place, refused.message)) from refused
    if as_json:
        print_json(plans[0] if len(plans) == 1 else plans)
        return
    for each in plans:
        for note in each["notes"]:
            say(note)
        needs = [
            "a prepared machine" if name == "prepared" else f"{name} {value}"
            for name, value in each["resources"].items()
        ]
        print_pairs(
            [
                ("command", shlex.join(each["arguments"])),
                ("needs", ", ".join(needs)),
                ("files", len(each["files"]) or None),
                ("could run now on", ", ".join(each["where"])),
                *(("would wait" if n == 0 else "", text) for n, text in enumerate(each["waits"])),
            ]
        )
