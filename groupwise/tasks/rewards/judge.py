"""The reward of a judge: another model scores completions by a rubric.

    {name: judge, endpoint: "https://api.example.com/v1", model: some-model, rubric: "Correct, short, polite."}

`alone` asks about each completion by itself; `pairs` about every two of a group, in both orders, which cancels a judge's preference
for the first place; `group` about all of them in one question. Equal completions are asked about once and score the same.

Only a verdict is a score: if an answer cannot be read, the judge is asked once more; after that its completions fail, as they do if
the endpoint does not answer or time runs out. Answers are kept on disk, so a resumed run does not pay for them again.
`judge_prompts` builds the questions, so that text in a completion cannot pass for the judge's verdict.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from groupwise.core.atomic_files import write_json
from groupwise.core.cache import cache_folder
from groupwise.core.errors import EndpointError, StoreError, UsageError
from groupwise.core.plugins import printable
from groupwise.core.reward_call.call import Failed
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.types import Message, Prompt
from groupwise.tasks.rewards.judge_prompts import (
    TEMPLATE,
    Malformed,
    Mode,
    Question,
    check_template,
    names_of,
    prompt_text,
    question,
)
from groupwise.tasks.rewards.registry import reward

if TYPE_CHECKING:
    from groupwise.api.openai_client.client import Client, Endpoint

logger = logging.getLogger(__name__)

_MAX_CHARACTERS_OF_ANSWER = 300
"""Characters of an unreadable answer that a reason shows."""


@reward("judge")
@dataclass(frozen=True, slots=True)
class Judge:
    """A number from 0 to 1 from a judge: the score's place on the scale, or the share of comparisons won."""

    endpoint: str
    """The base URL of an OpenAI-compatible service."""
    model: str
    mode: Mode = "alone"
    rubric: str | None = None
    """The rubric of every row; None takes each row's own from `rubric_column`."""
    rubric_column: str = "rubric"
    scale: tuple[float, float] = (0.0, 10.0)
    """The lowest and the highest score, which become 0 and 1."""
    template: str = TEMPLATE
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float | None = 0.0
    """None leaves it to the service; some models take no other."""
    max_tokens: int | None = 1024
    concurrency: int = 8
    """Most concurrent requests of each worker."""
    time_limit: float = 25.0
    """Seconds for a group; completions without a verdict by then fail, and no others."""
    retries: int = 3
    """Most retries of a request after a temporary error."""
    cache: str | None = None
    """Folder for answers; None for the user's cache folder."""

    def __post_init__(self) -> None:
        check_template(self.template)
        low, high = self.scale
        if not low < high:
            raise ValueError(
                f"scale is [{low:g}, {high:g}]; expected the lowest score, then a higher one."
            )
        if self.concurrency < 1 or not self.time_limit > 0 or self.retries < 0:
            raise ValueError(
                f"concurrency is {self.concurrency}, time_limit {self.time_limit:g} and retries {self.retries}; "
                "expected at least 1, more than 0 and at least 0."
            )
        if self.rubric is not None and not self.rubric.strip():
            raise ValueError(
                "rubric is empty. Write what a good answer is, or leave it out and name a rubric_column."
            )
        try:
            self._endpoint()
        except UsageError as error:
            raise ValueError(str(error)) from error

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a rubric."""
        self._rubric_of(row.get(self.rubric_column))

    async def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """A number for each completion; `Failed` if the judge gave no verdict, None if there is no other completion to compare with."""
        texts = [printable(completion_text(completion)) for completion in completions]
        values: list[float | None] = [None] * len(texts)
        answers: list[str | None] = [None] * len(texts)
        groups: dict[tuple[str, str], list[int]] = {}
        rubrics = columns.get(self.rubric_column, [None] * len(texts))
        for index, prompt in enumerate(prompts):
            try:
                rubric = self._rubric_of(rubrics[index])
            except ValueError as problem:
                values[index] = Failed(f"cannot judge this row: it {problem}")
            else:
                groups.setdefault((printable(prompt_text(prompt)), rubric), []).append(index)
        async with self._open_session() as session:
            tasks = [
                _MODES[self.mode](self, session, prompt, rubric, [texts[i] for i in members])
                for (prompt, rubric), members in groups.items()
            ]
            for members, opinions in zip(
                groups.values(), await asyncio.gather(*tasks), strict=True
            ):
                for index, opinion in zip(members, opinions, strict=True):
                    values[index], answers[index] = opinion.value, opinion.answer
        if log_metric is not None:
            for name, count in session.counts.items():
                log_metric(f"judge/{name}", count)
        if log_extra is not None and self.mode != "pairs":
            log_extra("judge", answers)
        return values

    async def alone(
        self, session: _Session, prompt: str, rubric: str, texts: list[str]
    ) -> list[_Opinion]:
        """An opinion on each text, asked separately."""
        different = list(dict.fromkeys(texts))
        questions = [self._make_question(prompt, rubric, [text]) for text in different]
        verdicts = await asyncio.gather(*(session.ask(question) for question in questions))
        opinions = {
            text: self._make_opinion(verdict, question.names[0])
            for text, question, verdict in zip(different, questions, verdicts, strict=True)
        }
        return [opinions[text] for text in texts]

    async def group(
        self, session: _Session, prompt: str, rubric: str, texts: list[str]
    ) -> list[_Opinion]:
        """An opinion on each text, from one question about all of them."""
        question = self._make_question(prompt, rubric, list(dict.fromkeys(texts)))
        verdict = await session.ask(question)
        names = names_of(question.mark, texts)
        return [self._make_opinion(verdict, name) for name in names]

    async def pairs(
        self, session: _Session, prompt: str, rubric: str, texts: list[str]
    ) -> list[_Opinion]:
        """The share of the others that each text beats; a tie counts as half."""
        orders = list(permutations(dict.fromkeys(texts), 2))
        questions = [self._make_question(prompt, rubric, pair) for pair in orders]
        verdicts = await asyncio.gather(*(session.ask(question) for question in questions))
        firsts = {
            pair: verdict.of(question.names[0])
            for pair, question, verdict in zip(orders, questions, verdicts, strict=True)
        }
        return [_Opinion(_win_rate(index, texts, firsts), None) for index in range(len(texts))]

    def _make_question(self, prompt: str, rubric: str, texts: Sequence[str]) -> Question:
        return question(self.mode, self.template, rubric, prompt, texts, self.scale)

    def _make_opinion(self, verdict: _Verdict, name: str) -> _Opinion:
        low, high = self.scale
        score = verdict.of(name)
        value = score if isinstance(score, Failed) else (score - low) / (high - low)
        return _Opinion(value, verdict.answer)

    def _rubric_of(self, rubric: Any) -> str:
        """The config's rubric, else this one of a row. Raises ValueError if that is not text."""
        if self.rubric is not None:
            return self.rubric
        if not isinstance(rubric, str) or not rubric.strip():
            raise ValueError(
                f"has no rubric in the column `{self.rubric_column}`; expected text there, or `rubric` in the config"
            )
        return printable(rubric)

    def _endpoint(self) -> Endpoint:
        from groupwise.api.openai_client.client import Endpoint

        return Endpoint(
            self.endpoint, self.model, self.api_key_env, self.time_limit, retries=self.retries
        )

    @asynccontextmanager
    async def _open_session(self) -> AsyncGenerator[_Session]:
        from groupwise.api.openai_client.client import Client

        cache = JudgeCache(None if self.cache is None else Path(self.cache))
        async with Client(self._endpoint(), concurrency=self.concurrency) as client:
            deadline = asyncio.get_running_loop().time() + self.time_limit
            yield _Session(self, client, cache, deadline)


