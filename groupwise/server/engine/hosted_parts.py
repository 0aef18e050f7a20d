"""Sampler and learner of this engine for a training loop in another process: built as for a local loop, and called one by one.

These are the parts that `groupwise.training.assembly.start` makes for a run, with the same layout, ranks and numbers, so a loop that drives
them over a network trains the same policy, bit for bit. Nothing here is durable: the run, its record and its checkpoints are stored where
the loop runs. Paths sent by the loop are relative to the parts' folder and stay inside it.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from groupwise.algorithms.custom import refuse_custom
from groupwise.algorithms.registry import from_spec
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
from groupwise.training import placement
from groupwise.training.assembly import start
from groupwise.training.assembly.parts import LearningParts, Parts, ServingParts
from groupwise.training.assembly.prepare import expect_ranks, refuse_servers
from groupwise.training.config import RunConfig, load_config
from groupwise.training.loops.rl_prepare import training_layout
from groupwise.training.placement import Layout
from groupwise.training.sft_config import SftConfig, load_sft_config

PUBLISHED = "published"
"""Subfolder of the parts' folder for the weights that the learner publishes."""

BuiltParts = Parts | LearningParts | ServingParts
PER_TOKEN = ("mask", "sampling_logprobs", "reference_logprobs", "proximal_logprobs", "credits")
"""Fields of a row that are as long as its completion, or as its targets if it names any."""
MAX_SEEDS = 4096


@dataclass(frozen=True, slots=True)
class _OpenedParts:
    parts: BuiltParts
    folder: Path
    vocabulary: int
    longest: int
    """Longest sequence in tokens that the sampler can hold; 0 if there is no sampler."""

    @property
    def sampler(self) -> Sampler:
        if isinstance(self.parts, LearningParts):
            raise UsageError("These parts were opened as `supervised` and have no sampler.")
        return self.parts.sampler

    @property
    def learner(self) -> Learner:
        if isinstance(self.parts, ServingParts):
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

    async def open(self, request: OpenParts) -> PartsOpened:
        """Load the model and build the parts; once. UsageError if config or model are wrong."""
        async with self._opening:
            if self._opened is not None:
                raise UsageError("The model is loaded already; open other parts for another one.")
            folder = Path(request.folder)
            check_sent(folder)
            config = _load_parts_config(request.kind, request.config)
            # Only the base is compared: `request.base` is its fingerprint without an adapter.
            base_config = config.model.model_copy(update={"adapter": None})
            if request.base is not None and (fingerprint := identity(base_config)) != request.base:
                raise ModelError(
                    f"{config.model.name} has other weights on the server ({fingerprint}) than where the loop runs ({request.base}): "
                    "numbers of the two would be mixed. Put the same files in both places, or name a hub id with a revision."
                )
            layout = _choose_layout(request.kind, config, request.longest_prompt)
            expect_ranks(config)
            self._scope.callback(prefork.end_zygote)
            published = folder / PUBLISHED
            if isinstance(config, SftConfig):
                parts = await start.start_supervised(config, layout, request.run, published)
            elif request.kind == "training":
                parts = await start.start_training(config, layout, request.run, published)
            else:
                weights = None if request.weights is None else Path(request.weights)
                parts = await start.start_serving(config, layout, weights)
            self._scope.callback(parts.close)
            stops = () if isinstance(parts, LearningParts) else parts.stop_token_ids
            self._opened = _OpenedParts(
                parts, folder, prefork.vocabulary(config.model), layout.key_length
            )
            serving = "" if request.kind == "supervised" else self._opened.sampler.fingerprint()
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
        await self._release_sampler_memory()
        try:
            return await learner.forward_backward(rows, loss, denominators)
        except KeyError as error:
            component = error.args[0]
            if component in denominators:
                raise
            raise UsageError(
                f"denominators has no {component!r}, a component of the loss {loss.name}; each one is divided by its own."
            ) from None

    async def _release_sampler_memory(self) -> None:
        """Let the sampler leave the device to the learner, if the layout says so: the loop that calls cannot ask for it."""
        parts = self._ready_parts.parts
        if isinstance(parts, Parts) and isinstance(parts.sampler, SharesDevice):
            await parts.sampler.release_memory()

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
        await self._release_sampler_memory()
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
        refuse_custom(cast("Mapping[str, Any]", section).get("type"))
    parts_config = loader(config).config
    if isinstance(parts_config, RunConfig):
        refuse_servers(parts_config, "a training server samples itself")
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


