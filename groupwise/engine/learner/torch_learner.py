"""The default learner: forward, backward and AdamW in this process.

It is independent of algorithms. Rows come with weights and denominators that were computed for the whole step. They are divided into
micro-batches, each adds its share of the gradient, and `update` applies the sum. Because losses are sums and the denominators are given,
the gradient does not depend on that division. Factors or weights, gradients and optimiser state are float32.

A learner trains one adapter over a base that others may share, or all weights of its own model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import unwrap
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from groupwise.algorithms.base import Loss, LossResult, SiblingSums, TokenBatch
from groupwise.algorithms.registry import from_spec
from groupwise.core import atomic_files
from groupwise.core.interruption import wait_until_done
from groupwise.core.types import (
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    Row,
    SiblingRowStats,
    TopTokens,
    UpdateResult,
)
from groupwise.engine.learner.layout import Batch
from groupwise.engine.learner.native.engine import NativeEngine
from groupwise.engine.learner.replicas import GradientSum
from groupwise.engine.learner.schedule import learning_rate_too_high
from groupwise.engine.learner.targets import DEFAULT_OUTPUTS, ForwardOutputs, ForwardResult
from groupwise.engine.learner.teacher import Teacher
from groupwise.engine.learner.weights import TrainedWeights, total_norm
from groupwise.engine.models.files import read_json, read_tensors, write_tensors
from groupwise.engine.models.lora import copy_exactly, fingerprint
from groupwise.engine.models.machine import engine_products
from groupwise.engine.models.memory import explaining_out_of_memory
from groupwise.engine.models.sharded import FullTensors
from groupwise.runs import publications

if TYPE_CHECKING:
    from groupwise.engine.learner.engine import LearnerEngine

OPTIMISER = "optimiser.safetensors"
STATE = "learner.json"
FUSED_ON = frozenset({"cuda"})
"""Kinds of devices on which one kernel reads each weight and its moments once; torch's other ways read and write them a dozen times."""


