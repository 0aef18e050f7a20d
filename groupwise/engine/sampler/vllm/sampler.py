"""A sampler whose completions are drawn by one or several vLLM servers. It sends token ids; they return token ids and log-probabilities.

load       read the published adapter here and compute its fingerprint; each server loads it under a new name,
completes fixed prompts (`probe.py`), and unloads the previous one
generate   send each member as a request with its own seed to the least busy server (`servers.py`)

A server is prepared when it is first needed, and again whenever it may have been restarted: after a lost connection, or when it does not
know the adapter. A server that turns out to serve other weights ends the run. vLLM's results vary, so the same seed may draw other tokens
a second time; the run trains on the drawn tokens, with the probabilities that they had on the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from groupwise.core.errors import EndpointError, RunError, UsageError
from groupwise.core.interruption import gather_all
from groupwise.core.types import Completion, GroupRequest, Policy, PromptLogprobs, SamplingParams
from groupwise.engine.sampler.rules import refuse_misfit, refuse_other_weights
from groupwise.engine.sampler.vllm import probe
from groupwise.engine.sampler.vllm.adapters import (
    UNLOAD,
    SharedFolder,
    adapter_name,
    list_models,
    serve_adapter,
)
from groupwise.engine.sampler.vllm.servers import Server, Servers
from groupwise.engine.sampler.vllm.wire import (
    Drawn,
    prompt_body,
    read_completion,
    read_prompt,
    refuse_what_differs,
    request_body,
)

T = TypeVar("T")

ATTEMPTS = 3
"""How often a server may answer that it does not know an adapter that it has just loaded."""


class PolicyWitness(Protocol):
    """Log-probabilities under the published weights, read from the files; `groupwise.engine.sampler.vllm.witness` computes them."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def read(self, folder: str) -> None: ...
    def fingerprint(self) -> str: ...
    def logprobs(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        temperature: float,
        plain: bool = False,
    ) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class Served:
    """The weights that all servers must serve now."""

    name: str
    """Name of the model in each request."""
    version: int
    fingerprint: str
    folder: str | None = None
    """Folder of the adapter, as a path on the servers; None: the base without adapter."""
    policy: Policy | None = None


