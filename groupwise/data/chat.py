"""Prompts from what the columns of a dataset hold, and an account of the rows that hold none.

A prompt may be given as text, as messages, as one message, or as parallel lists of roles and contents. As a chat it ends with the user:
what the assistant said last is left out, because it is to be written anew. Reasoning and answers that users quote from earlier models
are taken out of their text, a system prompt is put before those that have none, and further columns may follow as lines.

A row without a usable prompt is left out and counted by the reason, or refused where the config says `data.strict`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from groupwise.data.order import Share
from groupwise.errors import TaskError
from groupwise.types import Message, Prompt

Row = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
PromptFormat = Literal["chat", "text"]
LESSONS = ("messages", "prompt", "completion", "text", "input_ids")
"""Columns of which a teacher's rows are made."""
MOST_PLACES = 3
"""Rows that a message names for each reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWay:
    """How prompts are made from rows."""

    format: PromptFormat = "chat"
    """What a prompt that is given as text becomes: the user's message, or the text as it stands."""
    system_prompt: str | None = None
    lines: tuple[str, ...] = ()
    """Columns that follow the user's text as lines, `name: value`."""
    strip_tags: tuple[str, ...] = ()
    drop_duplicates: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the rows that are not as they were given; counts by reason."""

    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    changed: Mapping[str, int] = field(default_factory=dict[str, int])

    def under(self, name: str) -> Account:
        """The same, saying whose rows they are."""
        return Account(
            {f"{name}: {reason}": count for reason, count in self.left_out.items()},
            {f"{name}: {reason}": count for reason, count in self.changed.items()},
        )

    def __add__(self, other: Account) -> Account:
        return Account(
            dict(Counter(self.left_out) + Counter(other.left_out)),
            dict(Counter(self.changed) + Counter(other.changed)),
        )


class Rows(list[Row]):
    """Rows that can be used, with an account of the others."""

    def __init__(self, rows: Iterable[Row], account: Account, shares: Sequence[Share] = ()) -> None:
        super().__init__(rows)
        self.account = account
        self.shares = tuple(shares)
        """Of an epoch, where it is not each row once."""


class Unusable(Exception):
    """A row cannot be used; the text is the reason that it is counted by."""


def with_prompts(
    rows: Sequence[Row],
    way: PromptWay,
    where: str,
    *,
    strict: bool,
    unscorable: Callable[[Row], str | None] = lambda row: None,
) -> Rows:
    """The rows with their column `prompt` as text or chat messages. Raises TaskError where no row is left, or one is not `strict`ly.

    `unscorable` says why a row, without its prompt, is of no use to those who score it.
    """

    def made(row: Row, changes: list[str]) -> Row:
        prompt = _prompt(row.get("prompt"), row, way, changes)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        if reason := unscorable(columns):
            raise Unusable(reason)
        return {**row, "prompt": prompt}

    return _made(rows, made, ("prompt",), way, where, strict=strict)


def prepared(rows: Sequence[Row], step: Callable[[Row], Row], where: str, *, strict: bool) -> Rows:
    """The rows as a step makes them, which raises Unusable for those to be left out. Raises TaskError as `with_prompts` does."""

    def made(row: Row, changes: list[str]) -> Row:
        return step(row)

    return _made(rows, made, (), PromptWay(), where, strict=strict)


def with_teacher(rows: Sequence[Row], way: PromptWay, where: str, *, strict: bool) -> Rows:
    """The rows of a teacher with their chats made whole: `messages`, or `prompt` with `completion`; others stay as they are."""

    def made(row: Row, changes: list[str]) -> Row:
        if row.get("messages") is not None:
            return {**row, "messages": _taught(row["messages"], way, changes)}
        if lessons and all(row.get(name) is None for name in lessons):
            raise Unusable(f"there is no {' and no '.join(lessons)}")
        if "completion" not in lessons or all(row.get(n) is None for n in ("prompt", "completion")):
            return row
        if row.get("completion") in (None, "", []):
            raise Unusable("the completion is empty")
        return {**row, "prompt": _prompt(row.get("prompt"), row, way, changes)}

    lessons = [name for name in LESSONS if any(row.get(name) is not None for row in rows)]
    if way.system_prompt and not {"messages", "prompt"} & set(lessons):
        raise TaskError(
            f"{where}: data.system_prompt has no effect, because no row has a chat (`messages`, or `prompt` with `completion`). It has: "
            f"{', '.join(rows[0]) if rows else 'no rows'}. Leave the key out."
        )
    return _made(rows, made, LESSONS, way, where, strict=strict)


def _made(
    rows: Sequence[Row],
    make: Callable[[Row, list[str]], Row],
    identity: Sequence[str],
    way: PromptWay,
    where: str,
    *,
    strict: bool,
) -> Rows:
    """Each row as `make` makes it. Rows are the same where their columns `identity` are."""
    kept: list[Row] = []
    unusable: dict[str, list[int]] = {}
    changed: Counter[str] = Counter()
    seen: set[str] = set()
    for index, row in enumerate(rows):
        changes: list[str] = []
        try:
            made = make(row, changes)
            if way.drop_duplicates:
                _refuse_repetition(key_of(made, identity), seen)
        except Unusable as reason:
            unusable.setdefault(str(reason), []).append(index)
        else:
            kept.append(made)
            changed.update(set(changes))
    if unusable and (strict or not kept):
        raise TaskError(_unusable(unusable, len(rows), where, strict=strict and bool(kept)))
    left_out = {reason: len(places) for reason, places in unusable.items()}
    return Rows(kept, Account(left_out, dict(changed)))


def key_of(row: Row, columns: Sequence[str]) -> str:
    """Equal for rows that hold the same in these columns; in all, where they hold nothing in these."""
    told = {name: row[name] for name in columns if row.get(name) is not None}
    return json.dumps(told or row, sort_keys=True, default=str)


def _refuse_repetition(key: str, seen: set[str]) -> None:
    if key in seen:
        raise Unusable("the same as an earlier row (data.drop_duplicates)")
    seen.add(key)


def _unusable(
    unusable: Mapping[str, Sequence[int]], total: int, where: str, *, strict: bool
) -> str:
    count = sum(map(len, unusable.values()))
    what = "cannot be used, and data.strict is true" if strict else "can be used"
    begin = f"{count} of {total} rows {what}" if strict else f"none of {total} rows {what}"
    lines = [
        f"  {len(places)} × {reason} ({_places(places)})" for reason, places in unusable.items()
    ]
    remedy = (
        "Mend them, or set data.strict to false to leave them out."
        if strict
        else ("data.prompt_column and data.columns say which columns are meant.")
    )
    return "\n".join([f"{where}: {begin}:", *lines, remedy])


def _places(places: Sequence[int]) -> str:
    shown = ", ".join(map(str, places[:MOST_PLACES]))
    more = " …" if len(places) > MOST_PLACES else ""
    return f"row{'s' if len(places) > 1 else ''} {shown}{more}"


# --- one prompt ----------------------------------------------------------------------------------


def _prompt(value: Any, row: Row, way: PromptWay, changes: list[str]) -> Prompt:
    if value is None:
        raise Unusable("there is no prompt")
    if isinstance(value, str):
        if not value.strip():
            raise Unusable("the prompt is empty")
        if way.format == "text":
            return _with_lines(value, row, way.lines)
    messages = _stripped(messages_of(value), way.strip_tags, changes)
    asked = _asked(messages, changes)
    last = max(place for place, message in enumerate(asked) if message["role"] == "user")
    asked[last] = {**asked[last], "content": _with_lines(asked[last]["content"], row, way.lines)}
    return _with_system(asked, way.system_prompt, changes)


def _taught(value: Any, way: PromptWay, changes: list[str]) -> list[Message]:
    messages = messages_of(value)
    if not any(message["role"] == "assistant" for message in messages):
        raise Unusable("no message is the assistant's")
    return _with_system(messages, way.system_prompt, changes)


def messages_of(value: Any) -> list[Message]:
    """Messages with role and text, from any of the forms that a prompt is given in. Raises Unusable."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        value = _parallel(cast("Mapping[str, Any]", value))
    if not isinstance(value, list | tuple) or not value:
        raise Unusable(
            "the prompt is empty" if value in ([], ()) else "the prompt is no text and no messages"
        )
    return [_message(entry) for entry in cast("Sequence[Any]", value)]


