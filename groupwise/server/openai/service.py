"""Completions for the OpenAI protocol, without HTTP: only sampled, or stored to be rewarded.

Completions that are only sampled need just the engine; their seeds are random, or derived from the client's seed. Stored completions are
treated as in /completions: the request waits for admission, gets a draw, and is in the ledger before the response is complete. A call for
one stored completion shares a group with calls of the same name or prompt (`groupwise.server.ledger.members`): the first call samples the
group, while the others wait for it, and each gets one member. A call of a trajectory (`groupwise.server.ledger.trajectories`) is sampled
alone; the group of its trajectory waits for admission once, when it is opened.

A stream polls the engine for the texts written so far. It sends prefixes of the same response that a call without a stream gets.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.openai import BY_IDS, ModelData
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import MAX_DRAW, StatusAnswer
from groupwise.core.errors import GroupwiseError
from groupwise.core.interruption import gather_all
from groupwise.core.types import Rollout, TopLogprobs
from groupwise.server.engine.engine_protocol import Engine, GroupSampleRequest, Sampled
from groupwise.server.ledger import idempotency, runs, trajectories
from groupwise.server.ledger.idempotency import StoredResponse
from groupwise.server.ledger.members import NAMED, UNNAMED, GroupKey
from groupwise.server.ledger.trajectories import Call, NewTrajectoryGroup, Place, SampledTurn
from groupwise.server.ledger.writer import Ledger
from groupwise.server.openai import storing
from groupwise.server.openai.storing import Also, Render, StoredCompletion, StoreOptions
from groupwise.server.run.conductor import Conductor, RunStatus
from groupwise.server.run.engine_errors import check_prompt_length, naming_field
from groupwise.server.run.policy_versions import LATEST
from groupwise.server.settings import ServerConfig
from groupwise.tasks.openai.completed import (
    Completed,
    CompletionChoice,
    TokenDetails,
    describe_tokens,
    streamable_text,
    write_completion,
)
from groupwise.tasks.openai.generation_request import Gather, GenerationRequest, field_refusal
from groupwise.tasks.openai.responses import KeptResponse
from groupwise.tasks.openai.tools import call_format_of
from groupwise.tasks.rollouts.seeds import derive

T = TypeVar("T")

POLL = 0.03
"""Seconds between two polls of a stream's texts so far: short enough that a reader sees smooth text."""
POLLED_AT_ONCE = 8
"""Number of streams that are polled that often. With more of them each is polled less often, because every poll decodes the whole text in
the engine, up to a millisecond for thousands of tokens: dozens of streams would take much of its time.
"""
MAX_SAMPLING = 512
"""Limit on completions sampled at once without being stored; requests beyond it are refused and may be sent again."""
MAX_LISTED = 8
"""Limit on the versions that a message lists."""
TRY_AGAIN = 1.0
"""Seconds after which a refused client may try again."""


