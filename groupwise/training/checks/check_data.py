"""The checks of `groupwise check` that need no reward: a task's hooks, its datasets and its prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar, cast

from groupwise.core.errors import TaskError
from groupwise.core.findings import Finding
from groupwise.core.terminal.text import ending, one_line
from groupwise.core.types import Example, Prompt
from groupwise.engine.models.tokens import render_prompt
from groupwise.tasks.contract import HOOKS, NEEDED, Command, Task, absent_hooks, require
from groupwise.tasks.data.chat import Account
from groupwise.tasks.data.overlap import SameAs, prompt_key, trained_on
from groupwise.tasks.data.sft import teacher_example
from groupwise.tasks.rollouts.dialogue import first_ids
from groupwise.tasks.rollouts.prompts import odd_prompts, text_prompts
from groupwise.tasks.tools import Schema

MAX_QUOTED = 60
"""A prompt is quoted by its last characters, so many at most."""
MAX_MEASURED_PROMPTS = 2000
"""Largest number of prompts of a dataset whose length is measured, evenly spread over it."""

T = TypeVar("T")


def check_hooks(task: Task, *, has_configured_rewards: bool = False) -> Finding:
    """Report the task's hooks. Raises TaskError with all problems if one cannot be called, or if they suffice for no command.

    With `has_configured_rewards`, the config's rewards stand in for the hook get_reward_funcs.
    """
    hooks = [hook for hook in HOOKS if task.has(hook)]
    errors: list[str] = []
    for hook in hooks:
        try:
            task.check_signature(hook)
        except TaskError as error:
            errors.append(str(error))
    if errors:
        raise TaskError("\n".join(errors))
    commands = [command for command in NEEDED if suffices(task, command)]
    if not commands:
        raise TaskError("\n".join(task.missing(hook, "rl") for hook in absent_hooks(task, "rl")))
    missing = {
        command: absent_hooks(task, command) for command in NEEDED if command not in commands
    }
    missing_note = "; ".join(
        f"`{command}` would need {', '.join(names)}" for command, names in missing.items()
    )
    misspelt = task.misspelt()
    if has_configured_rewards:
        hooks.remove("get_reward_funcs")
    return Finding(
        "hooks",
        "warning" if misspelt else "ok",
        ", ".join([*hooks, *(["rewards of the config"] if has_configured_rewards else [])]),
        f"enough for {' and '.join(f'`{command}`' for command in commands)}"
        + (f"; {missing_note}" if missing_note else ""),
        "; ".join(f"is `{name}` the hook {hook}? Rename it" for name, hook in misspelt.items()),
        data={"hooks": hooks, "commands": commands, "missing": missing},
    )


def suffices(task: Task, command: Command) -> bool:
    """True if the task has every hook that the command needs."""
    try:
        require(task, command)
    except TaskError:
        return False
    return True


def check_dataset(
    name: str,
    examples: Sequence[Example],
    tokenizer: Any,
    room: int | None,
    key_of: SameAs,
    tools: Sequence[Schema] = (),
) -> Iterator[Finding]:
    """Report size, columns and lengths of a dataset, then its problems. `room` is the number of tokens that the model leaves for a prompt.

    `tools` are the schemas of the tools that are described in chat prompts.
    """
    lengths, unit = prompt_lengths(examples, tokenizer, tools)
    sizes = {"min": min(lengths), "median": median(lengths), "max": max(lengths)}
    columns = described_columns(examples)
    column_list = ", ".join(f"{column} ({kind})" for column, kind in columns.items())
    yield Finding(
        name,
        "ok",
        f"{rows(len(examples))}; prompts of {sizes['min']} to {sizes['max']} {unit}, median "
        f"{sizes['median']:g}; columns: {column_list or 'none but prompt'}",
        data={
            "rows": len(examples),
            "columns": columns,
            "prompt_length": {**sizes, "unit": unit, "measured": len(lengths)},
        },
    )
    if room is not None and sizes["max"] > room:
        too_long = sum(length > room for length in lengths)
        yield Finding(
            f"{name}: length",
            "problem",
            f"{too_long} of {len(lengths)} prompts are longer than the {room} tokens that the model leaves beside the completion",
            "training would refuse to start",
            "shorten sampler.max_completion_length"
            + (f", or set data.max_prompt_length={room} to leave them out" if room > 0 else ""),
            {"too_long": too_long, "room": room},
        )
    oddities = (*odd_prompts(tokenizer, examples), *text_prompts(tokenizer, examples))
    yield from _odd_prompt_findings(name, oddities)
    yield from _repeated_prompts(name, examples, key_of)
    counts = Counter(column for example in examples for column in example.columns)
    partial_columns = sorted(column for column, count in counts.items() if count < len(examples))
    if partial_columns:
        yield Finding(
            f"{name}: columns",
            "warning",
            f"only some rows have {', '.join(f'`{column}`' for column in partial_columns)}",
            "a reward function that asks for it by name would be refused",
            "give every row the same columns, None where there is nothing",
            {"partial": partial_columns},
        )


def check_left_out(accounts: Mapping[str, Account]) -> Iterator[Finding]:
    """Report the rows that the hooks left out, by reason."""
    for hook, account in accounts.items():
        if account.left_out:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in account.left_out.items())
            yield Finding(
                f"{hook}: left out",
                "warning",
                f"{rows(sum(account.left_out.values()))} cannot be used: {reasons}",
                "nothing is learnt or measured on them",
                "fix them, or set data.strict to refuse them",
                {"left_out": dict(account.left_out)},
            )


def check_teacher(
    task: Task, config: Any, tokenizer: Any, limit: int | None, text_field: str
) -> tuple[list[Finding], list[Example]]:
    """Report size and columns of a supervised dataset, or its error, which does not stop the other checks.

    Also returns the examples of `get_sft_dataset`, as far as they can be read without the formatting function.
    """
    findings: list[Finding] = []
    trained: list[Example] = []
    for hook, name in (
        ("get_sft_dataset", "sft data"),
        ("get_sft_eval_dataset", "sft held-out data"),
    ):
        if not task.has(hook):
            continue
        try:
            dataset = task.sft_rows(hook, config, tokenizer, limit)
            has_formatter = (
                task.sft_function("get_sft_formatting_func", config, tokenizer) is not None
            )
            origin = f"{task.described}: {hook}"
            examples = [
                teacher_example(index, row, text_field=text_field, where=origin).example
                for index, row in enumerate(() if has_formatter else dataset)
            ]
        except TaskError as error:
            findings.append(
                Finding(
                    name,
                    "problem",
                    str(error),
                    "groupwise sft would refuse to start",
                    "fix the hook",
                )
            )
            continue
        if hook == "get_sft_dataset":
            trained = examples
        columns = described_columns([Example(index, "", row) for index, row in enumerate(dataset)])
        column_list = ", ".join(f"{column} ({kind})" for column, kind in columns.items())
        findings.append(
            Finding(
                name,
                "ok",
                f"{rows(len(dataset))}; columns: {column_list}"
                + ("; the formatting function was not called" if has_formatter else ""),
                data={"rows": len(dataset), "columns": columns},
            )
        )
        findings.extend(_odd_prompt_findings(name, odd_prompts(tokenizer, examples)))
    return findings, trained


def check_overlap(
    train: Sequence[Example],
    held_out: Sequence[Example],
    key_of: SameAs,
    supervised: Sequence[Example] = (),
) -> Finding:
    """Report whether held-out prompts are also in the training data, or among those of `get_sft_dataset` (`supervised`)."""
    overlap = trained_on(train, held_out, key_of, [prompt_key(row.prompt) for row in supervised])
    in_train = len(trained_on(train, overlap, key_of))
    by_sft = (
        f", {len(overlap) - in_train} only by get_sft_dataset" if in_train < len(overlap) else ""
    )
    data = {"shared": len(overlap), "examples": [example.index for example in overlap[:5]]}
    if not overlap:
        return Finding("overlap", "ok", "no held-out prompt is trained on", data=data)
    return Finding(
        "overlap",
        "warning",
        f"{len(overlap)} of {len(held_out)} held-out prompts are also trained on "
        f"({_quoted(overlap[0])}, held-out row {overlap[0].index}, for example){by_sft}",
        "the evaluation partly measures what was learnt by heart",
        "split the rows before they are returned, by prompt",
        data,
    )


def first_prompts(
    examples: Sequence[Example], tokenizer: Any, count: int, tools: Sequence[Schema] = ()
) -> list[str]:
    """The first prompts as the model sees them; without a tokenizer, the prompts of the rows."""
    if tokenizer is None:
        return [prompt_as_text(example.prompt) for example in examples[:count]]
    ids = [
        first_ids(tokenizer, example.prompt, tools, example.columns) for example in examples[:count]
    ]
    return [render_prompt(tokenizer, prompt_ids) for prompt_ids in ids]


def prompt_as_text(prompt: Prompt) -> str:
    """A prompt as text; for a chat, each message with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"[{message['role']}] {message.get('content') or ''}" for message in prompt)