def _parallel(value: Mapping[str, Any]) -> list[Any]:
    """One message, or lists of roles and contents of one length."""
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, list | tuple) or not isinstance(content, list | tuple):
        return [value]
    roles, contents = cast("Sequence[Any]", role), cast("Sequence[Any]", content)
    if len(roles) != len(contents):
        raise Unusable("there are not as many roles as contents")
    return [{"role": one, "content": text} for one, text in zip(roles, contents, strict=True)]


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise Unusable("a message is no mapping of role and content")
    given = cast("Mapping[str, Any]", value)
    message = {str(key): entry for key, entry in given.items() if entry is not None}
    role = message.get("role")
    if role is None and "from" in message and "value" in message:
        raise Unusable("a message has `from` and `value` (ShareGPT), not `role` and `content`")
    if not isinstance(role, str):
        raise Unusable("a message has no role")
    if role not in ROLES:
        raise Unusable(f"a message has the role {role!r:.30}; there are {', '.join(ROLES)}")
    if role == "assistant" and "tool_calls" in message and "content" not in message:
        return message
    return {**message, "content": _text(message.get("content"))}


def _text(content: Any) -> str:
    """Text, or parts of which each is text."""
    if isinstance(content, list | tuple):
        parts = [_part(part) for part in cast("Sequence[Any]", content)]
        content = "".join(parts)
    if not isinstance(content, str):
        raise Unusable("a message has no text")
    return content


