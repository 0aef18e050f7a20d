"""The common part of all samplers in this process: a queue of groups, one driver that serves them, and the handling of drawn tokens.

Callers await `generate`, one call for each group, with any number of calls at once. A single driver task serves them all; the subclass
decides how their rows are computed. A member's draw depends only on its seed and the logits of its own row.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.core.errors import GroupwiseError, NonFiniteError, RunError, UsageError
from groupwise.core.interruption import wait_until_done
from groupwise.core.types import Completion, FinishReason, GroupRequest, Policy, TopLogprobs
from groupwise.engine.models.lora import fingerprint
from groupwise.engine.models.memory import explaining_out_of_memory, is_out_of_memory, out_of_memory
from groupwise.engine.sampler.draw import draw_tokens, mask_early_stops, truncate
from groupwise.engine.sampler.engine import Prompt
from groupwise.engine.sampler.json_schemas import SchemaMask, SchemaMasks
from groupwise.engine.sampler.logits import process_row, top_logprobs
from groupwise.engine.sampler.rules import (
    ends_with_stop,
    not_finite,
    refuse_misfit,
    refuse_other_weights,
    uniform,
)
from groupwise.engine.sampler.weights import ServedWeights


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """Size of the batch that is decoded at once; part of a run's recorded layout."""

    slots: int
    """Most members decoded together. At least 8: smaller matrix products use another code path with other last bits."""
    key_length: int
    """Longest prompt plus longest completion, in tokens."""


@dataclass(slots=True)
class Member:
    """A completion in progress."""

    ticket: Ticket
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """See `Completion.top_logprobs`."""
    mask: SchemaMask | None = None
    """None: the completion follows no schema."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One group's request, its prompt once it is computed, and the future that its caller awaits."""

    request: GroupRequest
    done: asyncio.Future[None]
    members: list[Member] = field(default_factory=list)
    prompt: Prompt | None = None