_MODES = {"alone": Judge.alone, "pairs": Judge.pairs, "group": Judge.group}


@dataclass(frozen=True, slots=True)
class _Opinion:
    value: float | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The answer to one question: scores by name, and the reason if any are missing."""

    scores: Mapping[str, float]
    failure: Failed | None = None
    answer: str | None = None

    def of(self, name: str) -> float:
        """The score of a completion, or `Failed`."""
        missing = self.failure or Failed("got no score for this completion")
        return self.scores.get(name, missing)


def _win_rate(
    index: int, texts: Sequence[str], firsts: Mapping[tuple[str, str], float]
) -> float | None:
    """The mean score against the other members, each compared twice: shown first and shown second."""
    text, points = texts[index], list[float]()
    for position, other in enumerate(texts):
        if other == text:
            points += [0.5] if position != index else []
            continue
        first, second = firsts[text, other], firsts[other, text]
        for score in (first, second):
            if isinstance(score, Failed):
                return score
        points.append((first + 1 - second) / 2)
    return fmean(points) if points else None


class _Session:
    """Asks the questions of one call, and counts the costs."""

    def __init__(self, judge: Judge, client: Client, cache: JudgeCache, deadline: float) -> None:
        self.counts = dict.fromkeys(("requests", "cached", "prompt_tokens", "completion_tokens"), 0)
        self._judge = judge
        self._client = client
        self._cache = cache
        self._deadline = deadline

    async def ask(self, question: Question) -> _Verdict:
        """The verdict, from the cache or the judge; never raises an error of the service."""
        # The cache key: everything known here that an answer depends on.
        judge = self._judge
        key = {
            "endpoint": self._client.endpoint.base_url,
            "model": judge.model,
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
            "messages": question.messages,
        }
        if (answer := self._cache.get(key)) is not None and not _verdict_problem(question, answer):
            self.counts["cached"] += 1
            return _Verdict(question.read(answer), answer=answer)
        try:
            async with asyncio.timeout_at(self._deadline):
                # Ask once more after a bad answer; for a group, keep the scores already received.
                text, problem, scores = await self._ask_judge(question, question.messages)
                if problem:
                    retry = question.retry_messages(text, problem)
                    text, problem, retry_scores = await self._ask_judge(question, retry)
                    scores = retry_scores or scores
                failure = None
                if problem:
                    # Each question has its own mark; without it equal reasons are counted as one.
                    reason = problem.replace(question.mark, "…")
                    shown = text[:_MAX_CHARACTERS_OF_ANSWER]
                    failure = Failed(f"got no verdict: {reason}, in {shown!r}")
                verdict = _Verdict(scores, failure, text)
        except TimeoutError:
            limit = self._judge.time_limit
            return _Verdict({}, Failed(f"got no verdict within time_limit, {limit:g} s"))
        except EndpointError as error:
            return _Verdict({}, Failed(f"got no verdict: {error}"))
        if verdict.answer is not None and verdict.failure is None:
            self._cache.put(key, verdict.answer)
        return verdict

    async def _ask_judge(
        self, question: Question, messages: list[Message]
    ) -> tuple[str, str | None, dict[str, float]]:
        """The judge's answer, the reason if it is not a complete verdict (else None), and the scores in it."""
        # A cut-off answer gives no verdict: the missing rest might have retracted this part.
        self.counts["requests"] += 1
        answer = await self._client.chat(
            messages, temperature=self._judge.temperature, max_tokens=self._judge.max_tokens
        )
        self.counts["prompt_tokens"] += answer.usage.prompt_tokens or 0
        self.counts["completion_tokens"] += answer.usage.completion_tokens or 0
        text, is_complete = printable(answer.texts[0]), answer.finish_reasons[0] != "length"
        if not is_complete:
            return text, f"the answer was cut off (max_tokens is {self._judge.max_tokens})", {}
        return text, _verdict_problem(question, text), _partial_scores(question, text)


