"""`groupwise fleet submit`: a job from words, its id alone on standard output.

What is a file here travels with the job: `--file`, and `--dataset` and `--reward_function` where they name one. Everything else is words
that the fleet checks at admission, the same way as for the API and for a row written by hand.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.fleet_access import AsJson, FleetOption, fleet
from groupwise.cli.fleet_progress import progress
from groupwise.cli.fleet_words import NONE, number, whole, whole_or_none
from groupwise.cli.output import say
from groupwise.errors import GroupwiseError, UsageError

if TYPE_CHECKING:
    from groupwise.cli.fleet_access import Fleet

MOST = 2**31 - 1
"""That a column of whole numbers holds."""
LONGEST_GRACE = 86_400.0
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[--] ARGUMENTS...",
        help="The command: a program and its arguments, never a line for a shell.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Submission:
    """What is to be submitted, once it has been read."""

    documents: list[dict[str, Any]]
    """Of one job each: a `JobRequest`."""
    places: list[str]
    """Where each was read, for people; empty where the options alone say it."""
    project: str | None
    idempotency_key: str | None


def submit(
    arguments: Arguments = None,
    told: FleetOption = None,
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
        bool, typer.Option("--use_unsloth", help="Refused: not in this version.")
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
            help="A variable whose value the dispatcher has, and nobody writes down.",
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
            parser=whole("--artefact-files", 200_000, most=10_000_000),
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

        groupwise fleet submit --gpus 2 -- python train.py --lr 1e-5

        groupwise fleet submit --kind GRPO --model M --dataset sums.jsonl --reward_function correctness

    The working folder of a job is empty but for the files that it takes along. What it leaves in `outputs` is fetched.
    """
    from groupwise.cli import fleet_words as words

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
    policy: dict[str, Any] = {
        "priority": priority,
        "name": name,
        "labels": words.pairs("--label", label or ()),
        "retry": _retry(retries),
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
    from groupwise.fleet.queue import resources
    from groupwise.wire.fleet import expect_few

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
    with fleet(told, make=not dry_run) as access:
        asked = {**columns, **policy, "resources": needs.as_json(), "arguments": arguments or []}
        base = {key: value for key, value in asked.items() if value not in (None, [], {}, False)}
        read = {"": base} if array is None else _array(array, base)
        expect_few(len(read))
        _take_along(access, read, file or (), dry_run)
        asked_for = Submission([*read.values()], [*read], project, idempotency_key)
        _submit(access, asked_for, wait, dry_run, as_json)


def _expect_one_kind(columns: Mapping[str, Any], arguments: Sequence[str], *, some: bool) -> None:
    """A command or a kind of job. `some`: one of them; else the lines of an array may say all."""
    given = [name for name, value in columns.items() if value is not None]
    training = [name for name in given if name not in ("job_type", "output_dir")]
    kind = columns["job_type"]
    if some and not given and not arguments:
        raise UsageError(
            "there is nothing to run: give a command, `groupwise fleet submit -- python train.py`, or a kind of job, "
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
    """The flags of `groupwise-train-grpo` that are no columns are settings of the kind."""
    from groupwise.launch.train_grpo import KEYS

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


def _retry(retries: str | int | None) -> dict[str, Any] | None:
    if retries is None:
        return None
    return {"once": True} if retries == NONE else {"charged": retries}


def _limits(
    time_limit: str | None, grace: str | None, size: str | None, files: int | None
) -> dict[str, Any]:
    from groupwise.cli.fleet_words import seconds_of
    from groupwise.fleet.queue.resources import megabytes

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


# Files


def _take_along(
    access: Fleet, documents: Mapping[str, dict[str, Any]], words: Sequence[str], dry_run: bool
) -> None:
    """Each job gets the manifest of what travels with it: what `--file` names, and its own data set and reward function."""
    of_all: dict[str, Path] = {}
    for word in words:
        _add(of_all, *_local_and_remote(word))
    own: dict[str, dict[str, Path]] = {}
    for place, document in documents.items():
        try:
            own[place] = _own_files(document, of_all)
        except UsageError as error:
            raise UsageError(_at(place, error.message)) from error
    _check(documents)  # before anything is sent
    kept = _kept(access, (of_all, *own.values()), dry_run)
    shared = {name: kept[path] for name, path in of_all.items()}
    for place, document in documents.items():
        its_own = {name: kept[path] for name, path in own[place].items()}
        said = document.get("files", {})
        # One for all jobs that have no files of their own: a long array of them may take thousands along.
        if manifest := {**shared, **said, **its_own} if said or its_own else shared:
            document["files"] = manifest


def _own_files(document: dict[str, Any], of_all: Mapping[str, Path]) -> dict[str, Path]:
    """Files here that its data set and reward function name; both are renamed to where they will lie."""
    found: dict[str, Path] = {}
    if (data := _local_file(document.get("dataset"))) is not None:
        _add(found, data, data.name, of_all)
        document["dataset"] = f"file:{data.name}"
    rewards = document.get("reward_function")
    if isinstance(rewards, str):
        words = (_reward(found, each.strip(), of_all) for each in rewards.split(","))
        document["reward_function"] = ",".join(words)
    return found


def _kept(
    access: Fleet, files: Iterable[Mapping[str, Path]], dry_run: bool
) -> dict[Path, list[Any]]:
    """In the fleet's store, where dispatchers take them from; `--dry-run` only looks at them."""
    from groupwise.hosts.files import hash_of

    named: dict[str, Path] = {}
    for each in files:
        for name, path in each.items():
            # Lines of an array may have files of one name; no path in a job's folder begins with a slash.
            named[name if named.get(name, path) == path else str(path.absolute())] = path
    if dry_run:
        return {
            each: [hash_of(each), each.stat().st_mode & 0o777, each.stat().st_size]
            for each in dict.fromkeys(named.values())
        }
    if not named:
        return {}
    with progress() as tell:
        sent = access.upload(named, tell=tell)
    return {path: sent[name] for name, path in named.items()}


def _local_and_remote(word: str) -> tuple[Path, str]:
    """`LOCAL`, `LOCAL:REMOTE`; a name with a colon in it is taken whole where there is such a file. `.` is the job's folder itself."""
    from groupwise.hosts.spec import path_problems

    local, colon, remote = word.rpartition(":")
    if not colon or Path(word).expanduser().exists():
        local, remote = word, ""
    path = Path(local).expanduser()
    if not path.exists():
        raise UsageError(f"--file {word}: there is no file or folder {path}.")
    own_name = Path(os.path.abspath(path)).name  # so `..` has a name too, and a link keeps its own
    named = PurePosixPath(remote or own_name).as_posix()
    if named == "." and not path.is_dir():
        named = own_name
    if named != "." and (wrong := path_problems("--file", named)):
        raise UsageError(wrong[0])
    return path, named


def _add(
    found: dict[str, Path], local: Path, remote: str, beside: Mapping[str, Path] | None = None
) -> None:
    """A file, or all below a folder, to travel under that name. `beside`: what lies there already."""
    from groupwise.hosts.files import files_below

    if local.is_dir():
        top = "" if remote == "." else f"{remote}/"
        below = {f"{top}{name}": path for name, path in files_below(local).items()}
    else:
        below = {remote: local}
    for name, path in below.items():
        there = found.get(name) or (beside or {}).get(name)
        if there is not None and there.resolve() != path.resolve():
            raise UsageError(
                f"{path} and {there} would both be {name} in the job's working folder: give one of them another "
                f"name, --file {path}:OTHER."
            )
        found[name] = path


def _local_file(word: object) -> Path | None:
    """The file that a word names here, if it names one; what is no word at all is told later."""
    if not isinstance(word, str):
        return None
    path = Path(word).expanduser()
    if path.is_file():
        return path
    if word.startswith(("./", "../", "~")):
        raise UsageError(f"dataset {word}: there is no such file here.")
    return None


def _reward(found: dict[str, Path], word: str, of_all: Mapping[str, Path]) -> str:
    """`rewards.py:score` takes the file along; anything else stays what it is."""
    name, colon, attribute = word.partition(":")
    path = Path(name).expanduser()
    if path.suffix != ".py" or not path.is_file():
        return word
    _add(found, path, path.name, of_all)
    return f"{path.name}{colon}{attribute}"


# Arrays


def _array(file: Path, base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A job for each line of a file, by its place: what the line says is laid over what the options say."""
    from groupwise.cli.fleet_words import json_object

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
            found[where] = _laid_over(base, json_object(where, line))
        else:
            found[where] = {**base, "arguments": [*base.get("arguments", ()), *_words(where, line)]}
        if not any(found[where].get(key) for key in ("arguments", "job_type", "model")):
            raise UsageError(
                f"{where}: there is nothing to run: give `arguments` or a `job_type` in the line, or a command behind the options."
            )
    if not found:
        raise UsageError(f"--array {file} has no line: each makes a job.")
    return found


def _check(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """What is wrong with the words is told here, the same way for every fleet."""
    from groupwise.fleet.queue.request import from_document

    for place, each in documents.items():
        try:
            from_document(each)
        except UsageError as error:
            raise UsageError(_at(place, error.message)) from error


def _at(place: str, message: str) -> str:
    return f"{place}: {message}" if place else message


def _laid_over(base: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """Objects (environment, hyperparams, labels …) key by key, everything else whole."""
    result = dict(base)
    for key, value in line.items():
        before: Any = result.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        result[key] = before | value if both else value
    return result


def _words(where: str, line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{where}: {error}: quotes are closed on the same line.") from None


# Submitting


def _submit(
    access: Fleet, submission: Submission, wait: bool, dry_run: bool, as_json: bool
) -> None:
    from groupwise.cli.fleet_follow import exit_code_of, until_ended
    from groupwise.cli.printing import print_json

    documents = submission.documents
    if dry_run:
        planned = [_planned(access, submission, place) for place in range(len(documents))]
        _print_plans(planned, as_json)
        return
    accepted = _accepted(access, submission)
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


def _planned(access: Fleet, submission: Submission, number: int) -> dict[str, Any]:
    """What one of the jobs would be; where it is refused, its line is told."""
    from groupwise.wire.problems import Refusal

    try:
        return access.plan(submission.documents[number], project=submission.project)
    except Refusal as refused:
        if refused.code != "invalid_request" or not submission.places[number]:
            raise
        raise UsageError(_at(submission.places[number], refused.message)) from refused


def _accepted(access: Fleet, submission: Submission) -> list[dict[str, Any]]:
    """The jobs; where one of several is refused, the line is told at which it stands."""
    from groupwise.wire.problems import Refusal

    try:
        return access.submit_all(
            submission.documents,
            project=submission.project,
            idempotency_key=submission.idempotency_key,
        )
    except Refusal as refused:
        word, _, number = refused.errors[0].field.partition(".") if refused.errors else ("", "", "")
        if word != "jobs" or not number.isdecimal() or int(number) >= len(submission.places):
            raise
        message = refused.errors[0].message
        raise UsageError(_at(submission.places[int(number)], message)) from refused


def _print_plans(planned: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    from groupwise.cli.printing import print_json, print_pairs

    if as_json:
        print_json(planned[0] if len(planned) == 1 else list(planned))
        return
    for each in planned:
        for note in each["notes"]:
            say(note)
        print_pairs(
            [
                ("command", shlex.join(each["arguments"])),
                ("needs", ", ".join(_need(k, v) for k, v in each["resources"].items())),
                ("files", len(each["files"]) or None),
                ("could run now on", ", ".join(each["where"])),
                *(("would wait" if n == 0 else "", text) for n, text in enumerate(each["waits"])),
            ]
        )


def _need(name: str, value: Any) -> str:
    return "a prepared machine" if name == "prepared" else f"{name} {value}"


# On one machine

EXEC_PRIORITY = 1000
"""Before everything that waits."""
_OWN_EXIT_CODE = re.compile(r"(crashed|user_error): exit code \d")
"""Reasons that say no more than exit code and output."""


def run_on(
    access: Fleet,
    target: str,
    arguments: Sequence[str],
    *,
    gpus: str,
    time_limit: str,
    project: str | None,
) -> int:
    """A command as a job that is pinned to a machine; its output, and its exit code. Interrupted, it does not go on."""
    from groupwise.cli.fleet_follow import exit_code_of
    from groupwise.cli.fleet_words import seconds_of
    from groupwise.fleet.queue import resources

    vm = _machine_of(access, target)
    request = {
        "arguments": list(arguments),
        "name": f"exec {shlex.join(arguments)}"[:256],
        "resources": resources.parse(gpus=gpus, vm=vm).as_json(),
        "limits": {"time_seconds": seconds_of("--time-limit", time_limit)},
        "retry": {"once": True},
        "priority": EXEC_PRIORITY,
        "artefacts": [],
        "checkpoints": [],
    }
    with _sigterm_interrupts():
        ended = _followed(access, request, project)
    reason = ended["failure_reason"]
    if reason and not _OWN_EXIT_CODE.match(reason):
        say(reason)
    return exit_code_of([ended])


def _followed(access: Fleet, request: Mapping[str, Any], project: str | None) -> dict[str, Any]:
    """What it was at its end. Where that is not waited for, it is called off."""
    from groupwise.cli.fleet_follow import follow_log

    job_id = None
    try:
        job_id = access.submit(request, project=project)["job_id"]
        return follow_log(access, job_id)
    except (KeyboardInterrupt, BrokenPipeError):  # or nobody reads any more (`| head`)
        _call_off(access, job_id)
        raise
    except GroupwiseError:
        if job_id is not None:
            say(_goes_on(job_id))
        raise


def _call_off(access: Fleet, job_id: str | None) -> None:
    """Whoever wanted it is no longer there."""
    from groupwise.wire.problems import Refusal

    if job_id is None:
        say("whether the command was submitted is not known: `groupwise fleet jobs` says so")
        return
    try:
        now = access.cancel(job_id, "exec was interrupted")["status"]
    except Refusal as refusal:
        if refusal.code != "job_state":
            say(f"{_goes_on(job_id)}: {refusal.message}")
    except (GroupwiseError, KeyboardInterrupt) as error:
        say(f"{_goes_on(job_id)}: {error or 'interrupted again'}")
    else:
        say(f"{job_id} {'is being ended' if now == 'running' else 'is cancelled'}")


def _goes_on(job_id: str) -> str:
    return f"{job_id} goes on; `groupwise fleet cancel {job_id}` ends it"


@contextmanager
def _sigterm_interrupts() -> Generator[None]:
    """SIGTERM does what Ctrl-C does, and is told from it by its number."""

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _machine_of(access: Fleet, target: str) -> str:
    """A machine by its name, or the one that a job was given last."""
    from groupwise.wire.problems import Refusal

    try:
        return access.machine(target)["vm_id"]
    except Refusal as no_machine:
        if no_machine.code != "unknown_vm":
            raise
        try:
            job = access.show(target)
        except Refusal:
            raise no_machine from None
    if job["assigned_vm"] is None:
        raise UsageError(f"{target} is {job['status']} and has no machine yet; name one instead.")
    return job["assigned_vm"]