class AdamW(torch.optim.AdamW):
    """Torch's optimiser without the decorators by which it imports torch's compiler, which takes a second. Nothing here is compiled."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class TorchLearner:
    """A `groupwise.core.types.Learner` over any transformers causal language model."""

    def __init__(
        self,
        weights: TrainedWeights,
        *,
        run: str,
        publish_folder: Path,
        max_tokens_per_microbatch: int,
        seed: int,
        gradient_checkpointing: bool = False,
        packing: bool = True,
        keep_publications: int = 2,
        replicas: GradientSum | None = None,
        native: bool = True,
        routing_replay: bool = False,
        shard_device: str | None = None,
        engine: LearnerEngine | None = None,
        make_teacher: Callable[[LearnerEngine], Teacher] | None = None,
    ) -> None:
        """`keep_publications`: how many of the latest publications keep their files.

        `replicas`: the learners in other processes that compute the gradients of other rows for the same update.
        `native`: if False, transformers computes every model; this is the reference for the native engine.
        `routing_replay`: replay the experts that the sampler chose; see `groupwise.engine.learner.routing_replay`.
        `engine`: computes the rows, if these weights need a special engine; the arguments that configure an engine do not apply to it.
        `make_teacher`: makes the teacher of a distillation, given the learner's own engine.
        `shard_device`: device of this learner's part if weights are divided among the replicas; see `groupwise.engine.learner.fsdp`.
        """
        self._weights = weights
        self._run = run
        self._publish_folder = publish_folder
        self._max_tokens = max_tokens_per_microbatch
        self._keep_publications = keep_publications
        self._seed = seed
        self._dropout = weights.dropout > 0
        self._sharded = shard_device is not None
        self._engine = engine or _make_engine(
            weights,
            native=native and not routing_replay,
            packing=packing,
            routing_replay=routing_replay,
            gradient_checkpointing=gradient_checkpointing,
            shard_device=shard_device,
        )
        self._teacher = make_teacher(self._engine) if make_teacher is not None else None
        self._parameters = weights.parameters()
        self._fused = next(iter(self._parameters.values())).device.type in FUSED_ON
        self._optimiser = AdamW(
            self._parameters.values(), fused=self._fused, foreach=not self._fused
        )
        self._updates = 0
        self._replicas = replicas
        self._trained: tuple[Sequence[Row], list[tuple[Batch, Tensor]]] = ((), [])
        """Rows of the last `forward_backward`, and the log-probabilities [B, T] that it computed, by micro-batch."""

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`."""
        return await self._add_gradient(rows, loss, denominators, untrained_logprobs=False)

    async def forward_backward_logprobs(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> tuple[dict[str, float], list[tuple[float, ...]]]:
        """Do what `forward_backward` does; also return the log-probabilities of all tokens from the same pass, as `logprobs` has them.

        With dropout they are those of the pass, which drops inputs.
        """
        sums = await self._add_gradient(rows, loss, denominators, untrained_logprobs=True)
        return sums, _by_row(*self._trained)

    async def _add_gradient(
        self,
        rows: Sequence[Row],
        loss: LossSpec,
        denominators: Mapping[str, float],
        *,
        untrained_logprobs: bool,
    ) -> dict[str, float]:
        loss_function = from_spec(loss)
        sums: dict[str, float] = {}
        if self._dropout:
            # Hashed, because torch's generator uses only the lower 32 bits.
            rank = f" {self._replicas.rank}" if self._replicas is not None else ""
            text = f"dropout {self._seed} {self._updates}{rank}"
            digest = hashlib.sha256(text.encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:4], "big"))
        outputs = ForwardOutputs(
            loss_function.needs_entropy_gradient,
            loss_function.needs_accuracy,
            trained_only=True,
            untrained_logprobs=untrained_logprobs,
        )
        logprobs_by_batch: list[tuple[Batch, Tensor]] = []
        self._trained = (rows, logprobs_by_batch)
        for batch in self._engine.cut(rows, self._max_tokens, gradient=True):
            result, logprobs_BT = self._backward(batch, outputs, loss_function, denominators)
            _add_sums(sums, result)
            logprobs_by_batch.append((batch, logprobs_BT))
            if not self._sharded:  # divided learners must stay in the same order
                device = self._weights.model.device
                devices = [] if device.type == "cpu" else [device]
                # Other learners in this process may draw random numbers now; dropout then continues from its own state.
                with torch.random.fork_rng(devices, enabled=self._dropout):
                    await asyncio.sleep(0)
        self._engine.keep_step("policy", gradient=True)
        return sums

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`."""
        return _by_row(*self._trained)

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`. A gradient that is NaN or infinite is not applied.

        Raises `NonFiniteError` if the update itself made weights NaN or infinite.
        """
        with explaining_out_of_memory("updating the weights"):
            if self._replicas is not None:
                self._replicas.sum_gradients([*self._parameters.values()])
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            length = total_norm(gradients) if gradients else 0.0
            applied = math.isfinite(length)
            if applied:
                if params.max_grad_norm is not None and length > params.max_grad_norm:
                    torch._foreach_mul_(gradients, params.max_grad_norm / length)
                self._apply_update(params)
                if self._teacher is not None and self._teacher.average is not None:
                    self._teacher.average.follow()
        self.discard()
        return UpdateResult(grad_norm=length, applied=applied)

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        # Not to zeros: AdamW would still move such weights by their momentum, and a checkpoint could not restore that.
        self._optimiser.zero_grad(set_to_none=True)
        self._trained = ((), [])

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`. Old publications' files are removed.

        Threads hash and write the weights, which takes seconds for a large model. Raises `StoreError` if the files cannot be written.
        """
        if self._sharded:  # parts are gathered before the next call of all learners begins
            return self._publish(version)
        return await wait_until_done(asyncio.to_thread(self._publish, version))

    def _publish(self, version: int) -> Policy:
        folder = publications.version_folder(self._publish_folder, version)
        # SHA-256 takes as long as writing, and both leave other threads running.
        with ThreadPoolExecutor(1) as beside:
            fingerprint = beside.submit(self.fingerprint)
            if self._sharded:  # all learners must read each tensor's parts in the same order
                fingerprint.result()
            with atomic_files.explaining_disk_errors(folder):
                self._weights.publish(folder)
        publications.remove_old(self._publish_folder, version, self._keep_publications)
        return Policy(
            run=self._run,
            version=version,
            fingerprint=fingerprint.result(),
            kind=self._weights.kind,
            path=str(folder),
        )

    def fingerprint(self) -> str:
        """Fingerprint of the current weights; see `groupwise.core.types.Policy.fingerprint`."""
        return fingerprint(self._weights.published())

    def attend_publication(self) -> str:
        """Contribute this learner's parts while the first learner publishes; returns the fingerprint."""
        fingerprint = self.fingerprint()
        self._weights.contribute_shards()
        return fingerprint

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`."""
        if role == "teacher":
            rows = [row.as_seen_by_teacher for row in rows]
        forwards = self._forwards(rows, role)
        return _by_row(rows, ((batch, forward.logprobs_BT) for batch, forward in forwards))

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`."""
        forwards = self._forwards(rows, outputs=ForwardOutputs(accuracy=True))
        logprobs = _by_row(rows, ((batch, forward.logprobs_BT) for batch, forward in forwards))
        right = _by_row(
            rows, ((batch, cast("Tensor", forward.right_BT)) for batch, forward in forwards)
        )
        return [Prediction(*pair) for pair in zip(logprobs, right, strict=True)]

    async def measure(
        self, rows: Sequence[Row], loss: LossSpec
    ) -> tuple[dict[str, float], list[tuple[float, ...]]]:
        """The sums that `forward_backward` returns, and the log-probabilities of all tokens; computes no gradient."""
        loss_function = from_spec(loss)
        outputs = ForwardOutputs(loss_function.needs_entropy_gradient, loss_function.needs_accuracy)
        forwards = self._forwards(rows, outputs=outputs)
        sums: dict[str, float] = {}
        for batch, forward in forwards:
            _add_sums(sums, loss_function.loss(token_batch(batch, forward)))
        return sums, _by_row(rows, ((batch, forward.logprobs_BT) for batch, forward in forwards))

    async def top_logprobs(
        self, rows: Sequence[Row], count: int
    ) -> tuple[list[tuple[float, ...]], list[TopTokens]]:
        """Return what `logprobs` does, and from that pass the `count` most likely tokens in place of each completion token of each row."""
        forwards = self._forwards(rows, outputs=ForwardOutputs(top=count))
        ids_by_row = _by_row(
            rows, ((batch, cast("Tensor", forward.top_ids_BTX)) for batch, forward in forwards)
        )
        logprobs_by_row = _by_row(
            rows, ((batch, cast("Tensor", forward.top_logprobs_BTX)) for batch, forward in forwards)
        )
        logprobs = _by_row(rows, ((batch, forward.logprobs_BT) for batch, forward in forwards))
        return logprobs, [
            TopTokens(count, tuple(chain(*ids)), tuple(chain(*values)))
            for ids, values in zip(ids_by_row, logprobs_by_row, strict=True)
        ]

    @engine_products()
    @explaining_out_of_memory("computing log-probabilities")
    def _forwards(
        self,
        rows: Sequence[Row],
        role: PolicyRole = "policy",
        outputs: ForwardOutputs = DEFAULT_OUTPUTS,
    ) -> list[tuple[Batch, ForwardResult]]:
        """Every micro-batch with its outputs, computed without gradient and dropout."""
        engine = self._engine
        if role == "teacher":
            engine, role = self._required_teacher.engine, self._required_teacher.role
        with torch.no_grad(), engine.acting(role, gradient=False) as compute:
            batches = engine.cut(rows, self._max_tokens, gradient=False)
            results = [(batch, compute(batch, outputs)) for batch in batches]
            engine.keep_step(role, gradient=False)
            return results

    @property
    def _required_teacher(self) -> Teacher:
        assert self._teacher is not None, "built without a teacher, because the algorithm has none"
        return self._teacher

    async def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`. A thread writes. Raises OSError if the files cannot be written."""
        if self._sharded:  # see `publish`
            self._save(Path(folder))
            return
        await wait_until_done(asyncio.to_thread(self._save, Path(folder)))

    def _save(self, path: Path) -> None:
        moments = {**FullTensors(self._optimiser_tensors())}
        self._weights.save(path)
        if self._teacher is not None and self._teacher.average is not None:
            self._teacher.average.save(path)
        write_tensors(moments, path / OPTIMISER)
        (path / STATE).write_text(json.dumps({"updates": self._updates, "seed": self._seed}))

    def attend_save(self) -> None:
        """Contribute this learner's parts while the first learner saves."""
        FullTensors(self._optimiser_tensors()).contribute_shards()
        self._weights.contribute_shards()

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        path = Path(folder)
        self._weights.read(path)
        if self._teacher is not None and self._teacher.average is not None:
            self._teacher.average.read(path)
        self._updates = int(read_json(path / STATE)["updates"])
        self.discard()
        stored = read_tensors(path / OPTIMISER)
        self._optimiser.state.clear()
        # A parameter that has never had a gradient has no moments.
        for name in {key.partition("|")[2] for key in stored} & self._parameters.keys():
            parameter = self._parameters[name]
            self._optimiser.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if self._fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        copy_exactly(self._optimiser_tensors(), stored, str(path / OPTIMISER))

    def load_weights(self, folder: str) -> None:
        """Load saved or published weights, and reset the optimiser."""
        self._weights.read(Path(folder))
        self.discard()
        self._optimiser.state.clear()
        self._updates = 0

    @engine_products()
    @explaining_out_of_memory("learning")
    def _backward(
        self, batch: Batch, outputs: ForwardOutputs, loss: Loss, denominators: Mapping[str, float]
    ) -> tuple[LossResult, Tensor]:
        """Add the gradient of a micro-batch's loss; returns the loss's sums, and the log-probabilities [B, T]."""
        if loss.needs_teacher_kl:
            teacher = self._required_teacher.distributions(batch.rows, self._max_tokens)
            outputs = replace(outputs, teacher=teacher)
        with self._engine.acting("policy", gradient=True) as compute:
            forward = compute(batch, outputs)
            result = loss.loss(token_batch(batch, forward))
            total = sum(
                value / denominators[name]
                for name, value in result.components.items()
                if denominators[name]
            )
            if isinstance(total, Tensor):
                total.backward()
        return result, forward.logprobs_BT.detach()

    def _apply_update(self, params: OptimiserParams) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = params.learning_rate
            group["weight_decay"] = params.weight_decay
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
        try:
            self._optimiser.step()
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            raise learning_rate_too_high(params) from error
        if not math.isfinite(total_norm([*self._parameters.values()])):
            raise learning_rate_too_high(params)
        self._updates += 1

    def _optimiser_tensors(self) -> dict[str, Tensor]:
        return {
            f"{kind}|{name}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._optimiser.state.get(parameter, {}).items()
        }


