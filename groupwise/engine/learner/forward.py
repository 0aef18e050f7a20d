"""Log-probabilities of the completions of a micro-batch, computed in one of four ways that agree.

`shared_prompt` computes the prompt once, and every completion attends to its keys and values; gradients flow back through them.
`packed_rows` computes rows of any prompts one after another in a sequence, each with its own positions and without attention to the others.
`packed_groups` does both in one sequence, without a cache. `whole_rows` is the plain reference: each row is prompt and completion, padded.

`Paths` selects the ways that a learner uses: `shared_prompt` needs a cache, which gradient checkpointing cannot recompute, and packing
needs a model in which the other rows of a sequence have no effect on a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.core.types import Row
from groupwise.engine.learner.divergence import teacher_kl
from groupwise.engine.learner.head import token_numbers
from groupwise.engine.learner.layout import (
    MicroBatch,
    PackedBatch,
    PackedGroups,
    TransformersBatch,
    cut,
)
from groupwise.engine.learner.targets import (
    DEFAULT_OUTPUTS,
    Distributions,
    ForwardOutputs,
    ForwardResult,
    QueriedTokens,
    TokenNumbers,
    compute_targets,
    distributions_at,
    pad_rows,
    real_places,
)
from groupwise.engine.models.decoder import Decoder, PromptCache, SharedPrefixCache
from groupwise.engine.models.machine import exact_products
from groupwise.engine.models.text_mask import TextMask

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Paths:
    """The ways of computing rows that a learner uses."""

    packing: bool
    """Rows of different prompts are computed one after another in one sequence."""
    sharing: bool
    """A prompt is computed once for all its completions, which may need a cache."""
    whole_groups: bool = False
    """With `packing`, prompts and their completions are computed one after another in one sequence, which needs no cache."""
    outputs: ForwardOutputs = DEFAULT_OUTPUTS

    def cut(self, rows: Sequence[Row], max_tokens: int) -> Sequence[TransformersBatch]:
        """Divide the rows into micro-batches of at most `max_tokens` tokens; a single longer row has its own."""
        return cut(
            rows,
            max_tokens,
            packing=self.packing,
            prompt_shared=self.sharing,
            whole_groups=self.whole_groups,
        )

    def forward(self, decoder: Decoder, batch: TransformersBatch) -> ForwardResult:
        """Log-probabilities and entropies of a micro-batch."""
        if isinstance(batch, PackedGroups):
            return packed_groups(decoder, batch, self.outputs)
        if isinstance(batch, PackedBatch):
            return packed_rows(decoder, batch, self.outputs)
        compute = shared_prompt if self.sharing else whole_rows
        return compute(decoder, batch, self.outputs)


def choose_paths(
    decoder: Decoder, *, packing: bool, sharing: bool, whole_groups: bool = False
) -> Paths:
    """The ways that this model allows. Packing is disabled, with a warning, if rows in one sequence would affect each other, and
    sharing too, if layers have a state."""
    if decoder.has_state:
        logger.warning(
            "%s has layers with a state, such as recurrent ones, so each row is computed with its own prompt, behind no other: slower, the "
            "result is the same",
            decoder.config.model_type,
        )
        return Paths(packing=False, sharing=False)
    exact = packing and packing_is_exact(decoder)
    if packing and not exact:
        logger.warning(
            "%s computes rows behind each other differently than alone, so they are not packed (training.packing): "
            "slower, the result is the same",
            decoder.config.model_type,
        )
    return Paths(packing=exact, sharing=sharing, whole_groups=whole_groups)


def shared_prompt(
    decoder: Decoder, batch: MicroBatch, outputs: ForwardOutputs = DEFAULT_OUTPUTS
) -> ForwardResult:
    """Compute the prompt once, then all its completions as a batch."""
    device = decoder.device
    prompt_1P = torch.tensor([batch.prompt_ids], device=device)
    length = prompt_1P.shape[1]
    cache = PromptCache()
    positions_1P = torch.arange(length, device=device)[None]
    prompt_hidden = decoder.hidden(prompt_1P, positions_1P, TextMask(length), cache)
    ids_BT = _padded_ids(batch.rows, device)
    rows, width = ids_BT.shape
    hidden_BTH = prompt_hidden[:, -1:].expand(rows, -1, -1)
    if width > 1:
        positions_1T = torch.arange(length, length + width - 1, device=device)[None]
        seen = TextMask(width - 1, past=length)
        later = decoder.hidden(ids_BT[:, :-1], positions_1T, seen, SharedPrefixCache(cache))
        hidden_BTH = torch.cat((hidden_BTH, later), dim=1)
    real_BT = real_places([len(row.completion_ids) for row in batch.rows], device)
    return _at_tokens(decoder, batch.rows, hidden_BTH[real_BT], outputs)


def whole_rows(
    decoder: Decoder, batch: MicroBatch, outputs: ForwardOutputs = DEFAULT_OUTPUTS
) -> ForwardResult:
    """Compute each row by itself, prompt included."""
    device = decoder.device
    ids_BT = _padded_ids(batch.rows, device)
    rows, width = ids_BT.shape
    prompt_BP = torch.tensor([batch.prompt_ids], device=device).expand(rows, -1)
    length = prompt_BP.shape[1]
    input_ids = torch.cat((prompt_BP, ids_BT[:, :-1]), dim=1)
    positions = torch.arange(length + width - 1, device=device)[None]
    hidden = decoder.hidden(input_ids, positions, TextMask(length + width - 1), None)
    real_BT = real_places([len(row.completion_ids) for row in batch.rows], device)
    return _at_tokens(decoder, batch.rows, hidden[:, length - 1 :][real_BT], outputs)


def packed_rows(
    decoder: Decoder, batch: PackedBatch, outputs: ForwardOutputs = DEFAULT_OUTPUTS
) -> ForwardResult:
    """Compute rows one after another in sequences: positions start at 0 in each row, and no row attends to another."""
    device = decoder.device
    ids_SL = torch.zeros(batch.shape, dtype=torch.long)
    positions_SL = torch.zeros(batch.shape, dtype=torch.long)
    lengths: list[list[int]] = [[] for _ in range(batch.shape[0])]
    token_indices: list[Tensor] = []
    for row, row_start in zip(batch.rows, batch.starts, strict=True):
        tokens = [*row.prompt_ids, *row.completion_ids[:-1]]
        sequence, start = row_start
        span = (sequence, slice(start, start + len(tokens)))
        ids_SL[span] = torch.tensor(tokens)
        positions_SL[span] = torch.arange(len(tokens))
        lengths[sequence].append(len(tokens))
        # The hidden state before the first completion token predicts it.
        first_index = sequence * batch.shape[1] + start + len(row.prompt_ids) - 1
        token_indices.append(torch.arange(len(row.completion_ids), device=device) + first_index)
    size = batch.shape[1]
    padded = ((*some, size - sum(some)) for some in lengths)  # padding is a text of its own
    texts = [length for some in padded for length in some if length]
    hidden_SLH = decoder.hidden(
        ids_SL.to(device), positions_SL.to(device), TextMask(size, lengths=texts), None
    )
    at_hidden = hidden_SLH.flatten(0, 1)[torch.cat(token_indices)]
    return _at_tokens(decoder, batch.rows, at_hidden, outputs)


def packed_groups(
    decoder: Decoder, batch: PackedGroups, outputs: ForwardOutputs = DEFAULT_OUTPUTS
) -> ForwardResult:
    """Compute each prompt, and after it its completions: they see the prompt and themselves, and their positions follow the prompt's."""
    tokens: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    prompts: list[int | None] = []
    before: list[int] = []
    """Place of the hidden state before each completion token, which predicts it."""

    def add(text: Sequence[int], first: int, prompt: int | None) -> range:
        places = range(len(tokens), len(tokens) + len(text))
        tokens.extend(text)
        positions.extend(range(first, first + len(text)))
        if text:
            lengths.append(len(text))
            prompts.append(prompt)
        return places

    for rows in batch.groups:
        prompt_ids, prompt = rows[0].prompt_ids, len(lengths)
        if len(rows) == 1:  # one text, which needs no copy of its prompt's keys
            row = rows[0]
            first = add((*prompt_ids, *row.completion_ids[:-1]), 0, None)[len(prompt_ids) - 1]
            before += range(first, first + len(row.completion_ids))
            continue
        end = add(prompt_ids, 0, None)[-1]
        for row in rows:
            before += [end, *add(row.completion_ids[:-1], len(prompt_ids), prompt)]
    alone = all(prompt is None for prompt in prompts)
    seen = TextMask(len(tokens), lengths=lengths, prompts=None if alone else prompts)
    device = decoder.device
    ids_1N, positions_1N = (torch.tensor([each], device=device) for each in (tokens, positions))
    hidden_NH = decoder.hidden(ids_1N, positions_1N, seen, None)[0]
    return _at_tokens(decoder, batch.rows, hidden_NH[torch.tensor(before, device=device)], outputs)


