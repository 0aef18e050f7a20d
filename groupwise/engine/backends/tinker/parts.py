"""Sampler and learner behind the API of a Tinker service, made by `groupwise.training.assembly.services` for `model.backend: tinker`.

service.py   the connection: address, key, errors
losses.py    our losses as the service's, and our statistics of what it computed
saved.py     the file that represents weights in a run's folders

The loop, the rewards, the record and the checkpoints are those of every run. The service has model, adapter and optimiser. A publication is
a snapshot of the adapter for a sampling client. A checkpoint names a state of adapter and optimiser that the service has saved. Token ids
are carried in both directions; no text is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.algorithms.base import Loss
from groupwise.algorithms.registry import from_spec
from groupwise.core.errors import EndpointError, NonFiniteError, PolicyMismatchError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    Row,
    SamplingParams,
    UpdateResult,
)
from groupwise.engine.backends.conflicts import trained_layers
from groupwise.engine.backends.tinker import losses, saved
from groupwise.engine.backends.tinker.losses import NamedLoss
from groupwise.engine.backends.tinker.saved import SavedWeights
from groupwise.engine.backends.tinker.service import Service, sampler_handle
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.sampler.rules import ends_with_stop
from groupwise.runs import publications

if TYPE_CHECKING:
    import tinker

GRAD_NORM = re.compile(r"(^|/|_)grad_norm|grad_l2")
"""Names under which services report the norm of the gradient before clipping: ours, and the first one of others."""
LONGEST_NAME = 80

Samplers = dict[str, "tinker.SamplingClient"]
"""The learner's latest publications, by the paths of their folders."""


class TinkerSampler:
    """A `groupwise.core.types.Sampler` that asks the service."""

    def __init__(self, service: Service, tokenizer: Any, published: Samplers) -> None:
        """`load` or `serve` comes before the first request."""
        self._service = service
        self._tokenizer = tokenizer
        self._published = published
        self._client: tinker.SamplingClient | None = None
        self._model: tinker.TrainingClient | None = None
        """Loaded for the sake of its sampler, where a service needs that."""
        self._version = 0
        self._fingerprint = ""

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`. The members share one call, which has the first one's seed."""
        assert self._client is not None, "nothing is served yet"
        package, version, fingerprint = self._service.package, self._version, self._fingerprint
        answer = await self._service.wait(
            self._client.sample(
                prompt=package.ModelInput.from_ints(list(request.prompt_ids)),
                num_samples=len(request.seeds),
                sampling_params=_sampling_params(
                    package, request, self._service.capabilities.largest_seed
                ),
            )
        )
        if len(answer.sequences) != len(request.seeds):
            raise EndpointError(
                f"The Tinker service drew {len(answer.sequences)} completions in place of {len(request.seeds)}."
            )
        completions: list[Completion] = []
        for sequence, seed in zip(answer.sequences, request.seeds, strict=True):
            tokens, logprobs = tuple(sequence.tokens), tuple(sequence.logprobs or ())
            if len(tokens) != len(logprobs):
                raise EndpointError(
                    f"The Tinker service returned {len(logprobs)} log-probabilities for {len(tokens)} sampled tokens; each needs one."
                )
            completion = Completion(
                token_ids=tokens,
                logprobs=logprobs,
                finish_reason="stop" if sequence.stop_reason == "stop" else "length",
                seed=seed,
                policy_version=version,
                fingerprint=fingerprint,
            )
            completions.append(cut_at_stop(completion, request.params, self._tokenizer))
        return tuple(completions)

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`."""
        client = self._published.get(policy.path)
        if client is None:
            raise PolicyMismatchError(
                f"{policy.path} is none of the latest publications of this session with the Tinker service, which alone it can sample from."
            )
        self._client, self._version = client, policy.version
        self._fingerprint = fingerprint_of(client)

    async def serve(self, weights: Path | None) -> None:
        """Serve the weights that a run's folder names; None: `model.adapter`, or the base. Raises CheckpointError for another folder."""
        model, service = self._service.model, self._service
        if weights is None:
            state = saved.starting_state(model)
            path = saved.sampler_path(model) if service.capabilities.samples_unloaded else state
        else:
            checkpoint = saved.read(weights)
            state, path = checkpoint.state, checkpoint.sampler
        create = service.client.create_sampling_client
        if path is None:
            self._client = await service.make(create, base_model=model.name)
        elif service.capabilities.samples_unloaded:
            self._client = await service.make(create, model_path=path)
        else:  # the model that saved them may be gone, so another one is made from the state beside them
            loaded = service.client.create_training_client_from_state
            model_of_state = await service.make(loaded, state)
            self._model = model_of_state
            self._client = await service.make(model_of_state.save_weights_and_get_sampling_client)
        self._version, self._fingerprint = 0, _digest(path or model.name)

    def fingerprint(self) -> str:
        """A hash of the service's name for the served weights, because the weights themselves are not visible here."""
        return self._fingerprint