@engine_products()
def _make_engine(
    weights: TrainedWeights,
    *,
    native: bool,
    packing: bool,
    routing_replay: bool,
    gradient_checkpointing: bool,
    shard_device: str | None,
) -> LearnerEngine:
    # Transformers and what divides tensors take seconds to import, so only where they compute.
    if shard_device is not None:
        from groupwise.engine.learner.fsdp import FsdpEngine

        return FsdpEngine(
            weights, shard_device, packing=packing, gradient_checkpointing=gradient_checkpointing
        )
    model = weights.native() if native else None
    if model is not None:
        return NativeEngine(
            model, weights, packing=packing, gradient_checkpointing=gradient_checkpointing
        )
    from groupwise.engine.learner.engine import TransformersEngine

    return TransformersEngine(
        weights,
        packing=packing,
        gradient_checkpointing=gradient_checkpointing,
        routing_replay=routing_replay,
    )


def _by_row(
    rows: Sequence[Row], values_by_batch: Iterable[tuple[Batch, Tensor]]
) -> list[tuple[Any, ...]]:
    """Values [B, T] of micro-batches as one tuple for each row, in the order of the rows and without padding."""
    values_by_row: list[tuple[Any, ...]] = [()] * len(rows)
    for batch, values_BT in values_by_batch:
        for index, row, values in zip(batch.indices, batch.rows, values_BT.tolist(), strict=True):
            values_by_row[index] = tuple(values[: len(row.target_ids)])
    return values_by_row


