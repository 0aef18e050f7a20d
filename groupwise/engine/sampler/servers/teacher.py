"""A teacher at an endpoint: servers of vLLM or SGLang, or any that echo a prompt of token ids with its log-probabilities.

Prompt and completion are sent as one prompt of token ids. Retries and pauses are those of `server_pool.py`. That the endpoint has the
policy's tokens is checked by content: before the first step it tokenises texts, and the ids must be those of the policy's tokenizer. An
echoed prompt also has the texts of its tokens, which are compared each time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from groupwise.api.openai_client.client import Endpoint
from groupwise.api.openai_client.response_parsing import excerpt, read_json
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.retry import Timing
from groupwise.core.types import PromptLogprobs, TopLogprobs
from groupwise.engine.models.teacher_config import TeacherConfig
from groupwise.engine.models.tokenizer_agreement import PROBES
from groupwise.engine.sampler.servers.completions import prompt_body, read_prompt
from groupwise.engine.sampler.servers.server_pool import Server, Servers
from groupwise.engine.sampler.servers.sglang import SglangServer

logger = logging.getLogger(__name__)

NO_ROUTE = frozenset({404, 405, 501})
"""Statuses of servers that do not tokenise."""


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """The log-probabilities that the teacher gives to the tokens of a completion."""

    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()
    """Its most probable tokens at each place, if they were asked for."""


class EndpointTeacher:
    """Asks the servers of an endpoint for the log-probabilities of completions."""

    def __init__(
        self,
        config: TeacherConfig,
        name: str,
        tokenizer: Any,
        top: int,
        timing: Timing | None = None,
    ) -> None:
        """`name`: the model at the servers; `top`: how many of the most probable tokens are wanted at each place."""
        timing = timing or Timing()
        kind = SglangServer if config.engine == "sglang" else Server
        self._servers = Servers(
            [
                kind(
                    Endpoint(url, name, config.api_key_env, config.timeout),
                    config.concurrency,
                    timing,
                )
                for url in config.urls
            ],
            config.server_timeout,
            timing,
            lambda: "Start one there (teacher.url)",
            server_timeout_key="teacher.server_timeout",
        )
        self._echoes = config.engine == "openai"
        self._name, self._tokenizer, self._top = name, tokenizer, top

    async def check(self) -> None:
        """Raise UsageError unless the endpoint's tokens are the policy's, EndpointError if it does not answer."""
        for text in PROBES:
            own = [*self._tokenizer(text, add_special_tokens=False)["input_ids"]]
            theirs = await self._tokenised(text)
            if theirs is None:
                if not self._echoes:
                    logger.warning(
                        "the teacher's endpoint has no route /tokenize, so that nothing says whether its tokens are the policy's"
                    )
                break
            if theirs != own:
                raise UsageError(
                    f"The teacher {self._name} at the endpoint has other tokens than the policy: {text!r} is {theirs[:12]} there and "
                    f"{own[:12]} here. Distillation compares probabilities token by token, so take a teacher with the same tokenizer."
                )
        probe = tuple(self._tokenizer(PROBES[0], add_special_tokens=False)["input_ids"])
        await self.logprobs(probe[:1], probe[1:])

    async def logprobs(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> TeacherAnswer:
        """Its numbers for a completion after a prompt. Raises EndpointError if no server has answered in time."""
        ids = (*prompt_ids, *completion_ids)

        async def ask(server: Server) -> PromptLogprobs:
            if self._echoes:
                return await server.complete(
                    _echo_body(self._name, ids), lambda answer: self._read_echo(answer, ids)
                )
            return await server.complete(
                prompt_body(self._name, ids, self._top),
                lambda answer: read_prompt(answer, self._name, ids, self._top),
            )

        found = await self._servers.ask(ask)
        first = len(prompt_ids) - 1
        top = found.top_logprobs[first:]
        if short := next((best for best in top if len(best) < self._top), None):
            raise EndpointError(
                f"answered {len(short)} most probable tokens where algorithm.top_k is {self._top}; start the server with --max-logprobs "
                f"{self._top} or more, or lower top_k"
            )
        return TeacherAnswer(found.logprobs[first:], top)

    async def _tokenised(self, text: str) -> list[int] | None:
        """The ids of a text at the endpoint; None if it has no route for that."""

        async def ask(server: Server) -> list[int]:
            address = server.url.removesuffix("/v1") + "/tokenize"
            body = {"model": self._name, "prompt": text, "add_special_tokens": False}
            return await server.client.ask("POST", address, body, _read_tokens, 0)

        try:
            return await self._servers.ask(ask)
        except EndpointError as error:
            if error.status in NO_ROUTE:
                return None
            raise

    def _read_echo(self, answer: bytes, ids: Sequence[int]) -> PromptLogprobs:
        """The log-probabilities of an echoed prompt, whose tokens must have the texts that they have here."""
        choices: Any = read_json(answer).get("choices")
        try:
            content: Mapping[str, Any] = choices[0]["logprobs"]
            tokens, values = [*content["tokens"]], [*content["token_logprobs"]]
        except (KeyError, IndexError, TypeError):
            raise EndpointError(
                "answered no log-probabilities of an echoed prompt. The server must take token ids with echo and logprobs in "
                f"/v1/completions, as groupwise serve does: {excerpt(answer)}"
            ) from None
        if len(values) < len(ids):
            raise EndpointError(
                f"answered log-probabilities of {len(values)} tokens for a prompt of {len(ids)}: {excerpt(answer)}"
            )
        own = [self._tokenizer.decode([token]) for token in ids]
        for place, (theirs, mine) in enumerate(zip(tokens, own, strict=False)):
            # A part of a character has no text of its own, which servers show in different ways.
            if "\ufffd" not in mine and theirs.strip() and theirs.strip() != mine.strip():
                raise UsageError(
                    f"The teacher {self._name} at the endpoint has other tokens than the policy: {ids[place]} is {theirs!r} there and "
                    f"{mine!r} here. Distillation compares probabilities token by token, so take a teacher with the same tokenizer."
                )
        return PromptLogprobs(tuple(map(float, values[1 : len(ids)])))


def _echo_body(name: str, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": [*ids],
        "max_tokens": 0,
        "temperature": 1.0,
        "echo": True,
        "logprobs": 0,
    }


def _read_tokens(answer: bytes) -> list[int]:
    tokens: object = read_json(answer).get("tokens")
    if not isinstance(tokens, list):
        raise EndpointError(f"answered no tokens of a text: {excerpt(answer)}")
    return cast("list[int]", tokens)
