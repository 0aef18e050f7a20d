"""What the verbs mean: sessions, models and samplers of clients, and the work that each call is.

A client opens a session and keeps it alive by a heartbeat; its models are let go of when it ends, or falls silent. A model is made by the
request 0 of its line (`futures.py`), from nothing or from a state that was saved; everything else about it follows in the client's order.
Samplers stand for weights that do not change: those of a name, those that a training client saved for this sampler alone (only the last
few of a model are kept), or a base model. This module knows no HTTP; `routes.py` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import RunError, UsageError
from groupwise.rollouts.seeds import derive
from groupwise.server.verbs import requests, translate
from groupwise.server.verbs.futures import (
    PROTOBUF,
    Answer,
    AnswerGone,
    Failure,
    Futures,
    Limits,
    Line,
    TooManyCalls,
    Work,
)
from groupwise.server.verbs.port import Base, ModelSpec, Stored, StoredKind, VerbEngine, VerbSample
from groupwise.types import OptimiserParams, SamplingParams

SCHEME = "tinker://"
EPHEMERAL = "_sampler-"
"""Begins the names of weights that were saved for one sampler; names that clients give begin with a letter or digit."""
EPHEMERAL_KEPT = 8
"""Of a model: a loop whose samplers lag behind its training by a few steps finds theirs."""
SESSION_SILENCE = 600.0
"""Seconds without a heartbeat after which the models of a session may be let go of; clients send one every ten seconds."""
SESSIONS_KEPT = 10_000


class NotThere(UsageError):
    """There is no session, model or sampler of this name."""

    code = "not_there"


@dataclass(eq=False, slots=True)
class _Session:
    id: str
    seen: float
    models: set[str] = field(default_factory=set[str])


@dataclass(eq=False, slots=True)
class _Model:
    id: str
    line: Line
    spec: ModelSpec | None = None
    """None until it has been made."""
    ephemeral: list[Stored] = field(default_factory=list[Stored])


@dataclass(frozen=True, slots=True)
class _Sampler:
    id: str
    base: Base
    weights: Stored | None
    """None: the base itself."""
    path: str | None


class VerbService:
    """All that clients have opened on this server."""

    def __init__(
        self,
        engine: VerbEngine,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._bases: dict[str, Base] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._session_keys: OrderedDict[str, str] = OrderedDict()
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, _Sampler] = {}
        self.futures = Futures(limits)

    async def open(self) -> None:
        """Ask the engine what it serves; before the first call."""
        self._bases = {base.name: base for base in await self._engine.bases()}

    async def close(self) -> None:
        """End what is under way; the engine stays."""
        for model in self._models.values():
            await model.line.close()
        await self.futures.close()

    def capabilities(self) -> list[dict[str, Any]]:
        """The bases, as the client reads them."""
        return [
            {
                "model_name": base.name,
                "max_context_length": base.longest,
                "trainable": True,
                "sampleable": True,
            }
            for base in self._bases.values()
        ]

    async def create_session(self, idempotency_key: str | None) -> str:
        """A new session; the same one for the same key, which a client sends again when the connection was lost."""
        await self._end_silent_sessions()
        if idempotency_key is not None and idempotency_key in self._session_keys:
            return self._session_keys[idempotency_key]
        session = _Session(f"s-{secrets.token_hex(8)}", self._clock())
        self._sessions[session.id] = session
        if idempotency_key is not None:
            self._session_keys[idempotency_key] = session.id
        while len(self._session_keys) > SESSIONS_KEPT:
            self._session_keys.popitem(last=False)
        return session.id

    def heartbeat(self, session: str) -> None:
        """The client is there."""
        self._session(session)

    async def finish(self, session: str) -> None:
        """The client is done; its models are let go of. Repeating it is harmless."""
        found = self._sessions.pop(session, None)
        for model in sorted(found.models) if found is not None else ():
            await self._drop(model)
        for id in [id for id in self._samplers if id.startswith(f"{session}:")]:
            del self._samplers[id]

    def create_model(self, body: requests.CreateModel) -> tuple[str, str]:
        """The ids of the model and of the call that makes it."""
        base = self._base(body.base_model)
        lora = body.lora_config
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise UsageError("lora_config trains nothing: all of its train_ settings are false.")
        spec = ModelSpec(
            base=base.name,
            rank=lora.rank,
            seed=lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        )
        model = self._new_model(body.session_id, body.model_seq_id)

        async def make() -> Answer:
            await self._make(model, spec)
            return _json({"model_id": model.id, "type": "create_model"})

        return model.id, model.line.submit(0, _content(body), make)

    def info(self, model: str) -> dict[str, Any]:
        """What the client wants to know of a model that has been made."""
        found = self._model(model)
        if found.spec is None:
            raise NotThere(f"The model {model} has not been made yet.")
        base = self._bases[found.spec.base]
        return {
            "type": "get_info",
            "model_id": model,
            "model_name": base.name,
            "model_data": {
                "arch": base.architecture,
                "model_name": base.name,
                "tokenizer_id": base.tokenizer,
            },
            "is_lora": True,
            "lora_rank": found.spec.rank,
        }

    def forward_backward(self, body: bytes) -> tuple[str, str]:
        """A protobuf request, with or without gradient. What it asks wrongly is refused at once, but has used its sequence number."""
        message = translate.parsed(body)
        model = self._model(message.model_id)
        content = message.SerializeToString(deterministic=True)
        try:
            asked = translate.forward_of(message)
        except UsageError as error:
            if message.seq_id >= 1:
                model.line.submit(message.seq_id, content, error)
            raise
        compute = self._engine.forward if asked.forward_only else self._engine.forward_backward

        async def work() -> Answer:
            computed = await compute(model.id, asked.rows, asked.loss)
            return Answer(translate.outputs(computed), PROTOBUF)

        return model.id, self._submit(model, asked.sequence, content, work)

    def optim_step(self, body: requests.OptimStep) -> tuple[str, str]:
        """An update with the gradient that has gathered."""
        model = self._model(body.model_id)
        adam = body.adam_params
        params = OptimiserParams(
            learning_rate=adam.learning_rate,
            max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else None,
            weight_decay=adam.weight_decay,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
        )

        async def work() -> Answer:
            result = await self._engine.optim_step(model.id, params)
            if not result.applied or not math.isfinite(result.grad_norm):
                raise RunError(
                    f"The gradient was not finite (norm {result.grad_norm}), so the update was left out and the gradient cleared."
                )
            return _json({"metrics": {"grad_norm": result.grad_norm}})

        return model.id, self._submit(model, body.seq_id, _content(body), work)

    def save_weights(self, body: requests.SaveWeights) -> tuple[str, str]:
        """Adapter and optimiser under a name."""
        model = self._model(body.model_id)
        stored = Stored(model.id, "weights", body.path)

        async def work() -> Answer:
            await self._engine.save_state(model.id, body.path, overwrite=body.overwrite)
            return _json({"path": path_of(stored), "type": "save_weights"})

        return model.id, self._submit(model, body.seq_id, _content(body), work)

    def load_weights(self, body: requests.LoadWeights) -> tuple[str, str]:
        """A state into a model that is there, or into a new one that is made for it."""
        stored = stored_at(body.path)
        if body.session_id is not None and body.model_seq_id is not None:
            return self._create_from(body, body.session_id, body.model_seq_id, stored)
        if body.model_id is None or body.seq_id is None:
            raise UsageError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id."
            )
        model = self._model(body.model_id)

        async def work() -> Answer:
            await self._engine.load_state(model.id, stored, with_optimiser=body.optimizer)
            return _json({"path": body.path, "type": "load_weights"})

        return model.id, self._submit(model, body.seq_id, _content(body), work)

    def save_for_sampler(self, body: requests.SaveForSampler) -> tuple[str, str]:
        """The weights as they are in the client's order, under a name, or for a new sampler alone."""
        model = self._model(body.model_id)
        number = body.sampling_session_seq_id
        if (body.path is None) == (number is None):
            raise UsageError(
                "save_weights_for_sampler needs either path or sampling_session_seq_id."
            )

        async def named() -> Answer:
            assert body.path is not None
            await self._engine.save_for_sampler(model.id, body.path)
            path = path_of(Stored(model.id, "sampler_weights", body.path))
            return _json({"path": path, "type": "save_weights_for_sampler"})

        async def for_a_sampler() -> Answer:
            sampler = await self._save_ephemeral(model, f"{_session_of(model.id)}:sample:{number}")
            return _json({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})

        work = named if body.path is not None else for_a_sampler
        return model.id, self._submit(model, body.seq_id, _content(body), work)

    async def create_sampler(self, body: requests.CreateSampler) -> str:
        """A sampler of weights that were saved, or of a base model. The same request gives the same one."""
        self._session(body.session_id)
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if body.model_path is None:
            if body.base_model is None:
                raise UsageError("create_sampling_session needs base_model or model_path.")
            sampler = _Sampler(id, self._base(body.base_model), None, None)
        else:
            stored = stored_at(body.model_path)
            base = self._base((await self._engine.stored(stored)).base)
            if body.base_model not in (None, base.name):
                raise UsageError(
                    f"{body.model_path} was trained on {base.name}, not on {body.base_model}."
                )
            sampler = _Sampler(id, base, stored, body.model_path)
        if self._samplers.setdefault(id, sampler) != sampler:
            raise UsageError(f"The sampler {id} exists already, with other weights.")
        return id

    def sampler(self, id: str) -> dict[str, Any]:
        """What a sampler was made of."""
        found = self._sampler(id)
        path = {} if found.path is None else {"model_path": found.path}
        return {"sampler_id": id, "base_model": found.base.name, **path}

    async def weights_info(self, path: str) -> dict[str, Any]:
        """What kind of model saved these weights."""
        spec = await self._engine.stored(stored_at(path))
        return {
            "base_model": spec.base,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    def sample(self, body: requests.Sample) -> tuple[str, list[str]]:
        """The id of the call, and one for each sequence that it will draw."""
        sampler = self._sampler(body.sampling_session_id)
        key = (sampler.id, body.seq_id)
        content = _content(body)
        digest = hashlib.sha256(content).digest()
        sequences = [f"{sampler.id}:{body.seq_id}:{index}" for index in range(body.num_samples)]
        if (earlier := self.futures.earlier(key, digest)) is not None:
            return earlier, sequences
        order = _order(body, sampler.base)
        weights = sampler.weights or sampler.base.name

        async def work() -> Answer:
            drawn = await self._engine.sample(weights, order)
            length = len(order.prompt_ids)
            return Answer(translate.sampled(drawn, length, body.prompt_logprobs_last_n), PROTOBUF)

        id = self.futures.add(key, digest, len(content))
        self.futures.begin(id, work)
        return id, sequences

    def refused(self, body: bytes, error: UsageError) -> None:
        """A JSON request was refused before it came to its model's line. Where it has a number there, the number is used up: the client
        goes on with the next one, which would wait for it for ever."""
        try:
            given: Any = json.loads(body)
            model, sequence = given["model_id"], given["seq_id"]
        except (ValueError, TypeError, KeyError):
            return
        found = self._models.get(model) if isinstance(model, str) else None
        if found is None or not isinstance(sequence, int) or sequence < 1:
            return
        # The number was used before: then the request was refused for that.
        with contextlib.suppress(UsageError, AnswerGone, TooManyCalls):
            found.line.submit(sequence, body, error)

    async def answer(self, id: str, patience: float) -> Answer | Failure | None:
        """See `Futures.answer`."""
        return await self.futures.answer(id, patience)

    def _create_from(
        self, body: requests.LoadWeights, session: str, number: int, stored: Stored
    ) -> tuple[str, str]:
        model = self._new_model(session, number)

        async def make() -> Answer:
            spec = await self._engine.stored(stored)
            if body.base_model not in (None, spec.base):
                raise UsageError(
                    f"{body.path} was trained on {spec.base}; it cannot go on with {body.base_model}."
                )
            await self._make(model, spec)
            await self._engine.load_state(model.id, stored, with_optimiser=body.optimizer)
            return _json({"path": body.path, "type": "load_weights"})

        return model.id, model.line.submit(0, _content(body), make)

    async def _make(self, model: _Model, spec: ModelSpec) -> None:
        await self._end_silent_sessions()
        await self._engine.create_model(model.id, spec)
        model.spec = spec

    async def _save_ephemeral(self, model: _Model, sampler: str) -> str:
        assert model.spec is not None
        name = EPHEMERAL + sampler.rpartition(":")[2]
        await self._engine.save_for_sampler(model.id, name)
        stored = Stored(model.id, "sampler_weights", name)
        self._samplers[sampler] = _Sampler(
            sampler, self._bases[model.spec.base], stored, path_of(stored)
        )
        model.ephemeral.append(stored)
        while len(model.ephemeral) > EPHEMERAL_KEPT:
            await self._engine.drop_sampler(model.ephemeral.pop(0))
        return sampler

    def _submit(self, model: _Model, sequence: int, content: bytes, work: Work) -> str:
        if sequence < 1:
            raise UsageError(
                f"seq_id is {sequence}; it counts the calls of a model from 1, because 0 makes the model."
            )
        return model.line.submit(sequence, content, work)

    def _new_model(self, session: str, number: int) -> _Model:
        owner = self._session(session)
        id = f"{session}:train:{number}"
        if id not in self._models:
            self._models[id] = _Model(id, Line(id, self.futures))
            owner.models.add(id)
        return self._models[id]

    async def _end_silent_sessions(self) -> None:
        silent = self._clock() - SESSION_SILENCE
        for session in [each.id for each in self._sessions.values() if each.seen < silent]:
            await self.finish(session)

    async def _drop(self, id: str) -> None:
        model = self._models.pop(id)
        await model.line.close()
        for stored in model.ephemeral:
            await self._engine.drop_sampler(stored)
        await self._engine.drop(id)

    def _session(self, id: str) -> _Session:
        if id not in self._sessions:
            raise NotThere(
                f"There is no session {id!r}: it was finished, has been silent for {SESSION_SILENCE:g} seconds, or the server was "
                "restarted. Make a new ServiceClient; what was saved can be loaded by its path."
            )
        self._sessions[id].seen = self._clock()
        return self._sessions[id]

    def _model(self, id: str) -> _Model:
        self._session(_session_of(id))
        if id not in self._models:
            raise NotThere(f"There is no model {id!r} in its session.")
        return self._models[id]

    def _sampler(self, id: str) -> _Sampler:
        if id not in self._samplers:
            raise NotThere(
                f"There is no sampler {id!r}: its session has ended, or the server was restarted. Make a new sampling client."
            )
        return self._samplers[id]

    def _base(self, name: str) -> Base:
        if name not in self._bases:
            raise UsageError(
                f"The base model {name!r} is not served here. There are: {', '.join(sorted(self._bases))}."
            )
        return self._bases[name]


def path_of(stored: Stored) -> str:
    """As the client names what was saved."""
    return f"{SCHEME}{stored.model}/{stored.kind}/{stored.name}"


def stored_at(path: str) -> Stored:
    """The inverse of `path_of`. UsageError for another path."""
    kinds: Mapping[str, StoredKind] = {"weights": "weights", "sampler_weights": "sampler_weights"}
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in kinds or not all(parts):
        raise UsageError(
            f"{path!r} is no path of saved weights. They look like tinker://<model>/weights/<name> or "
            "tinker://<model>/sampler_weights/<name>."
        )
    return Stored(parts[0], kinds[parts[1]], parts[2])


def _order(body: requests.Sample, base: Base) -> VerbSample:
    prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    settings = body.sampling_params
    room = base.longest - len(prompt)
    if not prompt:
        raise UsageError("The prompt is empty; it needs at least one token.")
    if room < 1 or (settings.max_tokens or 1) > room:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens and max_tokens is {settings.max_tokens}; together they may have {base.longest}."
        )
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and last < len(prompt)):
        raise UsageError(
            f"prompt_logprobs_last_n is {last}; it needs prompt_logprobs, and to be less than the prompt's {len(prompt)} tokens."
        )
    return VerbSample(
        prompt, _seeds(body), _params(settings, base, room), bool(body.prompt_logprobs)
    )


