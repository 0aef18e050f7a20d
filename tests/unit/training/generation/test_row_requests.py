from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.api.openai_client.client import Client, Endpoint
from groupwise.core.errors import EndpointError
from groupwise.training.generation.config import read_options
from groupwise.training.generation.journal import Answers, Journal
from groupwise.training.generation.prompts import Item
from groupwise.training.generation.row_requests import MAX_FAILURES_IN_A_ROW, RowRequester, Tally


def items(count: int) -> list[Item]:
    chat: Any = [{"role": "user", "content": "q"}]
    return [Item(n, chat if n % 2 else f"text {n}", {}, f"k{n}") for n in range(count)]


class Service:
    """Answers with at most `most` choices; `status` of a request's number may be another than 200."""

    def __init__(self, most: int = 9, **statuses: int) -> None:
        self.most = most
        self.statuses = {int(name[1:]): status for name, status in statuses.items()}
        self.every: int | None = None
        self.asked: list[dict[str, Any]] = []

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        status = self.statuses.get(len(self.asked) - 1, self.every or 200)
        if status != 200:
            return httpx2.Response(status, json={"error": {"message": f"no. {len(self.asked)}"}})
        choices = [{"text": "t", "finish_reason": "stop"}] * min(body.get("n", 1), self.most)
        usage = {"prompt_tokens": 5, "completion_tokens": len(choices)}
        return httpx2.Response(200, json={"choices": choices, "usage": usage})


async def ask(
    folder: Path, service: Service, rows: list[Item], **options: Any
) -> tuple[Tally, Answers]:
    given = {"dataset": "d", "output": "o", "concurrency": 1, "retries": 0, **options}
    config = read_options(given)
    endpoint = Endpoint("http://h", "m", retries=0)
    transport = httpx2.MockTransport(service.answer)
    answers = Answers()
    with Journal(folder / "a.jsonl", answers) as journal:
        async with Client(endpoint, transport=transport) as client:
            asking = RowRequester(client, config, answers, journal, lambda tally: None)
            return await asking.ask(rows), answers


@pytest.mark.parametrize("status", [401, 402, 403, 404])
async def test_a_status_that_every_row_would_get_ends_the_generation(
    tmp_path: Path, status: int
) -> None:
    service = Service(r2=status)
    with pytest.raises(EndpointError, match=f"status {status}"):
        await ask(tmp_path, service, items(50))
    assert len(service.asked) == 3
    kept = Answers()
    kept.read(tmp_path / "a.jsonl")
    assert kept.of("k0")
    assert kept.of("k1")


async def test_failures_in_a_row_end_it(tmp_path: Path) -> None:
    service = Service(r0=200, r1=500, r2=200)
    service.every = 500
    with pytest.raises(
        EndpointError, match=f"{MAX_FAILURES_IN_A_ROW} rows failed one after the other.*\n.*no. "
    ):
        await ask(tmp_path, service, items(50))
    assert len(service.asked) == 3 + MAX_FAILURES_IN_A_ROW
