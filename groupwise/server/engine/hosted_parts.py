"""Sampler and learner of this engine for a training loop in another process: built as for a local loop, and called one by one.

These are the parts that `groupwise.training.build` makes for a run, with the same layout, ranks and numbers, so a loop that drives them
over a network trains the same policy, bit for bit. Nothing here is durable: the run, its record and its checkpoints are stored where the
loop runs. Paths sent by the loop are relative to the parts' folder and stay inside it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from groupwise.algorithms.own import refuse_own
from groupwise.api.schemas.parts import PartsKind
from groupwise.core.errors import ModelError, UsageError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    Learner,
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    Row,
    Sampler,
    SharesDevice,
    UpdateResult,
)
from groupwise.engine.distributed import prefork
from groupwise.engine.models.files import check_sent
from groupwise.engine.models.identity import identity
from groupwise.engine.models.machine import available_cores
from groupwise.engine.sampler.rules import refuse_changed_draws
from groupwise.server.engine.engine_protocol import OpenParts, PartsOpened
from groupwise.server.engine.part_checks import (
    check_loss,
    check_optimiser,
    check_request,
    check_rows,
)
from groupwise.training import build, placement
from groupwise.training.config import RunConfig, load_config
from groupwise.training.loops.rl_prepare import training_layout
from groupwise.training.placement import Layout
from groupwise.training.sft_config import SftConfig, load_sft_config

PUBLISHED = "published"
"""Subfolder of the parts' folder for the weights that the learner publishes."""

BuiltParts = build.Parts | build.LearningParts | build.ServingParts


@dataclass(frozen=True, slots=True)
class _OpenedParts:
    parts: BuiltParts
    folder: Path
    vocabulary: int
    longest: int
    """Longest sequence in tokens that the sampler can hold; 0 if there is no sampler."""

    @property
    def sampler(self) -> Sampler:
        if isinstance(self.parts, build.LearningParts):
            raise UsageError("These parts were opened as `supervised` and have no sampler.")
        return self.parts.sampler

    @property
    def learner(self) -> Learner:
        if isinstance(self.parts, build.ServingParts):
            raise UsageError("These parts were opened as `serving` and have no learner.")
        return self.parts.learner