def _params(settings: requests.SamplingSettings, base: Base, room: int) -> SamplingParams:
    texts, tokens = _stops(settings.stop, base)
    return SamplingParams(
        max_tokens=settings.max_tokens or room,
        temperature=settings.temperature,
        stop_token_ids=tokens,
        stop=texts,
        top_k=settings.top_k if settings.top_k > 0 else None,
        top_p=settings.top_p if settings.top_p < 1 else None,
    )


def _stops(
    stop: str | list[str] | list[int] | None, base: Base
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and token ids that end a completion."""
    if stop is None:
        return (), base.stop_token_ids
    if not stop:
        return (), ()
    given = [stop] if isinstance(stop, str) else stop
    texts = tuple(each for each in given if isinstance(each, str))
    tokens = tuple(each for each in given if isinstance(each, int))
    return texts, (*base.stop_token_ids, *tokens)


def _seeds(body: requests.Sample) -> tuple[int, ...]:
    """Distinct ones: from the client's seed, or by chance where it gives none."""
    seed = body.sampling_params.seed
    chosen = secrets.randbits(64) if seed is None else seed
    return tuple(derive("verbs", chosen, index) for index in range(body.num_samples))


def _session_of(model: str) -> str:
    return model.partition(":")[0]


def _content(body: requests.Body) -> bytes:
    """A request as bytes that are the same for the same request."""
    return type(body).__name__.encode() + body.model_dump_json().encode()


def _json(value: Mapping[str, Any]) -> Answer:
    return Answer(json.dumps(value).encode())
