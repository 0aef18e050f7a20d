"""Creates clients' samplers and completes prompts with them. Samples may run in any order."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.types import SamplingParams
from groupwise.server.engine.tinker_protocol import Base, SampleRequest, TinkerEngine
from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import Outcome
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker import requests, translate
from groupwise.server.tinker.checkpoints import Checkpoints
from groupwise.server.tinker.futures import PROTOBUF, Futures, digest_of
from groupwise.server.tinker.requests import content_of, kind_of
from groupwise.server.tinker.sessions import Sampler, SessionRegistry, stored_at
from groupwise.server.tinker.tensors import MAX_CELLS, Sparse, dense, filled
from groupwise.tasks.rollouts.seeds import derive


class SamplingCalls:
    """The sampling calls of all samplers."""

    def __init__(
        self,
        registry: SessionRegistry,
        engine: TinkerEngine,
        futures: Futures,
        ledger: Ledger,
        checkpoints: Checkpoints,
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._futures = futures
        self._ledger = ledger
        self._checkpoints = checkpoints

    async def create_sampler(self, body: requests.CreateSampler) -> str:
        """Create a sampler of saved weights or of a base model, and return its id. A repeated request gets the same id."""
        self._registry.session(body.session_id)
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if body.model_path is None:
            if body.base_model is None:
                raise UsageError("create_sampling_session needs base_model or model_path.")
            await self._admit(body.session_id, body.base_model)
            self._registry.add_sampler(Sampler(id, body.base_model, None, None))
        else:
            stored = stored_at(body.model_path)
            async with self._checkpoints.lock:  # so that they are not removed before they are used
                self._checkpoints.check_available(stored)
                base = (await self._engine.saved(stored)).base
                if body.base_model not in (None, base):
                    raise UsageError(
                        f"{body.model_path} was trained on {base}, not on {body.base_model}."
                    )
                await self._admit(body.session_id, base)
                self._registry.add_sampler(Sampler(id, base, stored, body.model_path))
        sampler = self._registry.sampler(id)
        weights = None if sampler.weights is None else asdict(sampler.weights)
        await self._ledger.do_when_writable(
            calls.add_sampler, id, body.session_id, sampler.base, weights
        )
        return id

    async def _admit(self, session: str, base: str) -> None:
        """Raise UsageError if this base cannot be sampled now; ends silent sessions if their room is needed."""

        async def attempt() -> None:
            self._engine.admit(base)

        await self._registry.with_room(session, attempt)

    def sampler(self, id: str) -> dict[str, Any]:
        """Describe a sampler for the client: its base, and the path of its weights if it has any."""
        sampler = self._registry.sampler(id)
        path = {} if sampler.path is None else {"model_path": sampler.path}
        return {"sampler_id": id, "base_model": sampler.base, **path}

    async def sample(self, body: requests.Sample) -> tuple[str, list[str]]:
        """Start a sample; returns the id of the call, and one id for each sequence."""
        sampler = self._registry.sampler(body.sampling_session_id)
        sequences = [f"{sampler.id}:{body.seq_id}:{index}" for index in range(body.num_samples)]
        _sample_order(body, await self._engine.base(sampler.base))  # refuse early
        return self.begin_sample(body), sequences

    def begin_sample(self, body: requests.Sample) -> str:
        """Start a sample, or find the same earlier one; returns the id of the call."""
        sampler = self._registry.sampler(body.sampling_session_id)
        key = (sampler.id, body.seq_id)
        kind, content = kind_of(body), content_of(body)
        digest = digest_of(kind, content)
        if (repeated := self._futures.find_repeated(key, digest)) is not None:
            return repeated
        weights = sampler.weights or sampler.base

        async def work() -> Outcome:
            order = _sample_order(body, await self._engine.base(sampler.base))
            result = await self._engine.sample(weights, order)
            return Outcome("answered", PROTOBUF, translate.sample_response(result, body))

        id = self._futures.add(key, digest, kind, content)
        self._futures.start(id, work)
        return id


def _sample_order(body: requests.Sample, base: Base) -> SampleRequest:
    prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    settings = body.sampling_params
    room = base.longest - len(prompt)
    if not prompt:
        raise UsageError("The prompt is empty; it needs at least one token.")
    if room < 1 or (settings.max_tokens or 1) > room:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens and max_tokens is {settings.max_tokens}; together they may have {base.longest}."
        )
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and last_n < len(prompt)):
        raise UsageError(
            f"prompt_logprobs_last_n is {last_n}; it needs prompt_logprobs, and to be less than the prompt's {len(prompt)} tokens."
        )
    params = _sampling_params(settings, base, room)
    for name, places in (
        ("topk_prompt_logprobs", len(prompt)),
        ("topk_sample_logprobs", body.num_samples * params.max_tokens),
    ):
        cells = getattr(body, name) * places
        if cells > MAX_CELLS:
            raise UsageError(
                f"{name} is {getattr(body, name)} for up to {places:,} tokens, which makes {cells:,} entries; at most {MAX_CELLS:,} are "
                "given at once."
            )
    # Distinct seeds: from the client's seed, or random if it gives none.
    seed = body.sampling_params.seed
    base_seed = secrets.randbits(64) if seed is None else seed
    seeds = tuple(derive("verbs", base_seed, index) for index in range(body.num_samples))
    return SampleRequest(
        prompt,
        seeds,
        params,
        bool(body.prompt_logprobs),
        body.topk_prompt_logprobs,
        body.topk_sample_logprobs,
        prompt_targets(body, len(prompt)),
    )


def prompt_targets(body: requests.Sample, prompt_length: int) -> tuple[int, ...]:
    """The ids whose log-probabilities are wanted in place of the prompt's tokens, -1 where none is."""
    tensor, where = body.target_prompt_logprobs, "target_prompt_logprobs"
    if tensor is None:
        return ()
    starts, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if (starts is None) != (columns is None):
        raise UsageError(
            f"{where} needs both sparse_crow_indices and sparse_col_indices, or neither."
        )
    length = prompt_length - 1  # nothing comes before the first token
    if starts is None or columns is None:
        return dense(tensor.data, tensor.shape, where, length).values
    listed = Sparse(tensor.data, starts, columns)
    return filled(listed, tensor.shape, where, length, filling=-1).values


def _sampling_params(settings: requests.SamplingSettings, base: Base, room: int) -> SamplingParams:
    """Without `stop` the base's stop tokens end a completion, with an empty list nothing does; otherwise both."""
    stop = settings.stop
    stops = [stop] if isinstance(stop, str) and stop else list(stop or ())
    own = base.stop_token_ids if stop is None or stop else ()
    return SamplingParams(
        max_tokens=settings.max_tokens or room,
        temperature=settings.temperature,
        stop_token_ids=(*own, *(each for each in stops if isinstance(each, int))),
        stop=tuple(each for each in stops if isinstance(each, str)),
        top_k=settings.top_k if settings.top_k > 0 else None,
        top_p=settings.top_p if settings.top_p < 1 else None,
    )
