"""Builds the requests: one `Item` per row, with a key that is equal for equal requests.

The key is a hash of the request: the prompt as it is sent, the model, and the sampling options. It does not depend on the row's position,
so rows may be inserted, nor on its other columns, which are read from the input again. Rows with the same request have separate
answers. Rows without a usable prompt are listed with a reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal, cast

from groupwise.api.schemas.template_columns import for_request
from groupwise.core.errors import TaskError
from groupwise.core.types import Example, Prompt
from groupwise.tasks.contract import Task, load_task
from groupwise.tasks.data.content import canonical
from groupwise.tasks.data.examples import checked_prompt
from groupwise.tasks.data.messages import ends_begun
from groupwise.tasks.data.sources import no_column, read_source
from groupwise.training.config import RunConfig, load_config, view, with_task_schema
from groupwise.training.generation.config import INSTRUCTION, GenerateConfig
from groupwise.training.rollout_builder import with_configured_rewards

_BRACES = re.compile(r"\{\{(?:(?!\{[{%]).)*?\}\}|\{%(?:(?!\{[{%]).)*?%\}", re.DOTALL)
"""Expressions and statements of Jinja."""

PROMPT = "prompt"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """A row with a usable prompt."""

    index: int
    """Index of the row in the data, from 0."""
    prompt: Prompt
    """The prompt as it is sent: messages for a chat, or text to continue."""
    columns: dict[str, Any]
    """The complete row of the input."""
    key: str


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row without a usable prompt."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows of this command in the order of the input."""

    items: tuple[Item, ...]
    skipped: tuple[SkippedRow, ...]
    task: Task | None = None
    task_config: RunConfig | None = None
    ending_with_assistant: int = 0
    """Number of rows whose last turn is the assistant's."""


@dataclass(slots=True)
class _PromptRows:
    rows: list[tuple[int, Prompt, dict[str, Any]]] = field(
        default_factory=list[tuple[int, Prompt, dict[str, Any]]]
    )
    skipped: list[SkippedRow] = field(default_factory=list[SkippedRow])
    ending_with_assistant: int = 0


def read_prompts(config: GenerateConfig, sampling: Mapping[str, Any]) -> Prompts:
    """Read the rows of the dataset or task. `sampling`: the fields of each request other than the prompt.

    Raises TaskError for an unreadable source, a missing column or field, and if no row has a usable prompt.
    """
    task, task_config = None, None
    if config.task_module is not None:
        task, task_config, examples = _load_task_prompts(config.task_module, config.config)
        api = config.api or "completions"
        prompt_rows = _PromptRows()
        for example in examples:
            columns = {PROMPT: example.prompt, **example.columns}
            prompt: Prompt = example.prompt
            if isinstance(prompt, str) and api == "chat":
                prompt = [{"role": "user", "content": prompt}]
            prompt_rows.rows.append((example.index, prompt, columns))
    else:
        assert config.dataset is not None, "checked in conflicts"
        rows = read_source(config.dataset, config.dataset_config, config.split)
        prompt_rows = _prompts_of_rows(rows, config)
    if not prompt_rows.rows:
        first_unasked = prompt_rows.skipped[0]
        raise TaskError(f"No row can be asked. Row {first_unasked.index}: {first_unasked.reason}")
    shard_index, count = config.part
    items = [
        item for item in _with_keys(prompt_rows.rows, sampling) if item.index % count == shard_index
    ]
    skipped = [row for row in prompt_rows.skipped if row.index % count == shard_index]
    return Prompts(
        tuple(items), tuple(skipped), task, task_config, prompt_rows.ending_with_assistant
    )


def _load_task_prompts(source: str, config: str | None) -> tuple[Task, RunConfig, list[Example]]:
    task = load_task(source)
    if not task.has("get_rl_dataset"):
        raise TaskError(task.missing("get_rl_dataset", "rl"))
    if task.has("get_environment"):
        has_rows = task.has("get_sft_dataset")
        rows = f"\n  groupwise sft --task-module {source} trains on whole ones that its get_sft_dataset brings"
        raise TaskError(
            f"{task.described} has get_environment: it answers the model turn by turn, or runs the tools that it calls, but generate asks "
            "a service once for each row. First turns would be paid for and scored as if they were whole. Instead:\n"
            f"  groupwise rl --task-module {source} plays whole ones with a model here, which groupwise runs export --to jsonl writes"
            f"{rows if has_rows else ''}\n"
            "  --dataset in place of --task-module asks for one answer to each prompt of a file"
        )
    loaded = load_config(config or {"model": {"name": "tiny"}})
    settings = with_task_schema(loaded, task.config_schema()).config
    task = with_configured_rewards(settings, task)
    steps = settings.training.max_steps
    limit = None if steps is None else steps * settings.training.prompts_per_step
    return task, settings, task.rl_examples(view(settings), limit=limit)


