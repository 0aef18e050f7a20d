"""Requests all missing generations concurrently, and stores each answer when it arrives.

If the service refuses a row, that row fails and the others continue. Errors that would hit every row end the work: a refused key, a
missing model, or too many failures in a row. Earlier answers are kept in any case.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.api.openai_client.client import Client
from groupwise.api.openai_client.response_parsing import Choices
from groupwise.api.schemas.template_columns import for_request
from groupwise.core.errors import EndpointError
from groupwise.core.interruption import gather_all
from groupwise.tasks.data.messages import ends_begun
from groupwise.training.generation.config import GenerateConfig
from groupwise.training.generation.journal import Answers, Journal, UsageTotals
from groupwise.training.generation.prompts import Item

FATAL_STATUSES = frozenset({401, 402, 403, 404})
"""HTTP statuses that concern every row: the key, the account, the model."""
ROW_STATUSES = frozenset({400, 413, 422})
"""HTTP statuses that are caused by the row itself, once another row has been answered."""
MAX_FAILURES_IN_A_ROW = 8
"""Number of failures in a row after which the work ends; the number of concurrent requests if that is larger."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that lacks some of its generations."""

    index: int
    reason: str


@dataclass(slots=True)
class Tally:
    """The progress of this command."""

    answered: int = 0
    """Number of rows that have all their generations."""
    usage_totals: UsageTotals = field(default_factory=UsageTotals)
    failures: list[Failure] = field(default_factory=list[Failure])
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def tokens_per_second(self) -> float:
        return (self.usage_totals.usage.completion_tokens or 0) / max(self.seconds, 1e-9)


class RowRequester:
    """Requests the generations of rows from a service."""

    def __init__(
        self,
        client: Client,
        config: GenerateConfig,
        answers: Answers,
        journal: Journal,
        on_change: Callable[[Tally], None],
    ) -> None:
        """`on_change` is called after every answer and every failure."""
        self._client = client
        self._config = config
        self._answers = answers
        self._journal = journal
        self._on_change = on_change
        self._failed_in_a_row = 0
        self.tally = Tally()

    async def ask(self, items: Sequence[Item]) -> Tally:
        """Request until every row is answered or has failed. Raises EndpointError if continuing would be futile."""
        waiting = iter(items)
        count = min(self._config.concurrency, len(items))
        await gather_all(self._ask_rows(waiting) for _ in range(count))
        return self.tally

    async def _ask_rows(self, waiting: Iterator[Item]) -> None:
        for item in waiting:
            try:
                count = self._config.num_generations
                while (answer_count := len(self._answers.of(item.key))) < count:
                    answer = await self._send_request(item, answer_count, count - answer_count)
                    self._journal.append(item.key, answer_count, answer)
                    self.tally.usage_totals.add(answer.usage)
                    self._failed_in_a_row = 0
                    self._on_change(self.tally)
                self.tally.answered += 1
            except EndpointError as error:
                self.tally.failures.append(Failure(item.index, str(error)))
                if error.status not in ROW_STATUSES or self.tally.usage_totals.requests == 0:
                    self._failed_in_a_row += 1
                limit = max(MAX_FAILURES_IN_A_ROW, self._config.concurrency)
                if error.status in FATAL_STATUSES:
                    raise error
                if self._failed_in_a_row >= limit:
                    raise EndpointError(
                        f"{limit} rows failed one after the other; the last:\n{error}", error.status
                    ) from error
            self._on_change(self.tally)

    async def _send_request(self, item: Item, first_index: int, count: int) -> Choices:
        config = self._config
        # A chat request has fields for the chat template, as vLLM and SGLang accept them: the row's own fields, and
        # whether to continue the last message.
        template: dict[str, Any] = {}
        if not isinstance(item.prompt, str):
            template = for_request(item.columns)
            if ends_begun(item.prompt):
                template |= {"continue_final_message": True, "add_generation_prompt": False}
        knobs: dict[str, Any] = {
            "n": count,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": config.max_new_tokens,
            "seed": None if config.seed is None else _row_seed(config.seed, item.key) + first_index,
            "stop": config.stop,
            "extra": {**template, **config.extra},
            "or_fewer": True,
        }
        if isinstance(item.prompt, str):
            return await self._client.complete(item.prompt, **knobs)
        return await self._client.chat(item.prompt, **knobs)


def _row_seed(seed: int, key: str) -> int:
    """The seed of a row's first generation; the others have the next integers. Below 2³¹ − 2²⁰, for services with 32-bit seeds."""
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (2**31 - 2**20)
