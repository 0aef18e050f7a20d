"""The default sampler: continuous batching of rows, in this process.

The driver computes a prompt once for its group, and for other groups with the same prompt that are in progress, starts a row for each
member while there is room, and then advances all rows by one token at a time. A finished row makes room at once. The driver yields to
the event loop after every token, so scoring and cancelling continue.

A GPU computes the next token while this process looks at the last one: rows that end with it are computed once for nothing. So it does
after a refill of free rows: prompts, first tokens and the tokens after them are begun before the first are known here. That needs no token
to be known here, so it is not done while a completion has a schema, penalties or biases.

An engine computes the rows (`groupwise.engine.sampler.engine`): a native one if the model is of a known family (one for CPUs, one for
GPUs), otherwise one over transformers. A member's draw depends only on its seed and its own group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.core.errors import ModelError
from groupwise.core.types import PromptLogprobs, TopLogprobs
from groupwise.engine.models.machine import engine_products, send
from groupwise.engine.models.native.facts import FAMILIES
from groupwise.engine.models.native.fused import kernels_for
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.engine import DecodeEngine, DecodeRow
from groupwise.engine.sampler.logits import prompt_logprobs
from groupwise.engine.sampler.native.engine import NativeEngine
from groupwise.engine.sampler.native.graph_engine import GraphEngine
from groupwise.engine.sampler.native.recording import cuda_graphs, run_eagerly
from groupwise.engine.sampler.queued import (
    DecodeLayout,
    Member,
    QueuedSampler,
    Ticket,
    draw_members,
    draw_numbers,
)
from groupwise.engine.sampler.rules import not_finite, refuse_long_prompt
from groupwise.engine.sampler.weights import ServedWeights


class TorchSampler(QueuedSampler):
    """A `groupwise.core.types.Sampler` over any transformers causal language model."""

    def __init__(
        self,
        weights: ServedWeights,
        tokenizer: Any,
        layout: DecodeLayout,
        *,
        native: bool = True,
        enforce_eager: bool = False,
        int8: bool = False,
        frees_cache: bool = False,
    ) -> None:
        """Without `native`, transformers computes every model; this is the reference for the native engines.

        With `enforce_eager`, a GPU records no CUDA graphs. With `int8`, a CPU decodes with weights in int8; `ModelError` if it cannot.
        With `frees_cache`, `rest` frees keys and values.
        """
        super().__init__(weights, tokenizer, layout)
        self._frees_cache = frees_cache
        self._engine = _make_engine(
            weights, layout, native=native, enforce_eager=enforce_eager, int8=int8
        )
        self._members: dict[DecodeRow, Member] = {}
        self._drawings: list[Drawing] = []
        """What a GPU was asked for and has not been read: the next token of the rows in progress, and the first of new ones."""

    async def prompt_logprobs(self, prompt_ids: tuple[int, ...], top: int) -> PromptLogprobs:
        """The log-probabilities of a prompt's tokens under the weights that serve now, with the `top` most probable at each position.

        Raises `RunError` for a prompt that is empty or longer than the layout. It is computed at once, between two tokens of the others.
        """
        refuse_long_prompt(prompt_ids, self.layout.key_length)
        await self._until_loaded()
        logprobs: list[float] = []
        best: list[TopLogprobs] = []
        with engine_products(), torch.inference_mode():
            for logits_TV in self._engine.prompt_logits(prompt_ids[:-1]) if prompt_ids[1:] else ():
                following = prompt_ids[len(logprobs) + 1 :][: len(logits_TV)]
                slice_logprobs, slice_best = prompt_logprobs(logits_TV, following, top)
                logprobs += slice_logprobs
                best += slice_best
        if not all(map(math.isfinite, logprobs)):
            raise not_finite(self._version)
        return PromptLogprobs(tuple(logprobs), tuple(best))

    async def release_memory(self) -> None:
        """See `groupwise.core.types.SharesDevice.release_memory`."""
        if self._frees_cache and not self._waiting and not self._members and not self._loading:
            self._engine.free_cache()
            torch.cuda.empty_cache()

    async def _draw_waiting(self) -> None:
        """See `QueuedSampler._draw_waiting`."""
        while self._waiting or self._members:
            with engine_products(), torch.inference_mode():
                self._start_waiting()
                if self._members:
                    self._decode_one_token()
            await asyncio.sleep(0)
        self._drawings.clear()

    def _in_progress(self) -> Sequence[Member]:
        """See `QueuedSampler._in_progress`."""
        return [*self._members.values()]

    def _drop_group(self, ticket: Ticket) -> None:
        """See `QueuedSampler._drop_group`."""
        self._finish_rows([row for row, member in self._members.items() if member.ticket is ticket])

    def _reset(self) -> None:
        """See `QueuedSampler._reset`."""
        self._members.clear()
        self._drawings.clear()
        self._engine.reset()

    def _refresh(self) -> None:
        """See `QueuedSampler._refresh`."""
        with engine_products():
            self._engine.refresh()

    def _finish_rows(self, rows: list[DecodeRow]) -> None:
        self._engine.remove_rows(rows)
        for row in rows:
            del self._members[row]

    def _start_waiting(self) -> None:
        """Give rows to waiting members, as long as there is room."""
        while self._waiting and (room := self.layout.slots - len(self._members)):
            # They stay in the queue while they start, so that an error finds them there and fails their callers.
            beginning = [*islice(self._waiting, room)]
            self._start_members(beginning)
            for _ in beginning:
                self._waiting.popleft()

    def _start_members(self, members: list[Member]) -> None:
        """Draw the first tokens of all these members at once. A member gets a row unless it is known here that this token already ends it.

        Groups in progress with the same prompt share it: an agent's trajectories begin with the same prompt, each in its own request.
        """
        computed = {
            member.ticket.request.prompt_ids: member.ticket.prompt
            for member in self._members.values()
            if member.ticket.prompt is not None
        }
        tickets = [member.ticket for member in members if member.ticket.prompt is None]
        missing = dict.fromkeys(ticket.request.prompt_ids for ticket in tickets)
        missing = [ids for ids in missing if ids not in computed]
        computed.update(zip(missing, self._engine.prefill_all(missing), strict=True))
        for ticket in tickets:
            ticket.prompt = computed[ticket.request.prompt_ids]
        prompts = [member.ticket.prompt for member in members if member.ticket.prompt is not None]
        logits_NV = torch.stack([prompt.logits_V for prompt in prompts])
        if self._looks_ahead(members):
            rows = [self._engine.add_row(prompt) for prompt in prompts]
            self._members.update(zip(rows, members, strict=True))
            self._drawings.append(self._drawn(dict.fromkeys(rows, 0), logits_NV))
            return
        self._draw_tokens(members, logits_NV)
        for member, prompt in zip(members, prompts, strict=True):
            if member.finish_reason is None:
                self._members[self._engine.add_row(prompt)] = member
            else:
                self._deliver_if_finished(member.ticket)

    def _decode_one_token(self) -> None:
        drawings, self._drawings = self._drawings, []
        if not drawings and self._looks_ahead():
            drawings = [self._start_drawing(self._members, [])]
        if not drawings:
            rows = self._engine.rows
            members = [self._members[row] for row in rows]
            self._draw_tokens(
                members, self._engine.decode([member.token_ids[-1] for member in members])
            )
        else:
            if self._looks_ahead():
                lengths = {row: each.lengths[row] for each in drawings for row in each.lengths}
                continuing = {
                    row: member
                    for row, member in self._members.items()
                    if row not in lengths
                    or lengths[row] + 1 < member.ticket.request.params.max_tokens
                }
                if continuing:
                    self._drawings.append(self._start_drawing(continuing, drawings))
            for row, token, logprob in (found for each in drawings for found in each.read()):
                if row in self._members:  # its group may have been given up meanwhile
                    self._append_token(self._members[row], token, logprob)
        finished = [
            (row, member)
            for row, member in self._members.items()
            if member.finish_reason is not None
        ]
        if finished:
            self._finish_rows([row for row, _ in finished])
            for _, member in finished:
                self._deliver_if_finished(member.ticket)

    def _looks_ahead(self, beginning: Sequence[Member] = ()) -> bool:
        """True if the GPU may draw the next tokens before the last ones are known here. `beginning`: members that get rows now."""
        return isinstance(self._engine, GraphEngine) and not any(
            member.ticket.request.top_logprobs or member.ticket.request.params.processing
            for member in (*self._members.values(), *beginning)
        )

    def _start_drawing(
        self, members: Mapping[DecodeRow, Member], previous: Sequence[Drawing]
    ) -> Drawing:
        """Let the GPU draw a token for each of these rows, after the one that it still draws for rows of `previous`."""
        assert isinstance(self._engine, GraphEngine)
        rows = [*members]
        drawn, places = None, dict[DecodeRow, int]()
        if previous:
            before = 0
            for each in previous:
                places |= {row: before + place for place, row in enumerate(each.lengths)}
                before += len(each.tokens_N)
            tokens_N = torch.cat([each.tokens_N for each in previous])
            again = [row for row in rows if row in places]
            places_N = torch.tensor([places[row] for row in again], dtype=torch.long)
            drawn = again, tokens_N[send(places_N, tokens_N.device)]
        lengths = {row: len(member.token_ids) + (row in places) for row, member in members.items()}
        # A row of `previous` has no token here yet if that is its first.
        tokens = [0 if row in places else member.token_ids[-1] for row, member in members.items()]
        return self._drawn(lengths, self._engine.decode_rows(rows, tokens, drawn))

    def _drawn(self, lengths: Mapping[DecodeRow, int], logits_NV: Tensor) -> Drawing:
        """Let the GPU draw from these logits for rows whose completions then have these lengths."""
        members = [self._members[row] for row in lengths]
        logits_NV, empty = self._padded(logits_NV)
        numbers_2N, _, _ = draw_numbers(members, [*lengths.values()], logits_NV, empty)
        return Drawing(lengths, numbers_2N)

    def _draw_tokens(self, members: list[Member], logits_NV: Tensor) -> None:
        logits_NV, empty = self._padded(logits_NV)
        tokens, logprobs = draw_members(members, logits_NV, empty, self._engine.shift)
        for member, token, logprob in zip(members, tokens, logprobs, strict=False):
            self._append_token(member, token, logprob)

    def _padded(self, logits_NV: Tensor) -> tuple[Tensor, int]:
        """The logits, with so many empty rows behind them as a draw on this device needs."""
        # On a GPU torch splits sums over the vocabulary by the number of rows, so that number is kept constant.
        by_row = logits_NV.device.type == "cpu" or kernels_for(logits_NV) is not None
        empty = 0 if by_row else self.layout.slots - len(logits_NV)
        return F.pad(logits_NV, (0, 0, 0, empty)) if empty else logits_NV, empty


class Drawing:
    """One more token of some rows, which a GPU may still be drawing."""

    def __init__(self, lengths: Mapping[DecodeRow, int], numbers_2N: Tensor) -> None:
        """`lengths`: of the rows' completions before this token. `numbers_2N`: tokens and log-probabilities, in the order of the rows."""
        self.lengths = lengths
        self.tokens_N = numbers_2N[0].long()
        self._numbers_2N = numbers_2N.to("cpu", non_blocking=True)
        self._drawn = torch.cuda.Event() if numbers_2N.device.type == "cuda" else None
        if self._drawn is not None:
            self._drawn.record()

    def read(self) -> list[tuple[DecodeRow, int, float]]:
        """Each row with its token and log-probability; waits until they are drawn."""
        if self._drawn is not None:
            self._drawn.synchronize()
        tokens, logprobs = self._numbers_2N.tolist()
        # The draw may have been padded.
        return [*zip(self.lengths, map(int, tokens), logprobs, strict=False)]


