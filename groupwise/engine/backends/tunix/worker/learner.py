"""Learning: losses of `groupwise.algorithms` over rows, gradients of the factors, AdamW, checkpoints by Orbax.

It does the same as `groupwise.engine.learner.torch_learner` does in torch. Losses are sums and the denominators are given, so the gradient
does not depend on how rows are divided into batches; tokens outside the mask have no effect.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from groupwise.algorithms.base import SiblingSums, TokenBatch
from groupwise.algorithms.registry import from_spec
from groupwise.core.errors import CheckpointError
from groupwise.core.types import (
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    Row,
    SiblingRowStats,
    UpdateResult,
)
from groupwise.engine.backends.tunix.worker.adapter import Adapted, Factors
from groupwise.engine.backends.tunix.worker.forward import (
    Batch,
    Sequences,
    cut,
    numbers,
    with_recomputation,
)
from groupwise.engine.backends.tunix.worker.head import Numbers
from groupwise.engine.backends.tunix.worker.tensors import Tensor
from groupwise.engine.learner.schedule import learning_rate_too_high
from groupwise.runs import publications

STATE = "orbax"
"""Folder of Orbax's checkpoint inside the folder of the learner's state."""


class Learner:
    """The trained factors, their moments, and the gradient accumulated so far."""

    def __init__(
        self,
        adapted: Adapted,
        factors: Factors,
        *,
        run: str,
        publish_folder: Path,
        described: Mapping[str, Any],
        vocabulary: int,
        longest: int,
        max_tokens: int,
        multiple: int,
        remat: bool,
    ) -> None:
        """`factors` are also the reference. `described` is peft's config of the adapter. `longest` is the most tokens of a row,
        `max_tokens` of a batch; a batch's number of rows is a multiple of `multiple`. `remat`: see `forward.with_recomputation`."""
        self.adapted = adapted
        self._factors = factors
        self._reference = dict(factors)
        moments = optax.scale_by_adam().init(factors)
        shardings = _shardings_of(factors, moments)
        self._moments = jax.device_put(moments, shardings[1])
        self._gradient: Factors | None = None
        self._trained: list[tuple[Batch, Any]] = []
        """The batches of the last `forward_backward`, with the log-probabilities [B, L] that it computed."""
        self._run, self._publish_folder, self._described = run, publish_folder, described
        self._vocabulary = vocabulary
        self._cut = functools.partial(cut, longest=longest, tokens=max_tokens, multiple=multiple)
        self._remat = remat
        self._gradients: dict[str, Any] = {}
        self._compiled_numbers = jax.jit(self._compute_numbers)
        self._adamw_step = jax.jit(_adamw_step, static_argnums=(5, 6, 7), out_shardings=shardings)

    def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`."""
        compute = self._gradient_of(loss)
        sums: dict[str, float] = {}
        shares = {name: 1 / value if value else 0.0 for name, value in denominators.items()}
        self._trained = []
        for batch in self._cut(rows):
            (_, (stats, logprobs_BL)), gradient = compute(
                self._factors,
                self.adapted.base,
                batch.sequences(self._vocabulary),
                _loss_inputs(batch),
                shares,
            )
            self._gradient = (
                gradient
                if self._gradient is None
                else jax.tree.map(jnp.add, self._gradient, gradient)
            )
            self._trained.append((batch, logprobs_BL))
            for name, value in stats.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def trained_logprobs(self) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.trained_logprobs`."""
        return _by_row(self._trained)

    def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`. Raises `NonFiniteError` if the update itself made weights NaN or infinite."""
        gradient = self._gradient
        self.discard()
        norm = 0.0 if gradient is None else float(optax.global_norm(gradient))
        applied = math.isfinite(norm)
        if gradient is None or not applied:
            return UpdateResult(norm, applied)
        longest = params.max_grad_norm
        scale = longest / norm if longest is not None and norm > longest else 1.0
        factors, moments = self._adamw_step(
            self._factors,
            self._moments,
            jax.tree.map(lambda leaf: leaf * scale, gradient),
            params.learning_rate,
            params.weight_decay,
            params.beta1,
            params.beta2,
            params.eps,
        )
        if not math.isfinite(float(optax.global_norm(factors))):
            raise learning_rate_too_high(params)
        self._factors, self._moments = factors, moments
        return UpdateResult(norm, applied)

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._gradient = None
        self._trained = []

    def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`."""
        folder = publications.version_folder(self._publish_folder, version)
        fingerprint = self.adapted.write(self._factors, folder, self._described)
        return Policy(self._run, version, fingerprint, "adapter", str(folder))

    def logprobs(self, rows: Sequence[Row], role: PolicyRole) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`."""
        return _by_row(
            [(batch, result.logprobs_BL) for batch, result in self._compute_all(rows, role)]
        )

    def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`."""
        predictions: list[Prediction] = [Prediction((), ())] * len(rows)
        for batch, result in self._compute_all(rows, "policy"):
            logprobs, right = batch.unpad(result.logprobs_BL), batch.unpad(result.right_BL)
            for index, values, hits in zip(batch.indices, logprobs, right, strict=True):
                predictions[index] = Prediction(values, tuple(map(bool, hits)))
        return predictions

    def save(self, folder: Path) -> None:
        """Save the adapter in its published form, and the optimiser's state by Orbax."""
        self.adapted.write(self._factors, folder, self._described)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((folder / STATE).resolve(), self._moments, force=True)

    def load(self, folder: Path) -> None:
        """Restore the files that `save` wrote. Raises `CheckpointError` if they are missing."""
        if not (folder / STATE).is_dir():
            raise CheckpointError(
                f"{folder} has no {STATE}: it was not written by the backend tunix."
            )
        self._factors = self.adapted.read(folder)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._moments)
        with ocp.StandardCheckpointer() as checkpointer:
            self._moments = checkpointer.restore((folder / STATE).resolve(), shapes)
        self.discard()

    def _compute_all(self, rows: Sequence[Row], role: PolicyRole) -> list[tuple[Batch, Numbers]]:
        factors = self._factors if role == "policy" else self._reference
        return [
            (
                batch,
                self._compiled_numbers(
                    factors, self.adapted.base, batch.sequences(self._vocabulary)
                ),
            )
            for batch in self._cut(rows)
        ]

    def _compute_numbers(self, factors: Factors, base: Any, sequences: Sequences) -> Numbers:
        model = self.adapted.with_factors(factors, base)
        return numbers(with_recomputation(model) if self._remat else model, sequences)

    def _gradient_of(self, spec: LossSpec) -> Any:
        """The gradient function of a loss, compiled once for each loss and its settings."""
        key = json.dumps([spec.name, spec.knobs], sort_keys=True)
        if key not in self._gradients:
            loss = from_spec(spec)

            def total(
                factors: Factors,
                base: Any,
                sequences: Sequences,
                inputs: dict[str, Any],
                shares: dict[str, Any],
            ) -> tuple[Any, tuple[dict[str, Any], Any]]:
                computed = self._compute_numbers(factors, base, sequences)
                result = loss.loss(_token_batch(computed, inputs, loss))
                objective = sum(
                    value.value * shares[name] for name, value in result.components.items()
                )
                losses = {f"loss/{name}": value for name, value in result.components.items()}
                stats = {**losses, **result.stats}
                sums = {name: value.detach().value for name, value in stats.items()}
                return objective, (sums, computed.logprobs_BL)

            self._gradients[key] = jax.jit(jax.value_and_grad(total, has_aux=True))
        return self._gradients[key]


