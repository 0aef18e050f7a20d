"""A sampler whose completions are drawn by one or several servers of vLLM, or of SGLang (`sglang.py`). It sends token ids; they return
token ids and log-probabilities.

load       read the published weights here and compute their fingerprint; each server takes them over (`WeightSync`),
and completes fixed prompts (`probe.py`)
generate   ask the least busy server (`server_pool.py`) for the members of a group, in one request unless each is to have its own seed

A server is prepared when it is first needed, and again whenever it may have been restarted: after a lost connection, or when it does not
know the adapter. A server that turns out to serve other weights ends the run. vLLM's results vary, so the same seed may draw other tokens
a second time, and seeds may be left to the servers; the run trains on the drawn tokens, with the probabilities that they had on the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from groupwise.core.errors import EndpointError, RunError, UsageError
from groupwise.core.interruption import gather_all, wait_until_done
from groupwise.core.types import (
    Completion,
    GroupRequest,
    Policy,
    PromptLogprobs,
    RouterShape,
    SamplingParams,
)
from groupwise.engine.sampler.rules import refuse_misfit, refuse_other_weights
from groupwise.engine.sampler.servers import probe
from groupwise.engine.sampler.servers.adapters import ListedModel, is_policy_name, list_models
from groupwise.engine.sampler.servers.completions import (
    Drawn,
    divide_group,
    prompt_body,
    read_completions,
    read_prompt,
    request_body,
)
from groupwise.engine.sampler.servers.probe import LocalPolicy
from groupwise.engine.sampler.servers.server_pool import Served, Server, Servers
from groupwise.engine.sampler.servers.spawned_server import SpawnedServer

T = TypeVar("T")

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a server may answer that it does not know an adapter that it has just loaded."""


class WeightSync(Protocol):
    """How published weights get into servers: as files of adapters (`adapters.py`), or as all weights of the model (`whole_weights.py`;
    `sglang.py`)."""

    kind: Literal["adapter", "full"]

    def offer(self, policy: Policy) -> Served:
        """Put a publication where the servers find it."""
        ...

    async def serve(
        self, server: Server, served: Served, models: Mapping[str, ListedModel]
    ) -> None:
        """Make a server serve what was offered. `models`: the server's list. Raises UsageError if the server was not started for that."""
        ...

    async def still_serves(self, server: Server, served: Served) -> bool:
        """False if the server has lost the weights since `serve`, so that its last answer may be another model's."""
        ...

    def forget(self, server: Server, served: Served) -> None:
        """Tell a server, from code that is not async, that the run needs it no longer."""
        ...

    def remove(self, served: Served) -> None:
        """Remove what `offer` copied, if anything."""
        ...