def _sampling_params(package: Any, request: GroupRequest, largest_seed: int) -> Any:
    """The service's parameters. It takes either stop texts or stop ids, so it gets the texts if there are any."""
    params = request.params
    assert (params.min_tokens, params.min_p) == (0, None), "the config refuses both"
    return package.SamplingParams(
        max_tokens=params.max_tokens,
        seed=request.seeds[0] % largest_seed,
        stop=list(params.stop or params.stop_token_ids) or None,
        temperature=params.temperature,
        top_k=-1 if params.top_k is None else params.top_k,
        top_p=1.0 if params.top_p is None else params.top_p,
    )


def cut_at_stop(completion: Completion, params: SamplingParams, tokenizer: Any) -> Completion:
    """The completion without the tokens after its first stop token or stop text, of which the service may know only some."""
    text_of = partial(tokenizer.decode, skip_special_tokens=False)
    ids = completion.token_ids
    for count in range(1, len(ids) + 1):
        ended = ids[count - 1] in params.stop_token_ids
        if ended or (params.stop and ends_with_stop(ids[:count], params, text_of)):
            return Completion(
                token_ids=ids[:count],
                logprobs=completion.logprobs[:count],
                finish_reason="stop",
                seed=completion.seed,
                policy_version=completion.policy_version,
                fingerprint=completion.fingerprint,
            )
    return completion


