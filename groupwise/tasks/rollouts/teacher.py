"""A teacher's examples as token ids: which tokens are trained, how long rows are cut, and how rollouts are recorded.

Each example becomes one row, or several if its chat template rewrites earlier turns. A row longer than the limit is cut at the end
or the beginning, or left out; a cut row without trained tokens is left out as well. Cut and omitted rows are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from groupwise.core.errors import TaskError
from groupwise.core.types import Example, Group, Rollout, Row, Segment, number_of
from groupwise.engine.models.chat_masks import (
    Chat,
    MaskedRow,
    assistant_turns,
    mask_completion,
    mask_text,
    mask_turns,
    mask_whole_chat,
)
from groupwise.engine.models.chat_template import TemplateRefused
from groupwise.engine.models.tokens import completion_text
from groupwise.tasks.data.sft import (
    Completion,
    Content,
    Conversation,
    PlainText,
    TeacherExample,
    Tokens,
    has_form,
    teacher_example,
)
from groupwise.tasks.data.sft_functions import collate, format_rows
from groupwise.tasks.rollouts.dialogue import knows_tools, without_tools

TruncationMode = Literal["keep_start", "keep_end", "drop"]


@dataclass(frozen=True, slots=True)
class TeacherOptions:
    """Settings for reading a teacher's rows."""

    text_field: str = "text"
    completion_only: bool | None = None
    """None: only the completion, if the row marks one."""
    last_turn_only: bool = False
    max_length: int = 1 << 30
    """Most tokens of a row."""
    vocabulary: int = 1 << 30
    """Size of the vocabulary: valid token ids are below it."""
    truncation: TruncationMode = "keep_start"
    formatting: Callable[[Any], Any] | None = None
    collator: Callable[[Any], Any] | None = None
    strict: bool = False
    """True: a row that the chat template rejects is an error."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """An example and its training rows."""

    example: Example
    rows: tuple[MaskedRow, ...]


@dataclass(frozen=True, slots=True)
class LessonSet:
    """A teacher's examples, in their order."""

    lessons: tuple[Lesson, ...]
    cut: int = 0
    """Rows that were cut because they were too long."""
    dropped: int = 0
    """Rows that were left out, because they were too long or had no trained tokens left."""
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows that the chat template rejects, by reason."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(row.ids) for lesson in self.lessons for row in lesson.rows)

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        return sum(sum(row.mask) for lesson in self.lessons for row in lesson.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.ids) for lesson in self.lessons for row in lesson.rows)

    @property
    def without_end(self) -> int:
        """Number of turns and completions that are trained without an end token."""
        rows = [row for lesson in self.lessons for row in lesson.rows]
        return sum(row.stretches - row.ends for row in rows)


def read_lessons(
    tokenizer: Any, rows: Sequence[dict[str, Any]], options: TeacherOptions, *, where: str
) -> LessonSet:
    """Tokenise and mask all rows. Raises `TaskError` with a message that starts with `where` and names the row, for an invalid row.

    A row that the chat template rejects is left out; it is an error with `options.strict`, or if no other row is left.
    """
    if options.formatting is not None:
        what = f"{where}, formatted by get_sft_formatting_func,"
        rows = format_rows(rows, options.formatting, text_field=options.text_field, where=what)
    lessons: list[Lesson] = []
    cut_count = dropped_count = 0
    refusals: dict[str, list[TemplateRefused]] = {}
    for index, row in enumerate(rows):
        try:
            lesson = _read_lesson(tokenizer, index, row, options, where)
        except TemplateRefused as problem:
            if options.strict:
                raise
            refusals.setdefault(str(problem.__cause__), []).append(problem)
            continue
        fitted_rows = [
            fitted
            for fitted in (_fit_to_length(masked, options) for masked in lesson.rows)
            if fitted is not None
        ]
        cut_count += sum(fitted not in lesson.rows for fitted in fitted_rows)
        dropped_count += len(lesson.rows) - len(fitted_rows)
        if fitted_rows:
            lessons.append(replace(lesson, rows=tuple(fitted_rows)))
    if not lessons and refusals:
        raise next(iter(refusals.values()))[0]
    if not lessons:
        raise TaskError(
            f"{where}: nothing is left to train: none of the {dropped_count} rows has a trained token within data.max_length = "
            f"{options.max_length} tokens (data.truncation_mode is {options.truncation}). Raise it, or shorten the rows."
        )
    counts = {reason: len(problems) for reason, problems in refusals.items()}
    return LessonSet(tuple(lessons), cut_count, dropped_count, counts)


def teacher_group(tokenizer: Any, lesson: Lesson, draw: int) -> Group:
    """The lesson for the record: a rollout for each of its rows, written by a teacher."""
    rollouts = [
        _teacher_rollout(tokenizer, masked, draw, member)
        for member, masked in enumerate(lesson.rows)
    ]
    return Group(draw, lesson.example, tuple(rollouts))


def teacher_row(masked: MaskedRow) -> Row:
    """The learner's row: from the first trained token to the last, with all tokens before it as the prompt."""
    start, end = _trained_span(masked)
    completion = masked.ids[start:end]
    return Row(
        prompt_ids=masked.ids[:start],
        completion_ids=completion,
        mask=masked.mask[start:end],
        sampling_logprobs=(0.0,) * len(completion),
        advantage=1.0,
        scale=1.0,
    )


# --- masks ---------------------------------------------------------------------------------------


