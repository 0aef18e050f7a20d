"""The address at which an environment of another process asks the policy: the protocol of OpenAI on loopback, served by the run.

Each attempt has an address of its own, whose path holds a random word, so that a program that knows nothing of us can be pointed to it
by its base URL alone. What is sampled there is kept by `PolicyCalls`, under the ids that the answers carry.

How a completion is drawn is the run's business, because it is trained on: what a program says about it (its temperature, `top_p`, a
seed) is ignored, and so are fields that this protocol does not have; each is logged once. A schema or a call that would have to be
forced is refused: the learner could not compute its probability.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from groupwise.api.http import strict_json
from groupwise.api.http.listening import Uvicorn, bind, url_at, uvicorn_config
from groupwise.api.schemas.openai import ChatRequest, ModelData, ModelList, TextRequest
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.api.schemas.responses import ResponsesRequest
from groupwise.api.schemas.template_columns import TOOLS
from groupwise.core.errors import TaskError
from groupwise.core.types import EndedBy, Message, Rollout, Sampler
from groupwise.engine.models.tokens import call_markers, completion_text, render_prompt
from groupwise.tasks.data.messages import Unusable, messages_of
from groupwise.tasks.openai.answers import StreamEncoder, full_response
from groupwise.tasks.openai.completed import Completed, describe_tokens, write_completion
from groupwise.tasks.openai.errors import SHOULD_RETRY, error_of, status_of
from groupwise.tasks.openai.generation_request import (
    GenerationRequest,
    StorageHeaders,
    field_refusal,
    parse_request,
)
from groupwise.tasks.openai.responses import (
    ResponseEncoder,
    chat_request,
    in_own_names,
    kept_response,
    messages_of_input,
    response_of,
)
from groupwise.tasks.openai.tools import call_format_of
from groupwise.tasks.rollouts.dialogue import first_ids
from groupwise.tasks.rollouts.rollout_request import RolloutRequest
from groupwise.tasks.rollouts.single import policy_segment
from groupwise.tasks.rollouts.trajectory import Turn

logger = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the model; any other is taken for it, because programs have names of their own written into them."""
HOST = "127.0.0.1"
DECIDED_BY_THE_RUN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "top_logprobs", "store", "metadata"),
)
"""Fields of a request that the run decides."""
MAX_CHARACTERS_OF_A_TOKEN = 256
"""No known vocabulary has a longer token. A message that exceeds a prompt by this is refused before it is tokenised, since 10 MB keep the
run's event loop busy for 10 s."""
SESSION = "x-session-id"
RETRY_COUNT = "x-stainless-retry-count"
"""Header of OpenAI's client: how often it has sent this request before."""


