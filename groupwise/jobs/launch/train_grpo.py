"""GRPO from a dozen flags: the command `groupwise-train-grpo`.

    groupwise-train-grpo --model tiny --dataset sums.jsonl --reward_function correctness --output_dir outputs

The flags become the config of an ordinary `groupwise rl` without a task file, which then runs: resolved config, record, checkpoints and
resume are the same. Afterwards the complete trained model and its tokenizer are at the top of `output_dir`:

    outputs/config.json, model.safetensors, tokenizer.json …    one complete model that transformers can load
    outputs/grpo/                                               the run: record, checkpoints, the adapter in final/

A fleet turns each job of the kind GRPO into such a command (`groupwise.jobs.launch.kinds`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.training.loops.start import TrainingResult

PROGRAM = "groupwise-train-grpo"
RUN = "grpo"
"""Name of the run and of its folder in `output_dir`."""

KEYS = {
    "model": "model.name",
    "dataset": "data.dataset_name",
    "reward_function": "rewards.reward_funcs",
    "preprocessing_pipeline": "data.preprocessing_pipeline",
    "max_steps": "training.max_steps",
    "learning_rate": "training.learning_rate",
    "batch_size": "training.prompts_per_step",
    "num_generations": "training.num_generations",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "sampler.max_completion_length",
    "output_dir": "run.dir",
    "use_unsloth": "model.backend",
}
"""The config key of each flag."""

EXTRA_KEYS: Mapping[str, Any] = {
    "algorithm.type": "grpo",
    "run.name": RUN,
}
"""Keys without a flag whose values differ from the defaults of `groupwise rl`; overrides may change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of the command, with their defaults."""

    model: str
    """A hub id, a folder, a .gguf file or an alias."""
    dataset: str
    """A JSON or JSON lines file, or a hub id."""
    reward_function: tuple[str, ...]
    """Registered names, or module:function."""
    preprocessing_pipeline: str = "generic"
    max_steps: int = 500
    learning_rate: float = 5e-6
    batch_size: int = 1
    """Prompts of a step."""
    num_generations: int = 4
    max_prompt_length: int = 256
    """Tokens; longer prompts are left out and counted."""
    max_completion_length: int = 128
    output_dir: str = "outputs"
    use_unsloth: bool = False


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Flags)}


def problems(flags: Flags, overrides: Sequence[str] = ()) -> list[str]:
    """Problems with the flags, as messages for the user, except those that the config itself will report."""
    texts = ("model", "dataset", "preprocessing_pipeline", "output_dir")
    messages = [f"--{name} is empty." for name in texts if not getattr(flags, name)]
    if not flags.reward_function:
        messages.append("--reward_function is missing: name a reward.")
    if "" in flags.reward_function:
        messages.append("--reward_function is empty.")
    sizes = ("batch_size", "num_generations", "max_prompt_length", "max_completion_length")
    messages += [
        f"--{name} is {value}; it must be a whole number, 1 or more."
        for name in ("max_steps", *sizes)
        if (value := getattr(flags, name)) < 1
    ]
    rate = flags.learning_rate
    if not 0 < rate < math.inf:
        messages.append(f"--learning_rate is {rate:g}; it must be a number above 0, such as 5e-6.")
    for key in (word.partition("=")[0] for word in overrides):
        if (flag := next((flag for flag in KEYS if KEYS[flag] == key), None)) is not None:
            messages.append(f"{key} is --{flag} here; give it as that.")
        elif any(config_key.startswith(f"{key}.") for config_key in KEYS.values()):
            messages.append(
                f"{key} as a whole would replace what the flags say of it; give single keys, as in {key.partition('.')[0]}.KEY=value."
            )
    return messages


def config_of(flags: Flags) -> dict[str, Any]:
    """The config of `groupwise rl` that corresponds to the flags."""
    config: dict[str, Any] = {}
    values = {KEYS[name]: getattr(flags, name) for name in KEYS if name != "use_unsloth"}
    values[KEYS["reward_function"]] = list(flags.reward_function)
    if flags.use_unsloth:
        values[KEYS["use_unsloth"]] = "unsloth"
    for key, value in {**EXTRA_KEYS, **values}.items():
        section, _, name = key.partition(".")
        config.setdefault(section, {})[name] = value
    return config


def arguments_of(flags: Flags, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """The command line. Each flag and its value form one word, so a value may contain anything, even a leading dash."""
    arguments = [f"--{name}={getattr(flags, name)}" for name in KEYS if name not in _NOT_ONE_WORD]
    rewards = [f"--reward_function={name}" for name in flags.reward_function]
    unsloth = ["--use_unsloth"] if flags.use_unsloth else []
    return (PROGRAM, *arguments, *rewards, *unsloth, *overrides)


_NOT_ONE_WORD = ("reward_function", "use_unsloth")


def train_grpo(
    flags: Flags,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    resume_from: str | None = None,
    dry_run: bool = False,
) -> TrainingResult:
    """Train, and write the merged model to the top of `output_dir`.

    `resume` continues the unfinished run there, `resume_from` the checkpoint in that folder. Raises `UsageError` for wrong flags,
    `RunError` if the run failed.
    """
    from groupwise.training.loops.rl_start import rl

    if messages := problems(flags, overrides):
        raise UsageError("\n".join(messages))
    result = rl(
        config_of(flags),
        overrides=tuple(overrides),
        resume=resume,
        resume_from=resume_from,
        dry_run=dry_run,
    )
    if dry_run or result.summary["state"] != "finished":
        return result
    model = Path(flags.output_dir)
    write_merged_model(result.folder, model)
    return replace(result, summary={**result.summary, "model": str(model)})


def write_merged_model(run: Path, into: Path) -> None:
    """Write the final weights of a run, merged into their base model, and the tokenizer into a folder; other files there are kept.

    The model's config is written last: without it no program takes the folder for a model. Files of an earlier model are removed.
    """
    from groupwise.core import atomic_files
    from groupwise.engine.models.artefact import CARD, MODEL, TOKENIZER
    from groupwise.training.review.export import export

    with (
        atomic_files.explaining_disk_errors(into),
        tempfile.TemporaryDirectory(dir=into, prefix=atomic_files.BUILDING) as building,
    ):
        merged = Path(building) / into.resolve().name
        files = export(str(run), "merged", merged, keep_change=True, trust_remote_code=True).files
        config = MODEL[0]
        atomic_files.remove_file(into / config)
        for pattern in (*MODEL, *TOKENIZER, CARD):
            for stale in into.glob(pattern):
                if stale.name not in files and stale.is_file():
                    atomic_files.remove_file(stale)
        for name in sorted(files, key=lambda name: name == config):
            atomic_files.publish_file(merged / name, into / name)
