"""`groupwise generate`: answers of a service to the prompts of a dataset."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

import typer

from groupwise.cli.options import AsJson


def generate(
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "--hf-dataset",
            metavar="SOURCE",
            help="The prompts: a file (JSONL, JSON, Parquet, CSV), a folder, or a dataset on the hub.",
        ),
    ] = None,
    dataset_config: Annotated[
        str | None,
        typer.Option(
            "--dataset-config",
            "--hf-dataset-config",
            metavar="NAME",
            help="Which configuration of a dataset on the hub.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            "--hf-dataset-split",
            metavar="SPLIT",
            help="Which split, also a slice: train[:100]. Without it: train.",
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column with the prompt, text or chat messages. Without it: prompt.",
        ),
    ] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The prompt, with columns in braces: 'Solve: {question}'. {{ instruction }} is the prompt column; other doubled braces "
            "stand for themselves.",
        ),
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A system message for conversations that have none."),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="continue|drop",
            help="What becomes of the assistant's words at the end of a chat. Without it: the answer goes on with them.",
        ),
    ] = None,
    task_module: Annotated[
        str | None,
        typer.Option(
            "--task-module",
            "-t",
            metavar="T",
            help="In place of a dataset: a task whose training prompts are answered, and whose rewards score.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="C.yaml", help="What the task's hooks are given."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model's name there. Without it: the one that is served."
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            "--vllm-server-url",
            metavar="URL",
            help="The OpenAI-compatible service. Without it: http://127.0.0.1:8000/v1",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The environment variable with the key. Without it: OPENAI_API_KEY.",
        ),
    ] = None,
    api: Annotated[
        Literal["chat", "completions"] | None,
        typer.Option(
            help="chat sends text as a user's message; completions lets it be continued as it stands, which is what happens to the "
            "text prompts of a task.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Without it: the service's own.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Without it: the service's own.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Longest generation in tokens. Without it: 8192."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Ends a generation; may be given several times."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Makes a service that knows seeds repeat itself."),
    ] = None,
    extra: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="""Further fields of each request: '{"min_p": 0.1}'. null takes out a field.""",
        ),
    ] = None,
    num_generations: Annotated[
        int | None, typer.Option(metavar="N", help="Generations for each row. Without it: 1.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Requests under way at once. Without it: 16.")
    ] = None,
    input_batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="The same as --concurrency, for scripts that say so."
        ),
    ] = None,
    client_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="So many times as many requests at once as said, or as usual."
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="For one request. Without it: 900.")
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How often a request that may still succeed is repeated. Without it: 8.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|hub:OWNER/NAME",
            help="Where everything is written, or a dataset on the hub (with a folder in generated/).",
        ),
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option(
            "--hf-output-dataset",
            metavar="OWNER/NAME",
            help="A dataset on the hub to upload to as well.",
        ),
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Whether a dataset that is made on the hub is private. Without it: private.",
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|module:function",
            help="A reward that scores each generation; may be given several times.",
        ),
    ] = None,
    answer_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column with the answer that rewards look for."),
    ] = None,
    min_reward: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Train only on rows whose best generation earns at least so much."
        ),
    ] = None,
    keep: Annotated[
        Literal["best", "all"] | None,
        typer.Option(
            help="Of a row that earns enough its best generation, or all that earn enough. Without it: best."
        ),
    ] = None,
    keep_truncated: Annotated[
        bool, typer.Option("--keep-truncated", help="Train on what the limit cut off, too.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="i/N",
            help="Only the i-th of every N rows. The command without it puts the shards together.",
        ),
    ] = None,
    shards: Annotated[int | None, typer.Option(hidden=True)] = None,
    price_in: Annotated[
        float | None, typer.Option(metavar="X", help="Price of a million prompt tokens.")
    ] = None,
    price_out: Annotated[
        float | None, typer.Option(metavar="X", help="Price of a million generated tokens.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be asked; ask nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let a service answer prompts, as training data.

    What comes back trains with `groupwise sft`. The same command again goes on where it was.
    """
    from groupwise.cli.output import write_json, write_result
    from groupwise.training.generation.generate import generate as run

    fields: Any = None
    if extra is not None:
        try:
            fields = json.loads(extra)
        except ValueError as error:
            raise typer.BadParameter(f"--extra is no JSON: {error}.") from error
        if not isinstance(fields, dict):
            raise typer.BadParameter('--extra is no JSON object, such as {"min_p": 0.1}.')
    options = {
        "dataset": dataset,
        "dataset_config": dataset_config,
        "split": split,
        "prompt_column": prompt_column,
        "prompt_template": prompt_template,
        "system_prompt": system_prompt,
        "prefill": prefill,
        "task_module": task_module,
        "config": config,
        "model": model,
        "base_url": base_url,
        "api_key_env": api_key_env,
        "api": api,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "stop": stop,
        "seed": seed,
        "extra": cast("Any", fields),
        "num_generations": num_generations,
        "concurrency": _at_once(concurrency, input_batch_size, client_replicas),
        "timeout": timeout,
        "retries": retries,
        "output": output,
        "hub": hub,
        "private": private,
        "rewards": reward,
        "answer_column": answer_column,
        "min_reward": min_reward,
        "keep": keep,
        "keep_truncated": keep_truncated or None,
        "shard": shard,
        "shards": shards,
        "price_in": price_in,
        "price_out": price_out,
    }
    given = {name: value for name, value in options.items() if value is not None}
    result = run(dry_run=dry_run, **given)
    if dry_run:
        write_json(result.summary)
    else:
        write_result(result.summary, as_json=as_json)
    raise typer.Exit(result.exit_code)


def _at_once(
    concurrency: int | None, input_batch_size: int | None, client_replicas: int | None
) -> int | None:
    """Each of so many clients asks for a batch at a time."""
    if concurrency is not None and input_batch_size is not None:
        raise typer.BadParameter(
            "--input-batch-size is another word for --concurrency; give one of them."
        )
    one = concurrency if input_batch_size is None else input_batch_size
    if client_replicas is None:
        return one
    from groupwise.training.generation.config import CONCURRENCY

    return (CONCURRENCY if one is None else one) * client_replicas
