"""Completions: each group's prompt once, then one token of every row at a time, in one compiled loop.

Shapes are few and fixed: prompts are padded on the left, and each loop has a fixed number of groups and members, even if some are missing.
A member's draw depends on its seed and its prompt alone. Its random number (`groupwise.engine.sampler.rules`) is inverted through the
cumulative distribution as in `groupwise.engine.sampler.draw`, so torch and JAX draw the same tokens from the same logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from groupwise.core.types import Completion, GroupRequest, Policy, SamplingParams
from groupwise.engine.backends.tunix.worker.adapter import Adapted, Factors, fingerprint
from groupwise.engine.backends.tunix.worker.forward import HALVINGS
from groupwise.engine.backends.tunix.worker.head import NEVER, detach_head
from groupwise.engine.sampler.rules import not_finite, refuse_misfit, refuse_other_weights, uniform

BLOCK = 128
"""Tokens in a block of the vocabulary; the sums of whole blocks are searched first."""
NARROWEST = 256
"""Width of the narrowest prompts: below it, padding costs less than computing groups of different widths one after another."""
STOPS = 4
"""The number of stop tokens is padded to a multiple of this, with ids that are not tokens."""
FINENESS = 3
"""Loops are compiled for eighths of the next power of two, so that turns with less and less room for tokens need few loops."""


class LoopInputs(NamedTuple):
    """Arguments of a compiled loop: G members of each of U prompts, S = U · G rows."""

    prompts_UP: Any
    lengths_U: Any
    uniforms_ST: Any
    stops_K: Any
    temperature: Any
    min_tokens: Any
    max_tokens: Any
    there_S: Any


class Drawn(NamedTuple):
    """Results of a loop; -1 after a row's last token."""

    tokens_ST: Any
    logprobs_ST: Any


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Members of a group that are computed together."""

    request: GroupRequest
    seeds: tuple[int, ...]
    place: tuple[int, int]
    """Index of the request in the list, and of the part's first member in the request."""


