"""Calls of parts with each field corrupted in turn, to a real engine: each gets a defined answer, and later calls are unaffected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.api.schemas.problems import KINDS
from tests.parts_server import HERE, PartsServer

ID = "spoilt-calls"
CONFIG = {
    "model": {"name": "tiny", "dtype": "float32"},
    "lora": {"r": 2},
    "sampler": {"max_completion_length": 8, "max_num_seqs": 8},
    "algorithm": {"beta": 0.1},
}
ROW = {
    "prompt_ids": [5, 6], "completion_ids": [7, 8], "mask": [1, 1], "sampling_logprobs": [-1.0, -2.0], "advantage": 1.0,
    "scale": 1.0, "temperature": 1.0, "reference_logprobs": [-1.0, -2.0], "proximal_logprobs": None, "rollout": [0, 0],
    "others": {"tokens": 1}, "withheld": [{"start": 0, "end": 1, "token_ids": [3]}], "credits": None,
    "targets": [9, 8],
}  # fmt: skip
PARAMS = {
    "max_tokens": 4, "temperature": 1.0, "stop_token_ids": [0], "stop": ["x"], "min_tokens": 0, "top_k": None, "top_p": None,
    "min_p": None,
}  # fmt: skip
REQUEST = {"draw": 1, "prompt_ids": [5, 6], "seeds": [1, 2], "params": PARAMS}
ADAM = {"learning_rate": 0.0, "max_grad_norm": 1.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}  # fmt: skip
CALL_ARGUMENTS: dict[str, dict[str, Any]] = {
    "generate": {"request": REQUEST},
    "forward_backward": {
        "rows": [ROW],
        "loss": {"name": "dr_grpo", "knobs": {}},
        "denominators": {"policy": 2.0},
    },
    "logprobs": {"rows": [ROW], "role": "policy"},
    "predictions": {"rows": [ROW]},
    "update": {"params": ADAM},
    "publish": {"version": 3},
    "save_state": {"folder": "state"},
    "load_state": {"folder": "state"},
    "open": {"kind": "serving", "config": CONFIG, "run": "r", "longest_prompt": 8},
    "load": {  # last, as it changes what is sampled
        "policy": {"run": "r", "version": 0, "fingerprint": "f", "kind": "adapter", "path": "state"}
    },
}
CALLS = {verb: {"verb": verb, **arguments} for verb, arguments in CALL_ARGUMENTS.items()}
GENERATE, LEARN = CALLS["generate"], CALLS["forward_backward"]
WRONG = (
    None, True, -1, 0, 0.5, 2**70, 1e300, "NaN", "", "x", "../..", [], [[]], [-1], [10**9], {}, {"a": 1},
)  # fmt: skip


def spoilt(value: Any) -> Iterator[Any]:
    """With each part of it replaced by each wrong value in turn, or left out."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key != "verb":
                yield {name: each for name, each in value.items() if name != key}
                for other in (*WRONG, *spoilt(part)):
                    yield {**value, key: other}
    elif isinstance(value, list):
        for index, part in enumerate(value):
            for other in spoilt(part):
                yield [*value[:index], other, *value[index + 1 :]]


SHARES = 8
OTHERS = [pytest.param(n, marks=pytest.mark.soak(suite="attacks")) for n in range(1, SHARES)]


@pytest.mark.parametrize("first", [0, *OTHERS])
async def test_every_spoilt_call_has_its_answer(tmp_path: Path, first: int) -> None:
    """Every eighth of them from one on; the other eighths are soak tests."""
    server = PartsServer(tmp_path)
    http = httpx2.AsyncClient(transport=server.transport, base_url=HERE)
    numbers = iter(range(1, 10**6))

    async def call(do: Any) -> httpx2.Response:
        body = json.dumps({"do": do}).encode()
        headers = {"Content-Type": "application/json"}
        path = f"/parts/{ID}/calls/{next(numbers)}"
        return await http.put(path, content=body, headers=headers, params={"wait": "60"})

    async def result(do: Any) -> Any:
        return (await call(do)).json()["result"]

    await http.put(f"/parts/{ID}", json={"owner": "me"})
    await result({**CALLS["open"], "kind": "training"})
    await result(CALLS["save_state"])
    drawn, learnt = await result(GENERATE), await result(LEARN)
    for verb in CALLS:
        answers: set[str] = set()
        for do in islice(spoilt(CALLS[verb]), first, None, SHARES):
            answer = await call(do)
            shown = f"{json.dumps(do)[:600]} -> {answer.status_code} {answer.text[:900]}"
            assert answer.status_code < 500, shown
            if answer.status_code >= 400:
                assert KINDS[answer.json()["code"]].status == answer.status_code, shown
                answers.add(answer.json()["code"])
            else:
                error = answer.json()["error"]
                answers.add("done" if error is None else error["code"])
                assert error is None or "Traceback" not in error["message"], shown
        assert "run_failed" not in answers, "a mistake of the client is told as one"
        assert answers
        assert len(server.engines) == 1
        await result({"verb": "load_state", "folder": "state"})
        assert await result(LEARN) == learnt
        await result({"verb": "discard"})
        if verb != "load":
            assert await result(GENERATE) == drawn
    await server.service.shut_down()
    await http.aclose()


async def test_only_one_of_two_concurrent_opens_succeeds(tmp_path: Path) -> None:
    server = PartsServer(tmp_path)
    async with httpx2.AsyncClient(transport=server.transport, base_url=HERE) as http:
        await http.put(f"/parts/{ID}", json={"owner": "me"})
        order = {"do": {**CALLS["open"], "kind": "training"}}
        paths = [f"/parts/{ID}/calls/{number}" for number in (1, 2)]
        responses = await asyncio.gather(*(http.put(path, json=order) for path in paths))
        assert sorted(each.json()["state"] for each in responses) == ["done", "failed"]
    await server.service.shut_down()
