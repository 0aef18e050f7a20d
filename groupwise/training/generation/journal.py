"""The journal of answers: an append-only file. An appended answer is on disk and never has to be paid for again.

One line holds the answer to one request: the row's key, its generations (numbered from `first`), and the billed tokens. Each line is
written and flushed before its answer counts. A process that dies while it writes leaves an incomplete last line, which does not count:
`Journal` cuts it off when it opens the file again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from groupwise.api.openai_client.response_parsing import Choices, Usage
from groupwise.core.errors import StoreError

ANSWERS = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a row."""

    text: str
    finish_reason: str | None
    reasoning: str | None
    model: str


@dataclass(slots=True)
class UsageTotals:
    """The billed requests and tokens of answers."""

    requests: int = 0
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    without_usage: int = 0
    """Number of answers without the number of billed tokens."""

    def add(self, usage: Usage) -> None:
        """Count an answer."""
        self.requests += 1
        if usage.prompt_tokens is None or usage.completion_tokens is None:
            self.without_usage += 1
        else:
            self.usage += usage


class Answers:
    """The generations of each row, from one or several journals."""

    def __init__(self) -> None:
        self._generations: dict[str, dict[int, Generation]] = {}
        self._usage: dict[str, list[Usage]] = {}
        self.usage_totals = UsageTotals()

    def of(self, key: str) -> list[Generation]:
        """A row's generations, up to the first missing one."""
        by_number = self._generations.get(key, {})
        count = next(number for number in range(len(by_number) + 1) if number not in by_number)
        return [by_number[number] for number in range(count)]

    def usage(self, key: str) -> Usage:
        """The billed tokens of a row."""
        return sum(self._usage.get(key, ()), start=Usage(0, 0))

    def count_orphans(self, keys: Collection[str]) -> int:
        """Number of answers that belong to none of these rows."""
        return sum(len(usages) for key, usages in self._usage.items() if key not in keys)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of a journal. If a generation appears twice, the first one counts."""
        by_number = self._generations.setdefault(line["key"], {})
        for number, choice in enumerate(line["choices"], line["first"]):
            generation = Generation(
                choice["text"], choice["finish_reason"], choice.get("reasoning"), line["model"]
            )
            by_number.setdefault(number, generation)
        usage = Usage(**line["usage"])
        self._usage.setdefault(line["key"], []).append(usage)
        self.usage_totals.add(usage)

    def read(self, path: Path) -> int:
        """Add a whole journal. Returns its length in bytes without an incomplete last line. Raises StoreError for an invalid line."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return 0
        complete_data = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(complete_data.split(b"\n")[:-1], 1):
            try:
                self.add(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"{path}, line {number} is not an answer: {error!r}. Something else has changed the file; remove that line, and "
                    "what it held will be asked again."
                ) from error
        return len(complete_data)


class Journal:
    """The journal of this command, which is its only writer."""

    def __init__(self, path: Path, answers: Answers) -> None:
        """Open the file and cut off an incomplete last line. Old and new answers are added to `answers`."""
        self._path = path
        self._answers = answers
        length = answers.read(path)
        with _as_store_error(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(length)
            os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, key: str, first_index: int, answer: Choices) -> None:
        """Write an answer. It is on disk when this returns. Raises StoreError if writing fails."""
        entries = zip(answer.texts, answer.finish_reasons, answer.reasoning, strict=True)
        line = {
            "key": key,
            "first": first_index,
            "choices": [
                {
                    "text": text,
                    "finish_reason": reason,
                    **({"reasoning": reasoning} if reasoning else {}),
                }
                for text, reason, reasoning in entries
            ],
            "usage": {
                "prompt_tokens": answer.usage.prompt_tokens,
                "completion_tokens": answer.usage.completion_tokens,
            },
            "model": answer.model,
        }
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        with _as_store_error(self._path):
            while data:
                data = data[self._file.write(data) or 0 :]
            os.fsync(self._file.fileno())
        self._answers.add(line)


@contextmanager
def _as_store_error(path: Path) -> Generator[None]:
    """Convert an OSError to a StoreError with advice."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. Free space on that disk (or fix its permissions) and run the same "
            "command again: it continues with the existing answers."
        ) from error
