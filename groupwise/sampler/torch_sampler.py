"""The default sampler: continuous batching over a fixed number of slots, in this process.

Callers await `generate`, one call for each group, as many at once as they like. A single driver task serves them: it computes a
group's prompt once, copies its keys and values into a free slot for each member, and then moves all occupied slots one
token forward at a time. A slot that finishes is refilled at once. The driver yields to the event loop after every token, so
scoring and cancelling go on meanwhile.

What a member draws depends on its seed and its own group only: a prompt is computed alone, and decoding always runs in the same
shape (slots × key length), with empty slots computed and ignored, because another shape could change the last bits.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import GroupwiseError, NonFiniteError, PolicyMismatchError, RunError
from groupwise.models.decoder import Decoder, PromptCache, SlotCache, causal_mask
from groupwise.models.lora import fingerprint
from groupwise.sampler.draw import draw_tokens, uniform
from groupwise.sampler.restrict import truncated, without_early_stops
from groupwise.sampler.weights import ServedWeights
from groupwise.types import Completion, FinishReason, GroupRequest, Policy, SamplingParams

TOKENS_BEYOND_STOP = 8
"""Tokens without text (half characters, special tokens) that a stop string may be spread over, beside its own."""

INCOMPLETE = "\ufffd"
"""What a tokenizer gives for a character of which only some bytes are there yet."""


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """The one shape in which decoding runs; part of a run's recorded layout."""

    slots: int
    """Members decoded together. At least 8: smaller matrix products take another path with other last bits."""
    key_length: int
    """Longest prompt plus longest completion, in tokens."""


@dataclass(slots=True)
class _Member:
    """One completion on its way."""

    ticket: _Ticket
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Ticket:
    """One group's request, its prompt once computed, and the future that its caller awaits."""

    request: GroupRequest
    done: asyncio.Future[None]
    members: list[_Member] = field(default_factory=list)
    prompt: PromptCache | None = None
    first_logits_V: Tensor | None = None