def _part(part: Any) -> str:
    given = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
    text = given.get("text")
    if given.get("type") != "text" or not isinstance(text, str):
        raise Unusable("a message holds more than text")
    return text


def _stripped(
    messages: Sequence[Message], tags: Sequence[str], changes: list[str]
) -> list[Message]:
    """Without blocks of these tags in what the user says."""
    made: list[Message] = []
    for message in messages:
        text = without_blocks(message["content"], tags) if message["role"] == "user" else None
        if text is None or text == message["content"]:
            made.append(message)
        else:
            changes.append("blocks were taken out of the user's text (data.strip_tags)")
            made.append({**message, "content": text})
    return made


def without_blocks(text: str, tags: Sequence[str]) -> str:
    """The text without `<tag>…</tag>`, whatever the case; trimmed where something was taken out."""
    left = text
    for tag in tags:
        name = re.escape(tag)
        left = re.sub(rf"<{name}>.*?</{name}>", "", left, flags=re.IGNORECASE | re.DOTALL)
    return text if left == text else left.strip()


def _asked(messages: list[Message], changes: list[str]) -> list[Message]:
    """Up to the last turn that is answered: what the assistant says after it is to be written anew."""
    if not any(message["role"] == "user" for message in messages):
        raise Unusable("no message is the user's")
    asked = list(messages)
    while asked[-1]["role"] == "assistant":
        asked.pop()
    if len(asked) < len(messages):
        changes.append("turns of the assistant at the end were left out")
    if asked[-1]["role"] not in ("user", "tool"):
        raise Unusable("the messages do not end with the user")
    if not asked[-1]["content"].strip():
        raise Unusable("the prompt is empty")
    return asked


def _with_lines(text: str, row: Row, columns: Sequence[str]) -> str:
    lines = [f"{name}: {row[name]}" for name in columns if row.get(name) not in (None, "")]
    return "\n".join([text, *lines])


def _with_system(
    messages: list[Message], system_prompt: str | None, changes: list[str]
) -> list[Message]:
    if not system_prompt or any(m["role"] in ("system", "developer") for m in messages):
        return messages
    changes.append("the system prompt was put before (data.system_prompt)")
    return [{"role": "system", "content": system_prompt}, *messages]
