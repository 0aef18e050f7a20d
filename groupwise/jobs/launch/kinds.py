"""The kinds of fleet jobs that train or evaluate: from the columns of a row to a command.

    GRPO    groupwise-train-grpo --model=… --dataset=… …     the model at the top of `output_dir`, the run in `output_dir`/grpo
    SFT     groupwise sft model.name=… data.dataset_name=…   the run in `output_dir`/sft, its weights in the run's `final`
    EVAL    groupwise eval model.name=… …                    `output_dir`/evaluation.json

The fleet finds them as entry points of the group `groupwise.fleet_kinds`, calls `expand` once when it admits a job, and runs the command
at each attempt. A row gets the same checks as in the command itself: a wrong key fails before a machine is used. No code that a row names
is imported here: rewards in a file or a module, and pipelines, are resolved on the machine that runs the job. Only a reward that is given
by its name alone is checked here. An algorithm in a file is refused, because its keys could not be checked without its code.

`hyperparams` are config keys with their values, `{"algorithm.beta": 0.04}` or `{"algorithm": {"beta": 0.04}}`, and for GRPO the two
length flags that have no column. A column that has no effect is rejected, as an option would be. So are machines and GPUs that would be
idle: training and evaluation use one machine, and one GPU of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

from groupwise.algorithms.custom import is_custom
from groupwise.core.errors import ConfigError, TaskError
from groupwise.jobs.fleet.queue.request import request_document_from
from groupwise.jobs.hosts.spec import JobSpec, path_problems
from groupwise.jobs.launch.train_grpo import DEFAULTS, KEYS, Flags, arguments_of, config_of
from groupwise.jobs.launch.train_grpo import problems as flag_problems
from groupwise.tasks.data.sources import ENDINGS
from groupwise.tasks.rewards.registry import unknown_reward
from groupwise.training.config import LoadedConfig, load_config
from groupwise.training.sft_config import load_sft_config

Row = Mapping[str, Any]

SENT_PREFIX = "file:"
"""Prefix of a dataset whose file is sent with the job; the path in the working folder follows."""
RESULT = "evaluation.json"

MICROBATCH = "training.max_tokens_per_microbatch"
MAX_NUM_SEQS = "sampler.max_num_seqs"
MIN_MICROBATCH = 256
"""Tokens; a smaller microbatch would only be slower."""
SMALL_SLOTS = 32
"""Slots if the row does not set them, in which case the machine had chosen their number."""
MIN_SLOTS = 8

CALLBACKS = "callbacks"
IN_PROCESS = "rewards.in_process"
"""Keys whose code may use further GPUs. Rewards in separate processes see no GPU."""

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class TrainingKind:
    """One kind of job."""

    expand: Callable[[Row], JobSpec]
    """Builds the command of a row. Raises `TaskError`, a `UsageError`, with one line for each problem."""
    shrinkable_keys: tuple[str, ...]
    """Keys whose values can be reduced to save memory; this changes only the last bits of results."""

    def smaller(self, row: Row) -> Row | None:
        """The same job with less computed at once; None if no memory can be saved.

        The training batch is not reduced: the user requested it, and a job cannot resume from checkpoints of another batch size.
        """
        hyperparams = _flatten(row.get("hyperparams") or {})
        smaller = dict(hyperparams)
        if MICROBATCH in self.shrinkable_keys:
            tokens = hyperparams.get(MICROBATCH)
            tokens = 4096 if tokens is None else tokens  # a null leaves it to the machine
            if not isinstance(tokens, int) or tokens <= MIN_MICROBATCH:
                return None
            smaller[MICROBATCH] = max(MIN_MICROBATCH, tokens // 2)
            smaller["training.gradient_checkpointing"] = True
        if MAX_NUM_SEQS in self.shrinkable_keys:
            slots = hyperparams.get(MAX_NUM_SEQS)
            if not isinstance(slots, int):
                smaller[MAX_NUM_SEQS] = SMALL_SLOTS
            elif slots > MIN_SLOTS:
                smaller[MAX_NUM_SEQS] = max(MIN_SLOTS, slots // 2)
        return None if smaller == hyperparams else {**row, "hyperparams": smaller}


def _grpo(row: Row) -> JobSpec:
    problems = [
        *_missing_columns(row, "reward_function"),
        *_unknown_rewards(row),
        *_place_problems(row),
        *_idle_resources(row, "GRPO", (CALLBACKS, IN_PROCESS)),
    ]
    hyperparams = _flatten(row.get("hyperparams") or {})
    # Two flags have no column: take them out of the hyperparams, under either of their names.
    lengths: dict[str, int] = {}
    for flag in ("max_prompt_length", "max_completion_length"):
        for name in (flag, KEYS[flag]):
            if name in hyperparams:
                value = hyperparams.pop(name)
                if isinstance(value, int) and not isinstance(value, bool):
                    lengths[flag] = value
                else:
                    problems.append(
                        f"hyperparams: {name} is {value!r:.60}; it must be a whole number"
                    )
    flags = Flags(
        **lengths,
        model=row.get("model") or "",
        dataset=_dataset_argument(row),
        reward_function=_reward_names(row),
        preprocessing_pipeline=row["preprocessing_pipeline"],
        max_steps=row["max_steps"],
        learning_rate=float(row["learning_rate"]),
        batch_size=row["batch_size"],
        num_generations=row["num_generations"],
        output_dir=row["output_dir"],
        use_unsloth=bool(row["use_unsloth"]),
    )
    overrides = _overrides(hyperparams, problems)
    if not problems:
        problems += flag_problems(flags, overrides)
    _raise_problems(problems, lambda: load_config(config_of(flags), overrides))
    return _job_spec(arguments_of(flags, overrides), row)


def _sft(row: Row) -> JobSpec:
    problems = [
        *_missing_columns(row),
        *_place_problems(row),
        *_idle_resources(row, "SFT", (CALLBACKS,)),
        *_without_effect(row, "SFT", ("num_generations",)),
    ]
    if row.get("reward_function"):
        problems.append(
            "reward_function has no effect on SFT, which learns from given answers. Leave it out."
        )
    config = {
        KEYS["model"]: row.get("model"),
        KEYS["dataset"]: _dataset_argument(row),
        KEYS["preprocessing_pipeline"]: row["preprocessing_pipeline"],
        KEYS["max_steps"]: row["max_steps"],
        KEYS["learning_rate"]: float(row["learning_rate"]),
        "training.examples_per_step": row["batch_size"],
        KEYS["output_dir"]: row["output_dir"],
        "run.name": "sft",
        **_backend_override(row),
    }
    overrides = _all_overrides(row, config, problems)
    _raise_problems(problems, lambda: load_sft_config({}, overrides))
    return _job_spec(("groupwise", "sft", *overrides), row)


def _eval(row: Row) -> JobSpec:
    idle = ("max_steps", "learning_rate", "batch_size", "num_generations")
    problems = [
        *_missing_columns(row, "reward_function"),
        *_unknown_rewards(row),
        *_place_problems(row),
        *_idle_resources(row, "EVAL", (IN_PROCESS,)),
        *_without_effect(row, "EVAL", idle),
    ]
    config: dict[str, Any] = {
        KEYS["model"]: row.get("model"),
        KEYS["dataset"]: _dataset_argument(row),
        KEYS["reward_function"]: list(_reward_names(row)),
        KEYS["preprocessing_pipeline"]: row["preprocessing_pipeline"],
        **_backend_override(row),
    }
    held_out = {"data.dataset_test_split", "data.test_split_size"}
    if not held_out & _flatten(row.get("hyperparams") or {}).keys():
        config["data.dataset_test_split"] = "test" if _is_of_hub(row.get("dataset")) else "train"
    overrides = _all_overrides(row, config, problems)
    _raise_problems(problems, lambda: load_config({}, overrides))
    output = f"--output={row['output_dir']}/{RESULT}"
    return _job_spec(("groupwise", "eval", output, *overrides), row)


GRPO = TrainingKind(_grpo, (MICROBATCH, MAX_NUM_SEQS))
SFT = TrainingKind(_sft, (MICROBATCH,))
EVAL = TrainingKind(_eval, (MAX_NUM_SEQS,))


def _job_spec(arguments: Sequence[str], row: Row) -> JobSpec:
    folder = row["output_dir"]
    return JobSpec(tuple(arguments), artefacts=(folder,), checkpoints=(folder,))


def _raise_problems(problems: list[str], load: Callable[[], LoadedConfig]) -> None:
    """Raise TaskError with all problems: those found so far; if there are none, those that the command itself would report."""
    if not problems:
        try:
            load()
        except ConfigError as error:
            problems.append(error.message)
    if problems:
        raise TaskError("\n".join(problems))


# --- columns -------------------------------------------------------------------------------------


def _missing_columns(row: Row, *columns: str) -> Iterator[str]:
    for column in ("model", "dataset", *columns):
        if not row.get(column):
            yield f"{column} is missing"


def _place_problems(row: Row) -> Iterator[str]:
    """Problems with paths: a job can read only files that are on its machine or are sent with it."""
    yield from path_problems("output_dir", row["output_dir"])
    dataset = row.get("dataset") or ""
    if dataset.startswith(SENT_PREFIX):
        yield from path_problems("dataset", dataset.removeprefix(SENT_PREFIX))
    elif dataset and not dataset.startswith("/") and not _is_of_hub(dataset):
        yield (
            f"dataset {dataset!r} is neither an absolute path on the machine nor OWNER/NAME of the hub. `groupwise fleet submit` sends a "
            "file of yours along; a row that is written by hand names one of the two."
        )
    if (row.get("model") or "").startswith((".", "~")):
        yield f"model {row['model']!r}: a folder on the machine is named by its absolute path"


def _idle_resources(row: Row, kind: str, gpu_keys: Sequence[str]) -> Iterator[str]:
    """Problems with machines and GPUs that would be idle. Code set by the keys in `gpu_keys` may use GPUs of its own."""
    needs = request_document_from(row.get("request") or {}).resources.settled(1)
    if needs.machines > 1:
        yield (
            f"resources.machines is {needs.machines}, but {kind} knows nothing of the others: each machine would do the same. Leave it "
            "out. Several machines are for commands that share their work out, such as `groupwise fleet submit --machines 2 -- torchrun …`."
        )
    hyperparams = _flatten(row.get("hyperparams") or {})
    if needs.gpu_count > 1 and not any(hyperparams.get(key) for key in gpu_keys):
        yield (
            f"resources: {needs.gpu_count} GPUs are asked for, but {kind} computes on one: ask for one (--gpus 1, --gpus VM:0), or leave "
            f"it out. Only with {' or '.join(gpu_keys)} in its hyperparams may a job use others."
        )


def _is_of_hub(dataset: str | None) -> bool:
    """True if it could be a dataset on the hub, as in `groupwise.tasks.data.sources.is_local`: `data/sums.jsonl` is a file."""
    name = dataset or ""
    return bool(_HUB_ID.fullmatch(name)) and PurePosixPath(name).suffix not in ENDINGS


def _dataset_argument(row: Row) -> str:
    """The dataset in the form that the command expects: `./` marks a path in the working folder."""
    dataset: str = row.get("dataset") or ""
    return f"./{dataset.removeprefix(SENT_PREFIX)}" if dataset.startswith(SENT_PREFIX) else dataset


def _backend_override(row: Row) -> dict[str, str]:
    """The override for the backend that loads the model, if the row sets `use_unsloth`."""
    return {KEYS["use_unsloth"]: "unsloth"} if row["use_unsloth"] else {}


def _reward_names(row: Row) -> tuple[str, ...]:
    names: str = row.get("reward_function") or ""
    return tuple(name.strip() for name in names.split(",")) if names else ()


def _unknown_rewards(row: Row) -> Iterator[str]:
    for name in _reward_names(row):
        if name and (problem := unknown_reward(name)):
            yield f"reward_function: {' '.join(problem.splitlines())}"


def _without_effect(row: Row, kind: str, columns: Sequence[str]) -> Iterator[str]:
    for column in columns:
        if row[column] != DEFAULTS[column]:
            yield f"{column} is {row[column]}, which has no effect on {kind}. Leave it out."


# --- hyperparams ---------------------------------------------------------------------------------


def _flatten(hyperparams: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten sections: `{"algorithm": {"beta": 1}}` becomes `{"algorithm.beta": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in hyperparams.items():
        if isinstance(value, Mapping) and "." not in name:
            inner = cast("Mapping[str, Any]", value)
            flat |= {f"{name}.{key}": entry for key, entry in inner.items()}
        else:
            flat[name] = value
    return flat


def _overrides(hyperparams: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    """The hyperparams as config overrides; problems with them are appended to `problems`."""
    overrides: list[str] = []
    for name, value in hyperparams.items():
        if not _KEY.fullmatch(name):
            problems.append(
                f"hyperparams: {name!r:.60} is not a key of a config, as algorithm.beta is"
            )
            continue
        if name == "algorithm.type" and is_custom(str(value)):
            problems.append(
                f"hyperparams: {name} is {value!r:.60}, a class in a file, which a row cannot bring along. Submit the command, with the "
                "project that has the file: groupwise fleet submit --project-dir . -- groupwise rl …"
            )
            continue
        try:
            overrides.append(f"{name}={override_value(value)}")
        except ValueError:
            problems.append(f"hyperparams: {name} is not a finite number")
    return tuple(overrides)


def _all_overrides(row: Row, config: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    """Overrides for the columns, then for the hyperparams, which may not repeat a column."""
    columns = {key: name for name, key in KEYS.items()} | {
        "training.examples_per_step": "batch_size"
    }
    hyperparams = _flatten(row.get("hyperparams") or {})
    problems += [
        f"hyperparams: {name} is the column {columns[key]}; give it there"
        for name in hyperparams
        for key in config
        if key in columns and (name == key or key.startswith(f"{name}."))
    ]
    column_overrides = (f"{key}={override_value(value)}" for key, value in config.items())
    return (*column_overrides, *_overrides(hyperparams, problems))


def override_value(value: Any) -> str:
    """A value in the syntax of overrides: JSON that is also valid YAML, in visible ASCII only. Raises ValueError for NaN."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub(r"[^\x20-\x7e]", escape, text)