class EngineParts:
    """Opens the parts and calls them; see the module."""

    def __init__(self, scope: AsyncExitStack) -> None:
        """Everything opened here is closed with `scope`."""
        self._scope = scope
        self._opened: _OpenedParts | None = None
        self._opening = asyncio.Lock()

    async def plan(
        self,
        kind: PartsKind,
        config: Mapping[str, Any],
        longest_prompt: int | None,
        described: str | None = None,
    ) -> dict[str, Any]:
        """The layout that `open` would use, as a mapping. ModelError if `described` must not be read."""
        if described is not None:
            check_sent(Path(described))
        return asdict(_choose_layout(kind, _load_parts_config(kind, config), longest_prompt))

    async def open(self, order: OpenParts) -> PartsOpened:
        """Load the model and build the parts; once. UsageError if config or model are wrong."""
        async with self._opening:
            if self._opened is not None:
                raise UsageError("The model is loaded already; open other parts for another one.")
            folder = Path(order.folder)
            check_sent(folder)
            config = _load_parts_config(order.kind, order.config)
            # Only the base is compared: `order.base` is its fingerprint without an adapter.
            base_config = config.model.model_copy(update={"adapter": None})
            if order.base is not None and (fingerprint := identity(base_config)) != order.base:
                raise ModelError(
                    f"{config.model.name} has other weights on the server ({fingerprint}) than where the loop runs ({order.base}): "
                    "numbers of the two would be mixed. Put the same files in both places, or name a hub id with a revision."
                )
            layout = _choose_layout(order.kind, config, order.longest_prompt)
            build.expect_ranks(config)
            self._scope.callback(prefork.end_zygote)
            published = folder / PUBLISHED
            if isinstance(config, SftConfig):
                parts = await build.start_supervised(config, layout, order.run, published)
            elif order.kind == "training":
                parts = await build.start_training(config, layout, order.run, published)
            else:
                weights = None if order.weights is None else Path(order.weights)
                parts = await build.start_serving(config, layout, weights)
            self._scope.callback(parts.close)
            stops = () if isinstance(parts, build.LearningParts) else parts.stop_token_ids
            self._opened = _OpenedParts(
                parts, folder, prefork.vocabulary(config.model), layout.key_length
            )
            serving = "" if order.kind == "supervised" else self._opened.sampler.fingerprint()
            return PartsOpened(stops, asdict(layout), serving)

    @property
    def _ready_parts(self) -> _OpenedParts:
        if self._opened is None:
            raise UsageError("The model is not loaded yet: `open` comes first.")
        return self._opened

    # --- the sampler -----------------------------------------------------------------------------

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`."""
        current = self._ready_parts
        sampler = current.sampler
        check_request(request, current.vocabulary, current.longest)
        refuse_changed_draws(request, "the parts of a training server")
        return await sampler.generate(request)

    async def load(self, policy: Policy) -> str:
        """See `groupwise.core.types.Sampler.load`; returns the new `fingerprint`."""
        sampler, folder = self._ready_parts.sampler, self._existing_folder(policy.path)
        check_sent(folder)
        await sampler.load(replace(policy, path=str(folder)))
        return sampler.fingerprint()

    async def fingerprint(self) -> str:
        """See `groupwise.core.types.Sampler.fingerprint`."""
        return self._ready_parts.sampler.fingerprint()

    # --- the learner -----------------------------------------------------------------------------

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`."""
        learner = self._ready_parts.learner
        check_rows(rows, self._ready_parts.vocabulary)
        check_loss(loss, denominators)
        await self._rest_sampler()
        try:
            return await learner.forward_backward(rows, loss, denominators)
        except KeyError as error:
            component = error.args[0]
            if component in denominators:
                raise
            raise UsageError(
                f"denominators has no {component!r}, a component of the loss {loss.name}; each one is divided by its own."
            ) from None

    async def _rest_sampler(self) -> None:
        """Let the sampler leave the device to the learner, if the layout says so: the loop that calls cannot ask for it."""
        parts = self._ready_parts.parts
        if isinstance(parts, build.Parts) and isinstance(parts.sampler, SharesDevice):
            await parts.sampler.rest()

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`."""
        return await self._ready_parts.learner.trained_logprobs()

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`."""
        learner = self._ready_parts.learner
        check_optimiser(params)
        return await learner.update(params)

    async def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._ready_parts.learner.discard()

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`; the path is within the folder of the parts."""
        policy = await self._ready_parts.learner.publish(version)
        return replace(policy, path=str(Path(policy.path).relative_to(self._ready_parts.folder)))

    async def logprobs(self, rows: Sequence[Row], role: PolicyRole) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`."""
        learner = self._ready_parts.learner
        check_rows(rows, self._ready_parts.vocabulary)
        await self._rest_sampler()
        return await learner.logprobs(rows, role)

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`."""
        learner = self._ready_parts.learner
        check_rows(rows, self._ready_parts.vocabulary)
        return await learner.predictions(rows)

    async def save_state(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`; the folder is created and must be new."""
        learner = self._ready_parts.learner
        target = self._ready_parts.folder / folder
        if target.exists():
            raise UsageError(f"There is a folder {folder} already; choose another name.")
        target.mkdir(parents=True)
        try:
            await learner.save(str(target))
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    async def load_state(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        self._ready_parts.learner.load(str(self._existing_folder(folder)))

    def _existing_folder(self, path: str) -> Path:
        """An existing subfolder of the parts' folder. UsageError if it is missing."""
        folder = self._ready_parts.folder / path
        if not folder.is_dir():
            raise UsageError(
                f"There is no folder {path}: it was never sent or published, or is kept no longer."
            )
        return folder


def _load_parts_config(kind: PartsKind, config: Mapping[str, Any]) -> RunConfig | SftConfig:
    loader = load_sft_config if kind == "supervised" else load_config
    section = config.get("algorithm")
    if isinstance(section, Mapping):
        refuse_own(cast("Mapping[str, Any]", section).get("type"))
    parts_config = loader(config).config
    if isinstance(parts_config, RunConfig):
        build.refuse_servers(parts_config, "a training server samples itself")
    return parts_config


def _choose_layout(
    kind: PartsKind, config: RunConfig | SftConfig, longest_prompt: int | None
) -> Layout:
    placement.refuse_on_server(config)
    max_processes = max(placement.MAX_PROCESSES, 2 * available_cores())
    if (config.run.processes or 1) > max_processes:
        raise UsageError(
            f"run.processes is {config.run.processes}, but the server's machine has {available_cores()} cores and begins at "
            f"most {max_processes}."
        )
    if isinstance(config, SftConfig):
        return placement.supervised_layout(config)
    if longest_prompt is None:
        raise UsageError("longest_prompt is missing: what samples has to know it.")
    room = prefork.prompt_room(config.model, 0)
    key_length = placement.key_length(config, longest_prompt)
    if longest_prompt > room:
        raise UsageError(
            f"longest_prompt is {longest_prompt}, for which {key_length} tokens would be kept, but {config.model.name} has positions for "
            f"{room}."
        )
    choose = training_layout if kind == "training" else placement.choose_layout
    return choose(config, longest_prompt)