def packing_is_exact(decoder: Decoder) -> bool:
    """True if rows in one sequence do not affect each other in this model; tested on two short rows.

    That holds if all layers depend only on positions and mask. Recurrent or convolutional layers would break it.
    """
    rows = (_toy_row((2, 1), (0, 1, 2)), _toy_row((1, 0), (2, 2)))
    packed = PackedBatch(rows, (0, 1), ((0, 0), (0, 4)), (1, 7))
    single_batches = [
        PackedBatch((row,), (0,), ((0, 0),), (1, 4 - n)) for n, row in enumerate(rows)
    ]
    with torch.no_grad():
        packed_logprobs = packed_rows(decoder, packed).logprobs_BT
        single_logprobs = [packed_rows(decoder, batch).logprobs_BT for batch in single_batches]
    margin = 1e-4 if exact_products(decoder.model.dtype) else 5e-2
    return all(
        torch.allclose(
            packed_logprobs[number, : logprobs.shape[1]], logprobs[0], rtol=margin, atol=margin
        )
        for number, logprobs in enumerate(single_logprobs)
    )


def _toy_row(prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Row:
    count = len(completion_ids)
    return Row(prompt_ids, completion_ids, (1,) * count, (0.0,) * count, 0.0, 1.0)


def _padded_ids(rows: Sequence[Row], device: torch.device) -> Tensor:
    return pad_rows([row.completion_ids for row in rows], device)


def _at_tokens(
    decoder: Decoder, rows: Sequence[Row], hidden_AH: Tensor, outputs: ForwardOutputs
) -> ForwardResult:
    """Numbers in the padded shape, from the hidden state before each completion token; the hidden states of all rows are concatenated."""

    def compute(queried: QueriedTokens) -> TokenNumbers:
        hidden_NH = hidden_AH[queried.among_A]
        numbers = token_numbers(decoder, hidden_NH, queried.targets)
        own = Distributions(hidden_NH, decoder.logits)
        return numbers._replace(teacher_kl_N=teacher_kl(queried.targets, own))

    if outputs.distributions:
        return distributions_at(rows, outputs, hidden_AH, decoder.logits)
    return compute_targets(rows, outputs, hidden_AH.device, compute)
