"""`groupwise generate`: answers of a service to the prompts of a dataset."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from groupwise.cli.options import AsJson, flag, option


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The names of the fields are the keys of `GenerateConfig`."""

    dataset: Annotated[
        str | None,
        option(
            "SOURCE",
            "The prompts: a file (JSONL, JSON, Parquet, CSV), a folder, or a dataset on the hub.",
            "--dataset",
            "--hf-dataset",
        ),
    ] = None
    dataset_config: Annotated[
        str | None,
        option(
            "NAME",
            "Configuration of a dataset on the hub.",
            "--dataset-config",
            "--hf-dataset-config",
        ),
    ] = None
    split: Annotated[
        str | None,
        option(
            "SPLIT",
            "Split, or a slice of one: train[:100]; default: train.",
            "--split",
            "--hf-dataset-split",
        ),
    ] = None
    prompt_column: Annotated[
        str | None,
        option("COLUMN", "Column with the prompt, text or chat messages; default: prompt."),
    ] = None
    prompt_template: Annotated[
        str | None,
        option(
            "TEXT",
            "The prompt, with columns in braces: 'Solve: {question}'. {{ instruction }} is the prompt column; other doubled braces "
            "stand for themselves.",
        ),
    ] = None
    system_prompt: Annotated[
        str | None, option("TEXT", "A system message for conversations that have none.")
    ] = None
    prefill: Annotated[
        str | None,
        option(
            "continue|drop",
            "What to do with the assistant's words at the end of a chat; default: the answer continues them.",
        ),
    ] = None
    task_module: Annotated[
        str | None,
        option(
            "TASK",
            "In place of a dataset: a task whose training prompts are answered, and whose rewards score.",
            "--task-module",
            "-t",
        ),
    ] = None
    config: Annotated[
        str | None, option("C.yaml", "Config that the hooks of the task receive.", "--config", "-c")
    ] = None
    model: Annotated[
        str | None, option("NAME", "Name of the model there; default: the one that is served.")
    ] = None
    base_url: Annotated[
        str | None,
        option(
            "URL",
            "The OpenAI-compatible service; default: http://127.0.0.1:8000/v1.",
            "--base-url",
            "--vllm-server-url",
        ),
    ] = None
    api_key_env: Annotated[
        str | None, option("NAME", "Environment variable with the key; default: OPENAI_API_KEY.")
    ] = None
    api: Annotated[
        Literal["chat", "completions"] | None,
        option(
            None,
            "chat sends text as a user's message; completions has it continued as it is. Default: completions for the text "
            "prompts of a task, else chat.",
        ),
    ] = None
    temperature: Annotated[
        float | None, option("NUM", "Temperature; default: that of the service.")
    ] = None
    top_p: Annotated[float | None, option("NUM", "top_p; default: that of the service.")] = None
    max_new_tokens: Annotated[
        int | None, option("NUM", "Maximum tokens per generation; default: 8192.")
    ] = None
    stop: Annotated[list[str] | None, option("TEXT", "Stop string. May be repeated.")] = None
    seed: Annotated[int | None, option("NUM", "Seed, for a service that supports it.")] = None
    extra: Annotated[
        str | None,
        option(
            "JSON", """Further fields of each request: '{"min_p": 0.1}'. null removes a field."""
        ),
    ] = None
    num_generations: Annotated[int | None, option("NUM", "Generations per row; default: 1.")] = None
    concurrency: Annotated[
        int | None,
        option(
            "NUM", "Requests at the same time; default: 16.", "--concurrency", "--input-batch-size"
        ),
    ] = None
    timeout: Annotated[float | None, option("SECONDS", "Time for one request; default: 900.")] = (
        None
    )
    retries: Annotated[
        int | None, option("NUM", "Maximum number of retries of a request; default: 8.")
    ] = None
    output: Annotated[
        str | None,
        option(
            "FOLDER|hub:OWNER/NAME",
            "Folder for all results, or a dataset on the hub (with a folder in generated/).",
        ),
    ] = None
    hub: Annotated[
        str | None,
        option("OWNER/NAME", "A dataset on the hub to upload to as well.", "--hf-output-dataset"),
    ] = None
    private: Annotated[
        bool | None,
        flag(
            "Whether a new dataset on the hub is private; default: private.", "--private/--public"
        ),
    ] = None
    rewards: Annotated[
        list[str] | None,
        option(
            "NAME|module:function",
            "Reward that scores each generation. May be repeated.",
            "--reward",
        ),
    ] = None
    answer_column: Annotated[
        str | None, option("COLUMN", "Column with the answer that rewards look for.")
    ] = None
    min_reward: Annotated[
        float | None,
        option("NUM", "Train only on rows whose best generation earns at least this reward."),
    ] = None
    keep: Annotated[
        Literal["best", "all"] | None,
        option(None, "Keep the best generation of a row, or all that earn enough; default: best."),
    ] = None
    keep_truncated: Annotated[
        bool | None, flag("Keep truncated generations for training, too.", "--keep-truncated")
    ] = None
    shard: Annotated[
        str | None,
        option("i/N", "Only the i-th of every N rows. The command without it joins the shards."),
    ] = None
    shards: Annotated[int | None, typer.Option(hidden=True)] = None
    price_in: Annotated[float | None, option("NUM", "Price of a million prompt tokens.")] = None
    price_out: Annotated[float | None, option("NUM", "Price of a million generated tokens.")] = None


def generate(
    context: typer.Context,
    *,
    options: GenerateOptions,
    client_replicas: Annotated[
        int | None,
        option("NUM", "Multiplies --concurrency, or its default, by this number.", min=1),
    ] = None,
    dry_run: Annotated[bool, flag("Show what would be sent; send no prompt.", "--dry-run")] = False,
    as_json: AsJson = False,
) -> None:
    """Have a service answer prompts, to train on the answers.

    The answers train with `groupwise sft`. The same command again continues where it stopped.
    """
    from groupwise.cli.output import write_result
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
    if dry_run and not as_json:
        from groupwise.cli.printing import command_to_do_it, print_next, print_plan

        print_plan(result.summary)
        print_next((command_to_do_it(context), "the answers"))
    else:
        write_result(result.summary, as_json=as_json)
        if not as_json and result.exit_code == 0 and options.shard is None:
            from groupwise.cli.printing import command_line, print_next

            data = f"data.dataset_name={result.folder}"
            line = command_line("sft", None, None, "model.name=MODEL", data)
            print_next((line, "train MODEL on them"))
    raise typer.Exit(result.exit_code)