def _int8_refusal(weights: ServedWeights, model: NativeModel | None) -> str | None:
    """Why this machine cannot decode with weights in int8; None if it can."""
    if weights.model.device.type != "cpu":
        return "it is for decoding on a CPU, and this run samples on a GPU"
    if model is None:
        return (
            "this model is computed by transformers, which has no such products (the log says why); models of the families "
            f"{', '.join(FAMILIES)} have"
        )
    from groupwise.engine.models.native.products import HAS_VNNI

    if not HAS_VNNI:
        return (
            "this processor has no instruction for such products (AVX512_VNNI): Intel's have one from Ice Lake (2019) on, AMD's from "
            "Zen 4 (2022) on"
        )
    return None


@engine_products()
def _make_engine(
    weights: ServedWeights, layout: DecodeLayout, *, native: bool, enforce_eager: bool, int8: bool
) -> DecodeEngine:
    model = weights.native(int8=int8) if native else None
    if int8 and (reason := _int8_refusal(weights, model)):
        raise ModelError(
            f"sampler.quantization is int8, but {reason}. Leave it out to sample with the weights as they are."
        )
    if model is None:
        # They take seconds to import.
        from groupwise.engine.models.decoder import has_state
        from groupwise.engine.sampler.transformers_engines import RowEngine, SlotEngine

        if has_state(weights.model.config):
            return RowEngine(weights)
        return SlotEngine(weights, layout.slots, layout.key_length)
    if model.device.type == "cpu":
        return NativeEngine(model, weights, int8=int8)
    record = run_eagerly if enforce_eager else cuda_graphs()
    return GraphEngine(model, weights, layout.slots, layout.key_length, record)