def _by_row(batches: Sequence[tuple[Batch, Any]]) -> list[tuple[float, ...]]:
    """Values of each row, in order, from the values [B, L] of all batches."""
    by_index: dict[int, tuple[float, ...]] = {}
    for batch, values_BL in batches:
        by_index.update(zip(batch.indices, batch.unpad(values_BL), strict=True))
    return [by_index[index] for index in range(len(by_index))]


def _shardings_of(factors: Factors, moments: Any) -> tuple[Any, Any]:
    """Shardings of factors and moments. They are the same at every step, so restored tensors are computed exactly like saved ones."""
    shardings = {name: value.sharding for name, value in factors.items()}
    mesh = next(iter(shardings.values())).mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return shardings, moments._replace(count=everywhere, mu=shardings, nu=shardings)


def _adamw_step(
    factors: Factors,
    moments: Any,
    gradient: Factors,
    learning_rate: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Factors, Any]:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), as in torch."""
    directions, moments = optax.scale_by_adam(beta1, beta2, eps).update(gradient, moments)
    moved = jax.tree.map(
        lambda value, direction: (
            value * (1 - learning_rate * weight_decay) - learning_rate * direction
        ),
        factors,
        directions,
    )
    return moved, moments


def _loss_inputs(batch: Batch) -> dict[str, Any]:
    """The rows' inputs of a loss, as arrays."""
    rows = batch.rows
    inputs: dict[str, Any] = {
        "sampling": batch.spread([row.sampling_logprobs for row in rows]),
        "mask": batch.spread([row.mask for row in rows]),
        "advantages": batch.by_row([row.advantage for row in rows]),
        "scales": batch.by_row([row.scale for row in rows]),
    }
    optional = {
        "reference": [row.reference_logprobs for row in rows],
        "proximal": [row.proximal_logprobs for row in rows],
        "credits": [row.credits for row in rows],
    }
    for name, values in optional.items():
        present = [value for value in values if value is not None]
        if present:
            inputs[name] = batch.spread(present)
    if any(row.others is not None for row in rows):
        siblings = [row.others or SiblingRowStats(0) for row in rows]
        inputs["others"] = (
            batch.by_row([stats.tokens for stats in siblings]).astype(np.int32),
            batch.by_row([stats.log_weight for stats in siblings]),
            batch.by_row([stats.log_ratio for stats in siblings]),
        )
    return inputs


def _token_batch(computed: Numbers, about: Mapping[str, Any], loss: Any) -> TokenBatch:
    optional = {
        f"{name}_BT": Tensor(about[key])
        for name, key in (
            ("reference_logprobs", "reference"),
            ("proximal_logprobs", "proximal"),
            ("credits", "credits"),
        )
        if key in about
    }
    entropies = Tensor(computed.entropies_BL)
    return TokenBatch(
        policy_logprobs_BT=Tensor(computed.logprobs_BL),
        sampling_logprobs_BT=Tensor(about["sampling"]),
        mask_BT=Tensor(about["mask"]),
        advantages_B=Tensor(about["advantages"]),
        scales_B=Tensor(about["scales"]),
        entropies_BT=entropies if loss.needs_entropy_gradient else entropies.detach(),
        right_BT=Tensor(computed.right_BL) if loss.needs_accuracy else None,
        others=SiblingSums(*map(Tensor, about["others"])) if "others" in about else None,
        **optional,
    )
