"""Loads the rows of a config's sources: as prompts or lessons, labelled, and split into training and held-out rows.

`training_parts` and `held_out_parts` give one part for each source of `data.dataset_name` or `data.dataset_mixture`; a set that is a task
is skipped here: `groupwise.tasks.configured` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from groupwise.core.errors import TaskError
from groupwise.core.types import DATASET_COLUMN, TASK_COLUMN, with_number_of
from groupwise.tasks.data.chat import (
    Account,
    PromptOptions,
    Row,
    Rows,
    key_of,
    prepare_rows,
    with_prompts,
    with_teacher,
)
from groupwise.tasks.data.config import DatasetConfig, MixtureEntry
from groupwise.tasks.data.mixture import Part, split, with_same_columns
from groupwise.tasks.data.pipelines import Pipeline, find_pipeline
from groupwise.tasks.data.sources import no_column, read_source

KNOWN_BY = ("prompt", "messages", "text", "input_ids")
"""The columns by which rows are compared: equal rows must not be both trained on and held out."""

Found = tuple[list[Part], Account]
Unscorable = Callable[[Row], str | None]
"""Returns the reason why the rewards cannot score a row (which has its label but no prompt), or None if they can."""


def always_scorable(row: Row) -> None:
    """The `Unscorable` that accepts every row, for commands that do not score rows."""


def training_parts(
    data: DatasetConfig, *, teacher: bool, unscorable: Unscorable = always_scorable
) -> Found:
    """The rows to train on; with `teacher` as lessons, otherwise as prompts that can be scored. Raises TaskError."""
    parts, account = _parts_of_split(data, partial(_split_for_training, data), teacher, unscorable)
    if parts and data.test_split_size is not None:
        parts, _ = _split_parts(parts, data)
    return with_same_columns(parts, data.mixture_columns), account


def held_out_parts(
    data: DatasetConfig, *, teacher: bool, unscorable: Unscorable = always_scorable
) -> Found:
    """The held-out rows: from splits of their own, or split off the training rows, whose account reports the rows left out."""
    if data.test_split_size is None:
        parts, account = _parts_of_split(data, lambda entry: entry.test_split, teacher, unscorable)
        return with_same_columns(parts, data.mixture_columns), account
    parts, _ = _parts_of_split(data, partial(_split_for_training, data), teacher, unscorable)
    parts = _split_parts(parts, data)[1] if parts else []
    return with_same_columns(parts, data.mixture_columns), Account()


def holds_out(data: DatasetConfig, entry: MixtureEntry) -> bool:
    """True if some rows of a source are held out."""
    return entry.test_split is not None or data.test_split_size is not None


def set_location(data: DatasetConfig, number: int) -> str:
    """Name of a set in messages, by its number in the mixture."""
    name = data.mixture[number].name
    return name if data.dataset_mixture is None else f"data.dataset_mixture, set {number} ({name})"


def with_label(row: Row, entry: MixtureEntry, label: str | None) -> Row:
    """The row with the name of its set and, if there is one, the label that selects its rewards."""
    labelled = {**row, DATASET_COLUMN: entry.name}
    return with_number_of(row, labelled if label is None else {**labelled, TASK_COLUMN: label})


def as_prompts(
    data: DatasetConfig, rows: Sequence[Row], where: str, unscorable: Unscorable = always_scorable
) -> Rows:
    """Rows from elsewhere than the named data (such as the easy pool), with their prompts prepared in the same way."""
    processed = _apply_pipeline(_find_configured_pipeline(data, teacher=False), rows, where, data)
    prompts = with_prompts(
        processed, _prompt_options(data), where, strict=data.strict, unscorable=unscorable
    )
    return Rows(prompts, processed.account + prompts.account)


def _find_configured_pipeline(data: DatasetConfig, *, teacher: bool) -> Pipeline | None:
    name = data.preprocessing_pipeline
    return None if name is None else find_pipeline(name, teacher=teacher)


def _apply_pipeline(
    step: Pipeline | None, rows: Sequence[Row], where: str, data: DatasetConfig
) -> Rows:
    """The rows after the pipeline; unchanged without one."""
    return (
        Rows(rows, Account())
        if step is None
        else prepare_rows(rows, step, where, strict=data.strict)
    )


def _split_for_training(data: DatasetConfig, entry: MixtureEntry) -> str:
    return entry.split or data.dataset_split


def _split_parts(parts: Sequence[Part], data: DatasetConfig) -> tuple[list[Part], list[Part]]:
    assert data.test_split_size is not None
    return split(parts, data.test_split_size, data.seed, partial(key_of, columns=KNOWN_BY))


def _parts_of_split(
    data: DatasetConfig,
    split_of: Callable[[MixtureEntry], str | None],
    teacher: bool,
    unscorable: Unscorable,
) -> Found:
    """The rows of the sources that have such a split."""
    parts: list[Part] = []
    account = Account()
    step = _find_configured_pipeline(data, teacher=teacher)  # before reading, which may take long
    for number, entry in enumerate(data.mixture):
        split = split_of(entry)
        if entry.source is None or split is None:
            continue
        where = set_location(data, number)
        source_rows = _read_entry(data, entry, split, where, step, teacher=teacher)
        if teacher:
            rows = with_teacher(source_rows, _prompt_options(data), where, strict=data.strict)
        else:
            why = partial(_unscorable_reason, unscorable, entry)
            rows = with_prompts(
                source_rows, _prompt_options(data), where, strict=data.strict, unscorable=why
            )
        whole_account = source_rows.account + rows.account
        account += (
            whole_account if data.dataset_mixture is None else whole_account.with_prefix(where)
        )
        labelled_rows = [with_label(row, entry, entry.label) for row in rows]
        source_columns = _our_names(data, entry, teacher=teacher).values()
        parts.append(
            Part(
                where,
                labelled_rows,
                entry.weight,
                frozenset(n.partition(".")[0] for n in source_columns),
            )
        )
    return parts, account


def _unscorable_reason(unscorable: Unscorable, entry: MixtureEntry, row: Row) -> str | None:
    return unscorable(with_label(row, entry, entry.label))


def _read_entry(
    data: DatasetConfig,
    entry: MixtureEntry,
    split: str,
    where: str,
    step: Pipeline | None,
    *,
    teacher: bool,
) -> Rows:
    """The rows unchanged, or made by the pipeline, with the columns that prompts need."""
    assert entry.source is not None
    assert not isinstance(entry.config, dict)
    rows = read_source(
        entry.source,
        entry.config,
        split,
        _our_names(data, entry, teacher=teacher),
        revision=entry.revision,
    )
    needs_prompts = not teacher and not (step and step.may_make_prompts)
    if needs_prompts and "prompt" not in (columns := _column_names(rows)):
        raise TaskError(
            f"{where} has no column 'prompt'. It has: {', '.join(columns)}. Say in data.prompt_column which of them holds the prompt, or "
            "in `columns` of the set."
        )
    processed = _apply_pipeline(step, rows, where, data)
    available = _column_names(processed)
    for name in data.prompt_lines:
        if name not in available:
            raise TaskError(no_column(where, name, available, " in data.prompt_lines"))
    return processed


def _our_names(data: DatasetConfig, entry: MixtureEntry, *, teacher: bool) -> dict[str, str]:
    return {**data.renamed_columns("completion" if teacher else "answer"), **entry.columns}


def _column_names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _prompt_options(data: DatasetConfig) -> PromptOptions:
    return PromptOptions(
        format=data.prompt_format or ("chat" if data.system_prompt else "text"),
        system_prompt=data.system_prompt,
        lines=data.prompt_lines,
        prefill=data.prefill,
        strip_tags=data.strip_tags,
        strip_roles=data.strip_roles,
        drop_duplicates=data.drop_duplicates,
    )