class ServerSampler:
    """A `groupwise.core.types.Sampler` over HTTP."""

    def __init__(
        self,
        servers: Servers,
        local_policy: LocalPolicy,
        tokenizer: Any,
        *,
        base: str,
        key_length: int,
        tolerance: float,
        seeded: bool = True,
        sync: WeightSync,
        own: SpawnedServer | None = None,
        routers: RouterShape | None = None,
    ) -> None:
        """`base`: the servers' name for the base. `key_length`: most tokens of prompt and completion. `tolerance`: in nats, see
        `probe.check_logprobs`. `seeded`: send the members' seeds. `own`: the only server, if this run starts it. `routers`: completions
        come with the experts that the server chose, of this shape; those that are wrong are left out, with one warning."""
        self._servers = servers
        self._local_policy = local_policy
        self._tokenizer = tokenizer
        self._base = base
        self._key_length = key_length
        self._tolerance = tolerance
        self._seeded = seeded
        self._sync = sync
        self._own = own
        self._routers = routers
        self._has_warned = False
        self._served: Served | None = None
        self._fingerprint: str | None = None
        self._requests = 0

    def follow_server(self, log: Path, report: Callable[[str], None]) -> None:
        """If this run starts the server: append the server's output to `log`, and report how its start goes."""
        if self._own is not None:
            self._own.follow(log, report)

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`. Raises `EndpointError` for an invalid answer."""
        refuse_misfit(request, self._key_length)
        self._servers.all[0].refuse(request.params, self._tokenizer.eos_token_id)
        served = self._served
        if served is None:
            raise RunError("The sampler has been given no weights yet: `load` comes first.")
        self._requests += 1
        try:
            parts = divide_group(request, self._seeded, self._routers)
            drawn = await gather_all(self._draw_members(served, part) for part in parts)
            return tuple(completion for part in drawn for completion in part)
        finally:
            self._requests -= 1

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
            return await server.complete(body, read)

        self._requests += 1
        try:
            return await self._servers.ask(lambda server: self._ask_served(server, served, ask))
        finally:
            self._requests -= 1

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`. Raises UsageError for servers that are not set up correctly."""
        if self._requests:
            raise RunError(
                "The sampler was given new weights while completions of the old ones were on their way."
            )
        if policy.kind != self._sync.kind:
            raise UsageError(
                f"{policy.path} holds all weights of a model, but lora is set, so the servers are given adapters alone. Set lora: null."
                if policy.kind == "full"
                else f"{policy.path} holds an adapter, but lora is null, so the servers are given whole models. Set lora, with its rank."
            )
        previous, self._served = self._served, None
        # A thread, because reading, hashing and copying take seconds for a large model.
        served = await wait_until_done(asyncio.to_thread(self._take_weights, policy))
        await self._prepare_all(served)
        if previous is not None and previous.folder != served.folder:
            self._sync.remove(previous)

    def _take_weights(self, policy: Policy) -> Served:
        """Read the published weights, check their fingerprint, and give them to the servers."""
        self._local_policy.read(policy.path)
        self._fingerprint = self._local_policy.fingerprint()
        refuse_other_weights(policy, self._fingerprint)
        return self._sync.offer(policy)

    async def serve_base(self) -> None:
        """Serve the base without adapter."""
        await self._prepare_all(Served(self._base, 0, await asyncio.to_thread(self.fingerprint)))

    def fingerprint(self) -> str:
        """Fingerprint of the published files as they were read here; the servers' answers have been checked against these weights. Before
        the first `load`, of the weights that are in memory here."""
        if self._fingerprint is None:
            self._fingerprint = self._local_policy.fingerprint()
        return self._fingerprint

    async def release_memory(self) -> None:
        """See `groupwise.core.types.SharesDevice.release_memory`: the run's own server sleeps, if it takes turns with the learner."""
        if self._own is None or self._requests:
            return
        try:
            await self._own.sleep()
        except EndpointError as error:
            if not error.is_retryable:
                raise
            self._own.server.note_failure(error)

    def close(self) -> None:
        """Make the servers forget the weights, or end the run's own server. May be repeated."""
        served, self._served = self._served, None
        if self._own is not None:
            self._own.close()
        if served is None or served.policy is None:
            return
        for server in self._servers.all if self._own is None else ():
            if server.ready == served:
                self._sync.forget(server, served)
            server.ready = None
        self._sync.remove(served)

    # --- preparing servers --------------------------------------------------------------------------

    async def _prepare_all(self, served: Served) -> None:
        """Prepare all servers that answer; at least one must."""
        self._served = served
        await gather_all(self._try_to_prepare(server, served) for server in self._servers.all)
        await self._servers.ask(partial(self._ensure_prepared, served=served))

    async def _try_to_prepare(self, server: Server, served: Served) -> None:
        """Prepare a server; one that does not answer gets no requests for a while."""
        try:
            await self._ensure_prepared(server, served)
        except EndpointError as error:
            if not error.is_retryable:
                raise
            server.note_failure(error)
        else:
            server.note_answer()

    async def _ensure_prepared(self, server: Server, served: Served) -> None:
        async with server.preparing:
            if self._own is not None:
                await self._own.wake(self._local_policy.give_back_memory)
            for attempt in range(ATTEMPTS):
                if server.ready == served:
                    return
                try:
                    await self._prepare_server(server, served)
                except EndpointError as error:
                    if error.status != 404 or attempt == ATTEMPTS - 1:
                        raise

    async def _prepare_server(self, server: Server, served: Served) -> None:
        """Load the weights into a server, and compare the server's log-probabilities with those of the weights here."""
        if self._own is not None:
            await self._own.ensure_running(served.folder and str(Path(served.folder).parent))
        models = await list_models(server)
        base = models.get(self._base) or await self._renamed_base(server, models)
        if base is None:
            raise UsageError(
                f"{server.url} serves no model {self._base!r}; it serves: {', '.join(sorted(models)) or 'none'}. Set sampler.served_model "
                "to the name of the base there, or start the server with that --served-model-name."
            )
        if base.longest is not None and base.longest < self._key_length:
            raise UsageError(
                f"{server.url} takes {base.longest} tokens of prompt and completion, but this run has up to {self._key_length}. Start it "
                f"with --max-model-len {self._key_length} (SGLang: --context-length), or lower data.max_prompt_length or "
                "sampler.max_completion_length."
            )
        if served.policy is not None:
            await self._sync.serve(server, served, models)
        prompts = [tuple(self._tokenizer(text)["input_ids"]) for text in probe.TEXTS]
        completions = await self._request_completions(
            server, served, prompts, 1, probe.SEED, probe.PARAMS
        )
        faults = [completion.routing_fault for completion in completions]
        if all(faults):
            raise UsageError(
                f"sampler.routing_replay is true, but {server.url} {faults[0]}. Start vLLM, 0.22 or newer, with "
                "--enable-return-routed-experts, or leave the key out."
            )
        answers = [
            (prompt, completion.token_ids)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        logprobs = [value for completion in completions for value in completion.logprobs]
        # Computed by the learner's model, which has the same base.
        expected = self._logprobs_here(answers, adapter=served.name != self._base)
        probe.check_logprobs(
            server.url, served.name, logprobs, expected.pop(""), expected, self._tolerance
        )
        if self._own is not None:
            self._own.note_served()
        server.ready = served

    async def _renamed_base(
        self, server: Server, models: Mapping[str, ListedModel]
    ) -> ListedModel | None:
        """The base of a server that calls it by the folder of the weights which a run of full fine-tuning has given it."""
        if not server.renames_base or self._sync.kind == "adapter":
            return None
        version = await server.weight_version()
        return next(iter(models.values()), None) if is_policy_name(version) else None

    def _logprobs_here(
        self, answers: Sequence[probe.Answer], *, adapter: bool
    ) -> dict[str, list[float]]:
        """Log-probabilities of the tokens under the weights here. The key "" is correct; any other key names the step that is left out."""
        hot = probe.PARAMS.temperature
        right, not_processed = self._local_policy.logprobs(answers, (hot, 1.0))
        found = {"": right, probe.NOT_PROCESSED: not_processed}
        if adapter:
            (found[probe.NOT_APPLIED],) = self._local_policy.logprobs(answers, (hot,), plain=True)
        return found

    # --- completions ------------------------------------------------------------------------------

    async def _draw_members(self, served: Served, request: GroupRequest) -> list[Completion]:
        async def ask(server: Server, served: Served) -> tuple[Drawn, ...]:
            return await self._request_completions(
                server,
                served,
                [request.prompt_ids],
                len(request.seeds),
                request.seeds[0] if self._seeded else None,
                request.params,
                request.top_logprobs,
            )

        drawn = await self._servers.ask(
            lambda server: self._ask_served(server, served, ask), len(request.seeds)
        )
        fault = next((one.routing_fault for one in drawn if one.routing_fault), None)
        if fault is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A vLLM server %s. The learner chooses the experts of such completions by itself; sampling/routing_lost counts them",
                fault,
            )
        return [
            Completion(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish_reason=completion.finish_reason,
                seed=seed,
                policy_version=served.version,
                fingerprint=served.fingerprint,
                top_logprobs=completion.top_logprobs,
                routed_experts=completion.routed_experts,
            )
            for seed, completion in zip(request.seeds, drawn, strict=True)
        ]

    async def _ask_served(
        self, server: Server, served: Served, ask: Callable[[Server, Served], Awaitable[T]]
    ) -> T:
        """Ask a server that is prepared; prepare it again if it has been restarted since."""
        for attempt in range(ATTEMPTS):
            await self._ensure_prepared(server, served)
            try:
                answer = await ask(server, served)
                if await self._sync.still_serves(server, served):
                    return answer
            except EndpointError as error:
                if error.status != 404 or attempt == ATTEMPTS - 1:
                    raise
            server.ready = None
        raise RunError(
            f"{server.url} has lost the weights of this run {ATTEMPTS} times in a row, right after it took them. Does another run give "
            "it weights, or is it started again and again? Each run needs servers of its own."
        )

    async def _request_completions(
        self,
        server: Server,
        served: Served,
        prompts: Sequence[Sequence[int]],
        count: int,
        seed: int | None,
        params: SamplingParams,
        top: int = 0,
    ) -> tuple[Drawn, ...]:
        def read(answer: bytes) -> tuple[Drawn, ...]:
            size = self._local_policy.vocabulary
            return read_completions(
                *(answer, served.name, prompts, count, params, size, self._decode_text, top),
                self._routers,
            )

        body = request_body(served.name, prompts, count, seed, params, top)
        return await server.complete(body, read)

    def _decode_text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