class TorchSampler:
    """A `groupwise.types.Sampler` over any transformers causal language model."""

    def __init__(self, weights: ServedWeights, tokenizer: Any, layout: DecodeLayout) -> None:
        if layout.slots < 8:
            raise ValueError(
                f"slots is {layout.slots}; at least 8 are needed for results that do not depend on it."
            )
        self.layout = layout
        self._weights = weights
        self._tokenizer = tokenizer
        self._decoder = Decoder(weights.model)
        self._cache = SlotCache(layout.slots, layout.key_length)
        self._slots: list[_Member | None] = [None] * layout.slots
        self._waiting: deque[_Member] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._version = 0
        self._fingerprint = fingerprint(weights.tensors())

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.types.Sampler.generate`. Raises `RunError` if the request does not fit the layout."""
        self._check_fits(request)
        if not request.seeds:
            return ()
        ticket = _Ticket(request, asyncio.get_running_loop().create_future())
        ticket.members = [_Member(ticket, seed) for seed in request.seeds]
        self._waiting.extend(ticket.members)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            await ticket.done
        except asyncio.CancelledError:
            self._forget(ticket)
            raise
        return tuple(self._completion(member) for member in ticket.members)

    async def load(self, policy: Policy) -> None:
        """See `groupwise.types.Sampler.load`. Only between groups: keys and values belong to one version."""
        if self._waiting or any(self._slots):
            raise RunError(
                "The sampler was given new weights while completions of the old ones were on their way."
            )
        self._weights.read(Path(policy.path))
        self._fingerprint = fingerprint(self._weights.tensors())
        if self._fingerprint != policy.fingerprint:
            raise PolicyMismatchError(
                f"{policy.run}@{policy.version} was published with the fingerprint {policy.fingerprint}, but the files in "
                f"{policy.path} have {self._fingerprint}. Someone else wrote there, or the disk is damaged."
            )
        self._version = policy.version

    def fingerprint(self) -> str:
        """Of the tensors in memory, as they were when they were loaded."""
        return self._fingerprint

    def _check_fits(self, request: GroupRequest) -> None:
        if not request.prompt_ids or request.params.max_tokens < 1:
            raise RunError(
                f"A prompt of {len(request.prompt_ids)} tokens and a completion of at most "
                f"{request.params.max_tokens}; both need at least one."
            )
        needed = len(request.prompt_ids) + request.params.max_tokens
        if needed > self.layout.key_length:
            raise RunError(
                f"A prompt of {len(request.prompt_ids)} tokens with {request.params.max_tokens} new ones needs "
                f"{needed} positions, but the sampler was laid out for {self.layout.key_length}."
            )

    def _completion(self, member: _Member) -> Completion:
        assert member.finish_reason is not None
        return Completion(
            token_ids=tuple(member.token_ids),
            logprobs=tuple(member.logprobs),
            finish_reason=member.finish_reason,
            seed=member.seed,
            policy_version=self._version,
            fingerprint=self._fingerprint,
        )

    def _forget(self, ticket: _Ticket) -> None:
        self._waiting = deque(member for member in self._waiting if member.ticket is not ticket)
        self._slots = [None if slot and slot.ticket is ticket else slot for slot in self._slots]

    async def _drive(self) -> None:
        try:
            while self._waiting or any(self._slots):
                with torch.inference_mode(), self._weights.acting():
                    self._fill_slots()
                    if any(self._slots):
                        self._decode_one_token()
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 — belongs to those who wait for their groups
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        reason = (
            error if isinstance(error, GroupwiseError) else RunError(f"Sampling failed: {error!r}")
        )
        tickets = {
            id(member.ticket): member.ticket for member in (*self._waiting, *self._slots) if member
        }
        self._waiting.clear()
        self._slots = [None] * self.layout.slots
        self._cache = SlotCache(self.layout.slots, self.layout.key_length)  # it may hold NaN
        for ticket in tickets.values():
            if not ticket.done.done():
                ticket.done.set_exception(reason)

    def _fill_slots(self) -> None:
        for index, slot in enumerate(self._slots):
            while slot is None and self._waiting:
                # It stays in the queue while it starts, so that an error finds it and fails its caller.
                slot = self._start(self._waiting[0], index)
                self._waiting.popleft()

    def _start(self, member: _Member, index: int) -> _Member | None:
        """Draw the member's first token and place its prompt; None if that token already ended it."""
        ticket = member.ticket
        if ticket.prompt is None:
            self._compute_prompt(ticket)
        assert ticket.first_logits_V is not None
        assert ticket.prompt is not None
        self._draw([member], ticket.first_logits_V[None])
        if member.finish_reason is not None:
            self._deliver(ticket)
            return None
        self._cache.place(index, ticket.prompt)
        self._slots[index] = member
        return member

    def _compute_prompt(self, ticket: _Ticket) -> None:
        device = self._decoder.device
        ids_1P = torch.tensor([ticket.request.prompt_ids], device=device)
        length = ids_1P.shape[1]
        positions_1P = torch.arange(length, device=device)[None]
        ticket.prompt = PromptCache()
        hidden = self._decoder.hidden(
            ids_1P, positions_1P, causal_mask(length, 0, device), ticket.prompt
        )
        ticket.first_logits_V = self._decoder.logits(hidden[0, -1:])[0]

    def _decode_one_token(self) -> None:
        device = self._decoder.device
        tokens, positions = [0] * self.layout.slots, [0] * self.layout.slots
        for index, member in enumerate(self._slots):
            if member is not None:
                tokens[index] = member.token_ids[-1]
                positions[index] = len(member.ticket.request.prompt_ids) + len(member.token_ids) - 1
        positions_S = torch.tensor(positions, device=device)
        self._cache.positions = positions_S
        mask_S1K = torch.arange(self.layout.key_length, device=device) <= positions_S[:, None, None]
        ids_S1 = torch.tensor(tokens, device=device)[:, None]
        hidden = self._decoder.hidden(ids_S1, positions_S[:, None], mask_S1K, self._cache)
        self._draw(self._slots, self._decoder.logits(hidden[:, 0]))
        for index, member in enumerate(self._slots):
            if member is not None and member.finish_reason is not None:
                self._slots[index] = None
                self._deliver(member.ticket)

    def _draw(self, members: list[_Member | None] | list[_Member], logits_SV: Tensor) -> None:
        params = [member.ticket.request.params if member else None for member in members]
        lengths = [len(member.token_ids) if member else 0 for member in members]
        uniforms = [
            uniform(member.seed, len(member.token_ids)) if member else 0.5 for member in members
        ]
        device = logits_SV.device
        temperatures_S = torch.tensor(
            [each.temperature if each else 1.0 for each in params], device=device
        )
        logits_SV = without_early_stops(logits_SV, params, lengths)
        logits_SV = truncated(logits_SV, temperatures_S, params)
        tokens_S, logprobs_S = draw_tokens(
            logits_SV,
            temperatures_S,
            torch.tensor(uniforms, dtype=torch.float64, device=device),
        )
        for member, token, logprob in zip(
            members, tokens_S.tolist(), logprobs_S.tolist(), strict=True
        ):
            if member is not None:
                self._append(member, token, logprob)

    def _append(self, member: _Member, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            raise NonFiniteError(
                f"The model's logits are not finite (policy version {self._version}), so nothing can be drawn from them. "
                "Lower training.learning_rate, or try model.dtype=float32."
            )
        member.token_ids.append(token)
        member.logprobs.append(logprob)
        params = member.ticket.request.params
        if token in params.stop_token_ids or self._ends_with_stop(member, params):
            member.finish_reason = "stop"
        elif len(member.token_ids) == params.max_tokens:
            member.finish_reason = "length"

    def _ends_with_stop(self, member: _Member, params: SamplingParams) -> bool:
        """Whether a stop text ends here; of one that came before `min_tokens` only another occurrence counts."""
        if not params.stop or len(member.token_ids) < params.min_tokens:
            return False
        reach = max(len(text.encode()) for text in params.stop) + TOKENS_BEYOND_STOP
        tail = self._text(member.token_ids[-reach:])
        found = [text for text in params.stop if text in tail]
        if not found or not params.min_tokens:
            return bool(found)
        before = self._text(member.token_ids[-reach:-1]).rstrip(INCOMPLETE)
        return any(tail.rfind(text) + len(text) > len(before) for text in found)

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _deliver(self, ticket: _Ticket) -> None:
        finished = all(member.finish_reason is not None for member in ticket.members)
        if finished and not ticket.done.done():
            ticket.done.set_result(None)