def _prompts_of_rows(rows: Sequence[Row], config: GenerateConfig) -> _PromptRows:
    """The prompts of a dataset's rows, from the template or a column. Raises TaskError if a column is missing."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    label = f"The dataset {config.dataset!r}"
    column, template = config.prompt_column or PROMPT, None
    if config.prompt_template is not None:
        template = Template(config.prompt_template, column)
        for name in template.fields:
            if name not in columns:
                raise TaskError(no_column(label, name, columns, " in the prompt template"))
        # In a template with `{{ instruction }}` single braces are literal, so one that seems to mean
        # a column is an error; LaTeX (`\boxed{answer}`) is none.
        if INSTRUCTION.search(config.prompt_template):
            braces = re.findall(r"(\\\w+)?(?<!\{)\{(\w+)\}(?!\})", config.prompt_template)
            if column_names := [
                name for command, name in braces if not command and name in columns
            ]:
                raise TaskError(
                    f"The prompt template has {{{{ instruction }}}}, beside which single braces stand for "
                    f"themselves, but {{{column_names[0]}}} is a column. Write all columns in single braces, {{{column}}} "
                    f"for {{{{ instruction }}}}; braces that are meant as such are doubled then."
                )
    elif column not in columns:
        raise TaskError(no_column(label, column, columns, " for the prompt"))
    result = _PromptRows()
    for index, row in enumerate(rows):
        try:
            value = row.get(column) if template is None else template.fill(row)
            prompt, prefix = _request_prompt(value, config)
        except TaskError as problem:
            result.skipped.append(SkippedRow(index, str(problem)))
        else:
            result.ending_with_assistant += prefix
            result.rows.append((index, prompt, dict(row)))
    return result


def _request_prompt(value: Any, config: GenerateConfig) -> tuple[Prompt, bool]:
    """The prompt as messages or text, and whether the row ends with the start of an assistant's turn."""
    prompt = checked_prompt(value, "its prompt", config.prompt_column or PROMPT)
    if config.api == "completions":
        if not isinstance(prompt, str):
            raise TaskError("its prompt is a chat, and completions takes text alone.")
        return prompt, False
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = list(prompt)
    while config.prefill == "drop" and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if all(message["role"] == "assistant" for message in messages):
        raise TaskError("its messages are all the assistant's, so that nothing is asked.")
    prefix = ends_begun(prompt)
    if config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return messages, prefix


def _with_keys(
    rows: Sequence[tuple[int, Prompt, dict[str, Any]]], sampling: Mapping[str, Any]
) -> list[Item]:
    occurrences: Counter[str] = Counter()
    items: list[Item] = []
    for index, prompt, columns in rows:
        request = [canonical(prompt), canonical(sampling)]
        if template := for_request(columns):
            request.append(canonical(template))
        digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        key = hashlib.sha256(f"{digest} {occurrences[digest]}".encode()).hexdigest()[:32]
        occurrences[digest] += 1
        items.append(Item(index, prompt, columns, key))
    return items


class Template:
    """A text with columns in braces; `{{` and `}}` are literal braces. Raises TaskError if it is invalid or names no column.

    In templates of other tools, `{{ instruction }}` is the prompt column and single braces are literal.
    """

    def __init__(self, text: str, prompt_column: str = PROMPT) -> None:
        is_jinja = INSTRUCTION.search(text) is not None
        self._template_pieces = (
            _parse_instruction_template(text, prompt_column) if is_jinja else _template_pieces(text)
        )
        self._is_jinja = is_jinja
        self.fields = tuple(
            dict.fromkeys(piece for kind, piece in self._template_pieces if kind == "field")
        )
        if not self.fields:
            match = re.search(r"\{\{\s*(\w+)\s*\}\}", text)
            hint = f" Is {{{match[1]}}} meant for {match[0]}?" if match else ""
            raise TaskError(
                "The prompt template names no column, so that every row would get the same prompt. Write a column in single "
                f"braces, {{question}}; doubled braces stand for themselves.{hint}"
            )

    def fill(self, row: Row) -> str:
        """Fill in the template for a row. Raises TaskError if a column is empty in this row."""
        empty_columns = [name for name in self.fields if row.get(name) in (None, "")]
        if empty_columns:
            raise TaskError(f"its column {empty_columns[0]!r}, which the template names, is empty.")
        if self._is_jinja and not isinstance(row[self.fields[0]], str | int | float):
            raise TaskError(
                f"its column {self.fields[0]!r} is not text, which {{{{ instruction }}}} in a longer template stands for."
            )
        return "".join(
            piece if kind == "text" else _column_text(row[piece])
            for kind, piece in self._template_pieces
        )


def _parse_instruction_template(
    text: str, column: str
) -> list[tuple[Literal["text", "field"], str]]:
    """Split a template at `{{ instruction }}`. Raises TaskError for other Jinja expressions, which could not be filled in."""
    texts = INSTRUCTION.split(text)
    if unknown := _BRACES.search("\n".join(texts)):
        raise TaskError(
            f"The prompt template has {unknown[0]} beside {{{{ instruction }}}}, which alone is known in doubled braces. For several "
            "columns write each in single braces, {question}."
        )
    pieces: list[tuple[Literal["text", "field"], str]] = [("text", texts[0])]
    for part in texts[1:]:
        pieces.append(("field", column))
        pieces.append(("text", part))
    return pieces


def _template_pieces(text: str) -> list[tuple[Literal["text", "field"], str]]:
    pieces: list[tuple[Literal["text", "field"], str]] = []
    try:
        for literal, name, form, conversion in Formatter().parse(text):
            pieces.append(("text", literal))
            if form or conversion:
                raise ValueError(f"the field {name!r} has more than the name of a column in it")
            if name == "":
                raise ValueError("a field names no column")
            if name is not None:
                pieces.append(("field", name))
    except ValueError as error:
        raise TaskError(
            f"The prompt template cannot be read: {error}. Columns stand in braces, {{question}}; braces that are meant as such "
            "are doubled: {{ and }}."
        ) from error
    return pieces


def _column_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(canonical(cast("Any", value)), ensure_ascii=False)
    return str(value)