def fingerprint_of(client: tinker.SamplingClient) -> str:
    """Fingerprint of a publication: of the handle of its sampler, which no other publication has."""
    return _digest(sampler_handle(client))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class TinkerLearner:
    """A `groupwise.core.types.Learner` that asks the service. Its model is made with the first call, or by `load` from a saved state."""

    def __init__(
        self,
        service: Service,
        lora: LoraConfig,
        seed: int,
        run: str,
        publish_folder: Path,
        published: Samplers,
        keep_publications: int = 2,
    ) -> None:
        """`seed` of a new adapter. The sampler can draw from the latest `keep_publications` publications."""
        self._service = service
        self._lora = lora
        self._seed = seed
        self._run = run
        self._publish_folder = publish_folder
        self._published = published
        self._keep = keep_publications
        self._model: tinker.TrainingClient | None = None
        self._reference: tinker.SamplingClient | None = None
        self._trained: list[tuple[float, ...]] | None = None
        self._updates = 0
        self._saves = 0
        self._last_save: SavedWeights | None = None
        self._has_gradient = False
        """True while the service has a gradient that no update has used."""
        self._is_spoilt = False
        """True once that gradient must not be used."""

    # --- computing --------------------------------------------------------------------------------

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`. Raises NonFiniteError after `discard` of a gradient that was computed."""
        self._check_gradient()
        model, ours = await self._ready(), from_spec(loss)
        named = losses.named_loss(ours, self._service.capabilities)
        self._has_gradient = True
        if named is None and self._service.capabilities.averages:
            return await self._by_ratios(model, rows, ours, denominators)
        if named is None:
            return await self._by_custom_loss(model, rows, ours, denominators)
        numbers = [losses.token_numbers(row, ours, denominators) for row in rows]
        output = await self._by_name(model, rows, named, numbers)
        self._trained = losses.completion_logprobs(rows, output)
        tensors = [torch.tensor(values) for values in self._trained]
        return losses.sums_of(losses.loss_of(rows, tensors, ours))

    async def _by_name(
        self,
        model: tinker.TrainingClient,
        rows: Sequence[Row],
        named: NamedLoss,
        numbers: Sequence[Sequence[float]],
    ) -> Any:
        """The service's output for a loss that it names, with a number for each completion token of each row."""
        package, capabilities = self._service.package, self._service.capabilities
        data = [
            losses.datum(
                package, row, named, losses.undo_averages(values, row, len(rows), capabilities)
            )
            for row, values in zip(rows, numbers, strict=True)
        ]
        settings = named.settings or None
        return await self._service.wait(
            model.forward_backward(data, named.name, settings)  # pyright: ignore[reportArgumentType]
        )

    async def _by_ratios(
        self,
        model: tinker.TrainingClient,
        rows: Sequence[Row],
        loss: Loss,
        denominators: Mapping[str, float],
    ) -> dict[str, float]:
        """Like `_by_custom_loss`, for a service that averages: the gradient is sent as advantages, which may be negative, at ratio 1."""
        self._trained = await self.logprobs(rows)
        tensors = [torch.tensor(values, requires_grad=True) for values in self._trained]
        result = losses.loss_of(rows, tensors, loss)
        numbers = losses.descent(losses.total_of(result, denominators), tensors)
        pairs = zip(rows, self._trained, strict=True)
        on_policy_rows = [replace(row, sampling_logprobs=values) for row, values in pairs]
        await self._by_name(model, on_policy_rows, losses.RATIO, numbers)
        return losses.sums_of(result)

    async def _by_custom_loss(
        self,
        model: tinker.TrainingClient,
        rows: Sequence[Row],
        loss: Loss,
        denominators: Mapping[str, float],
    ) -> dict[str, float]:
        """Compute the loss here, from log-probabilities of one pass, and have the service add its gradient in another."""
        sums: dict[str, float] = {}

        def compute(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            pairs = zip(rows, logprobs, strict=True)
            of_completions = [values[len(row.prompt_ids) - 1 :] for row, values in pairs]
            result = losses.loss_of(rows, of_completions, loss)
            sums.update(losses.sums_of(result))
            return losses.total_of(result, denominators), {}

        data = [losses.datum(self._service.package, row, None, None) for row in rows]
        output = await self._service.wait(model.forward_backward_custom(data, compute))
        self._trained = losses.completion_logprobs(rows, output)
        return sums

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`."""
        return self._trained

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`. The norm is NaN if the service does not report it."""
        self._check_gradient()
        model = await self._ready()
        adam = self._service.package.AdamParams(
            learning_rate=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.max_grad_norm or 0.0,
        )
        answer = await self._service.wait(model.optim_step(adam))
        self._has_gradient, self._trained = False, None
        self._updates += 1
        self._last_save = None
        metrics: Mapping[str, float] = answer.metrics or {}
        norms = [value for name, value in metrics.items() if GRAD_NORM.search(name)]
        return UpdateResult(grad_norm=norms[0] if norms else math.nan, applied=True)

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`. Tinker's API cannot clear a gradient: later calls that would use it are refused."""
        self._is_spoilt = self._has_gradient
        self._trained = None

    def _check_gradient(self) -> None:
        if self._is_spoilt:
            raise NonFiniteError(
                "The last gradient must not be applied, because the loss was not finite or the step was given up, and Tinker's API has no "
                "call that clears it. --resume goes on from the last checkpoint, without it. If the loss was not finite, lower "
                "training.learning_rate."
            )

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`. The reference is the base, computed by a sampling client."""
        if role == "reference":
            return await self._reference_logprobs(rows)
        model = await self._ready()
        data = [losses.datum(self._service.package, row, None, None) for row in rows]
        output = await self._service.wait(model.forward(data, "cross_entropy"))
        return losses.completion_logprobs(rows, output)

    async def _reference_logprobs(self, rows: Sequence[Row]) -> list[tuple[float, ...]]:
        service, reference = self._service, self._reference
        if reference is None:
            create = service.client.create_sampling_client
            reference = self._reference = await service.make(create, base_model=service.model.name)
        answers = await asyncio.gather(
            *(
                service.prompt_logprobs(
                    reference, (*row.prompt_ids, *row.completion_ids), len(row.completion_ids)
                )
                for row in rows
            )
        )
        logprobs: list[tuple[float, ...]] = []
        for row, values in zip(rows, answers, strict=True):
            if len(values) != len(row.completion_ids) or None in values:
                raise EndpointError(
                    "The Tinker service did not compute the log-probabilities of the base that a KL penalty needs. Set algorithm.beta to 0."
                )
            logprobs.append(tuple(values))
        return logprobs

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`; the service does not say which tokens are the most likely."""
        return [Prediction(logprobs, None) for logprobs in await self.logprobs(rows)]

    # --- weights ----------------------------------------------------------------------------------

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`. The folder holds no tensors, but `tinker.json`."""
        model = await self._ready()
        client = await self._service.make(model.save_weights_and_get_sampling_client)
        folder = publications.version_folder(self._publish_folder, version)
        name = self._service.model.name
        weights = SavedWeights(base_model=name, state=None, sampler=None, updates=self._updates)
        saved.write(weights, folder)
        self._published[str(folder)] = client
        for old in publications.remove_old(self._publish_folder, version, self._keep):
            self._published.pop(str(old), None)
        return Policy(self._run, version, fingerprint_of(client), "adapter", str(folder))

    async def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`. The service saves; the folder gets the paths of state and sampler weights."""
        if self._last_save is None:
            model = await self._ready()
            self._saves += 1
            name = f"{_as_name(self._run)}-{self._saves}-after-{self._updates}"
            state = (await self._service.make(model.save_state, name)).path
            sampler = (await self._service.make(model.save_weights_for_sampler, name)).path
            self._last_save = SavedWeights(
                base_model=self._service.model.name,
                state=state,
                sampler=sampler,
                updates=self._updates,
            )
        saved.write(self._last_save, Path(folder))

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`. The service makes another model from the saved state, with its optimiser."""
        weights = saved.read(Path(folder))
        assert weights.state is not None, "a checkpoint names a state"
        create = self._service.client.create_training_client_from_state_with_optimizer
        self._model = self._service.make_now(create, weights.state)
        self._updates, self._last_save = weights.updates, weights
        self._has_gradient = self._is_spoilt = False
        self._trained = None

    async def _ready(self) -> tinker.TrainingClient:
        model = self._model
        if model is None:
            model = self._model = await self._service.make(self._new_model)
        return model

    def _new_model(self) -> Any:
        """A model, or its future, with a new adapter, or with the one of `model.adapter` and a new optimiser."""
        client, config = self._service.client, self._service.model
        start = saved.starting_state(config)
        if start is not None:
            return client.create_training_client_from_state(start)
        layers = trained_layers(self._lora.target_modules)
        return client.create_lora_training_client(
            config.name,
            rank=self._lora.r,
            seed=self._seed,
            train_attn=layers["train_attn"],
            train_mlp=layers["train_mlp"],
            train_unembed=layers["train_unembed"],
        )


def _as_name(run: str) -> str:
    """A run's name as a name of saved weights: letters, digits, dashes and underscores, which every service takes."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run).strip("-_")
    return name[:LONGEST_NAME] or "run"
