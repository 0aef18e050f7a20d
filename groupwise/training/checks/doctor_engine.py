"""The checks of `groupwise doctor` on sampler and learner together: the sampled tokens must be the trained ones.

The functions below need only the two protocols, so they work for every engine. The learner is discarded afterwards, because
`check_publication` makes one coarse update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from groupwise.algorithms.registry import make
from groupwise.core.errors import PolicyMismatchError, RunError
from groupwise.core.findings import Finding
from groupwise.core.interruption import gather_all
from groupwise.core.types import (
    Example,
    Group,
    Learner,
    OptimiserParams,
    Policy,
    RolloutCredit,
    Row,
    Sampler,
    SamplingParams,
)
from groupwise.engine.models.tokens import completion_text
from groupwise.tasks.rollouts.rows import training_rows
from groupwise.tasks.rollouts.seeds import member_seed
from groupwise.tasks.rollouts.single import sample_group
from groupwise.training.config import DEFAULT_ALGORITHM
from groupwise.training.loops.recording import MAX_GAP

PROMPTS = 3
MEMBERS = 4
TOKENS = 32
"""Longest completion that is sampled here, in tokens: long enough to compare, short enough to wait for."""
EXACT_GAP = 1e-3
"""Largest accepted mean difference of log-probabilities (nats) for float32, in which rounding explains less than 0.0001."""
COARSE_RATE = {"adapter": 3e-3, "full": 1e-4}
"""Learning rate of the one update, by kind of publication: large enough to change every output, too small to destroy the model."""
MIN_SLOPE = 0.9
"""Fraction of a small change that must reach a layer's output."""
CONFIDENCE_SIGMAS = 4.0
"""Number of standard deviations; a smaller shortfall from that fraction counts as rounding noise."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The sampler and learner to examine, with their prompts."""

    sampler: Sampler
    learner: Learner
    tokenizer: Any
    params: SamplingParams
    """The sampling parameters of training, except for the number of tokens."""
    examples: tuple[Example, ...]
    prompts: tuple[tuple[int, ...], ...]
    dtype: str
    seed: int = 0

    async def sample(self, indices: Sequence[int] | None = None) -> list[Group]:
        """Sample a group for each prompt, all concurrently, with the same seeds each time."""
        selection = range(len(self.prompts)) if indices is None else indices
        return await gather_all(
            sample_group(
                self.sampler,
                self.examples[index],
                index,
                self.prompts[index],
                [member_seed(self.seed, index, member) for member in range(MEMBERS)],
                self.params,
                lambda ids: completion_text(self.tokenizer, ids),
            )
            for index in selection
        )


# --- masks, tokens -------------------------------------------------------------------------------


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """A training row for each rollout, with artificial advantages that differ within each group."""
    credits = [
        tuple(RolloutCredit((-1.0) ** member, 1.0) for member in range(len(group.rollouts)))
        for group in groups
    ]
    return training_rows(groups, credits)


def judge_masks(groups: Sequence[Group], rows: Sequence[Row], stops: Sequence[int]) -> Finding:
    """Check that each sampled token is trained exactly once, and that stop tokens occur only at the end of completions that stopped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors: list[str] = []
    stopped_count = 0
    for rollout, row in zip(rollouts, rows, strict=True):
        segment = rollout.segments[0]
        token_ids, has_stopped = segment.token_ids, segment.finish_reason == "stop"
        stopped_count += has_stopped
        if row.completion_ids != token_ids or sum(row.mask) != len(token_ids):
            errors.append(f"{len(token_ids)} tokens were sampled, {sum(row.mask)} are trained")
        if len(row.sampling_logprobs) != len(row.completion_ids):
            errors.append(
                f"{len(row.sampling_logprobs)} log-probabilities for {len(row.completion_ids)} tokens"
            )
        *before_end, last_is_stop = (token in stops for token in row.completion_ids or (None,))
        if any(before_end):
            errors.append(f"{sum(before_end)} stop tokens stand before the end")
        if last_is_stop and not has_stopped:
            errors.append("a completion that was cut off ends with a stop token")
    cut_off_count = len(rollouts) - stopped_count
    data = {
        "rows": len(rows),
        "stopped": stopped_count,
        "cut_off": cut_off_count,
        "wrong": len(errors),
    }
    if errors:
        return Finding(
            "masks",
            "problem",
            f"in {len(errors)} places of {len(rows)} rows: {errors[0]}",
            "other tokens are trained than were sampled",
            "this is a fault of the engine: please report it with the model's name",
            data,
        )
    return Finding(
        "masks",
        "ok",
        f"the trained tokens are the sampled ones in {len(rows)} rows: {stopped_count} end with one stop token, {cut_off_count} were "
        "cut off and have none",
        data=data,
    )


def judge_drift(tokenizer: Any, groups: Sequence[Group]) -> Finding:
    """Report how often the text of a completion encodes to other tokens. Harmless, because a run never encodes the text again."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    drift_count = 0
    for rollout in rollouts:
        ids = list(rollout.completion_ids)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        drift_count += list(tokenizer(text, add_special_tokens=False)["input_ids"]) != ids
    share = drift_count / len(rollouts)
    return Finding(
        "re-encoding",
        "ok",
        f"{drift_count} of {len(rollouts)} completions would become other tokens if their text were encoded again",
        "harmless: the sampled tokens are trained as they are" if drift_count else "",
        data={"drifted": drift_count, "completions": len(rollouts), "share": share},
    )


