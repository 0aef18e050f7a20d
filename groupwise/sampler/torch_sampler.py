"""The default sampler: continuous batching of rows, in this process.

Callers await `generate`, one call for each group, as many at once as they like. A single driver task serves them: it computes a
group's prompt once, begins a row for each member while there is room, and then moves all rows one token forward at a time. A row
that finishes makes room at once. The driver yields to the event loop after every token, so scoring and cancelling go on meanwhile.

An engine computes the rows (`groupwise.sampler.engine`): natively where the model is of a known family, in one way on processors and in
another on GPUs, else by transformers. What a member draws depends on its seed and its own group only.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.errors import GroupwiseError, RunError
from groupwise.models.lora import fingerprint
from groupwise.models.memory import lacks_memory, memory_explained, out_of_memory
from groupwise.sampler.chance import uniform
from groupwise.sampler.draw import draw_tokens
from groupwise.sampler.engine import Engine, Prompt, Row
from groupwise.sampler.native.engine import NativeEngine
from groupwise.sampler.native.graph_engine import GraphEngine
from groupwise.sampler.native.recording import cuda_graphs, plainly
from groupwise.sampler.refusals import not_finite, refuse_misfit, refuse_other_weights
from groupwise.sampler.restrict import truncated, without_early_stops
from groupwise.sampler.slot_engine import SlotEngine
from groupwise.sampler.stops import ends_with_stop
from groupwise.sampler.weights import ServedWeights
from groupwise.types import Completion, FinishReason, GroupRequest, Policy


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """How much decoding goes on at once; part of a run's recorded layout."""

    slots: int
    """Members decoded together, at most. At least 8: smaller matrix products take another path with other last bits."""
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


@dataclass(slots=True, eq=False)
class _Ticket:
    """One group's request, its prompt once computed, and the future that its caller awaits."""

    request: GroupRequest
    done: asyncio.Future[None]
    members: list[_Member] = field(default_factory=list)
    prompt: Prompt | None = None