class PolicyCalls:
    """One attempt's calls of the policy: what it may ask, and what was sampled for it."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Any,
        rollout_request: RolloutRequest,
        member: int,
        max_turns: int,
        longest: int,
    ) -> None:
        """`longest`: most tokens of a prompt and its completion together."""
        self.tokenizer = tokenizer
        self.turns: dict[str, Turn] = {}
        """What was sampled, by the id of its answer, in the order of completion."""
        self.sessions: dict[str, str | None] = {}
        """What their requests said in the header `X-Session-ID`, by which an environment tells its agents apart."""
        self.messages: dict[str, Message] = {}
        """What was answered, by id, as messages of the assistant."""
        self.kept: dict[str, list[dict[str, Any]]] = {}
        """Conversations of /responses by the id of their last response."""
        self.cut_by: EndedBy | None = None
        """The limit that refused a call."""
        self.failure: Exception | None = None
        """An error of the sampler, which is the run's."""
        self._sampler, self._rollout_request, self._member = sampler, rollout_request, member
        self._max_turns, self._longest = max_turns, longest
        self._begun = 0
        self._in_flight, self._waited, self._since = 0, 0.0, 0.0

    @property
    def waited(self) -> float:
        """How many seconds the environment has waited for the policy so far."""
        return self._waited + (time.monotonic() - self._since if self._in_flight else 0.0)

    async def complete(
        self, generation_request: GenerationRequest, session: str | None = None
    ) -> Completed:
        """Sample one completion. Refuses what cannot be sampled or trained on."""
        if self._in_flight == 0:
            self._since = time.monotonic()
        self._in_flight += 1
        try:
            return await self._complete(generation_request, session)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._waited += time.monotonic() - self._since

    async def _complete(
        self, generation_request: GenerationRequest, session: str | None
    ) -> Completed:
        _refuse_untrainable(generation_request)
        if self._begun == self._max_turns:
            self.cut_by = "turns"
            raise field_refusal(
                "messages",
                f"this attempt has had its {self._max_turns} completions (rollout.max_turns)",
            )
        ids = self._prompt_ids(generation_request)
        room = self._longest - len(ids)
        if room < 1:
            raise self._too_long(f"{len(ids)}")
        turn = self._begun
        self._begun += 1
        own = self._rollout_request.params
        request = self._rollout_request.sampler_request(
            ids,
            [self._rollout_request.seed(self._member, turn)],
            max_tokens=min(
                generation_request.sampling.max_tokens or own.max_tokens, own.max_tokens, room
            ),
            stop=(*own.stop, *(stop for stop in generation_request.stops if stop not in own.stop)),
        )
        try:
            (completion,) = await self._sampler.generate(request)
        except Exception as error:  # of the run, which ends by it; the program only sees that
            self.failure = error
            raise Refusal("internal") from error
        keep = (
            call_markers(self.tokenizer)
            if generation_request.columns.get(TOOLS)
            else frozenset[int]()
        )
        rollout = Rollout(
            draw=self._rollout_request.draw,
            member=self._member,
            attempt=0,
            prompt_ids=ids,
            segments=(policy_segment(completion, request.params),),
            completion=completion_text(self.tokenizer, completion.token_ids, keep),
        )
        details = None
        if generation_request.logprobs:
            details = await describe_tokens(rollout, None, None, self._token_texts)
        id = secrets.token_hex(12)
        choice = write_completion(rollout, generation_request, details)
        calls = [{"name": call.name, "arguments": call.arguments} for call in choice.calls]
        self.messages[id] = {
            "role": "assistant",
            "content": choice.text,
            **({"tool_calls": calls} if calls else {}),
        }
        prompt = next(iter(generation_request.prompts))
        if isinstance(prompt, tuple):
            prompt = render_prompt(self.tokenizer, ids)
        self.turns[id], self.sessions[id] = Turn(prompt, rollout), session
        return Completed(
            id=id,
            group=None,
            run=MODEL,
            step=completion.policy_version,
            fingerprint=completion.fingerprint,
            created=time.time(),
            prompt_tokens=len(ids),
            choices=(choice,),
        )

    def _prompt_ids(self, generation_request: GenerationRequest) -> tuple[int, ...]:
        prompt = generation_request.prompts[0]
        if isinstance(prompt, tuple):
            vocabulary = len(self.tokenizer)
            if not prompt or any(not 0 <= id < vocabulary for id in prompt):
                raise field_refusal(
                    "prompt", f"has no tokens, or others than 0 to {vocabulary - 1}"
                )
            return prompt
        try:
            prompt = prompt if isinstance(prompt, str) else messages_of(prompt)
            texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
            most = self._longest * MAX_CHARACTERS_OF_A_TOKEN
            if any(isinstance(text, str) and len(text) > most for text in texts):
                raise self._too_long(f"one of more than {most} characters")
            return first_ids(self.tokenizer, prompt, (), generation_request.columns)
        except (TaskError, Unusable) as error:
            raise field_refusal(generation_request.field_names["prompt"], str(error)) from None

    def _too_long(self, length: str) -> Refusal:
        """The refusal of a prompt for which there is no room; it also marks the attempt as cut off."""
        self.cut_by = "tokens"
        return Refusal(
            "prompt_too_long",
            f"This model's maximum context length is {self._longest} tokens, and the messages have {length}.",
        )

    async def _token_texts(self, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(render_prompt(self.tokenizer, [id]) for id in token_ids)


@dataclass(slots=True)
class _Attempt:
    calls: PolicyCalls
    answers: dict[str, asyncio.Task[Response]]
    """The newest answer for each hash of a request, so that a repeated request gets the same one."""
    under_way: set[asyncio.Task[Response]]


@dataclass(frozen=True, slots=True)
class _Call:
    """One request of a program."""

    calls: PolicyCalls
    body: bytes
    session: str | None

    async def complete(self, request: ChatRequest | TextRequest) -> Completed:
        generation_request = parse_request(request, StorageHeaders())
        template = _template(self.calls.tokenizer)
        return await self.calls.complete(
            generation_request.with_call_format(call_format_of(template)), self.session
        )


class PolicyEndpoint:
    """Serves the addresses of all attempts."""

    def __init__(self) -> None:
        self._attempts: dict[str, _Attempt] = {}
        self._ignored: set[str] = set()
        self._server: Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self._origin = ""

    async def start(self) -> None:
        """Listen on a free port."""
        if self._serving is not None:
            return
        routes = {
            "chat/completions": self._chat,
            "completions": self._text,
            "responses": self._responses,
        }
        app = Starlette(
            routes=[
                Route("/{key}/v1/models", self._models),
                *(
                    Route(f"/{{key}}/v1/{path}", self._handler(answer), methods=["POST"])
                    for path, answer in routes.items()
                ),
            ]
        )
        config = uvicorn_config(app, certificate=None, key=None, proxy=None)
        self._server = Uvicorn(config)
        listening = asyncio.Event()

        async def serve(server: Uvicorn) -> None:
            with bind(HOST, 0) as listener:
                self._origin = url_at("http", *listener.getsockname()[:2])
                listening.set()
                await server.serve(sockets=[listener])

        self._serving = asyncio.ensure_future(serve(self._server))
        await self._server.listening.wait()

    def open(self, calls: PolicyCalls) -> tuple[str, str]:
        """The base URL of an attempt, and its key."""
        key = secrets.token_urlsafe(16)
        self._attempts[key] = _Attempt(calls, {}, set())
        return f"{self._origin}/{key}/v1", key

    async def end(self, key: str) -> None:
        """Answer no more calls of an attempt; those under way are given up."""
        attempt = self._attempts.pop(key)
        for answer in attempt.under_way:
            answer.cancel()
        await asyncio.gather(*attempt.under_way, return_exceptions=True)

    async def close(self) -> None:
        """Stop listening."""
        for key in list(self._attempts):
            await self.end(key)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
        self._server = self._serving = None

    # --- requests -------------------------------------------------------------------------------

    def _handler(self, answer: Callable[[_Call], Awaitable[Response]]) -> Callable[..., Any]:
        """A route: an answer of the policy, or a refusal in OpenAI's form."""

        async def handle(request: Request) -> Response:
            attempt = self._attempts.get(request.path_params["key"])
            if attempt is None:
                return _refused(Refusal("not_found", "This attempt has ended, or never began."))
            body = await request.body()
            name = hashlib.sha256(request.url.path.encode() + body).hexdigest()
            task = attempt.answers.get(name)
            if task is None or request.headers.get(RETRY_COUNT, "0") == "0":
                call = _Call(attempt.calls, body, request.headers.get(SESSION))
                task = asyncio.ensure_future(self._answered(answer, call))
                attempt.answers[name] = task
                attempt.under_way.add(task)
                task.add_done_callback(attempt.under_way.discard)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    return _refused(Refusal("not_found", "This attempt has ended."))
                raise

        return handle

    async def _answered(
        self, answer: Callable[[_Call], Awaitable[Response]], call: _Call
    ) -> Response:
        try:
            return await answer(call)
        except strict_json.NotStrict as error:
            return _refused(Refusal("invalid_request", f"The body cannot be read: {error.msg}."))
        except Refusal as refusal:
            return _refused(refusal)

    async def _models(self, request: Request) -> Response:
        """The one model that there is."""
        if request.path_params["key"] not in self._attempts:
            return _refused(Refusal("not_found", "This attempt has ended, or never began."))
        model = ModelData(id=MODEL, created=0, owned_by="groupwise", fingerprint="")
        return _json(ModelList(data=[model]))

    async def _chat(self, call: _Call) -> Response:
        request = self._read(ChatRequest, call)
        completed = await call.complete(request)
        if not request.stream:
            return _json(full_response("chat", completed))
        usage = request.includes_usage
        return _stream(completed, StreamEncoder("chat", MODEL, int(time.time()), usage=usage))

    async def _text(self, call: _Call) -> Response:
        request = self._read(TextRequest, call)
        completed = await call.complete(request)
        if not request.stream:
            return _json(full_response("text", completed))
        usage = request.includes_usage
        return _stream(completed, StreamEncoder("text", MODEL, int(time.time()), usage=usage))

    async def _responses(self, call: _Call) -> Response:
        request = self._read(ResponsesRequest, call)
        messages, kept = messages_of_input(request), call.calls.kept
        if (previous := request.previous_response_id) is not None:
            if previous not in kept:
                problem = f"there is no response {previous[:200]!r} of this attempt"
                error = FieldError(field="previous_response_id", message=problem)
                raise Refusal("unknown_response", problem, errors=[error])
            messages = [*kept[previous], *messages]
        try:
            completed = await call.complete(chat_request(request, messages))
        except Refusal as refusal:
            raise in_own_names(refusal) from None
        response = response_of(request, "", "", 0.0, completed)
        kept[response.id] = kept_response(request, messages, completed).messages
        if request.stream:
            return _stream(completed, ResponseEncoder(request, time.time()))
        return _json(response)

    def _read(self, kind: type[Any], call: _Call) -> Any:
        """The request without what the run decides. Refuses what is malformed."""
        body = strict_json.parse(call.body)
        if not isinstance(body, dict):
            raise Refusal("invalid_request", "The body is not a JSON object.")
        fields = cast("dict[str, Any]", body)
        ignored = {
            name for name in fields if name in DECIDED_BY_THE_RUN or name not in kind.model_fields
        }
        if "reasoning_effort" not in _template(call.calls.tokenizer):
            ignored.add("reasoning_effort")
        for name in ignored - self._ignored:
            if fields.get(name) is not None:
                self._ignored.add(name)
                logger.info(
                    "an environment's program sends `%s`, which is ignored: the run decides how completions are drawn",
                    name[:100],
                )
        taken = {name: value for name, value in fields.items() if name not in ignored}
        try:
            return kind.model_validate({**taken, "model": MODEL})
        except ValidationError as error:
            raise Refusal.of_fields(error, kind) from None


def _refuse_untrainable(request: GenerationRequest) -> None:
    """Refuse several completions or prompts at once, and fields that force what is drawn."""
    if request.n > 1:
        raise field_refusal("n", f"is {request.n}; ask for one completion at a time")
    if len(request.prompts) > 1:
        raise field_refusal("prompt", f"has {len(request.prompts)} texts; ask one by one")
    if (processing := request.sampling.processing) is not None:
        raise field_refusal(
            request.field_names["tool_calls" if processing.tool_calls else "json_schema"],
            "would force what is drawn, which cannot be trained on; leave it to the model",
        )


def _template(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _stream(completed: Completed, encoder: StreamEncoder | ResponseEncoder) -> Response:
    """The completion as the events of a stream, all at once."""
    text = completed.choices[0].text
    chunks = [
        *encoder.first_chunks(completed.id, 1),
        *([encoder.text_chunk(0, text)] if text else []),
        *encoder.last_chunks(completed),
    ]
    return Response(b"".join(chunks), media_type="text/event-stream")


def _refused(refusal: Refusal) -> Response:
    return Response(
        error_of(refusal.problem()).model_dump_json(),
        status_code=status_of(refusal.status),
        headers={SHOULD_RETRY: json.dumps(False)},
        media_type="application/json",
    )