def check_request(request: GroupRequest, vocabulary: int, longest: int) -> None:
    """Check a request to `Sampler.generate`: `longest` is in tokens, prompt and completion together."""
    params = request.params
    _require(bool(request.prompt_ids), "prompt_ids", "is empty; at least one token is needed")
    seeds = request.seeds
    _require(0 < len(seeds) <= MAX_SEEDS, "seeds", f"are {len(seeds)}; 1 to {MAX_SEEDS} are needed")
    _require(len({*seeds}) == len(seeds), "seeds", "are not distinct")
    _require(all(0 <= seed < 2**64 for seed in seeds), "seeds", "are not all of 64 bits")
    _require(params.max_tokens >= 1, "max_tokens", f"is {params.max_tokens}; at least 1 is needed")
    _require(
        0 <= params.temperature < math.inf,
        "temperature",
        f"is {params.temperature}; 0 or a number above it is needed",
    )
    _require(params.min_tokens >= 0, "min_tokens", f"is {params.min_tokens}; 0 or more is needed")
    _require(all(params.stop), "stop", "has an empty text")
    _require(params.top_k is None or params.top_k >= 1, "top_k", "is below 1")
    for name in ("top_p", "min_p"):
        value = getattr(params, name)
        _require(
            value is None or 0 < value <= 1, name, f"is {value}; above 0 and at most 1 is needed"
        )
    length = len(request.prompt_ids) + params.max_tokens
    _require(
        length <= longest,
        "max_tokens",
        f"would make up to {length} tokens with the prompt; the parts were opened for {longest} (longest_prompt and "
        "sampler.max_completion_length)",
    )
    check_tokens(request.prompt_ids, vocabulary, "prompt_ids")
    check_tokens(params.stop_token_ids, vocabulary, "stop_token_ids")


def check_rows(rows: Sequence[Row], vocabulary: int) -> None:
    """Check rows given to a learner."""
    for index, row in enumerate(rows):
        where = f"rows.{index}"
        length = len(row.completion_ids)
        targets = row.target_ids
        _require(
            row.targets is None or (bool(targets) and len(targets) % max(1, length) == 0),
            f"{where}.targets",
            f"has {len(targets)} entries, but completion_ids has {length}; each token has equally many targets, one or more",
        )
        of_what = "completion_ids" if row.targets is None else "targets"
        for name in PER_TOKEN:
            values = getattr(row, name)
            _require(
                values is None or len(values) == len(targets),
                f"{where}.{name}",
                f"has {0 if values is None else len(values)} entries, but {of_what} has {len(targets)}; they go together",
            )
        _require(
            bool(row.prompt_ids), f"{where}.prompt_ids", "is empty; at least one token is needed"
        )
        _require(bool(length), f"{where}.completion_ids", "is empty; at least one token is needed")
        _require({*row.mask} <= {0, 1}, f"{where}.mask", "has other entries than 0 and 1")
        _require(
            0 < row.temperature < math.inf,
            f"{where}.temperature",
            f"is {row.temperature}; a number above 0 is needed",
        )
        check_tokens((*row.prompt_ids, *row.completion_ids), vocabulary, where)
        check_tokens(row.targets or (), vocabulary, f"{where}.targets")
        siblings = row.others
        _require(
            siblings is None or 0 <= siblings.tokens < 2**53,
            f"{where}.others.tokens",
            "is not a number of tokens",
        )
        end = 0
        for span in sorted(row.withheld, key=lambda withheld: withheld.start):
            _require(
                end <= span.start < span.end <= length,
                f"{where}.withheld",
                f"names the tokens {span.start} to {span.end} of {length}; stretches lie within the completion and do not overlap",
            )
            check_tokens(span.token_ids, vocabulary, f"{where}.withheld")
            end = span.end


def check_loss(loss: LossSpec, denominators: Mapping[str, float]) -> None:
    """Check the loss given to `Learner.forward_backward`."""
    refuse_custom(loss.name)
    try:
        from_spec(loss)
    except (TypeError, ValueError) as error:
        raise UsageError(f"loss: {error}") from None
    for name, value in denominators.items():
        _require(
            0 < value < math.inf, f"denominators.{name}", f"is {value}; a number above 0 is needed"
        )


def check_optimiser(params: OptimiserParams) -> None:
    """Check the parameters of `Learner.update`."""
    for name in ("learning_rate", "weight_decay", "eps"):
        value = getattr(params, name)
        _require(0 <= value < math.inf, name, f"is {value}; 0 or a number above it is needed")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        _require(0 <= value < 1, name, f"is {value}; 0 or more and below 1 is needed")
    norm = params.max_grad_norm
    _require(norm is None or 0 < norm < math.inf, "max_grad_norm", f"is {norm}; above 0 is needed")


def check_tokens(tokens: Sequence[int], vocabulary: int, where: str) -> None:
    """Check that all tokens are within the model's vocabulary."""
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    _require(
        unknown is None,
        where,
        f"has the token {unknown}; those of the model are 0 to {vocabulary - 1}",
    )


def _require(condition: bool, field: str, problem: str) -> None:
    if not condition:
        raise UsageError(f"{field} {problem}.")