def _add_sums(sums: dict[str, float], result: LossResult) -> None:
    losses = {f"loss/{name}": value for name, value in result.components.items()}
    for name, value in {**losses, **result.stats}.items():
        sums[name] = sums.get(name, 0.0) + float(value.detach())


def token_batch(batch: Batch, forward: ForwardResult) -> TokenBatch:
    """Convert a micro-batch and its log-probabilities to the tensors that a loss takes."""
    device = forward.logprobs_BT.device

    def padded(values: list[tuple[float, ...]]) -> Tensor:
        width = batch.width
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in values], device=device)

    def where_present(values: list[tuple[float, ...] | None]) -> Tensor | None:
        present = [row for row in values if row is not None]
        return padded(present) if present else None

    return TokenBatch(
        policy_logprobs_BT=forward.logprobs_BT,
        sampling_logprobs_BT=padded([row.sampling_logprobs for row in batch.rows]),
        mask_BT=padded([row.mask for row in batch.rows]),
        advantages_B=torch.tensor([row.advantage for row in batch.rows], device=device),
        scales_B=torch.tensor([row.scale for row in batch.rows], device=device),
        entropies_BT=forward.entropies_BT,
        right_BT=forward.right_BT,
        reference_logprobs_BT=where_present([row.reference_logprobs for row in batch.rows]),
        proximal_logprobs_BT=where_present([row.proximal_logprobs for row in batch.rows]),
        others=_sibling_stats(batch, device),
        credits_BT=where_present([row.credits for row in batch.rows]),
        teacher_logprobs_BT=where_present([row.teacher_logprobs for row in batch.rows]),
        teacher_kl_BT=forward.teacher_kl_BT,
    )


def _sibling_stats(batch: Batch, device: torch.device) -> SiblingSums | None:
    """Sums over the other rows of each row's rollout; None if each row is a whole rollout."""
    if all(row.others is None for row in batch.rows):
        return None
    siblings = [row.others or SiblingRowStats(0) for row in batch.rows]
    return SiblingSums(
        tokens_B=torch.tensor([stats.tokens for stats in siblings], device=device),
        log_weights_B=torch.tensor([stats.log_weight for stats in siblings], device=device),
        log_ratios_B=torch.tensor([stats.log_ratio for stats in siblings], device=device),
    )