# --- the same numbers ----------------------------------------------------------------------------


async def check_gap(engine: Engine, rows: Sequence[Row], name: str) -> Finding:
    """Report whether sampler and learner give a token the same probability."""
    logprobs = await engine.learner.logprobs(rows)
    return judge_gap([row.sampling_logprobs for row in rows], logprobs, engine.dtype, name)


def judge_gap(
    sampler_logprobs: Sequence[Sequence[float]],
    learner_logprobs: Sequence[Sequence[float]],
    dtype: str,
    name: str,
) -> Finding:
    """Judge the mean difference by the rounding of the number format and by the limit at which a run warns."""
    gaps = [
        abs(sampler_logprob - learner_logprob)
        for sampler_row, learner_row in zip(sampler_logprobs, learner_logprobs, strict=True)
        for sampler_logprob, learner_logprob in zip(sampler_row, learner_row, strict=True)
    ]
    mean, largest = fmean(gaps), max(gaps)
    data = {"mean": mean, "max": largest, "tokens": len(gaps), "alarm": MAX_GAP, "dtype": dtype}
    measured = (
        f"{mean:.2g} nats on average over {len(gaps)} tokens, {largest:.2g} at most, in {dtype}"
    )
    if not mean <= MAX_GAP:  # true for NaN as well
        return Finding(
            name,
            "problem",
            f"{measured}; {MAX_GAP} is where a run warns",
            "sampler and learner do not compute the same policy: what is learnt is not what was sampled",
            "model.dtype=float32 shows whether rounding is to blame; otherwise one side has another temperature, dropout or other weights",
            data,
        )
    if dtype == "float32" and mean > EXACT_GAP:
        return Finding(
            name,
            "problem",
            f"{measured}; rounding explains less than 0.0001",
            "sampler and learner do not compute the same: one side has another temperature, dropout or other weights",
            "this is a fault of the engine: please report it with the model's name",
            data,
        )
    if mean > MAX_GAP / 2:
        return Finding(
            name,
            "warning",
            f"{measured}; 0.02 is usual (0.04 with transformers' modules), {MAX_GAP} is where a run warns",
            "the clip will remove some gradients for rounding alone",
            "model.dtype=float32 closes it, at twice the memory of bfloat16",
            data,
        )
    return Finding(name, "ok", f"{measured}; a run warns at {MAX_GAP}", data=data)


async def check_invariance(engine: Engine, groups: Sequence[Group]) -> Finding:
    """Report whether a group that is sampled alone is bit-equal to the same group sampled among others."""
    (single_group,) = await engine.sample([0])
    name = "batch invariance"
    pairs = [
        (batched.segments[0], single.segments[0])
        for batched, single in zip(groups[0].rollouts, single_group.rollouts, strict=True)
    ]
    other_tokens = sum(batched.token_ids != single.token_ids for batched, single in pairs)
    other_bits = sum(
        batched.sampling_logprobs != single.sampling_logprobs for batched, single in pairs
    )
    data = {"members": len(pairs), "other_tokens": other_tokens, "other_bits": other_bits}
    if other_tokens:
        return Finding(
            name,
            "problem",
            f"{other_tokens} of {len(pairs)} completions change when they are sampled without others",
            "results depend on the order of arrival, and a resumed run differs from one that was not interrupted",
            "sampler.max_num_seqs of at least 8; if that is so, please report it with the model's name",
            data,
        )
    if other_bits:
        return Finding(
            name,
            "warning",
            f"the tokens are the same, but log-probabilities of {other_bits} of {len(pairs)} completions differ in their last bits",
            "runs repeat to rounding only",
            "nothing, unless you need bit-equal runs",
            data,
        )
    return Finding(
        name, "ok", f"{len(pairs)} completions are bit-equal, alone and among others", data=data
    )


# --- publication ---------------------------------------------------------------------------------


async def publish(engine: Engine, version: int) -> Policy:
    """Publish the learner's weights and load them into the sampler."""
    policy = await engine.learner.publish(version)
    await engine.sampler.load(policy)
    return policy


