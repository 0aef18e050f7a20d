"""`groupwise-train-grpo`: GRPO from flags alone, the model at the top of the output folder. A program of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson, Command, command
from groupwise.cli.output import Stopped, run_command
from groupwise.cli.rl import Overrides, ResumeOptions
from groupwise.jobs.launch.train_grpo import DEFAULTS, PROGRAM

ELSEWHERE = {
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
            if unknown in ELSEWHERE:
                error.possibilities = [ELSEWHERE[unknown]]  # type: ignore[attr-defined] — which the message names
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
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A hub id, a folder, a .gguf file, or an alias (smollm2-135m-instruct, tiny).",
        ),
    ] = None
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", metavar="DATA", help="A JSON or JSON lines file, or a hub id OWNER/NAME."
        ),
    ] = None
    reward_function: Annotated[
        list[str],
        typer.Option(
            "--reward_function",
            metavar="NAME",
            help="A reward by its name, or module:function, file.py:function. May be repeated.",
        ),
    ] = field(default_factory=list[str])
    preprocessing_pipeline: Annotated[
        str,
        typer.Option(
            "--preprocessing_pipeline",
            metavar="NAME",
            help="generic: the prompt is text, and its answer becomes `reference`. deepseek: the prompt is a chat. Or "
            "module:function, row to row or None.",
        ),
    ] = DEFAULTS["preprocessing_pipeline"]
    max_steps: Annotated[int, typer.Option("--max_steps", metavar="N", help="Steps to train.")] = (
        DEFAULTS["max_steps"]
    )
    learning_rate: Annotated[
        float, typer.Option("--learning_rate", metavar="X", help="Peak step size of AdamW.")
    ] = DEFAULTS["learning_rate"]
    batch_size: Annotated[
        int, typer.Option("--batch_size", metavar="N", help="Prompts per step.")
    ] = DEFAULTS["batch_size"]
    num_generations: Annotated[
        int, typer.Option("--num_generations", metavar="N", help="Completions per prompt.")
    ] = DEFAULTS["num_generations"]
    max_prompt_length: Annotated[
        int,
        typer.Option(
            "--max_prompt_length",
            metavar="N",
            help="Tokens; longer prompts are left out and counted.",
        ),
    ] = DEFAULTS["max_prompt_length"]
    max_completion_length: Annotated[
        int,
        typer.Option(
            "--max_completion_length", metavar="N", help="Tokens; longer ones are cut off."
        ),
    ] = DEFAULTS["max_completion_length"]
    output_dir: Annotated[
        str,
        typer.Option(
            "--output_dir",
            metavar="DIR",
            help="Output folder: the full model at its top, the run below it.",
        ),
    ] = DEFAULTS["output_dir"]
    use_unsloth: Annotated[
        bool, typer.Option("--use_unsloth", help="Have Unsloth load and compute the model.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFlags(ResumeOptions):
    """Spelled as the other flags of this program."""

    resume_from: Annotated[
        str | None,
        typer.Option(
            "--resume_from",
            metavar="PATH",
            help="Continue from the checkpoint in this folder. The environment variable RESUME_FROM, if set, overrides it.",
        ),
    ] = None


def train_grpo(
    *,
    flag_options: FlagOptions,
    overrides: Overrides = None,
    start: ResumeFlags,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry_run", help="Print the resolved config and the plan as JSON; train nothing."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model with GRPO: an ordinary `groupwise rl`, whose config is made of these flags."""
    from groupwise.cli.output import write_json, write_result
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
    if dry_run:
        write_json(result.summary)
    else:
        write_result(result.summary, as_json=as_json)
    raise typer.Exit(result.exit_code)


app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
command(app, PROGRAM, cls=_FlagCommand)(train_grpo)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code and raises nothing."""
    return run_command(app, PROGRAM, list(sys.argv[1:] if args is None else args))