def _quoted(example: Example) -> str:
    """The end of an example's prompt, which has the question, as it can be searched for."""
    return f'"{ending(one_line(prompt_as_text(example.prompt)), MAX_QUOTED)}"'


def prompt_lengths(
    examples: Sequence[Example], tokenizer: Any, tools: Sequence[Schema] = ()
) -> tuple[list[int], str]:
    """Lengths of prompts spread over the dataset, and their unit (tokens or characters)."""
    sample = spread(examples, MAX_MEASURED_PROMPTS)
    if tokenizer is None:
        return [len(prompt_as_text(example.prompt)) for example in sample], "characters"
    return [
        len(first_ids(tokenizer, example.prompt, tools, example.columns)) for example in sample
    ], "tokens"


def spread(items: Sequence[T], count: int) -> list[T]:
    """Pick at most `count` items, evenly spaced from the first to the last."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def described_columns(examples: Sequence[Example]) -> dict[str, str]:
    """The type of each column's values, and how many rows lack it."""
    kinds: dict[str, Counter[str]] = {}
    for example in examples:
        for column, value in example.columns.items():
            kinds.setdefault(column, Counter())[kind(value)] += 1
    descriptions: dict[str, str] = {}
    for column, counts in kinds.items():
        absent = len(examples) - counts.total() + counts.pop("nothing", 0)
        types = " or ".join(sorted(counts)) or "nothing"
        descriptions[column] = types + (f", missing in {absent}" if absent else "")
    return descriptions


