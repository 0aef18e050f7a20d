"""Completions drawn during Unsloth's generation: its kernels compute the logits, and we draw from them.

`generate` of transformers, as replaced by Unsloth, advances all rows by one token at a time. A logits processor draws each row's token by
its seed, records its log-probability, and leaves `generate` only that token to choose. So temperature, truncation and stops mean the same
as in the default sampler. Waiting rows start together, at most as many as there are slots, and the next ones start when all of them have
ended; the last bits of a row's results depend on the other rows.

A thread computes, so rewards can be scored and calls cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from groupwise.engine.backends.unsloth import library
from groupwise.engine.models.machine import engine_products
from groupwise.engine.sampler.queued import (
    DecodeLayout,
    Member,
    QueuedSampler,
    Ticket,
    draw_members,
)
from groupwise.engine.sampler.weights import ServedWeights


class UnslothSampler(QueuedSampler):
    """A `groupwise.core.types.Sampler` over a model that Unsloth has loaded."""

    def __init__(self, weights: ServedWeights, tokenizer: Any, layout: DecodeLayout) -> None:
        super().__init__(weights, tokenizer, layout)
        self._batch: list[Member] = []
        self._left: set[int] = set()
        """Ids of tickets in the batch whose callers no longer wait for them."""
        self._ending = False
        most = getattr(weights.model.config, "max_position_embeddings", None)
        self._room = min(layout.key_length, most or layout.key_length)

    async def _draw_waiting(self) -> None:
        """See `QueuedSampler._draw_waiting`."""
        while self._waiting:
            # Take waiting members in order while `generate` has room for the longest prompt with the longest completion.
            longest = max_tokens = 0
            while self._waiting and len(self._batch) < self.layout.slots:
                request = self._waiting[0].ticket.request
                longest = max(longest, len(request.prompt_ids))
                max_tokens = max(max_tokens, request.params.max_tokens)
                if self._batch and longest + max_tokens > self._room:
                    break
                self._batch.append(self._waiting.popleft())
            try:
                await asyncio.to_thread(self._generate_batch)
            except asyncio.CancelledError:
                self._ending = True  # the thread ends after its next token
                raise
            tickets = {id(member.ticket): member.ticket for member in self._batch}
            self._reset()
            for ticket in tickets.values():
                self._deliver_if_finished(ticket)

    @engine_products()
    def _generate_batch(self) -> None:
        """Complete the batch in one `generate`; the prompts [B, P] are padded on the left, so that their ends are aligned."""
        model: Any = self._weights.model
        prompts = [member.ticket.request.prompt_ids for member in self._batch]
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with self._weights.acting(), torch.inference_mode():
            library.sampling(model)
            model.generate(
                input_ids=torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=max(
                    member.ticket.request.params.max_tokens for member in self._batch
                ),
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([_TokenDrawer(self)]),
                stopping_criteria=StoppingCriteriaList([_AllEnded(self)]),
            )

    def draw(self, logits_BV: Tensor) -> Tensor:
        """Draw for each unfinished row of the batch. Returns the tokens [B]; 0 for finished rows."""
        tokens_B = torch.zeros(len(self._batch), dtype=torch.long, device=logits_BV.device)
        unfinished = [
            index for index, member in enumerate(self._batch) if not self._is_over(member)
        ]
        if unfinished:
            members = [self._batch[index] for index in unfinished]
            tokens, logprobs = draw_members(members, logits_BV[unfinished])
            for member, token, logprob in zip(members, tokens, logprobs, strict=True):
                self._append_token(member, token, logprob)
            tokens_B[unfinished] = torch.tensor(tokens, device=logits_BV.device)
        return tokens_B

    def over(self) -> list[bool]:
        """True for each row of the batch that has ended."""
        return [self._is_over(member) for member in self._batch]

    def _is_over(self, member: Member) -> bool:
        return self._ending or member.finish_reason is not None or id(member.ticket) in self._left

    def _in_progress(self) -> Sequence[Member]:
        """See `QueuedSampler._in_progress`."""
        return self._batch

    def _drop_group(self, ticket: Ticket) -> None:
        """See `QueuedSampler._drop_group`."""
        self._left.add(id(ticket))

    def _reset(self) -> None:
        """See `QueuedSampler._reset`."""
        self._batch = []
        self._left.clear()

    def _refresh(self) -> None:
        """See `QueuedSampler._refresh`. Nothing to do: the modules hold the weights themselves."""


class _TokenDrawer(LogitsProcessor):
    """Leaves only the drawn token in the logits [B, V]."""

    def __init__(self, sampler: UnslothSampler) -> None:
        self._sampler = sampler

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens_B = self._sampler.draw(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


class _AllEnded(StoppingCriteria):
    """Reports the rows that have ended."""

    def __init__(self, sampler: UnslothSampler) -> None:
        self._sampler = sampler

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.tensor(self._sampler.over(), device=input_ids.device)