class Host(Protocol):
    """The part of the server's service that is used here."""

    def active(self) -> Conductor:
        """The run that accepts new requests; raises a Refusal if there is none."""
        ...

    async def status(self) -> StatusAnswer:
        """Status of server and run."""
        ...

    async def wait_for_engine(self) -> Conductor:
        """The run that accepts new requests, once its engine accepts calls; raises a Refusal if that takes too long."""
        ...

    async def await_engine(self, work: Awaitable[T], conductor: Conductor) -> T:
        """Await the engine's answer; its errors become Refusals."""
        ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of one choice, in a stream."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """The first item of a stream, with its id; sent just before the first text."""

    id: str


@dataclass(slots=True)
class _Progress:
    """A request under way: its texts can be read here while they are written."""

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    engine: Engine | None = None
    """None: nothing can be read yet."""
    draws: tuple[int, ...] = ()
    n: int = 0
    """Number of choices per draw."""

    async def texts(self) -> list[str]:
        """The texts so far, one for each choice; empty if they are not known."""
        if self.engine is None:
            return []
        with suppress(GroupwiseError):  # raised where the completions are awaited
            texts_by_draw = await gather_all(self.engine.partial(draw) for draw in self.draws)
            if all(len(texts) >= self.n for texts in texts_by_draw):
                return [text for texts in texts_by_draw for text in texts[: self.n]]
        return []


@dataclass(frozen=True, slots=True)
class _Work:
    """A request under way: what it asks for, of which run, how its completions are stored, and how far they are."""

    request: GenerationRequest
    conductor: Conductor
    options: StoreOptions
    progress: _Progress


class OpenAIService:
    """The service of the routes under /v1."""

    def __init__(self, host: Host, ledger: Ledger, config: ServerConfig) -> None:
        self._host = host
        self._ledger = ledger
        self._config = config
        self._draws = itertools.count(MAX_DRAW)
        """Draws for completions that are only sampled: above the largest draw of groups."""
        self._sampling = 0
        self._streams = 0
        self._group_locks: dict[GroupKey, tuple[asyncio.Lock, int]] = {}
        """A lock for each group key, and the number of calls that use it."""

    # --- models ----------------------------------------------------------------------------------

    async def models(self) -> list[ModelData]:
        """The models now served: the newest policy, under its versioned name and as `latest`. Empty if nothing is served."""
        status = self._run_status()
        if status is None:
            return []
        run_row = await self._ledger.do(runs.read_run, status.run)
        return [
            ModelData(
                id=name,
                created=int(run_row.started_at),
                owned_by=status.run,
                fingerprint=status.policy.fingerprint,
            )
            for name in _model_names(status)
        ]

    async def model(self, name: str) -> ModelData:
        """One of the models; refuses with `unknown_model`."""
        for model in await self.models():
            if model.id == name:
                return model
        raise await self._unknown_model(name)

    def _run_status(self) -> RunStatus | None:
        try:
            return self._host.active().status
        except Refusal as refusal:
            if refusal.code not in ("not_started", "finished"):
                raise
            return None

    async def _unknown_model(self, name: str) -> Refusal:
        status = self._run_status()
        names = (
            "none, because no run is active" if status is None else ", ".join(_model_names(status))
        )
        problem = f"no policy is served under the name {name[:200]!r}. There are: {names}."
        served = None if status is None else status.version
        others = [
            f"{run}@{step}"
            for run, step in (await self._host.status()).versions
            if (run, step) != served
        ]
        if others:
            problem += f" GET /model has the files of {', '.join(others[-MAX_LISTED:])}."
        return Refusal("unknown_model", problem, field="model")

    # --- kept responses --------------------------------------------------------------------------

    async def kept_response(
        self, caller: Caller, id: str, field: str = "response_id"
    ) -> KeptResponse:
        """A response of /v1/responses. Refuses with `unknown_response`, which names `field`."""
        return await self._ledger.do(idempotency.read_response, caller, id, field)

    async def delete_response(self, caller: Caller, id: str) -> None:
        """Delete a kept response. Refuses with `unknown_response`."""
        await self._ledger.do(idempotency.delete_response, caller, id)

    # --- completions -----------------------------------------------------------------------------

    async def claim_answer(self, caller: Caller, retry: AnswerKey) -> str | None:
        """The key of the stored answer that this retry repeats; None if there is none."""
        return await self._ledger.do(storing.claim_answer, caller, retry)

    async def with_template(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the notation of tool calls that the model's chat template uses, unless the setting `tool_call_parser` names
        another. Refuses a `reasoning_effort` that the template does not know.

        Every request comes here first, so it waits here for an engine that is started again: the client of OpenAI would use up its few
        retries within seconds.
        """
        conductor = await self._host.wait_for_engine()
        if not request.columns:
            return request
        template, chosen = conductor.status.opened.chat_template, self._config.tool_call_parser
        if request.reasoning_effort is not None and not re.search(
            r"\breasoning_effort\b", template
        ):
            raise field_refusal(
                "reasoning_effort",
                f"is {request.reasoning_effort!r:.80}, but this model's chat template has no such argument, so that it would have no "
                'effect; leave it out, or give an argument that the template knows, as chat_template_kwargs: {"enable_thinking": false}',
            )
        return request.with_call_format(call_format_of(template) if chosen == "auto" else chosen)

    async def answer(
        self, request: GenerationRequest, caller: Caller, render: Render, also: Also | None = None
    ) -> StoredResponse:
        """The complete response. Stored completions, and what `also` stores, are on disk before it is returned."""
        return (await self._sample_and_store(request, caller, render, _Progress(), also)).answer

    async def stream(
        self, request: GenerationRequest, caller: Caller, render: Render, also: Also | None = None
    ) -> AsyncGenerator[StreamStarted | TextDelta | StoredCompletion]:
        """Yields `StreamStarted`, then texts as they are written, then the complete result. Stored completions are on disk before the last
        item.

        Refusals before the first text are raised by the first iteration. Closing the generator ends the sampling.
        """
        progress = _Progress()
        texts_sent = [""] * (len(request.prompts) * request.n)
        work = asyncio.create_task(self._sample_and_store(request, caller, render, progress, also))
        has_started = False
        self._streams += 1
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=POLL * max(1.0, self._streams / POLLED_AT_ONCE))
                texts = [streamable_text(text, request) for text in await progress.texts()]
                texts = texts_after_prompts(request, texts)
                if any(texts) and not has_started:
                    has_started = True
                    yield StreamStarted(progress.id)
                for delta in _text_deltas(texts_sent, texts):
                    yield delta
            stored = work.result()
            completed = stored.completed
            assert completed is not None, "no other request with its key was answered meanwhile"
            if not has_started:
                yield StreamStarted(completed.id)
            for delta in _text_deltas(texts_sent, [choice.text for choice in completed.choices]):
                yield delta
            yield stored
        finally:
            self._streams -= 1
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _sample_and_store(
        self,
        request: GenerationRequest,
        caller: Caller,
        render: Render,
        progress: _Progress,
        also: Also | None,
    ) -> StoredCompletion:
        conductor = self._host.active()
        _ = conductor.engine  # raises early if the engine is unavailable
        if request.model not in _model_names(conductor.status):
            raise await self._unknown_model(request.model)
        for prompt in request.prompts:
            if isinstance(prompt, tuple):
                continue  # the engine counts tokens
            check_prompt_length(prompt, conductor.status.opened, request.field_names["prompt"])
        options = StoreOptions(caller, conductor.request.lease_seconds, render, also)
        work = _Work(request, conductor, options, progress)
        if not request.store:
            return await self._sample_only(work)
        if request.gather is None:
            return await self._sample_group(work, request.n)
        if request.gather.trajectory is not None:
            return await self._sample_turn(work, request.gather)
        size = request.gather.size or conductor.request.num_completions_per_prompt
        settings_hash = request.hash_with(size)
        name = (
            f"{UNNAMED}{settings_hash}"
            if request.gather.name is None
            else f"{NAMED}{request.gather.name}"
        )
        group_key = GroupKey(conductor.status.run, caller.key_id, name, settings_hash)
        async with self._one_at_a_time(group_key):
            completion = await self._next_member(work, group_key)
            return completion or await self._sample_group(work, size, group_key)

    # --- completions that are only sampled --------------------------------------------------------

    async def _sample_only(self, work: _Work) -> StoredCompletion:
        request, conductor, options = work.request, work.conductor, work.options
        completions = len(request.prompts) * request.n
        if self._sampling and self._sampling + completions > MAX_SAMPLING:
            raise Refusal(
                "rate_limited",
                f"{self._sampling} completions are being sampled; beside them there is no room for {completions}. Ask again.",
                retry_after=TRY_AGAIN,
            )
        sampling = request.sampling
        sample_requests: list[GroupSampleRequest] = []
        for prompt in request.prompts:
            draw, columns = next(self._draws), request.columns
            # Random, so that a restarted server does not repeat itself.
            if request.sampling.seed is None:
                sampling = replace(sampling, seed=secrets.randbits(63))
            sample_requests.append(
                GroupSampleRequest(
                    draw,
                    prompt,
                    request.n,
                    sampling,
                    columns=columns,
                    trains=False,
                    top_logprobs=request.alternatives,
                    prompt_logprobs=request.alternatives
                    if request.echo and request.logprobs
                    else None,
                )
            )
        self._sampling += completions
        try:
            samples = await self._sample_all(work, sample_requests)
        finally:
            self._sampling -= completions
        first_sample = samples[0]
        choices = [
            choice
            for sample in samples
            for choice in await self._write_choices(work, sample.group.rollouts, sample)
        ]
        completed = Completed(
            id=work.progress.id,
            group=None,
            run=conductor.status.run,
            step=first_sample.step,
            fingerprint=first_sample.fingerprint,
            created=time.time(),
            prompt_tokens=sum(len(sample.group.rollouts[0].prompt_ids) for sample in samples),
            choices=tuple(choices),
        )
        if options.caller.answer_key is None and options.also is None:
            return StoredCompletion(completed, options.render(completed))
        return await self._ledger.do(storing.keep_answer, options, completed)

    # --- stored completions -----------------------------------------------------------------------

    async def _sample_group(
        self, work: _Work, size: int, group_key: GroupKey | None = None
    ) -> StoredCompletion:
        """Sample and store a new group; with `group_key` the call gets only the first member."""
        request, conductor, options = work.request, work.conductor, work.options
        group = f"g-{secrets.token_hex(10)}"
        work.progress.id = group if group_key is None else f"{group}-0"
        wait = self._config.completions_wait
        async with conductor.admission.admit((None,), wait, options.caller.key_id) as (draw,):
            sample_request = GroupSampleRequest(
                draw, request.prompts[0], size, request.sampling, columns=request.columns
            )
            (sampled,) = await self._sample_all(work, [sample_request])
            choices = await self._write_choices(work, sampled.group.rollouts[: request.n])
            completion = await self._ledger.do(
                storing.keep_group,
                conductor.status.run,
                group,
                sampled,
                choices,
                group_key,
                options,
            )
            await conductor.recount()
            return completion

    async def _next_member(self, work: _Work, group_key: GroupKey) -> StoredCompletion | None:
        """The next member of an open shared group; None if a new group is needed."""
        oldest = work.conductor.status.step
        if work.request.model == LATEST:
            oldest -= work.conductor.request.staleness
        member_and_rollout = await self._ledger.do(storing.next_member, group_key, oldest)
        if member_and_rollout is None:
            return None
        member, rollout = member_and_rollout
        (choice,) = await self._write_choices(work, [rollout])
        prompt_tokens = len(rollout.prompt_ids)
        return await self._ledger.do(
            storing.give_member, member, prompt_tokens, choice, work.options
        )

    # --- calls of trajectories --------------------------------------------------------------------

    async def _sample_turn(self, work: _Work, gather: Gather) -> StoredCompletion:
        """Sample and store one call of a trajectory. Only the first call of a group waits for admission."""
        request, conductor, options = work.request, work.conductor, work.options
        trajectory = gather.trajectory or BY_IDS
        size = gather.size or conductor.request.num_completions_per_prompt
        call = Call(conductor.status.run, options.caller.key_id, trajectory, gather.name, size)
        place = await self._place_of_call(work, call)
        work.progress.id = place.id
        try:
            draw, member = place.row.draw, place.member if trajectory == BY_IDS else 0
            seed = derive("trajectory", conductor.seed, draw, trajectory, member, place.turn)
            sampling = replace(request.sampling, seed=seed >> 1)  # SQLite and JSON hold 63 bits
            # A draw of its own, because calls of a group may be sampled at the same time.
            sample_request = GroupSampleRequest(
                next(self._draws), request.prompts[0], 1, sampling, columns=request.columns
            )
            (sampled,) = await self._sample_all(work, [sample_request])
            (choice,) = await self._write_choices(work, sampled.group.rollouts)
            turn = SampledTurn(place, sampled.group, sampled.step)
            return await self._ledger.do(storing.keep_turn, turn, choice, options)
        except BaseException:
            # Also if the client has gone: a trajectory without a call would hold its place for a lease.
            with suppress(GroupwiseError):  # then the place is held until the lease ends
                await self._ledger.do(trajectories.withdraw, place)
                await conductor.recount()
            raise

    async def _place_of_call(self, work: _Work, call: Call) -> Place:
        """The place of a call: in the trajectory that it continues, in the open group of its name, or in a new group."""
        request, conductor, lease = work.request, work.conductor, work.options.lease
        oldest = conductor.status.step - conductor.request.staleness
        name = call.group or f"{UNNAMED}{request.hash_with(call.size)}"
        group_key = GroupKey(call.run, call.key_id, trajectories.group_name(name), "")
        existing_place = await self._ledger.do(trajectories.place_if_begun, call, lease)
        if existing_place is not None:
            return existing_place
        call = replace(call, group=name)
        deadline = time.monotonic() + self._config.completions_wait
        async with self._one_at_a_time(group_key):
            place = await self._ledger.do(trajectories.find_place, call, oldest, lease)
            if place is not None:
                return place
            wait = max(deadline - time.monotonic(), 0.0)  # less what the calls before it waited
            async with conductor.admission.admit((None,), wait, call.key_id) as (draw,):
                status, prompt = conductor.status, request.prompts[0]
                assert not isinstance(prompt, tuple), "refused by parse_request"
                new = NewTrajectoryGroup(
                    f"g-{secrets.token_hex(10)}",
                    draw,
                    prompt,
                    status.step,
                    status.policy.version,
                    status.policy.fingerprint,
                )
                place = await self._ledger.do(trajectories.open_group, call, new, lease)
                await conductor.recount()
                return place

    @asynccontextmanager
    async def _one_at_a_time(self, group_key: GroupKey) -> AsyncGenerator[None]:
        """Admit one call of a group key at a time, so that the first can sample their group while the others wait."""
        lock, calls = self._group_locks.get(group_key, (asyncio.Lock(), 0))
        self._group_locks[group_key] = (lock, calls + 1)
        try:
            async with asyncio.timeout(self._config.sampling_time_limit) as limit, lock:
                limit.reschedule(None)  # the work inside has its own limits
                yield
        except TimeoutError:
            raise Refusal("timed_out") from None
        finally:
            lock, calls = self._group_locks[group_key]
            if calls == 1:
                del self._group_locks[group_key]
            else:
                self._group_locks[group_key] = (lock, calls - 1)

    # --- the engine -------------------------------------------------------------------------------

    async def _sample_all(
        self, work: _Work, sample_requests: Sequence[GroupSampleRequest]
    ) -> list[Sampled]:
        """Sample these requests; meanwhile `progress` gives access to the texts of the members that the answer has."""
        request, conductor, progress, engine = (
            work.request,
            work.conductor,
            work.progress,
            work.conductor.engine,
        )
        progress.draws, progress.n = (
            tuple(sample_request.draw for sample_request in sample_requests),
            request.n,
        )
        progress.engine = engine
        samples = await self._host.await_engine(
            gather_all(
                naming_field(engine.sample(sample_request), request.field_names)
                for sample_request in sample_requests
            ),
            conductor,
        )
        progress.engine = None
        steps = {sample.step for sample in samples}
        if request.model != LATEST and steps != {int(request.model.rpartition("@")[2])}:
            # A step changed the policy before the prompts were sampled.
            raise await self._unknown_model(request.model)
        if len(steps) > 1:
            raise Refusal(
                "engine_recovering",
                "the policy has moved on between two of the prompts. Ask again.",
                retry_after=TRY_AGAIN,
            )
        return list(samples)

    async def _write_choices(
        self, work: _Work, rollouts: Sequence[Rollout], sampled: Sampled | None = None
    ) -> list[CompletionChoice]:
        """The choices of the answer; `sampled` has what is not stored: alternatives, and the prompt's log-probabilities."""
        request, conductor = work.request, work.conductor
        details: Sequence[TokenDetails | None] = [None] * len(rollouts)
        best: Sequence[Sequence[TopLogprobs] | None] = [None] * len(rollouts)
        echo, prompt_logprobs = "", None
        if sampled is not None and request.alternatives:
            best = sampled.top_logprobs or [()] * len(rollouts)
        if sampled is not None and request.echo:
            echo, prompt_logprobs = str(sampled.group.example.prompt), sampled.prompt_logprobs
        if request.logprobs:
            token_texts = conductor.engine.token_texts
            requests = (
                describe_tokens(rollout, tops, prompt_logprobs, token_texts)
                for rollout, tops in zip(rollouts, best, strict=True)
            )
            details = await self._host.await_engine(gather_all(requests), conductor)
        return [
            write_completion(rollout, request, described, echo)
            for rollout, described in zip(rollouts, details, strict=True)
        ]


def _model_names(status: RunStatus) -> tuple[str, ...]:
    """Model names of the policy now served."""
    return f"{status.run}@{status.step}", LATEST


def _text_deltas(texts_sent: list[str], texts: Sequence[str]) -> list[TextDelta]:
    """The text added since `texts_sent`, which is updated to include it."""
    deltas: list[TextDelta] = []
    for choice, text in enumerate(texts):
        if len(text) > len(texts_sent[choice]) and text.startswith(texts_sent[choice]):
            deltas.append(TextDelta(choice, text[len(texts_sent[choice]) :]))
            texts_sent[choice] = text
    return deltas


def texts_after_prompts(request: GenerationRequest, texts: list[str]) -> list[str]:
    """The texts of a stream with `echo`; none before the end if prompts are token ids, because only the result has their text."""
    if not request.echo or not texts:
        return texts
    prompts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    if len(prompts) < len(request.prompts):
        return []
    return [prompts[index // request.n] + text for index, text in enumerate(texts)]
