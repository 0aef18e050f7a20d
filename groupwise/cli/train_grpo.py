"""`groupwise-train-grpo`: GRPO from flags alone, the model at the top of the output folder. A program of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson, Command, command, flag, option
from groupwise.cli.output import Stopped, run_command
from groupwise.cli.rl import Overrides, ResumeOptions, write_outcome
from groupwise.jobs.launch.train_grpo import DEFAULTS, PROGRAM

EQUIVALENT_FLAGS = {
    **dict.fromkeys(("model_name_or_path", "model_name", "model_id"), "--model"),
    **dict.fromkeys(("dataset_name", "train_dataset", "dataset_path"), "--dataset"),
    **dict.fromkeys(("reward_funcs", "reward_functions", "reward"), "--reward_function"),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size"), "--batch_size"),
    **dict.fromkeys(("lr", "actor_lr"), "--learning_rate"),
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "--max_completion_length"),
}
"""Flags of other launchers -> the equivalent flag here."""


EXAMPLES = {
    "model": "a hub id, a folder or an alias such as smollm2-135m-instruct",
    "dataset": "a JSON or JSON lines file, or a hub id",
    "reward_function": "a reward by its name, such as correctness, or module:function",
}
"""Examples of values for required flags."""


class _FlagCommand(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            unknown = str(getattr(error, "option_name", "")).lstrip("-")
            if unknown in EQUIVALENT_FLAGS:
                error.possibilities = [EQUIVALENT_FLAGS[unknown]]  # type: ignore[attr-defined] — which the message names
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # typer would lose the signal's number
            raise Stopped(interrupt) from interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagOptions:
    """The flags that become the config; the names of the fields are those of `Flags`."""

    model: Annotated[
        str | None,
        option(
            "MODEL", "A hub id, a folder, a .gguf file, or an alias (smollm2-135m-instruct, tiny)."
        ),
    ] = None
    dataset: Annotated[
        str | None, option("DATA", "A JSON or JSON lines file, or a hub id OWNER/NAME.")
    ] = None
    reward_function: Annotated[
        list[str],
        option(
            "NAME",
            "A reward by its name, or module:function, file.py:function. May be repeated.",
            "--reward_function",
        ),
    ] = field(default_factory=list[str])
    preprocessing_pipeline: Annotated[
        str,
        option(
            "NAME",
            "generic: the prompt is text, and its answer becomes `reference`. deepseek: the prompt is a chat. Or "
            "module:function, row to row or None.",
            "--preprocessing_pipeline",
        ),
    ] = DEFAULTS["preprocessing_pipeline"]
    max_steps: Annotated[int, option("N", "Steps to train.", "--max_steps")] = DEFAULTS["max_steps"]
    learning_rate: Annotated[float, option("X", "Peak step size of AdamW.", "--learning_rate")] = (
        DEFAULTS["learning_rate"]
    )
    batch_size: Annotated[int, option("N", "Prompts per step.", "--batch_size")] = DEFAULTS[
        "batch_size"
    ]
    num_generations: Annotated[int, option("N", "Completions per prompt.", "--num_generations")] = (
        DEFAULTS["num_generations"]
    )
    max_prompt_length: Annotated[
        int, option("N", "Tokens; longer prompts are left out and counted.", "--max_prompt_length")
    ] = DEFAULTS["max_prompt_length"]
    max_completion_length: Annotated[
        int, option("N", "Tokens; longer ones are cut off.", "--max_completion_length")
    ] = DEFAULTS["max_completion_length"]
    output_dir: Annotated[
        str,
        option(
            "DIR", "Output folder: the full model at its top, the run below it.", "--output_dir"
        ),
    ] = DEFAULTS["output_dir"]
    use_unsloth: Annotated[
        bool, flag("Have Unsloth load and compute the model.", "--use_unsloth")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFlags(ResumeOptions):
    """Spelled as the other flags of this program."""

    resume_from: Annotated[
        str | None,
        option(
            "PATH",
            "Continue from the checkpoint in this folder. The environment variable RESUME_FROM, if set, overrides it.",
            "--resume_from",
        ),
    ] = None


def train_grpo(
    context: typer.Context,
    *,
    flag_options: FlagOptions,
    overrides: Overrides = None,
    start: ResumeFlags,
    dry_run: Annotated[
        bool, flag("Print the plan, with --json also the whole config; train nothing.", "--dry_run")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model with GRPO: an ordinary `groupwise rl`, whose config is made of these flags."""
    from groupwise.cli.printing import command_to_do_it
    from groupwise.core.errors import UsageError
    from groupwise.jobs.launch.train_grpo import Flags
    from groupwise.jobs.launch.train_grpo import train_grpo as train

    flags = asdict(flag_options)
    missing = [
        f"  --{name}: {text}" for name, text in EXAMPLES.items() if flags[name] in (None, [])
    ]
    if missing:
        raise UsageError("\n".join(["These are needed:", *missing]))
    flags["reward_function"] = tuple(flag_options.reward_function)
    result = train(Flags(**flags), tuple(overrides or ()), dry_run=dry_run, **start.keywords())
    after_plan = command_to_do_it(context) if dry_run else None
    write_outcome(result.summary, as_json=as_json, after_plan=after_plan)
    raise typer.Exit(result.exit_code)


app = typer.Typer(
    name=PROGRAM, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
command(app, PROGRAM, cls=_FlagCommand)(train_grpo)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code and raises nothing."""
    return run_command(app, PROGRAM, list(sys.argv[1:] if args is None else args))
