"""`groupwise generate`: answers of a service to the prompts of a dataset."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from groupwise.cli.options import AsJson


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The names of the fields are the keys of `GenerateConfig`."""

    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "--hf-dataset",
            metavar="SOURCE",
            help="The prompts: a file (JSONL, JSON, Parquet, CSV), a folder, or a dataset on the hub.",
        ),
    ] = None
    dataset_config: Annotated[
        str | None,
        typer.Option(
            "--dataset-config",
            "--hf-dataset-config",
            metavar="NAME",
            help="Configuration of a dataset on the hub.",
        ),
    ] = None
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            "--hf-dataset-split",
            metavar="SPLIT",
            help="Split, or a slice of one: train[:100]; default: train.",
        ),
    ] = None
    prompt_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column with the prompt, text or chat messages; default: prompt.",
        ),
    ] = None
    prompt_template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The prompt, with columns in braces: 'Solve: {question}'. {{ instruction }} is the prompt column; other doubled braces "
            "stand for themselves.",
        ),
    ] = None
    system_prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A system message for conversations that have none."),
    ] = None
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="continue|drop",
            help="What to do with the assistant's words at the end of a chat; default: the answer continues them.",
        ),
    ] = None
    task_module: Annotated[
        str | None,
        typer.Option(
            "--task-module",
            "-t",
            metavar="TASK",
            help="In place of a dataset: a task whose training prompts are answered, and whose rewards score.",
        ),
    ] = None
    config: Annotated[
        str | None,
        typer.Option(
            "--config", "-c", metavar="C.yaml", help="Config that the hooks of the task receive."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the model there; default: the one that is served."
        ),
    ] = None
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            "--vllm-server-url",
            metavar="URL",
            help="The OpenAI-compatible service; default: http://127.0.0.1:8000/v1.",
        ),
    ] = None
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the key; default: OPENAI_API_KEY.",
        ),
    ] = None
    api: Annotated[
        Literal["chat", "completions"] | None,
        typer.Option(
            help="chat sends text as a user's message; completions lets it be continued as it stands, which is what happens to the "
            "text prompts of a task.",
        ),
    ] = None
    temperature: Annotated[
        float | None, typer.Option(metavar="NUM", help="Default: that of the service.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(metavar="NUM", help="Default: that of the service.")
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="NUM", help="Maximum tokens per generation; default: 8192."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop string. May be repeated."),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(metavar="NUM", help="Seed, for a service that supports it."),
    ] = None
    extra: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="""Further fields of each request: '{"min_p": 0.1}'. null takes out a field.""",
        ),
    ] = None
    num_generations: Annotated[
        int | None, typer.Option(metavar="NUM", help="Generations per row; default: 1.")
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "--input-batch-size",
            metavar="NUM",
            help="Requests at the same time; default: 16.",
        ),
    ] = None
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time for one request; default: 900.")
    ] = None
    retries: Annotated[
        int | None,
        typer.Option(
            metavar="NUM",
            help="Maximum number of retries of a request; default: 8.",
        ),
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|hub:OWNER/NAME",
            help="Folder for all results, or a dataset on the hub (with a folder in generated/).",
        ),
    ] = None
    hub: Annotated[
        str | None,
        typer.Option(
            "--hf-output-dataset",
            metavar="OWNER/NAME",
            help="A dataset on the hub to upload to as well.",
        ),
    ] = None
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Whether a new dataset on the hub is private; default: private.",
        ),
    ] = None
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="NAME|module:function",
            help="Reward that scores each generation. May be repeated.",
        ),
    ] = None
    answer_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column with the answer that rewards look for."),
    ] = None
    min_reward: Annotated[
        float | None,
        typer.Option(
            metavar="NUM",
            help="Train only on rows whose best generation earns at least this reward.",
        ),
    ] = None
    keep: Annotated[
        Literal["best", "all"] | None,
        typer.Option(
            help="Keep the best generation of a row, or all that earn enough; default: best."
        ),
    ] = None
    keep_truncated: Annotated[
        bool | None,
        typer.Option("--keep-truncated", help="Keep truncated generations for training, too."),
    ] = None
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="i/N",
            help="Only the i-th of every N rows. The command without it joins the shards.",
        ),
    ] = None
    shards: Annotated[int | None, typer.Option(hidden=True)] = None
    price_in: Annotated[
        float | None, typer.Option(metavar="NUM", help="Price of a million prompt tokens.")
    ] = None
    price_out: Annotated[
        float | None, typer.Option(metavar="NUM", help="Price of a million generated tokens.")
    ] = None


def generate(
    *,
    options: GenerateOptions,
    client_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="NUM", min=1, help="Multiplies --concurrency, or its default, by this number."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let a service answer prompts, as training data.

    The answers train with `groupwise sft`. The same command again continues where it stopped.
    """
    from groupwise.cli.output import write_json, write_result
    from groupwise.training.generation.generate import generate as run

    options_given = {name: value for name, value in asdict(options).items() if value is not None}
    if options.extra is not None:
        try:
            options_given["extra"] = json.loads(options.extra)
        except ValueError as error:
            raise typer.BadParameter(f"--extra is not JSON: {error}.") from error
        if not isinstance(options_given["extra"], dict):
            raise typer.BadParameter('--extra is not a JSON object, such as {"min_p": 0.1}.')
    if client_replicas is not None:  # the limit counts for each client
        from groupwise.training.generation.config import CONCURRENCY

        options_given["concurrency"] = (
            options_given.get("concurrency", CONCURRENCY) * client_replicas
        )
    result = run(dry_run=dry_run, **options_given)
    if dry_run:
        write_json(result.summary)
    else:
        write_result(result.summary, as_json=as_json)
    raise typer.Exit(result.exit_code)