def _verdict_problem(question: Question, text: str) -> str | None:
    """The reason why an answer is not a complete verdict; None if it is."""
    try:
        missing = [name for name in question.names if name not in question.read(text)]
    except Malformed as malformed:
        return str(malformed)
    return f"there is no {question.scale_text} for {', '.join(missing)}" if missing else None


def _partial_scores(question: Question, text: str) -> dict[str, float]:
    try:
        return question.read(text)
    except Malformed:
        return {}


# --- cache ---------------------------------------------------------------------------------------


CACHE_FORMAT = 1


class JudgeCache:
    """Verdicts that were paid for, on disk: one file for each question, shared by all runs and workers.

    A file appears whole or not at all, so any number of workers may share the folder and be killed. Two that ask the same question
    at the same time both pay, and write the same file. If a file cannot be read, its question is asked again.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` may start with `~`; None is the default cache folder of this machine."""
        self._folder = (folder or cache_folder("judge")).expanduser()
        self._writable = True

    def get(self, key: dict[str, Any]) -> str | None:
        """The stored answer to this question; None if there is none."""
        try:
            stored: object = json.loads(self._cache_file(key).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict):
            return None
        entry = cast("dict[str, object]", stored)
        answer = entry.get("said")
        return answer if entry.get("format") == CACHE_FORMAT and isinstance(answer, str) else None

    def put(self, key: dict[str, Any], answer: str) -> None:
        """Store an answer. A full or read-only disk causes one warning; the verdict itself is not affected."""
        file = self._cache_file(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"format": CACHE_FORMAT, "asked": key, "said": answer})
        except (OSError, StoreError) as error:
            if self._writable:
                logger.warning(
                    "Verdicts of the judge cannot be kept in %s: %s", self._folder, error
                )
            self._writable = False

    def _cache_file(self, request: dict[str, Any]) -> Path:
        text = json.dumps(request, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        return self._folder / key[:2] / f"{key}.json"