async def check_publication(
    engine: Engine, old_policy: Policy, groups: Sequence[Group]
) -> list[Finding]:
    """Make one coarse update and publish it. Fingerprint and outputs of the sampler must change and match the learner's."""
    rows = rows_of(groups)
    tokens = float(sum(map(len, (row.completion_ids for row in rows))))
    algorithm = make(DEFAULT_ALGORITHM, {})
    await engine.learner.forward_backward(rows, algorithm.loss_spec(), {"policy": tokens})
    result = await engine.learner.update(
        OptimiserParams(learning_rate=COARSE_RATE[old_policy.kind])
    )
    if not result.applied or not result.grad_norm:
        return [
            Finding(
                "weight publication",
                "problem",
                f"an update did nothing: the norm of its gradient is {result.grad_norm}",
                "nothing would be learnt",
                "this is a fault of the engine: please report it with the model's name",
                {"grad_norm": result.grad_norm},
            )
        ]
    try:
        new_policy = await publish(engine, old_policy.version + 1)
    except PolicyMismatchError as error:
        return [Finding("weight publication", "problem", str(error), _STALE, _REPORT)]
    new_groups = await engine.sample()
    findings = [
        judge_publication(old_policy, new_policy, engine.sampler.fingerprint(), groups, new_groups)
    ]
    if findings[0].level == "ok":
        findings.append(await check_gap(engine, rows_of(new_groups), "gap after an update"))
    return findings


_STALE = "the sampler does not serve what was learnt: training would go round in circles"
_REPORT = "this is a fault of the engine: please report it with the model's name"


def judge_publication(
    old_policy: Policy,
    new_policy: Policy,
    sampler_fingerprint: str,
    old_groups: Sequence[Group],
    new_groups: Sequence[Group],
) -> Finding:
    """Judge a publication; `sampler_fingerprint` is the sampler's fingerprint after the publication of `new_policy`."""
    name = "weight publication"
    changed_groups = sum(
        _sampled_segments(a) != _sampled_segments(b)
        for a, b in zip(old_groups, new_groups, strict=True)
    )
    fingerprints = {
        segment.fingerprint
        for group in new_groups
        for rollout in group.rollouts
        for segment in rollout.segments
    }
    data = {
        "before": old_policy.fingerprint,
        "after": new_policy.fingerprint,
        "served": sampler_fingerprint,
        "groups": len(old_groups),
        "changed": changed_groups,
    }
    if new_policy.fingerprint == old_policy.fingerprint:
        measured = f"an update left the fingerprint at {old_policy.fingerprint}"
        return Finding(name, "problem", measured, "nothing would be learnt", _REPORT, data)
    if sampler_fingerprint != new_policy.fingerprint or fingerprints != {new_policy.fingerprint}:
        measured = (
            f"{new_policy.fingerprint} was published, the sampler serves {sampler_fingerprint}"
        )
        return Finding(name, "problem", measured, _STALE, _REPORT, data)
    if not changed_groups:
        measured = (
            "the sampler names the new fingerprint, but its outputs are those of the old weights"
        )
        return Finding(name, "problem", measured, _STALE, _REPORT, data)
    return Finding(
        name,
        "ok",
        f"after an update the sampler serves {sampler_fingerprint} instead of {old_policy.fingerprint}, and {changed_groups} of "
        f"{len(old_groups)} groups come out differently",
        data=data,
    )


def _sampled_segments(group: Group) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
    return [
        (segment.token_ids, segment.sampling_logprobs)
        for rollout in group.rollouts
        for segment in rollout.segments
    ]


def judge_slopes(slopes: Sequence[tuple[str, float, float]], learning_rate: float) -> Finding:
    """Report how much of a step at the configured learning rate takes effect.

    `slopes`: layer, fraction of the change that reaches its output, and the standard deviation of that fraction by chance.
    """
    values = [value for _, value, _ in slopes]
    layer, lowest, error = min(slopes, key=lambda slope: slope[1] + CONFIDENCE_SIGMAS * slope[2])
    data = {"learning_rate": learning_rate, "slopes": {layer: value for layer, value, _ in slopes}}
    measured = (
        f"of a step at the learning rate {learning_rate:g}, {fmean(values):.0%} reaches the layers' outputs on average "
        f"(lowest, allowing for chance: {lowest:.0%} ± {error:.0%}, {layer})"
    )
    if lowest + CONFIDENCE_SIGMAS * error < MIN_SLOPE:
        return Finding(
            "adapter slope",
            "warning",
            measured,
            "rounding swallows part of each step: learning is slower than the learning rate says",
            "model.dtype=float32, or a higher training.learning_rate",
            data,
        )
    return Finding("adapter slope", "ok", measured, data=data)


def failed_check(error: RunError, name: str) -> Finding:
    """The finding for a check that the engine failed to run."""
    return Finding(
        name,
        "problem",
        str(error),
        "a run would stop in the same way",
        "fix what the message names",
    )