def _read_lesson(
    tokenizer: Any, index: int, row: Mapping[str, Any], options: TeacherOptions, where: str
) -> Lesson:
    location = f"{where}: row {number_of(row, index)}"
    try:
        if options.collator is not None:
            source_example: TeacherExample | None = None
            ids: tuple[int, ...] | None = None
            if has_form(row, options.text_field):
                source_example = teacher_example(
                    index, row, text_field=options.text_field, where=where
                )
                ids = _all_trained(tokenizer, source_example.content).ids
            tokens = collate(options.collator, row, ids, location)
            example = source_example.example if source_example else Example(index, "", dict(row))
            return Lesson(example, (_check_tokens(_from_tokens(tokens), options, location),))
        source_example = teacher_example(index, row, text_field=options.text_field, where=where)
        return Lesson(
            source_example.example,
            tuple(
                _check_tokens(m, options, location)
                for m in _mask_content(tokenizer, source_example.content, options)
            ),
        )
    except TaskError as error:
        if error.message.startswith(where):
            raise
        raise type(error)(f"{location}: {error.message}") from error


def _mask_content(tokenizer: Any, content: Content, options: TeacherOptions) -> list[MaskedRow]:
    if isinstance(content, PlainText) and options.completion_only:
        raise TaskError(
            "data.completion_only_loss is true, but the row is one text, of which no part is a completion. Give rows of "
            "`prompt` and `completion` or of `messages`, or set it to null, which trains such a text whole."
        )
    if isinstance(content, Tokens):
        return [_from_tokens(content)]
    if options.completion_only is False or isinstance(content, PlainText):
        return [_all_trained(tokenizer, content)]
    if isinstance(content, Completion):
        return [mask_completion(tokenizer, content.prompt, content.completion, train_prompt=False)]
    chat = _chat_input(tokenizer, content)
    # A message that describes the tools may come first.
    start = content.completion_start + len(chat.messages) - len(content.messages)
    turns = [turn for turn in assistant_turns(chat) if turn >= start]
    prefills = {start: content.prefill} if content.prefill else {}
    return mask_turns(tokenizer, chat, turns[-1:] if options.last_turn_only else turns, prefills)


def _all_trained(tokenizer: Any, content: Content) -> MaskedRow:
    """Every token trained."""
    match content:
        case PlainText(text=text):
            return mask_text(tokenizer, text)
        case Completion(prompt=prompt, completion=completion):
            return mask_completion(tokenizer, prompt, completion, train_prompt=True)
        case Conversation():
            return mask_whole_chat(tokenizer, _chat_input(tokenizer, content))
        case Tokens():
            return _from_tokens(content)


def _chat_input(tokenizer: Any, content: Conversation) -> Chat:
    """The template's input; if the template does not support tools, they are described in the system message, and results are
    messages of the user."""
    if content.tools and not knows_tools(tokenizer):
        messages = without_tools(tokenizer, content.messages, content.tools)
        return Chat(messages, (), content.template_kwargs)
    return Chat(content.messages, content.tools, content.template_kwargs)


def _from_tokens(tokens: Tokens) -> MaskedRow:
    """A row of given tokens, whose end is not changed."""
    return MaskedRow(tokens.ids, tokens.mask, ends=1)


def _check_tokens(masked: MaskedRow, options: TeacherOptions, where: str) -> MaskedRow:
    """Checks token ids and masks. The first token is never trained, because there is no context to predict it from."""
    unknown = (n for n, token in enumerate(masked.ids) if not 0 <= token < options.vocabulary)
    if (index := next(unknown, None)) is not None:
        raise TaskError(
            f"{where}: token {index} has the id {masked.ids[index]}, but the model's vocabulary has {options.vocabulary} tokens, "
            f"with the ids 0 to {options.vocabulary - 1}. Make `input_ids` with this model's tokenizer."
        )
    if not any(masked.mask[1:]):
        raise TaskError(
            f"{where}: no token of it is trained. It has {len(masked.ids)} tokens, and all of them are masked; a row needs one "
            "trained token after its first."
        )
    return replace(masked, mask=(0, *masked.mask[1:]))


def _fit_to_length(masked: MaskedRow, options: TeacherOptions) -> MaskedRow | None:
    """The row within the length limit; None if it is left out, or has no trained token left."""
    if len(masked.ids) <= options.max_length:
        return masked
    if options.truncation == "drop":
        return None
    window = (
        slice(-options.max_length, None)
        if options.truncation == "keep_end"
        else slice(options.max_length)
    )
    mask = masked.mask[window]
    if not any(mask[1:]):
        return None
    return replace(masked, ids=masked.ids[window], mask=(0, *mask[1:]))


# --- rows and record -----------------------------------------------------------------------------


def _trained_span(masked: MaskedRow) -> tuple[int, int]:
    trained = [index for index, mark in enumerate(masked.mask) if mark]
    return trained[0], trained[-1] + 1


def _teacher_rollout(tokenizer: Any, masked: MaskedRow, draw: int, member: int) -> Rollout:
    start, end = _trained_span(masked)
    pairs = zip(masked.ids[start:end], masked.mask[start:end], strict=True)
    segments = tuple(
        Segment("teacher" if trained else "environment", tuple(token for token, _ in stretch))
        for trained, stretch in groupby(pairs, key=lambda pair: pair[1])
    )
    return Rollout(
        draw=draw,
        member=member,
        attempt=0,
        prompt_ids=masked.ids[:start],
        segments=segments,
        completion=completion_text(tokenizer, masked.ids[start:end]),
        outcome="scored",
    )