def kind(value: Any) -> str:
    """The name of a value's type in a word or two, for people."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "yes or no"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, list | tuple):
        inner = {kind(entry) for entry in cast("Sequence[Any]", value)}
        return f"list of {inner.pop()}" if len(inner) == 1 else "list"
    return "mapping" if isinstance(value, Mapping) else type(value).__name__


def rows(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} row{'' if count == 1 else 's'}"


def _odd_prompt_findings(name: str, warnings: Iterable[str]) -> Iterator[Finding]:
    for warning in warnings:
        yield Finding(
            f"{name}: prompts",
            "warning",
            warning,
            "the model may not see the prompt that you mean",
            "look at the first prompts, which --json shows as the model sees them",
        )


def _repeated_prompts(name: str, examples: Sequence[Example], key_of: SameAs) -> Iterator[Finding]:
    """Report prompts that occur several times."""
    counts = Counter(map(key_of, examples))
    duplicate_count = len(examples) - len(counts)
    if not duplicate_count:
        return
    key, occurrences = counts.most_common(1)[0]
    repeated = [example for example in examples if key_of(example) == key]
    places = [example.index for example in repeated[:3]]
    yield Finding(
        f"{name}: duplicates",
        "warning",
        f"{rows(duplicate_count)} repeat the prompt of another; the most frequent one, {_quoted(repeated[0])}, occurs "
        f"{occurrences} times (rows {', '.join(map(str, places))}{' …' if occurrences > 3 else ''})",
        "they count as often as they occur",
        "leave them out, unless they are meant to weigh more",
        {"surplus": duplicate_count, "most": occurrences, "rows": places},
    )