class VllmSampler:
    """A `groupwise.core.types.Sampler` over HTTP."""

    def __init__(
        self,
        servers: Servers,
        witness: PolicyWitness,
        tokenizer: Any,
        *,
        base: str,
        key_length: int,
        tolerance: float,
        shared: SharedFolder | None = None,
        begin: Callable[[], Awaitable[None]] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        """`base`: the servers' name for the base. `key_length`: most tokens of prompt and completion. `tolerance`: in nats, see
        `probe.check_logprobs`. `shared`: None if the servers can read the folder of the publications. `begin` and `end` are given for a
        server of this run: `begin` starts it and waits until it answers, and may be called repeatedly."""
        self._servers = servers
        self._witness = witness
        self._tokenizer = tokenizer
        self._base = base
        self._key_length = key_length
        self._tolerance = tolerance
        self._shared = shared
        self._begin = begin
        self._end = end
        self._served: Served | None = None
        self._under_way = 0

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`. Raises `EndpointError` for an invalid answer."""
        refuse_misfit(request, self._key_length)
        refuse_what_differs(request.params, self._tokenizer.eos_token_id)
        served = self._served
        if served is None:
            raise RunError("The sampler has been given no weights yet: `load` comes first.")
        self._under_way += 1
        try:
            return tuple(
                await gather_all(self._draw_member(served, request, seed) for seed in request.seeds)
            )
        finally:
            self._under_way -= 1

    async def prompt_logprobs(self, prompt_ids: tuple[int, ...], top: int) -> PromptLogprobs:
        """The log-probabilities of a prompt's tokens, with the `top` most probable at each position; see `TorchSampler.prompt_logprobs`."""
        refuse_misfit(GroupRequest(0, prompt_ids, (0,), SamplingParams(1)), self._key_length)
        served = self._served
        if served is None:
            raise RunError("The sampler has been given no weights yet: `load` comes first.")

        async def ask(server: Server, served: Served) -> PromptLogprobs:
            def read(answer: bytes) -> PromptLogprobs:
                return read_prompt(answer, served.name, prompt_ids, top)

            body = prompt_body(served.name, prompt_ids, top)
            return await server.client.ask("POST", "/completions", body, read, 0)

        self._under_way += 1
        try:
            return await self._servers.ask(lambda server: self._ask_served(server, served, ask))
        finally:
            self._under_way -= 1

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`. Raises UsageError for servers that are not set up correctly."""
        if self._under_way:
            raise RunError(
                "The sampler was given new weights while completions of the old ones were on their way."
            )
        if policy.kind != "adapter":
            raise UsageError(
                f"{policy.path} holds all weights of a model, but the servers of sampler.url take adapters alone. Train an adapter (lora), "
                "or leave sampler.engine out."
            )
        previous, self._served = self._served, None
        self._witness.read(policy.path)
        refuse_other_weights(policy, self._witness.fingerprint())
        folder = policy.path if self._shared is None else self._shared.put(policy)
        name = adapter_name(policy)
        await self._serve_adapter(Served(name, policy.version, policy.fingerprint, folder, policy))
        if previous is not None and previous.name != name:
            self._remove_adapter(previous)

    async def serve_base(self) -> None:
        """Serve the base without adapter."""
        await self._serve_adapter(Served(self._base, 0, self._witness.fingerprint()))

    def fingerprint(self) -> str:
        """Fingerprint of the published files as read here; the servers' answers have been checked against these weights."""
        return self._witness.fingerprint()

    def close(self) -> None:
        """Make the servers unload the adapter, or end the run's own server. May be repeated."""
        if self._end is not None:
            self._served = None
            self._end()
            return
        served, self._served = self._served, None
        if served is None or served.policy is None:
            return
        for server in self._servers.all:
            if server.ready == served.name:
                server.tell(UNLOAD, {"lora_name": served.name})
            server.ready = None
        self._remove_adapter(served)

    def _remove_adapter(self, served: Served) -> None:
        if self._shared is not None and served.policy is not None:
            self._shared.remove(served.policy)

    # --- preparing servers --------------------------------------------------------------------------

    async def _serve_adapter(self, served: Served) -> None:
        """Prepare all servers that answer; at least one must."""
        if self._begin is not None:
            await self._begin()
        self._served = served
        await gather_all(self._try_to_ready(server, served) for server in self._servers.all)
        await self._servers.ask(partial(self._prepare_once, served=served))

    async def _try_to_ready(self, server: Server, served: Served) -> None:
        """Prepare a server; one that does not answer gets no requests for a while."""
        try:
            await self._prepare_once(server, served)
        except EndpointError as error:
            if not error.may_pass:
                raise
            server.note_failure(error)
        else:
            server.note_answer()

    async def _prepare_once(self, server: Server, served: Served) -> None:
        async with server.preparing:
            for attempt in range(ATTEMPTS):
                if server.ready == served.name:
                    return
                try:
                    await self._prepare_server(server, served)
                except EndpointError as error:
                    if error.status != 404 or attempt == ATTEMPTS - 1:
                        raise

    async def _prepare_server(self, server: Server, served: Served) -> None:
        """Load the adapter into a server, and compare the server's log-probabilities with those of the weights here."""
        models = await list_models(server)
        base = models.get(self._base)
        if base is None:
            raise UsageError(
                f"{server.url} serves no model {self._base!r}; it serves: {', '.join(sorted(models)) or 'none'}. Set sampler.served_model "
                "to the name of the base there, or start vLLM with that --served-model-name."
            )
        if base.longest is not None and base.longest < self._key_length:
            raise UsageError(
                f"{server.url} takes {base.longest} tokens of prompt and completion, but this run has up to {self._key_length}. Start vLLM "
                f"with --max-model-len {self._key_length}, or lower data.max_prompt_length or sampler.max_completion_length."
            )
        if served.folder is not None:
            await serve_adapter(server, served.name, served.folder, models)
        prompts = [tuple(self._tokenizer(text)["input_ids"]) for text in probe.TEXTS]
        completions = await gather_all(
            self._request_completion(
                server,
                served,
                seed=probe.SEED,
                request=GroupRequest(0, prompt, (probe.SEED,), probe.PARAMS),
            )
            for prompt in prompts
        )
        answers = list(
            zip(prompts, (completion.token_ids for completion in completions), strict=True)
        )
        logprobs = [value for completion in completions for value in completion.logprobs]
        # Computed by the learner's model, which has the same base.
        expected = self._logprobs_here(answers, adapter=served.folder is not None)
        probe.check_logprobs(
            server.url, served.name, logprobs, expected.pop(""), expected, self._tolerance
        )
        server.ready = served.name

    def _logprobs_here(
        self, answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, adapter: bool
    ) -> dict[str, list[float]]:
        """Log-probabilities of the tokens under the weights here. The key "" is correct; any other key names the step that is left out."""
        hot = probe.PARAMS.temperature
        ways: dict[str, tuple[float, bool]] = {"": (hot, False), probe.NOT_PROCESSED: (1.0, False)}
        if adapter:
            ways[probe.NOT_APPLIED] = (hot, True)
        return {
            lacking: [
                value
                for prompt, ids in answers
                for value in self._witness.logprobs(prompt, ids, temperature, plain=plain)
            ]
            for lacking, (temperature, plain) in ways.items()
        }

    # --- one completion ---------------------------------------------------------------------------

    async def _draw_member(self, served: Served, request: GroupRequest, seed: int) -> Completion:
        completion = await self._servers.ask(
            lambda server: self._ask_served(
                server, served, partial(self._request_completion, seed=seed, request=request)
            )
        )
        return Completion(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            seed=seed,
            policy_version=served.version,
            fingerprint=served.fingerprint,
            top_logprobs=completion.top_logprobs,
        )

    async def _ask_served(
        self, server: Server, served: Served, ask: Callable[[Server, Served], Awaitable[T]]
    ) -> T:
        """Ask a server that is prepared; prepare it again if it has been restarted since."""
        for attempt in range(ATTEMPTS):
            await self._prepare_once(server, served)
            try:
                return await ask(server, served)
            except EndpointError as error:
                if error.status != 404 or attempt == ATTEMPTS - 1:
                    raise
                server.ready = None
        raise AssertionError("it is answered or given up")

    async def _request_completion(
        self,
        server: Server,
        served: Served,
        *,
        seed: int,
        request: GroupRequest,
    ) -> Drawn:
        prompt_ids, params, top = request.prompt_ids, request.params, request.top_logprobs

        def read(answer: bytes) -> Drawn:
            size = self._witness.vocabulary
            return read_completion(
                answer, served.name, prompt_ids, params, size, self._decode_text, top
            )

        body = request_body(served.name, prompt_ids, seed, params, top)
        return await server.client.ask("POST", "/completions", body, read, 0)

    def _decode_text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
