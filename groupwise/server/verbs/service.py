"""What the verbs mean: sessions, models and samplers of clients, and the work that each call is.

A client opens a session and keeps it alive by a heartbeat; its models are let go of when it ends, or falls silent. A model is made by the
request 0 of its line (`futures.py`), from nothing or from a state that was saved; everything else about it follows in the client's order.
Samplers stand for weights that do not change: those of a name, those that a training client saved for this sampler alone (only the last
few of a model are kept), or a base model. This module knows no HTTP; `routes.py` does.

All of it is in the journal before clients are told, and a new process opens it again (`open`): what was answered stays answered, and what
waits is done.
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
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from groupwise.errors import UsageError
from groupwise.rollouts.seeds import derive
from groupwise.server.ledger.calls import CallRow, StepRow
from groupwise.server.verbs import requests, translate
from groupwise.server.verbs.futures import (
    PROTOBUF,
    Answer,
    AnswerGone,
    Failure,
    Futures,
    LeftOut,
    Limits,
    Line,
    Note,
    TooManyCalls,
    Work,
)
from groupwise.server.verbs.journal import Journal, NoJournal
from groupwise.server.verbs.port import Base, ModelSpec, Stored, StoredKind, VerbEngine, VerbSample
from groupwise.types import OptimiserParams, SamplingParams

BodyT = TypeVar("BodyT", bound=requests.Body)

SCHEME = "tinker://"
EPHEMERAL = "_sampler-"
"""Begins the names of weights that were saved for one sampler; names that clients give begin with a letter or digit."""
EPHEMERAL_KEPT = 8
"""Of a model: a loop whose samplers lag behind its training by a few steps finds theirs."""
SESSION_SILENCE = 600.0
"""Seconds without a heartbeat after which the models of a session may be let go of; clients send one every ten seconds."""
SESSIONS_KEPT = 10_000
KEEP_EVERY = 10
"""Updates of a model between two of its states that are kept, from which it can be made again."""
KEPT_WITHIN = 10.0
"""Seconds that a client waits for its call to be written down."""
FORWARD_BACKWARD = "forward_backward"
REFUSED = "refused"
"""Kinds of calls beside the classes of `requests`."""


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
    updates: int = 0
    """Since its state was kept last."""
    sums: dict[str, float] = field(default_factory=dict[str, float])
    """Of the forward passes with gradient since the update before."""


@dataclass(frozen=True, slots=True)
class _Sampler:
    id: str
    base: str
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
        journal: Journal | None = None,
        keep_every: int = KEEP_EVERY,
    ) -> None:
        """`keep_every`: updates of a model after which its state is kept, where there is a journal."""
        self._engine = engine
        self._clock = clock
        self._journal = journal or NoJournal()
        self._keep_every = keep_every
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._session_keys: OrderedDict[str, str] = OrderedDict()
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, _Sampler] = {}
        self.futures = Futures(limits, self._journal)

    async def open(self) -> None:
        """Know what clients have opened before, and go on with their calls; before the first request."""
        found = await self._journal.everything()
        for id, name in found.sessions:
            self._sessions[id] = _Session(id, self._clock())
            if name is not None:
                self._session_keys[name] = id
        for row in found.models:
            line = Line(row.id, self.futures, first=row.done + 1)
            self._models[row.id] = _Model(row.id, line, ModelSpec(**row.spec))
            self._sessions[row.session].models.add(row.id)
        for row in found.samplers:
            self._know_sampler(row.id, row.base, _stored(row.weights))
        for row in found.calls:
            self.futures.restore(row)
        for row in found.calls:
            if row.state == "waiting":
                await self._go_on(row)

    async def _go_on(self, row: CallRow) -> None:
        """Have a call done that came to nothing before the last process ended."""
        assert row.content is not None
        if row.kind == REFUSED:
            self._models[row.line].line.submit(
                row.sequence, row.content, UsageError("This request was refused before."), REFUSED
            )
            return
        begin: Mapping[str, Callable[[bytes], Any]] = {
            FORWARD_BACKWARD: self.forward_backward,
            "CreateModel": _reading(requests.CreateModel, self.create_model),
            "OptimStep": _reading(requests.OptimStep, self.optim_step),
            "SaveWeights": _reading(requests.SaveWeights, self.save_weights),
            "LoadWeights": _reading(requests.LoadWeights, self.load_weights),
            "SaveForSampler": _reading(requests.SaveForSampler, self.save_for_sampler),
            "Sample": _reading(requests.Sample, self._begin_sample),
        }
        try:
            begin[row.kind](row.content)
        except UsageError as error:
            # Where it was not refused with its number, as it was before, its model is no longer there.
            self.futures.abandon(row.id, error)

    def _know_sampler(self, id: str, base: str, weights: Stored | None) -> None:
        path = None if weights is None else path_of(weights)
        self._samplers[id] = _Sampler(id, base, weights, path)
        if weights is not None and weights.name.startswith(EPHEMERAL):
            owner = self._models.get(weights.model)
            if owner is not None and _session_of(id) == _session_of(owner.id):
                owner.ephemeral.append(weights)

    async def kept(self, id: str) -> None:
        """Return when a call is written down, so that its client may be told of it. NotKept where that takes too long."""
        await self.futures.kept(id, KEPT_WITHIN)

    async def close(self) -> None:
        """End what is under way; the engine stays."""
        self.futures.suspend()
        for model in self._models.values():
            await model.line.close()
        await self.futures.close()

    def capabilities(self) -> list[dict[str, Any]]:
        """The bases, as the client reads them."""
        return [
            {"model_name": name, "trainable": True, "sampleable": True}
            for name in self._engine.names()
        ]

    async def create_session(self, idempotency_key: str | None) -> str:
        """A new session; the same one for the same key, which a client sends again when the connection was lost."""
        await self.end_silent_sessions()
        if idempotency_key is not None and idempotency_key in self._session_keys:
            return self._session_keys[idempotency_key]
        session = _Session(f"s-{secrets.token_hex(8)}", self._clock())
        await self._journal.add_session(session.id, idempotency_key)
        if idempotency_key is not None and idempotency_key in self._session_keys:
            return self._session_keys[idempotency_key]  # the same request came meanwhile
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
        if found is not None:
            await self._journal.end_session(session)

    async def end_silent_sessions(self) -> None:
        """Let go of the models of clients that have gone without a word."""
        silent = self._clock() - SESSION_SILENCE
        for session in [each.id for each in self._sessions.values() if each.seen < silent]:
            await self.finish(session)

    def create_model(self, body: requests.CreateModel) -> tuple[str, str]:
        """The ids of the model and of the call that makes it."""
        self._engine.admit(body.base_model)
        lora = body.lora_config
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise UsageError("lora_config trains nothing: all of its train_ settings are false.")
        model = self._new_model(body.session_id, body.model_seq_id)
        spec = ModelSpec(
            base=body.base_model,
            rank=lora.rank,
            seed=derive("verbs", model.id) % 2**63 if lora.seed is None else lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        )

        async def make() -> Answer:
            await self._make(model, spec)
            return _json({"model_id": model.id, "type": "create_model"})

        return model.id, model.line.submit(0, _content(body), make, _kind(body))

    async def info(self, model: str) -> dict[str, Any]:
        """What the client wants to know of a model that has been made."""
        found = self._model(model)
        if found.spec is None:
            raise NotThere(f"The model {model} has not been made yet.")
        base = await self._engine.base(found.spec.base)
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
                model.line.submit(message.seq_id, content, error, FORWARD_BACKWARD)
            raise

        async def work() -> Answer:
            if asked.forward_only:
                computed = await self._engine.forward(model.id, asked.rows, asked.loss)
                return Answer(translate.outputs(computed), PROTOBUF)
            computed = await self._engine.forward_backward(model.id, asked.rows, asked.loss)
            for name, value in computed.sums.items():
                model.sums[name] = model.sums.get(name, 0.0) + value
            return Answer(translate.outputs(computed), PROTOBUF, Note())

        return model.id, self._submit(model, asked.sequence, content, work, FORWARD_BACKWARD)

    def optim_step(self, body: requests.OptimStep) -> tuple[str, str]:
        """An update with the gradient that has gathered."""
        model = self._model(body.model_id)
        params = optimiser_of(body)

        async def work() -> Answer:
            keep_as = self._keeps_as(model, body.seq_id)
            result = await self._engine.optim_step(model.id, params, keep_as)
            sums, model.sums = model.sums, {}
            finite = result.applied and math.isfinite(result.grad_norm)
            norm = result.grad_norm if finite else None
            note = Note(keep_as, StepRow(params.learning_rate, norm, _finite(sums)))
            if norm is None:
                raise LeftOut(
                    f"The gradient was not finite (norm {result.grad_norm}), so the update was left out and the gradient cleared.",
                    note,
                )
            return replace(_json({"metrics": {"grad_norm": norm}}), note=note)

        return model.id, self._submit(model, body.seq_id, _content(body), work, _kind(body))

    def _keeps_as(self, model: _Model, call: int) -> int | None:
        """The number of an update after which the model's state is kept; None for the others."""
        model.updates += 1
        if not self._journal.durable or model.updates < self._keep_every:
            return None
        model.updates = 0
        return call

    def save_weights(self, body: requests.SaveWeights) -> tuple[str, str]:
        """Adapter and optimiser under a name."""
        model = self._model(body.model_id)
        stored = Stored(model.id, "weights", body.path)

        async def work() -> Answer:
            await self._engine.save_state(
                model.id, body.path, overwrite=body.overwrite, call=body.seq_id
            )
            return _json({"path": path_of(stored), "type": "save_weights"})

        return model.id, self._submit(model, body.seq_id, _content(body), work, _kind(body))

    def load_weights(self, body: requests.LoadWeights) -> tuple[str, str]:
        """A state into a model that is there, or into a new one that is made for it."""
        stored = stored_at(body.path)
        if body.session_id is not None and body.model_seq_id is not None:
            return self._create_from(body, body.session_id, body.model_seq_id, stored)
        if body.model_id is None or body.seq_id is None:
            raise UsageError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id."
            )
        model, number = self._model(body.model_id), body.seq_id

        async def work() -> Answer:
            return await self._load(model, body, number, stored)

        return model.id, self._submit(model, number, _content(body), work, _kind(body))

    async def _load(
        self, model: _Model, body: requests.LoadWeights, call: int, stored: Stored
    ) -> Answer:
        """The state is kept at once: what was saved may be another one when this would be repeated."""
        await self._engine.load_state(model.id, stored, with_optimiser=body.optimizer, keep_as=call)
        model.sums.clear()
        answer = _json({"path": body.path, "type": "load_weights"})
        return replace(answer, note=Note(kept=call))

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
            await self._engine.save_for_sampler(model.id, body.path, body.seq_id)
            path = path_of(Stored(model.id, "sampler_weights", body.path))
            return _json({"path": path, "type": "save_weights_for_sampler"})

        async def for_a_sampler() -> Answer:
            name = f"{_session_of(model.id)}:sample:{number}"
            sampler = await self._save_ephemeral(model, name, body.seq_id)
            return _json({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})

        work = named if body.path is not None else for_a_sampler
        return model.id, self._submit(model, body.seq_id, _content(body), work, _kind(body))

    async def create_sampler(self, body: requests.CreateSampler) -> str:
        """A sampler of weights that were saved, or of a base model. The same request gives the same one."""
        self._session(body.session_id)
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        if body.model_path is None:
            if body.base_model is None:
                raise UsageError("create_sampling_session needs base_model or model_path.")
            self._engine.admit(body.base_model)
            sampler = _Sampler(id, body.base_model, None, None)
        else:
            stored = stored_at(body.model_path)
            base = (await self._engine.saved(stored)).base
            if body.base_model not in (None, base):
                raise UsageError(
                    f"{body.model_path} was trained on {base}, not on {body.base_model}."
                )
            sampler = _Sampler(id, base, stored, body.model_path)
        if self._samplers.setdefault(id, sampler) != sampler:
            raise UsageError(f"The sampler {id} exists already, with other weights.")
        await self._journal.add_sampler(id, body.session_id, sampler.base, sampler.weights)
        return id

    def sampler(self, id: str) -> dict[str, Any]:
        """What a sampler was made of."""
        found = self._sampler(id)
        path = {} if found.path is None else {"model_path": found.path}
        return {"sampler_id": id, "base_model": found.base, **path}

    async def weights_info(self, path: str) -> dict[str, Any]:
        """What kind of model saved these weights."""
        spec = await self._engine.saved(stored_at(path))
        return {
            "base_model": spec.base,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    async def sample(self, body: requests.Sample) -> tuple[str, list[str]]:
        """The id of the call, and one for each sequence that it will draw."""
        sampler = self._sampler(body.sampling_session_id)
        sequences = [f"{sampler.id}:{body.seq_id}:{index}" for index in range(body.num_samples)]
        _order(body, await self._engine.base(sampler.base))  # refused at once
        return self._begin_sample(body), sequences

    def _begin_sample(self, body: requests.Sample) -> str:
        sampler = self._sampler(body.sampling_session_id)
        key = (sampler.id, body.seq_id)
        content = _content(body)
        digest = hashlib.sha256(_kind(body).encode() + content).digest()
        if (earlier := self.futures.earlier(key, digest)) is not None:
            return earlier
        weights = sampler.weights or sampler.base

        async def work() -> Answer:
            order = _order(body, await self._engine.base(sampler.base))
            drawn = await self._engine.sample(weights, order)
            length = len(order.prompt_ids)
            return Answer(translate.sampled(drawn, length, body.prompt_logprobs_last_n), PROTOBUF)

        id = self.futures.add(key, digest, len(content), kind=_kind(body), content=content)
        self.futures.begin(id, work)
        return id

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
            found.line.submit(sequence, body, error, REFUSED)

    async def answer(self, id: str, patience: float) -> Answer | Failure | None:
        """See `Futures.answer`."""
        return await self.futures.answer(id, patience)

    def _create_from(
        self, body: requests.LoadWeights, session: str, number: int, stored: Stored
    ) -> tuple[str, str]:
        model = self._new_model(session, number)

        async def make() -> Answer:
            spec = await self._engine.saved(stored)
            if body.base_model not in (None, spec.base):
                raise UsageError(
                    f"{body.path} was trained on {spec.base}; it cannot go on with {body.base_model}."
                )
            await self._make(model, spec)
            return await self._load(model, body, 0, stored)

        return model.id, model.line.submit(0, _content(body), make, _kind(body))

    async def _make(self, model: _Model, spec: ModelSpec) -> None:
        await self.end_silent_sessions()
        await self._engine.create_model(model.id, spec)
        await self._journal.add_model(model.id, _session_of(model.id), spec)
        model.spec = spec

    async def _save_ephemeral(self, model: _Model, sampler: str, call: int) -> str:
        assert model.spec is not None
        name = EPHEMERAL + sampler.rpartition(":")[2]
        await self._engine.save_for_sampler(model.id, name, call)
        stored = Stored(model.id, "sampler_weights", name)
        await self._journal.add_sampler(sampler, _session_of(model.id), model.spec.base, stored)
        if sampler not in self._samplers:  # this call may be done for the second time
            self._know_sampler(sampler, model.spec.base, stored)
        while len(model.ephemeral) > EPHEMERAL_KEPT:
            await self._engine.drop_sampler(model.ephemeral.pop(0))
        return sampler

    def _submit(self, model: _Model, sequence: int, content: bytes, work: Work, kind: str) -> str:
        if sequence < 1:
            raise UsageError(
                f"seq_id is {sequence}; it counts the calls of a model from 1, because 0 makes the model."
            )
        return model.line.submit(sequence, content, work, kind)

    def _new_model(self, session: str, number: int) -> _Model:
        owner = self._session(session)
        id = f"{session}:train:{number}"
        if id not in self._models:
            self._models[id] = _Model(id, Line(id, self.futures))
            owner.models.add(id)
        return self._models[id]

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


def optimiser_of(body: requests.OptimStep) -> OptimiserParams:
    """What an update is to do."""
    adam = body.adam_params
    return OptimiserParams(
        learning_rate=adam.learning_rate,
        max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else None,
        weight_decay=adam.weight_decay,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
    )


def _content(body: requests.Body) -> bytes:
    """A request as bytes that are the same for the same request."""
    return body.model_dump_json().encode()


def _reading(kind: type[BodyT], begin: Callable[[BodyT], Any]) -> Callable[[bytes], Any]:
    """Begin a call with its content as it was written down."""
    return lambda content: begin(kind.model_validate_json(content))


def _kind(body: requests.Body) -> str:
    return type(body).__name__


def _stored(values: Mapping[str, Any] | None) -> Stored | None:
    return None if values is None else Stored(**values)


def _finite(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in sums.items() if math.isfinite(value)}


def _json(value: Mapping[str, Any]) -> Answer:
    return Answer(json.dumps(value).encode())