class TorchSampler:
    """A `groupwise.types.Sampler` over any transformers causal language model."""

    def __init__(
        self,
        weights: ServedWeights,
        tokenizer: Any,
        layout: DecodeLayout,
        *,
        native: bool = True,
        enforce_eager: bool = False,
    ) -> None:
        """Without `native`, the model is computed by transformers, whatever it is: the reference for the native engine.

        With `enforce_eager`, a GPU records no CUDA graphs.
        """
        if layout.slots < 8:
            raise ValueError(
                f"slots is {layout.slots}; at least 8 are needed for results that do not depend on it."
            )
        self.layout = layout
        self._weights = weights
        self._tokenizer = tokenizer
        self._engine = _engine(weights, layout, native=native, enforce_eager=enforce_eager)
        self._members: dict[Row, _Member] = {}
        self._waiting: deque[_Member] = deque()
        self._tickets: list[_Ticket] = []
        self._driver: asyncio.Task[None] | None = None
        self._version = 0
        self._fingerprint = fingerprint(weights.tensors())

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.types.Sampler.generate`. Raises `RunError` if the request does not fit the layout."""
        refuse_misfit(request, self.layout.key_length)
        if not request.seeds:
            return ()
        ticket = _Ticket(request, asyncio.get_running_loop().create_future())
        ticket.members = [_Member(ticket, seed) for seed in request.seeds]
        self._waiting.extend(ticket.members)
        self._tickets.append(ticket)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            await ticket.done
        except asyncio.CancelledError:
            self._forget(ticket)
            raise
        finally:
            self._tickets.remove(ticket)
            ticket.prompt = None  # ticket and members hold each other: its keys would wait for the garbage collector
        return tuple(self._completion(member) for member in ticket.members)

    async def load(self, policy: Policy) -> None:
        """See `groupwise.types.Sampler.load`. Only between groups: keys and values belong to one version."""
        if self._waiting or self._members:
            raise RunError(
                "The sampler was given new weights while completions of the old ones were on their way."
            )
        with memory_explained("taking new weights for sampling"):
            self._weights.read(Path(policy.path))
            with torch.inference_mode():
                self._engine.refresh()
        self._fingerprint = fingerprint(self._weights.tensors())
        refuse_other_weights(policy, self._fingerprint)
        self._version = policy.version

    def fingerprint(self) -> str:
        """Of the tensors in memory, as they were when they were loaded."""
        return self._fingerprint

    def so_far(self, draw: int) -> tuple[tuple[int, ...], ...]:
        """The tokens that each member of a request has while it is under way; none where there is no such request."""
        found = next((ticket for ticket in self._tickets if ticket.request.draw == draw), None)
        return () if found is None else tuple(tuple(each.token_ids) for each in found.members)

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
        self._finish([row for row, member in self._members.items() if member.ticket is ticket])

    def _finish(self, rows: list[Row]) -> None:
        self._engine.finish(rows)
        for row in rows:
            del self._members[row]

    async def _drive(self) -> None:
        try:
            while self._waiting or self._members:
                with torch.inference_mode():
                    self._begin_rows()
                    if self._members:
                        self._decode_one_token()
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 — belongs to those who wait for their groups
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        reason = _explained(error)
        members = (*self._waiting, *self._members.values())
        tickets = {id(member.ticket): member.ticket for member in members}
        self._waiting.clear()
        self._members.clear()
        self._engine.reset()
        for ticket in tickets.values():
            if not ticket.done.done():
                ticket.done.set_exception(reason)

    def _begin_rows(self) -> None:
        """Give members that wait a row each, as far as there is room."""
        while self._waiting and len(self._members) < self.layout.slots:
            # They stay in the queue while they begin, so that an error finds them and fails their caller.
            self._begin(self._waiting[0])
            self._waiting.popleft()

    def _begin(self, member: _Member) -> None:
        """Draw the member's first token; it needs a row unless that token already ends it."""
        ticket = member.ticket
        if ticket.prompt is None:
            ticket.prompt = self._engine.prefill(ticket.request.prompt_ids)
        self._draw([member], ticket.prompt.logits_V[None])
        if member.finish_reason is None:
            self._members[self._engine.begin(ticket.prompt)] = member
        else:
            self._deliver(ticket)

    def _decode_one_token(self) -> None:
        rows = self._engine.rows
        members = [self._members[row] for row in rows]
        self._draw(members, self._engine.decode([member.token_ids[-1] for member in members]))
        ended = [
            (row, member)
            for row, member in zip(rows, members, strict=True)
            if member.finish_reason is not None
        ]
        if ended:
            self._finish([row for row, _ in ended])
            for _, member in ended:
                self._deliver(member.ticket)

    def _draw(self, members: list[_Member], logits_NV: Tensor) -> None:
        # A GPU cuts sums over the vocabulary up by the number of rows, so that there are always as many.
        empty = 0 if logits_NV.device.type == "cpu" else self.layout.slots - len(members)
        logits_NV = F.pad(logits_NV, (0, 0, 0, empty)) if empty else logits_NV
        tokens, logprobs = _drawn(members, logits_NV, empty)
        for member, token, logprob in zip(members, tokens, logprobs, strict=False):
            self._append(member, token, logprob)

    def _append(self, member: _Member, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            raise not_finite(self._version)
        member.token_ids.append(token)
        member.logprobs.append(logprob)
        params = member.ticket.request.params
        if token in params.stop_token_ids or ends_with_stop(member.token_ids, params, self._text):
            member.finish_reason = "stop"
        elif len(member.token_ids) == params.max_tokens:
            member.finish_reason = "length"

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _deliver(self, ticket: _Ticket) -> None:
        finished = all(member.finish_reason is not None for member in ticket.members)
        if finished and not ticket.done.done():
            ticket.done.set_result(None)


def _explained(error: Exception) -> GroupwiseError:
    """What those are told who wait for their groups."""
    if isinstance(error, GroupwiseError):
        return error
    if lacks_memory(error):
        return out_of_memory(error, "sampling")
    return RunError(f"Sampling failed: {error!r}")


def _drawn(
    members: Sequence[_Member], logits_NV: Tensor, empty: int
) -> tuple[list[int], list[float]]:
    """A token and its log-probability for each row of logits, of which the last `empty` are nobody's."""
    device = logits_NV.device
    params = [*(member.ticket.request.params for member in members), *[None] * empty]
    lengths = [*(len(member.token_ids) for member in members), *[0] * empty]
    uniforms = [uniform(member.seed, len(member.token_ids)) for member in members]
    temperatures_N = torch.tensor(
        [1.0 if each is None else each.temperature for each in params], device=device
    )
    logits_NV = without_early_stops(logits_NV, params, lengths)
    logits_NV = truncated(logits_NV, temperatures_N, params)
    tokens_N, logprobs_N = draw_tokens(
        logits_NV,
        temperatures_N,
        torch.tensor(uniforms + [0.0] * empty, dtype=torch.float64, device=device),
    )
    return tokens_N.tolist(), logprobs_N.tolist()


def _engine(
    weights: ServedWeights, layout: DecodeLayout, *, native: bool, enforce_eager: bool
) -> Engine:
    model = weights.native() if native else None
    if model is None:
        return SlotEngine(weights, layout.slots, layout.key_length)
    if model.device.type == "cpu":
        return NativeEngine(model, weights)
    record = plainly if enforce_eager else cuda_graphs()
    return GraphEngine(model, weights, layout.slots, layout.key_length, record)