class QueuedSampler(ABC):
    """A `groupwise.core.types.Sampler` with weights in this process."""

    def __init__(self, weights: ServedWeights, tokenizer: Any, layout: DecodeLayout) -> None:
        if layout.slots < 8:
            raise ValueError(
                f"slots is {layout.slots}; at least 8 are needed for results that do not depend on it."
            )
        self.layout = layout
        self._weights = weights
        self._tokenizer = tokenizer
        self._waiting: deque[Member] = deque()
        self._tickets: list[Ticket] = []
        self._driver: asyncio.Task[None] | None = None
        self._masks = SchemaMasks(tokenizer)
        self._loading: asyncio.Future[None] | None = None
        """The load that is under way; None while there is none."""
        self._version = 0
        self._fingerprint = fingerprint(weights.tensors())

    @abstractmethod
    async def _draw_waiting(self) -> None:
        """Draw until no caller waits for a group; yield to the event loop in between."""

    @abstractmethod
    def _in_progress(self) -> Sequence[Member]:
        """Members that have started and not finished."""

    @abstractmethod
    def _drop_group(self, ticket: Ticket) -> None:
        """Called when the caller of a group no longer waits for it: remove its rows."""

    @abstractmethod
    def _reset(self) -> None:
        """Drop all rows in progress."""

    @abstractmethod
    def _refresh(self) -> None:
        """Load changed weights into the engine; there are no rows in progress."""

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`. Raises `RunError` if the request does not fit the layout."""
        refuse_misfit(request, self.layout.key_length)
        if not request.seeds:
            return ()
        masks = await self._schema_masks(request)
        await self._until_loaded()
        ticket = Ticket(request, asyncio.get_running_loop().create_future())
        ticket.members = [
            Member(ticket, seed, mask=mask) for seed, mask in zip(request.seeds, masks, strict=True)
        ]
        self._waiting.extend(ticket.members)
        self._tickets.append(ticket)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._run_driver())
        try:
            await ticket.done
        except (asyncio.CancelledError, NonFiniteError, UsageError):  # only this group ends
            self._waiting = deque(member for member in self._waiting if member.ticket is not ticket)
            self._drop_group(ticket)
            raise
        finally:
            self._tickets.remove(ticket)
            ticket.prompt = None  # ticket and members form a cycle, which would keep the prompt's keys until garbage collection
        return tuple(self._make_completion(member) for member in ticket.members)

    async def _schema_masks(self, request: GroupRequest) -> Sequence[SchemaMask | None]:
        """A mask for each member, if the request has a JSON schema or calls. Raises `UsageError` if they cannot be enforced."""
        processing, members = request.params.processing, len(request.seeds)
        if processing is None or not processing.is_constrained:
            return [None] * members
        stops = request.params.stop_token_ids
        return await asyncio.to_thread(
            self._masks.masks, processing.json_schema, stops, members, processing.tool_calls
        )

    async def prepare_schemas(self) -> None:
        """Do what the first schema needs before there are completions that would wait for it; nothing if schemas cannot be enforced."""
        with suppress(UsageError):
            await asyncio.to_thread(self._masks.prepare)

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`. Allowed only between groups: keys and values belong to one version.

        A thread reads and hashes the weights, which takes seconds for a large model. Groups that are requested meanwhile begin afterwards.
        If the caller is cancelled, the load is completed first.
        """
        await self._until_loaded()
        if self._waiting or self._in_progress():
            raise RunError(
                "The sampler was given new weights while completions of the old ones were on their way."
            )
        self._loading = loading = asyncio.ensure_future(self._take_weights(policy))
        try:
            await wait_until_done(loading)  # half of the new weights would be no policy
        finally:
            self._loading = None

    async def _take_weights(self, policy: Policy) -> None:
        with explaining_out_of_memory("taking new weights for sampling"):
            await asyncio.to_thread(self._weights.read, Path(policy.path))
            with torch.inference_mode():
                self._refresh()
        self._fingerprint = await asyncio.to_thread(lambda: fingerprint(self._weights.tensors()))
        refuse_other_weights(policy, self._fingerprint)
        self._version = policy.version

    async def _until_loaded(self) -> None:
        """Wait until no weights are being loaded."""
        while self._loading is not None:
            await asyncio.wait([self._loading])

    def fingerprint(self) -> str:
        """Fingerprint of the weights as they were when they were loaded."""
        return self._fingerprint

    def so_far(self, draw: int) -> tuple[tuple[int, ...], ...]:
        """The tokens drawn so far for each member of a running request; empty if there is no such request."""
        ticket = next((ticket for ticket in self._tickets if ticket.request.draw == draw), None)
        return () if ticket is None else tuple(tuple(member.token_ids) for member in ticket.members)

    def _make_completion(self, member: Member) -> Completion:
        assert member.finish_reason is not None
        return Completion(
            token_ids=tuple(member.token_ids),
            logprobs=tuple(member.logprobs),
            finish_reason=member.finish_reason,
            seed=member.seed,
            policy_version=self._version,
            fingerprint=self._fingerprint,
            top_logprobs=tuple(member.top_logprobs),
        )

    async def _run_driver(self) -> None:
        """Serve; pass an error on to all callers that wait for their groups."""
        try:
            await self._draw_waiting()
        except Exception as error:  # noqa: BLE001 — the callers receive any error
            if isinstance(error, GroupwiseError):
                reason = error
            elif is_out_of_memory(error):
                reason = out_of_memory(error, "sampling")
            else:
                reason = RunError(f"Sampling failed: {error!r}")
            members = (*self._waiting, *self._in_progress())
            tickets = {id(member.ticket): member.ticket for member in members}
            self._waiting.clear()
            self._reset()
            for ticket in tickets.values():
                if not ticket.done.done():
                    ticket.done.set_exception(reason)

    def _append_token(self, member: Member, token: int, logprob: float) -> None:
        member.token_ids.append(token)
        member.logprobs.append(logprob)
        params = member.ticket.request.params
        if not math.isfinite(logprob):
            member.finish_reason = "stop"  # its group fails, see `_deliver_if_finished`
        elif token in params.stop_token_ids or ends_with_stop(
            member.token_ids, params, self._decode_text
        ):
            member.finish_reason = "stop"
        elif len(member.token_ids) == params.max_tokens:
            member.finish_reason = "length"
        elif member.mask is not None:
            member.mask.advance(token)

    def _decode_text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _deliver_if_finished(self, ticket: Ticket) -> None:
        """Complete a group's future if the group is finished, or fail it if a member's logits are not finite."""
        if ticket.done.done():
            return
        if not all(
            math.isfinite(logprob) for member in ticket.members for logprob in member.logprobs[-1:]
        ):
            errors = [member.mask.error for member in ticket.members if member.mask is not None]
            if any(errors):
                ticket.done.set_exception(UsageError(max(errors)))
            else:
                ticket.done.set_exception(not_finite(self._version))
        elif all(member.finish_reason is not None for member in ticket.members):
            ticket.done.set_result(None)


MIN_TEMPERATURE = 1e-30
"""The lowest temperature above 0 that logits are divided by: a lower one would draw the same tokens, but the quotient overflows."""


def draw_members(
    members: Sequence[Member], logits_NV: Tensor, empty: int = 0, shift: float = 0.0
) -> tuple[list[int], list[float]]:
    """A token and its log-probability for each row of logits; the last `empty` rows are padding. See `DecodeEngine.shift`."""
    lengths = [len(member.token_ids) for member in members]
    logits_NV = _process_logits(members, logits_NV, shift)
    numbers_2N, logits_NV, temperatures_N = draw_numbers(members, lengths, logits_NV, empty)
    tokens, logprobs = numbers_2N.tolist()  # one sync
    tokens = [*map(int, tokens)]
    for row, member in enumerate(members):
        if count := member.ticket.request.top_logprobs:
            sampled_tokens = tokens[row], logprobs[row]
            best = top_logprobs(logits_NV[row], temperatures_N[row].item(), *sampled_tokens, count)
            member.top_logprobs.append(best)
    return tokens, logprobs


def draw_numbers(
    members: Sequence[Member], lengths: Sequence[int], logits_NV: Tensor, empty: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of each member, which then has these lengths, and its log-probability, both as float64 [2, N]; nothing waits for them.

    Also returns the logits that they were drawn from, and the temperatures [N].
    """
    params = [*(member.ticket.request.params for member in members), *[None] * empty]
    uniforms = [uniform(each.seed, length) for each, length in zip(members, lengths, strict=True)]
    temperatures = [1.0 if row_params is None else row_params.temperature for row_params in params]
    temperatures_N = torch.tensor(
        [temperature and max(temperature, MIN_TEMPERATURE) for temperature in temperatures]
    )
    logits_NV = mask_early_stops(logits_NV, params, [*lengths, *[0] * empty])
    logits_NV = truncate(logits_NV, temperatures_N, params)
    tokens_N, logprobs_N = draw_tokens(
        logits_NV,
        temperatures_N,
        torch.tensor(uniforms + [0.0] * empty, dtype=torch.float64),
    )
    return torch.stack((tokens_N.double(), logprobs_N.double())), logits_NV, temperatures_N


def _process_logits(members: Sequence[Member], logits_NV: Tensor, shift: float) -> Tensor:
    """The logits as the requests change them: the same tensor if none does."""
    processed = [
        (row, member, processing)
        for row, member in enumerate(members)
        if (processing := member.ticket.request.params.processing) is not None
    ]
    if not processed:
        return logits_NV
    logits_NV = logits_NV.float().clone()
    for row, member, processing in processed:
        prompt_ids = member.ticket.request.prompt_ids
        process_row(logits_NV[row], processing, prompt_ids, member.token_ids, member.mask, shift)
    return logits_NV
