"""Does the work of each call of a client's model, under the call's number in the client's order.

A model is made by the request 0 of its line (`futures.py`), from nothing or from a state that was saved; everything else about it follows
in the client's order. Weights that it saves for one sampler alone are kept for the last few of its samplers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.types import OptimiserParams
from groupwise.server.engine.verb_protocol import ModelSpec, Stored, VerbEngine
from groupwise.server.ledger.calls import StepRow
from groupwise.server.tinker import requests, translate
from groupwise.server.tinker.futures import PROTOBUF, CallResult, LeftOut, Note, Work
from groupwise.server.tinker.journal import Journal
from groupwise.server.tinker.paths import path_of, stored_at
from groupwise.server.tinker.requests import content_of, kind_of
from groupwise.server.tinker.sessions import EPHEMERAL, Model, NotThere, Opened, session_of
from groupwise.tasks.rollouts.seeds import derive

EPHEMERAL_KEPT = 8
"""Number kept for each model: enough for a loop whose samplers lag a few steps behind its training."""
FORWARD_BACKWARD = "forward_backward"
"""A kind of calls beside the classes of `requests`."""


class TrainingCalls:
    """Training calls of all models."""

    def __init__(
        self, opened: Opened, engine: VerbEngine, journal: Journal, keep_every: int
    ) -> None:
        """`keep_every`: updates of a model after which its state is kept, if the journal is durable."""
        self._opened = opened
        self._engine = engine
        self._journal = journal
        self._keep_every = keep_every

    # --- making one ------------------------------------------------------------------------------

    def create_model(self, body: requests.CreateModel) -> tuple[str, str]:
        """The ids of the model and of the call that makes it."""
        self._engine.admit(body.base_model)
        lora = body.lora_config
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise UsageError("lora_config trains nothing: all of its train_ settings are false.")
        model = self._opened.new_model(body.session_id, body.model_seq_id)
        spec = ModelSpec(
            base=body.base_model,
            rank=lora.rank,
            seed=derive("verbs", model.id) % 2**63 if lora.seed is None else lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        )

        async def make() -> CallResult:
            await self._make(model, spec)
            return _json({"model_id": model.id, "type": "create_model"})

        return model.id, model.line.submit(0, content_of(body), make, kind_of(body))

    def _create_from(
        self, body: requests.LoadWeights, session: str, number: int, stored: Stored
    ) -> tuple[str, str]:
        model = self._opened.new_model(session, number)

        async def make() -> CallResult:
            spec = await self._engine.saved(stored)
            if body.base_model not in (None, spec.base):
                raise UsageError(
                    f"{body.path} was trained on {spec.base}; it cannot go on with {body.base_model}."
                )
            await self._make(model, spec)
            return await self._load(model, body, 0, stored)

        return model.id, model.line.submit(0, content_of(body), make, kind_of(body))

    async def _make(self, model: Model, spec: ModelSpec) -> None:
        await self._opened.end_silent_sessions()
        await self._engine.create_model(model.id, spec)
        await self._journal.add_model(model.id, session_of(model.id), spec)
        model.spec = spec

    async def info(self, model: str) -> dict[str, Any]:
        """Describe a model that has been made, for the client."""
        found = self._opened.model(model)
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

    # --- training it -----------------------------------------------------------------------------

    def forward_backward(self, request: translate.ForwardRequest) -> tuple[str, str]:
        """Run a pass with or without gradient. A malformed request is refused at once, but has used its sequence number."""
        model = self._opened.model(request.model)
        asked = request.asked
        if isinstance(asked, UsageError):
            if request.sequence >= 1:
                model.line.submit(request.sequence, request.content, asked, FORWARD_BACKWARD)
            raise asked

        async def work() -> CallResult:
            if asked.forward_only:
                computed = await self._engine.forward(model.id, asked.rows, asked.loss)
                return CallResult(translate.outputs(computed), PROTOBUF)
            computed = await self._engine.forward_backward(model.id, asked.rows, asked.loss)
            for name, value in computed.sums.items():
                model.sums[name] = model.sums.get(name, 0.0) + value
            return CallResult(translate.outputs(computed), PROTOBUF, Note())

        return model.id, self._submit(
            model, request.sequence, request.content, work, FORWARD_BACKWARD
        )

    def optim_step(self, body: requests.OptimStep) -> tuple[str, str]:
        """An update with the gradient that has gathered."""
        model = self._opened.model(body.model_id)
        params = optimiser_of(body)

        async def work() -> CallResult:
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

        return model.id, self._submit(model, body.seq_id, content_of(body), work, kind_of(body))

    def _keeps_as(self, model: Model, call: int) -> int | None:
        """The number of an update after which the model's state is kept; None for the others."""
        model.updates += 1
        if not self._journal.durable or model.updates < self._keep_every:
            return None
        model.updates = 0
        return call

    # --- its weights -----------------------------------------------------------------------------

    def save_weights(self, body: requests.SaveWeights) -> tuple[str, str]:
        """Adapter and optimiser under a name."""
        model = self._opened.model(body.model_id)
        stored = Stored(model.id, "weights", body.path)

        async def work() -> CallResult:
            await self._engine.save_state(
                model.id, body.path, overwrite=body.overwrite, call=body.seq_id
            )
            return _json({"path": path_of(stored), "type": "save_weights"})

        return model.id, self._submit(model, body.seq_id, content_of(body), work, kind_of(body))

    def load_weights(self, body: requests.LoadWeights) -> tuple[str, str]:
        """A state into a model that is there, or into a new one that is made for it."""
        stored = stored_at(body.path)
        if body.session_id is not None and body.model_seq_id is not None:
            return self._create_from(body, body.session_id, body.model_seq_id, stored)
        if body.model_id is None or body.seq_id is None:
            raise UsageError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id."
            )
        model, number = self._opened.model(body.model_id), body.seq_id

        async def work() -> CallResult:
            return await self._load(model, body, number, stored)

        return model.id, self._submit(model, number, content_of(body), work, kind_of(body))

    async def _load(
        self, model: Model, body: requests.LoadWeights, call: int, stored: Stored
    ) -> CallResult:
        """The state is kept at once: what was saved may be another one when this would be repeated."""
        await self._engine.load_state(model.id, stored, with_optimiser=body.optimizer, keep_as=call)
        model.sums.clear()
        answer = _json({"path": body.path, "type": "load_weights"})
        return replace(answer, note=Note(kept=call))

    async def weights_info(self, path: str) -> dict[str, Any]:
        """Describe the model that saved these weights."""
        spec = await self._engine.saved(stored_at(path))
        return {
            "base_model": spec.base,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    def save_for_sampler(self, body: requests.SaveForSampler) -> tuple[str, str]:
        """The weights as they are in the client's order, under a name, or for a new sampler alone."""
        model = self._opened.model(body.model_id)
        number = body.sampling_session_seq_id
        if (body.path is None) == (number is None):
            raise UsageError(
                "save_weights_for_sampler needs either path or sampling_session_seq_id."
            )

        async def named() -> CallResult:
            assert body.path is not None
            await self._engine.save_for_sampler(model.id, body.path, body.seq_id)
            path = path_of(Stored(model.id, "sampler_weights", body.path))
            return _json({"path": path, "type": "save_weights_for_sampler"})

        async def for_a_sampler() -> CallResult:
            name = f"{session_of(model.id)}:sample:{number}"
            sampler = await self._save_ephemeral(model, name, body.seq_id)
            return _json({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})

        work = named if body.path is not None else for_a_sampler
        return model.id, self._submit(model, body.seq_id, content_of(body), work, kind_of(body))

    async def _save_ephemeral(self, model: Model, sampler: str, call: int) -> str:
        assert model.spec is not None
        name = EPHEMERAL + sampler.rpartition(":")[2]
        await self._engine.save_for_sampler(model.id, name, call)
        stored = Stored(model.id, "sampler_weights", name)
        await self._journal.add_sampler(sampler, session_of(model.id), model.spec.base, stored)
        self._opened.know_sampler(sampler, model.spec.base, stored)
        while len(model.ephemeral) > EPHEMERAL_KEPT:
            await self._engine.drop_sampler(model.ephemeral.pop(0))
        return sampler

    def _submit(self, model: Model, sequence: int, content: bytes, work: Work, kind: str) -> str:
        if sequence < 1:
            raise UsageError(
                f"seq_id is {sequence}; it counts the calls of a model from 1, because 0 makes the model."
            )
        return model.line.submit(sequence, content, work, kind)


def optimiser_of(body: requests.OptimStep) -> OptimiserParams:
    """Convert a request to the optimiser's parameters."""
    adam = body.adam_params
    return OptimiserParams(
        learning_rate=adam.learning_rate,
        max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else None,
        weight_decay=adam.weight_decay,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
    )


def _finite(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in sums.items() if math.isfinite(value)}


def _json(value: Mapping[str, Any]) -> CallResult:
    return CallResult(json.dumps(value).encode())
