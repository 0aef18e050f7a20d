"""A small OpenAI-compatible server on loopback, for tests of clients: real HTTP, answers from the tiny model or from a script.

    with serve(Service(scripted(lambda text, seed: f"{text}? {seed}."))) as service:
        Endpoint(service.url, "tiny")

`Service.asked` keeps the body of every request. `Service.interfere` is called with the number of each request before it is answered, and
may answer in its place: with a failure, or never.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass(frozen=True, slots=True)
class Written:
    """One choice of an answer."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The contents of a request."""

    prompt: str | list[dict[str, Any]]
    seeds: list[int]
    max_tokens: int
    temperature: float
    stop: list[str]


Writer = Callable[[Asked], Awaitable[tuple[int, list[Written]]]]
"""A function from a request to the prompt's length in tokens and the choices."""

Interference = Callable[[int], Awaitable[Response | None]]


def scripted(write: Callable[[str, int], str]) -> Writer:
    """A writer whose answers are a function of the prompt's last text and the seed; each word is a token."""

    async def written(asked: Asked) -> tuple[int, list[Written]]:
        prompt = asked.prompt if isinstance(asked.prompt, str) else asked.prompt[-1]["content"]
        texts = [write(prompt, seed) for seed in asked.seeds]
        return len(prompt.split()), [Written(text, "stop", len(text.split())) for text in texts]

    return written


def tiny() -> Writer:
    """A writer whose answers come from the tiny model and this package's sampler."""
    import torch

    from groupwise.core.types import GroupRequest, SamplingParams
    from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
    from groupwise.engine.models.tokens import completion_text, prompt_ids
    from groupwise.engine.sampler.queued import DecodeLayout
    from groupwise.engine.sampler.torch_sampler import TorchSampler
    from groupwise.engine.sampler.weights import ServedModel

    tokenizer: Any = tiny_tokenizer()
    model: Any = tiny_model(seed=4)
    model = model.to(torch.float32).eval()
    sampler = TorchSampler(ServedModel(model), tokenizer, DecodeLayout(slots=16, key_length=512))
    draws = count()

    async def written(asked: Asked) -> tuple[int, list[Written]]:
        ids = prompt_ids(tokenizer, asked.prompt)
        params = SamplingParams(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            stop_token_ids=(tokenizer.eos_token_id,),
            stop=tuple(asked.stop),
        )
        drawn = await sampler.generate(GroupRequest(next(draws), ids, tuple(asked.seeds), params))
        return len(ids), [
            Written(
                completion_text(tokenizer, each.token_ids), each.finish_reason, len(each.token_ids)
            )
            for each in drawn
        ]

    return written


class Service:
    """The server's behaviour; see the module."""

    def __init__(
        self,
        write: Writer,
        *,
        models: tuple[str, ...] = ("tiny",),
        key: str | None = None,
        most: int | None = None,
    ) -> None:
        """With `key`, other keys are refused. A request gets at most `most` choices."""
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.answered: list[dict[str, Any]] = []
        """The requests whose answers were sent."""
        self.interfere: Interference | None = None
        self._write = write
        self._models = models
        self._key = key
        self._most = most
        self._seeds = count(1000)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._list, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _list(self, request: Request) -> Response:
        refusal = self._refusal(request)
        return refusal or JSONResponse({"data": [{"id": name} for name in self._models]})

    async def _chat(self, request: Request) -> Response:
        return await self._answer(
            request, "messages", lambda text: {"message": {"role": "assistant", "content": text}}
        )

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, "prompt", lambda text: {"text": text})

    async def _answer(
        self, request: Request, field: str, shaped: Callable[[str], dict[str, Any]]
    ) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.asked.append(body)
        if self.interfere is not None:
            instead = await self.interfere(len(self.asked) - 1)
            if instead is not None:
                return instead
        if body["model"] not in self._models:
            return _error(404, f"The model {body['model']!r} does not exist.")
        length, written = await self._write(self._wanted(body, field))
        choices = [
            {"index": number, "finish_reason": each.finish_reason, **shaped(each.text)}
            for number, each in enumerate(written)
        ]
        tokens = sum(each.tokens for each in written)
        usage = {
            "prompt_tokens": length,
            "completion_tokens": tokens,
            "total_tokens": length + tokens,
        }
        self.answered.append(body)
        answer = {"model": body["model"], "choices": choices, "usage": usage}
        return _as_stream(answer) if body.get("stream") else JSONResponse(answer)

    def _wanted(self, body: dict[str, Any], field: str) -> Asked:
        wanted = min(body.get("n", 1), self._most or body.get("n", 1))
        first = body.get("seed")
        seeds = [next(self._seeds) if first is None else first + n for n in range(wanted)]
        return Asked(
            body[field],
            seeds,
            body.get("max_completion_tokens") or body.get("max_tokens") or 64,
            body.get("temperature", 1.0),
            body.get("stop") or [],
        )

    def _refusal(self, request: Request) -> Response | None:
        if self._key is None or request.headers.get("Authorization") == f"Bearer {self._key}":
            return None
        return _error(401, "Incorrect API key provided.")


def _as_stream(answer: dict[str, Any]) -> Response:
    """The answer to a chat as a stream: an event with the texts, and one that ends them."""
    said = [{"index": choice["index"], "delta": choice["message"]} for choice in answer["choices"]]
    ended = [
        {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        for choice in answer["choices"]
    ]
    shared = {**answer, "id": "stream", "object": "chat.completion.chunk", "created": 0}
    events = [json.dumps({**shared, "choices": choices}) for choices in (said, ended)]
    text = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
    return Response(text, media_type="text/event-stream")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


@contextmanager
def serve(service: Service) -> Generator[Service]:
    """Serve it from a thread on a free port of loopback; `service.url` says where."""
    with listening(service.app()) as url:
        service.url = f"{url}/v1"
        yield service


@contextmanager
def listening(app: Any) -> Generator[str]:
    """Serve any ASGI application from a thread; yields `http://127.0.0.1:PORT`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
