"""Does the work of the calls of clients' models, each under its number in the client's order.

Request 0 of a model's queue (`futures.py`) creates the model, with a new adapter or from a saved state; all its other calls follow in the
client's order. Weights saved only for one sampler are kept for the newest few samplers of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.types import OptimiserParams
from groupwise.server.engine.tinker_protocol import ModelSpec, Stored, TinkerEngine
from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import Outcome, StepRow
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker import requests, translate
from groupwise.server.tinker.checkpoints import Checkpoints
from groupwise.server.tinker.futures import JSON, PROTOBUF, AnswerFunction, failed_outcome
from groupwise.server.tinker.requests import content_of, identity_of, kind_of
from groupwise.server.tinker.sessions import (
    EPHEMERAL,
    Model,
    NotFound,
    SessionRegistry,
    path_of,
    session_of,
    stored_at,
)
from groupwise.tasks.rollouts.seeds import derive

EPHEMERAL_KEPT = 8
"""Number of such samplers per model whose weights are kept: enough for a loop whose samplers lag a few steps behind its training."""
FORWARD_BACKWARD = "forward_backward"
"""A kind of call that has no class in `requests`, because its body is protobuf."""


class TrainingCalls:
    """The training calls of all models."""

    def __init__(
        self,
        registry: SessionRegistry,
        engine: TinkerEngine,
        ledger: Ledger,
        checkpoints: Checkpoints,
        *,
        keep_every: int,
    ) -> None:
        """`keep_every`: number of updates after which a model's state is kept."""
        self._registry = registry
        self._engine = engine
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._keep_every = keep_every

    # --- creating models --------------------------------------------------------------------------

    async def admit(self, body: requests.CreateModel) -> None:
        """Raise UsageError if there cannot be a model over this base now; ends silent sessions if their room is needed."""

        async def attempt() -> None:
            self._engine.admit(body.base_model)

        await self._registry.with_room(body.session_id, attempt)

    def create_model(self, body: requests.CreateModel) -> tuple[str, str]:
        """Queue the creation of a model; returns the ids of the model and of the call."""
        lora = body.lora_config
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise UsageError("lora_config trains nothing: all of its train_ settings are false.")
        model = self._registry.new_model(body.session_id, body.model_seq_id)
        spec = ModelSpec(
            base=body.base_model,
            rank=lora.rank,
            seed=derive("verbs", model.id) % 2**63 if lora.seed is None else lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
        )

        async def make() -> Outcome:
            await self._create(model, spec, body.user_metadata)
            return _json_outcome({"model_id": model.id, "type": "create_model"})

        return model.id, model.queue.submit(0, content_of(body), make, kind_of(body))

    async def _create(
        self, model: Model, spec: ModelSpec, user_metadata: Mapping[str, str] | None
    ) -> None:
        session = session_of(model.id)
        await self._registry.with_room(session, lambda: self._engine.create_model(model.id, spec))
        await self._ledger.do_when_writable(
            calls.add_model, model.id, session, asdict(spec), user_metadata
        )
        model.spec = spec

    async def info(self, model: str) -> dict[str, Any]:
        """Describe a created model for the client."""
        state = self._registry.model(model)
        if state.spec is None:
            raise NotFound(f"The model {model} has not been made yet.")
        base = await self._engine.base(state.spec.base)
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
            "lora_rank": state.spec.rank,
        }

    # --- training ---------------------------------------------------------------------------------

    def forward_backward(self, request: translate.ForwardRequest) -> tuple[str, str]:
        """Queue a pass with or without gradient. A malformed request is refused at once, but has used its sequence number."""
        model = self._registry.model(request.model)
        forward = request.forward
        if isinstance(forward, UsageError):
            if request.sequence >= 1:
                model.queue.submit(request.sequence, request.content, forward, FORWARD_BACKWARD)
            raise forward
        _check_sequence(request.sequence)

        async def work() -> Outcome:
            if forward.forward_only:
                computed = await self._engine.forward(model.id, forward.rows, forward.loss)
                return Outcome("answered", PROTOBUF, translate.outputs(computed, forward.widths))
            computed = await self._engine.forward_backward(model.id, forward.rows, forward.loss)
            for name, value in computed.sums.items():
                model.sums[name] = model.sums.get(name, 0.0) + value
            answer = translate.outputs(computed, forward.widths)
            return Outcome("answered", PROTOBUF, answer, changed=True, sums={**model.sums})

        return model.id, model.queue.submit(
            request.sequence, request.content, work, FORWARD_BACKWARD
        )

    def optim_step(self, body: requests.OptimStep) -> tuple[str, str]:
        """Queue an update with the accumulated gradient."""
        model = self._registry.model(body.model_id)
        params = optimiser_of(body)

        async def work() -> Outcome:
            model.updates += 1
            keep_as = None
            if model.updates >= self._keep_every:
                model.updates, keep_as = 0, body.seq_id
            result = await self._engine.optim_step(model.id, params, keep_as)
            sums, model.sums = model.sums, {}
            finite = result.applied and math.isfinite(result.grad_norm)
            norm = result.grad_norm if finite else None
            finite_sums = {name: value for name, value in sums.items() if math.isfinite(value)}
            outcome = _json_outcome({"metrics": {"grad_norm": norm}})
            if norm is None:  # the call has failed, but has changed the model: its gradient is gone
                outcome = failed_outcome(
                    f"The gradient was not finite (norm {result.grad_norm}), so the update was left out and the gradient cleared.",
                    "server",
                )
            step = StepRow(params.learning_rate, norm, finite_sums)
            return replace(outcome, changed=True, kept=keep_as, step=step, sums={})

        return _submit_call(model, body.seq_id, body, work)

    # --- saving and loading weights ---------------------------------------------------------------

    def save_weights(self, body: requests.SaveWeights) -> tuple[str, str]:
        """Queue saving the adapter and optimiser under a name."""
        model = self._registry.model(body.model_id)
        stored = Stored(model.id, "weights", body.path)

        async def work() -> Outcome:
            async with self._checkpoints.saving(stored, body.ttl_seconds, body.user_metadata):
                await self._engine.save_state(
                    model.id, body.path, overwrite=body.overwrite, call=body.seq_id
                )
            return _json_outcome({"path": path_of(stored), "type": "save_weights"})

        return _submit_call(model, body.seq_id, body, work)

    def load_weights(self, body: requests.LoadWeights) -> tuple[str, str]:
        """Queue loading a saved state into an existing model, or into a new one created for it."""
        stored = stored_at(body.path)
        if body.session_id is not None and body.model_seq_id is not None:
            new_model = self._registry.new_model(body.session_id, body.model_seq_id)

            async def make() -> Outcome:
                self._checkpoints.check_available(stored)
                spec = await self._engine.saved(stored)
                if body.base_model not in (None, spec.base):
                    raise UsageError(
                        f"{body.path} was trained on {spec.base}; it cannot continue on {body.base_model}."
                    )
                await self._create(new_model, spec, body.user_metadata)
                return await self._load_weights(new_model, body, 0, stored)

            return new_model.id, new_model.queue.submit(0, content_of(body), make, kind_of(body))
        if body.model_id is None or body.seq_id is None:
            raise UsageError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id."
            )
        model, number = self._registry.model(body.model_id), body.seq_id

        async def work() -> Outcome:
            return await self._load_weights(model, body, number, stored)

        return _submit_call(model, number, body, work)

    async def _load_weights(
        self, model: Model, body: requests.LoadWeights, call: int, stored: Stored
    ) -> Outcome:
        """Load a state. The model's state is kept at once, because the saved weights could be different by the time this call were
        repeated.
        """
        self._checkpoints.check_available(stored)
        await self._engine.load_state(model.id, stored, with_optimiser=body.optimizer, keep_as=call)
        model.sums.clear()
        answer = _json_outcome({"path": body.path, "type": "load_weights"})
        return replace(answer, changed=True, kept=call, sums={})

    async def weights_info(self, path: str) -> dict[str, Any]:
        """Describe the model that saved these weights."""
        stored = stored_at(path)
        self._checkpoints.check_available(stored)
        spec = await self._engine.saved(stored)
        return {
            "base_model": spec.base,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    def save_for_sampler(self, body: requests.SaveForSampler) -> tuple[str, str]:
        """Queue saving the model's current weights, under a name or for one new sampler only."""
        model = self._registry.model(body.model_id)
        number = body.sampling_session_seq_id
        if (body.path is None) == (number is None):
            raise UsageError(
                "save_weights_for_sampler needs either path or sampling_session_seq_id."
            )
        if body.path is None and body.ttl_seconds is not None:
            raise UsageError(
                "ttl_seconds needs path: weights without a name last as long as their session."
            )

        async def named() -> Outcome:
            assert body.path is not None
            stored = Stored(model.id, "sampler_weights", body.path)
            async with self._checkpoints.saving(stored, body.ttl_seconds, body.user_metadata):
                await self._engine.save_for_sampler(model.id, body.path, body.seq_id)
            return _json_outcome({"path": path_of(stored), "type": "save_weights_for_sampler"})

        async def for_a_sampler() -> Outcome:
            assert model.spec is not None
            session, base = session_of(model.id), model.spec.base
            sampler = f"{session}:sample:{number}"
            stored = Stored(model.id, "sampler_weights", f"{EPHEMERAL}{number}")
            await self._engine.save_for_sampler(model.id, stored.name, body.seq_id)
            await self._ledger.do_when_writable(
                calls.add_sampler, sampler, session, base, asdict(stored)
            )
            self._registry.register_sampler(sampler, base, stored)
            while len(model.ephemeral) > EPHEMERAL_KEPT:
                await self._engine.drop_sampler(model.ephemeral.pop(0))
            return _json_outcome(
                {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}
            )

        work = named if body.path is not None else for_a_sampler
        return _submit_call(model, body.seq_id, body, work)


def _submit_call(
    model: Model, sequence: int, body: requests.Body, work: AnswerFunction
) -> tuple[str, str]:
    """Queue a call of a created model; returns the ids of the model and of the call."""
    _check_sequence(sequence)
    content, identity = content_of(body), identity_of(body)
    return model.id, model.queue.submit(sequence, content, work, kind_of(body), identity)


def _check_sequence(sequence: int) -> None:
    if sequence < 1:
        raise UsageError(
            f"seq_id is {sequence}; it counts the calls of a model from 1, because 0 makes the model."
        )


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


def _json_outcome(value: Mapping[str, Any]) -> Outcome:
    return Outcome("answered", JSON, json.dumps(value).encode())