class Sampler:
    """Draws completions with the served factors."""

    def __init__(self, adapted: Adapted, factors: Factors, slots: int, key_length: int) -> None:
        """`slots`: rows that are computed together. `key_length`: most tokens of a prompt with its completion."""
        self.adapted = adapted
        self._factors = factors
        self._slots, self._key_length = slots, key_length
        self.fingerprint = fingerprint(adapted.to_peft(factors))
        self._version = 0
        self._loop = jax.jit(
            self._decode_loop, static_argnames=("members", "longest", "truncation")
        )

    def load(self, policy: Policy) -> str:
        """See `groupwise.core.types.Sampler.load`; returns the fingerprint of the weights that it then serves."""
        self._factors = self.adapted.read(Path(policy.path))
        self.fingerprint = fingerprint(self.adapted.to_peft(self._factors))
        refuse_other_weights(policy, self.fingerprint)
        self._version = policy.version
        return self.fingerprint

    def generate(self, requests: Sequence[GroupRequest]) -> list[tuple[Completion, ...]]:
        """The completions of several groups. Raises `RunError` for requests that do not fit."""
        results: list[list[Completion | None]] = [
            [None] * len(request.seeds) for request in requests
        ]
        for parts in self._batch_requests(requests):
            for part, completions in zip(parts, self._complete_batch(parts), strict=True):
                index, start = part.place
                results[index][start : start + len(completions)] = completions
        return [
            tuple(completion for completion in group if completion is not None) for group in results
        ]

    def _batch_requests(self, requests: Sequence[GroupRequest]) -> Iterator[list[GroupPart]]:
        """Divide groups into batches of one shape and the same parameters, each with as many as fit into the slots."""
        groups: dict[Any, list[GroupPart]] = {}
        for index, request in enumerate(requests):
            refuse_misfit(request, self._key_length)
            for start in range(0, len(request.seeds), self._slots):
                seeds = request.seeds[start : start + self._slots]
                key = (request.params, self._width(request), len(seeds))
                groups.setdefault(key, []).append(GroupPart(request, seeds, (index, start)))
        for (_, _, members), parts in groups.items():
            prompts = max(1, self._slots // members)
            for start in range(0, len(parts), prompts):
                yield parts[start : start + prompts]

    def _width(self, request: GroupRequest) -> int:
        """Padded width of the batch in which this prompt is computed."""
        longest, step = _rounded_up(request.params.max_tokens)
        widest = self._key_length - (longest - step + 1)
        shapes = sorted(
            {min(widest, max(NARROWEST, widest >> halving)) for halving in range(HALVINGS)}
        )
        return next(width for width in shapes if width >= len(request.prompt_ids))

    def _complete_batch(self, parts: Sequence[GroupPart]) -> list[list[Completion]]:
        params, members = parts[0].request.params, len(parts[0].seeds)
        inputs = self._loop_inputs(parts, params, members)
        result = self._loop(
            self._factors,
            self.adapted.base,
            inputs,
            members=members,
            longest=_rounded_up(params.max_tokens)[0],
            truncation=(params.top_k, params.top_p, params.min_p),
        )
        tokens_ST, logprobs_ST = np.asarray(result.tokens_ST), np.asarray(result.logprobs_ST)
        groups: list[list[Completion]] = []
        for number, part in enumerate(parts):
            rows = range(number * members, (number + 1) * members)
            groups.append(
                [
                    self._make_completion(tokens_ST[row], logprobs_ST[row], seed, params)
                    for row, seed in zip(rows, part.seeds, strict=True)
                ]
            )
        return groups

    def _make_completion(
        self, tokens_T: np.ndarray, logprobs_T: np.ndarray, seed: int, params: SamplingParams
    ) -> Completion:
        length = int((tokens_T >= 0).sum())
        ids, logprobs = tokens_T[:length].tolist(), logprobs_T[:length]
        if not np.isfinite(logprobs).all():
            raise not_finite(self._version)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs.tolist()),
            finish_reason="stop" if ids[-1] in params.stop_token_ids else "length",
            seed=seed,
            policy_version=self._version,
            fingerprint=self.fingerprint,
        )

    def _loop_inputs(
        self, parts: Sequence[GroupPart], params: SamplingParams, members: int
    ) -> LoopInputs:
        prompts, width = max(1, self._slots // members), self._width(parts[0].request)
        prompts_UP = np.zeros((prompts, width), np.int32)
        lengths_U = np.ones(prompts, np.int32)
        longest, _ = _rounded_up(params.max_tokens)
        uniforms_ST = np.zeros((prompts * members, longest), np.float32)
        for number, part in enumerate(parts):
            ids = part.request.prompt_ids
            prompts_UP[number, width - len(ids) :] = ids
            lengths_U[number] = len(ids)
            for member, seed in enumerate(part.seeds):
                uniforms_ST[number * members + member, : params.max_tokens] = [
                    uniform(seed, position) for position in range(params.max_tokens)
                ]
        stops = params.stop_token_ids
        padding = max(1, -(-len(stops) // STOPS)) * STOPS - len(stops)
        return LoopInputs(
            prompts_UP,
            lengths_U,
            uniforms_ST,
            np.array([*stops, *[-1] * padding], np.int32),
            np.float32(params.temperature),
            np.int32(params.min_tokens),
            np.int32(params.max_tokens),
            np.arange(prompts * members) < len(parts) * members,
        )

    def _decode_loop(
        self,
        factors: Factors,
        base: Any,
        inputs: LoopInputs,
        *,
        members: int,
        longest: int,
        truncation: tuple[int | None, float | None, float | None],
    ) -> Drawn:
        merged = functools.partial(self.adapted.with_factors, factors, base)
        model = merged()
        prompts, width = inputs.prompts_UP.shape
        size = width + longest
        column = jnp.arange(size)
        padding_U = width - inputs.lengths_U
        seen_UC = (column >= padding_U[:, None]) & (column < width)
        before_PC = column <= jnp.arange(width)[:, None]
        head = detach_head(model)
        hidden_UPD, cache = model(
            inputs.prompts_UP,
            jnp.maximum(jnp.arange(width) - padding_U[:, None], 0),
            _empty_cache(model.config, prompts, size, self.adapted.number),
            seen_UC[:, None, :] & before_PC,
        )
        repeated = functools.partial(jnp.repeat, repeats=members, axis=0)
        rows = prompts * members
        seen_SC, lengths_S = repeated(seen_UC), repeated(inputs.lengths_U)
        start = (
            jnp.int32(0),
            ~inputs.there_S,
            repeated(head(hidden_UPD[:, -1:])[:, 0]),
            jax.tree.map(repeated, cache),
            jnp.full((rows, longest), -1, jnp.int32),
            jnp.zeros((rows, longest), jnp.float32),
        )

        def goes_on(state: Any) -> Any:
            return (state[0] < inputs.max_tokens) & ~state[1].all()

        def next_token(state: Any) -> Any:
            step, done_S, logits_SV, cache, tokens_ST, logprobs_ST = state
            allowed_SV = _without_early_stops(logits_SV, inputs, step)
            chosen_S, logprobs_S = _draw_tokens(
                allowed_SV, inputs.temperature, inputs.uniforms_ST[:, step], truncation
            )
            tokens_ST = tokens_ST.at[:, step].set(jnp.where(done_S, -1, chosen_S))
            logprobs_ST = logprobs_ST.at[:, step].set(jnp.where(done_S, 0.0, logprobs_S))
            done_S = done_S | (chosen_S[:, None] == inputs.stops_K).any(-1)
            mask_SC = seen_SC | ((column >= width) & (column <= width + step))
            inside = merged()  # layers change their own state, so they must be created in the loop
            head = detach_head(inside)
            hidden_S1D, cache = inside(
                chosen_S[:, None], (lengths_S + step)[:, None], cache, mask_SC[:, None, :]
            )
            return step + 1, done_S, head(hidden_S1D)[:, 0], cache, tokens_ST, logprobs_ST

        *_, tokens_ST, logprobs_ST = jax.lax.while_loop(goes_on, next_token, start)
        return Drawn(tokens_ST, logprobs_ST)


def _rounded_up(max_tokens: int) -> tuple[int, int]:
    """Number of tokens that a loop is compiled for, and the distance to the next such number."""
    step = max(1, 1 << (max_tokens - 1).bit_length() >> FINENESS)
    return -(-max_tokens // step) * step, step


def _empty_cache(config: Any, rows: int, size: int, number: Any) -> dict[str, Any]:
    shape = (rows, size, config.num_kv_heads, config.head_dim)
    return {
        f"layer_{layer}": {
            "k": jnp.zeros(shape, number),
            "v": jnp.zeros(shape, number),
            "end_index": jnp.zeros((rows,), jnp.int32),
        }
        for layer in range(config.num_layers)
    }


def _without_early_stops(logits_SV: Any, inputs: LoopInputs, step: Any) -> Any:
    vocabulary = jnp.arange(logits_SV.shape[1])
    stops_V = (vocabulary[:, None] == inputs.stops_K).any(-1)
    return jnp.where(stops_V & (step < inputs.min_tokens), NEVER, logits_SV)


def _draw_tokens(
    logits_SV: Any,
    temperature: Any,
    uniforms_S: Any,
    truncation: tuple[int | None, float | None, float | None],
) -> tuple[Any, Any]:
    """Tokens, and their log-probabilities at the temperature; 0 takes the most likely token, with its log-probability at 1."""
    scaled_SV = logits_SV / jnp.where(temperature == 0, 1.0, temperature)
    truncated_SV = _truncate_logits(scaled_SV, *truncation)
    weights_SV = jnp.exp(truncated_SV - truncated_SV.max(-1, keepdims=True))
    drawn_S = _search_cumulative(weights_SV, uniforms_S)
    chosen_S = jnp.where(temperature == 0, truncated_SV.argmax(-1), drawn_S).astype(jnp.int32)
    logprobs_SV = jax.nn.log_softmax(truncated_SV)
    return chosen_S, jnp.take_along_axis(logprobs_SV, chosen_S[:, None], -1)[:, 0]


def _search_cumulative(weights_SV: Any, uniforms_S: Any) -> Any:
    """Index at which the cumulative weights reach a share of their total: first the block of the vocabulary, then the place in it."""
    count, vocabulary = weights_SV.shape
    padded = jnp.pad(weights_SV, ((0, 0), (0, -vocabulary % BLOCK)))
    blocks_SKB = padded.reshape(count, -1, BLOCK)
    sums_SK = blocks_SKB.sum(-1)
    ends_SK = _cumulative_weights(sums_SK)
    targets_S1 = (uniforms_S * ends_SK[:, -1] * (1 - 1e-7))[:, None]
    block_S1 = _first_beyond(sums_SK, ends_SK, targets_S1)
    begins_SK = jnp.pad(ends_SK, ((0, 0), (1, 0)))
    rest_S1 = targets_S1 - jnp.take_along_axis(begins_SK, block_S1, -1)
    inside_SB = jnp.take_along_axis(blocks_SKB, block_S1[..., None], 1)[:, 0]
    offset_S1 = _first_beyond(inside_SB, _cumulative_weights(inside_SB), rest_S1)
    # Only NaN or infinite logits reach beyond the end; their log-probability shows it.
    return jnp.minimum(block_S1 * BLOCK + offset_S1, vocabulary - 1)[:, 0]


def _cumulative_weights(weights_SN: Any) -> Any:
    """Cumulative weights. JAX sums in parallel, so a sum may be slightly below the previous one; here that is corrected."""
    return jax.lax.cummax(weights_SN.cumsum(-1), axis=1)


def _first_beyond(weights_SN: Any, ends_SN: Any, targets_S1: Any) -> Any:
    """The first place with weight whose cumulative end is beyond the target; the last place with weight if rounding leaves none."""
    there_SN = weights_SN > 0
    beyond_SN = there_SN & (ends_SN > targets_S1)
    last_S = weights_SN.shape[1] - 1 - there_SN[:, ::-1].argmax(-1)
    return jnp.where(beyond_SN.any(-1), beyond_SN.argmax(-1), last_S)[:, None]


def _truncate_logits(
    scaled_SV: Any, top_k: int | None, top_p: float | None, min_p: float | None
) -> Any:
    """Like `groupwise.engine.sampler.draw.truncate`: each rule applies to the tokens that the previous one kept."""
    if top_k is not None:
        least = jax.lax.top_k(scaled_SV, min(top_k, scaled_SV.shape[1]))[0][:, -1:]
        scaled_SV = jnp.where(scaled_SV < least, NEVER, scaled_SV)
    if top_p is not None:
        best_SV = jnp.sort(scaled_SV, axis=-1, descending=True)
        chances_SV = jax.nn.softmax(best_SV)
        inside_SV = chances_SV.cumsum(-1) - chances_SV < top_p
        least = jnp.where(inside_SV, best_SV, jnp.inf).min(-1, keepdims=True)
        scaled_SV = jnp.where(scaled_SV < least, NEVER, scaled_SV)
    if min_p is not None:
        least = scaled_SV.max(-1, keepdims=True) + jnp.log(min_p)
        scaled_SV = jnp.where(scaled_SV < least, NEVER, scaled_SV)
    return scaled_SV
