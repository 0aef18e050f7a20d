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
LEAST_SLOPE = 0.9
"""Fraction of a small change that must reach a layer's output."""
SURELY = 4.0
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

    async def sample(self, places: Sequence[int] | None = None) -> list[Group]:
        """Sample a group for each prompt, all concurrently, with the same seeds each time."""
        chosen = range(len(self.prompts)) if places is None else places
        return await gather_all(
            sample_group(
                self.sampler,
                self.examples[place],
                place,
                self.prompts[place],
                [member_seed(self.seed, place, member) for member in range(MEMBERS)],
                self.params,
                lambda ids: completion_text(self.tokenizer, ids),
            )
            for place in chosen
        )


# --- masks, tokens -------------------------------------------------------------------------------


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """A training row for each rollout, with artificial advantages that differ within each group."""
    credit = [
        tuple(RolloutCredit((-1.0) ** member, 1.0) for member in range(len(group.rollouts)))
        for group in groups
    ]
    return training_rows(groups, credit)


def judge_masks(groups: Sequence[Group], rows: Sequence[Row], stops: Sequence[int]) -> Finding:
    """Check that each sampled token is trained exactly once, and that stop tokens occur only at the end of completions that stopped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    wrong: list[str] = []
    ended = 0
    for rollout, row in zip(rollouts, rows, strict=True):
        segment = rollout.segments[0]
        sampled, stopped = segment.token_ids, segment.finish_reason == "stop"
        ended += stopped
        if row.completion_ids != sampled or sum(row.mask) != len(sampled):
            wrong.append(f"{len(sampled)} tokens were sampled, {sum(row.mask)} are trained")
        if len(row.sampling_logprobs) != len(row.completion_ids):
            wrong.append(
                f"{len(row.sampling_logprobs)} log-probabilities for {len(row.completion_ids)} tokens"
            )
        *before_end, last = (token in stops for token in row.completion_ids or (None,))
        if any(before_end):
            wrong.append(f"{sum(before_end)} stop tokens stand before the end")
        if last and not stopped:
            wrong.append("a completion that was cut off ends with a stop token")
    cut = len(rollouts) - ended
    data = {"rows": len(rows), "stopped": ended, "cut_off": cut, "wrong": len(wrong)}
    if wrong:
        return Finding(
            "masks",
            "problem",
            f"in {len(wrong)} places of {len(rows)} rows: {wrong[0]}",
            "other tokens are trained than were sampled",
            "this is a fault of the engine: please report it with the model's name",
            data,
        )
    return Finding(
        "masks",
        "ok",
        f"the trained tokens are the sampled ones in {len(rows)} rows: {ended} end with one stop token, {cut} were cut off and "
        "have none",
        data=data,
    )


def judge_drift(tokenizer: Any, groups: Sequence[Group]) -> Finding:
    """Report how often the text of a completion encodes to other tokens. Harmless, because a run never encodes the text again."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    drifted = 0
    for rollout in rollouts:
        ids = list(rollout.completion_ids)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        drifted += list(tokenizer(text, add_special_tokens=False)["input_ids"]) != ids
    share = drifted / len(rollouts)
    return Finding(
        "re-encoding",
        "ok",
        f"{drifted} of {len(rollouts)} completions would become other tokens if their text were encoded again",
        "harmless: the sampled tokens are trained as they are" if drifted else "",
        data={"drifted": drifted, "completions": len(rollouts), "share": share},
    )


# --- the same numbers ----------------------------------------------------------------------------


async def check_gap(engine: Engine, rows: Sequence[Row], name: str) -> Finding:
    """Report whether sampler and learner give a token the same probability."""
    found = await engine.learner.logprobs(rows)
    return judge_gap([row.sampling_logprobs for row in rows], found, engine.dtype, name)


def judge_gap(
    sampled: Sequence[Sequence[float]], learnt: Sequence[Sequence[float]], dtype: str, name: str
) -> Finding:
    """Judge the mean difference by the rounding of the number format and by the limit at which a run warns."""
    gaps = [
        abs(ours - theirs)
        for one, other in zip(sampled, learnt, strict=True)
        for ours, theirs in zip(one, other, strict=True)
    ]
    mean, worst = fmean(gaps), max(gaps)
    data = {"mean": mean, "max": worst, "tokens": len(gaps), "alarm": MAX_GAP, "dtype": dtype}
    measured = (
        f"{mean:.2g} nats on average over {len(gaps)} tokens, {worst:.2g} at most, in {dtype}"
    )
    if not mean <= MAX_GAP:  # true for NaN as well
        return Finding(
            name,
            "problem",
            f"{measured}; {MAX_GAP} is where a run warns",
            "sampler and learner do not compute the same policy: what is learnt is not what was sampled",
            "model.dtype=float32 shows whether rounding is to blame; otherwise another temperature, dropout or other weights act",
            data,
        )
    if dtype == "float32" and mean > EXACT_GAP:
        return Finding(
            name,
            "problem",
            f"{measured}; rounding explains less than 0.0001",
            "sampler and learner do not compute the same: another temperature, dropout or other weights act on one side",
            "this is a fault of the engine: please report it with the model's name",
            data,
        )
    if mean > MAX_GAP / 2:
        return Finding(
            name,
            "warning",
            f"{measured}; 0.02 is usual (0.04 with transformers' modules), {MAX_GAP} is where a run warns",
            "the clip will remove some gradients for rounding alone",
            "model.dtype=float32 closes it, at twice the memory",
            data,
        )
    return Finding(name, "ok", f"{measured}; a run warns at {MAX_GAP}", data=data)


async def check_invariance(engine: Engine, together: Sequence[Group]) -> Finding:
    """Report whether a group that is sampled alone is bit-equal to the same group sampled among others."""
    (alone,) = await engine.sample([0])
    name = "batch invariance"
    pairs = [
        (one.segments[0], other.segments[0])
        for one, other in zip(together[0].rollouts, alone.rollouts, strict=True)
    ]
    other_tokens = sum(one.token_ids != other.token_ids for one, other in pairs)
    other_bits = sum(one.sampling_logprobs != other.sampling_logprobs for one, other in pairs)
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
    engine: Engine, before: Policy, groups: Sequence[Group]
) -> list[Finding]:
    """Make one coarse update and publish it. Fingerprint and outputs of the sampler must change and match the learner's."""
    rows = rows_of(groups)
    tokens = float(sum(map(len, (row.completion_ids for row in rows))))
    algorithm = make(DEFAULT_ALGORITHM, {})
    await engine.learner.forward_backward(rows, algorithm.loss_spec(), {"policy": tokens})
    result = await engine.learner.update(OptimiserParams(learning_rate=COARSE_RATE[before.kind]))
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
        after = await publish(engine, before.version + 1)
    except PolicyMismatchError as error:
        return [Finding("weight publication", "problem", str(error), _STALE, _REPORT)]
    again = await engine.sample()
    found = [judge_publication(before, after, engine.sampler.fingerprint(), groups, again)]
    if found[0].level == "ok":
        found.append(await check_gap(engine, rows_of(again), "gap after an update"))
    return found


_STALE = "the sampler does not serve what was learnt: training would go round in circles"
_REPORT = "this is a fault of the engine: please report it with the model's name"


def judge_publication(
    before: Policy, after: Policy, served: str, old: Sequence[Group], new: Sequence[Group]
) -> Finding:
    """Judge a publication; `served` is the sampler's fingerprint after the publication of `after`."""
    name = "weight publication"
    changed = sum(
        _sampled_segments(a) != _sampled_segments(b) for a, b in zip(old, new, strict=True)
    )
    stamped = {
        segment.fingerprint
        for group in new
        for rollout in group.rollouts
        for segment in rollout.segments
    }
    data = {
        "before": before.fingerprint,
        "after": after.fingerprint,
        "served": served,
        "groups": len(old),
        "changed": changed,
    }
    if after.fingerprint == before.fingerprint:
        measured = f"an update left the fingerprint at {before.fingerprint}"
        return Finding(name, "problem", measured, "nothing would be learnt", _REPORT, data)
    if served != after.fingerprint or stamped != {after.fingerprint}:
        measured = f"{after.fingerprint} was published, the sampler serves {served}"
        return Finding(name, "problem", measured, _STALE, _REPORT, data)
    if not changed:
        measured = (
            "the sampler names the new fingerprint, but its outputs are those of the old weights"
        )
        return Finding(name, "problem", measured, _STALE, _REPORT, data)
    return Finding(
        name,
        "ok",
        f"after an update the sampler serves {served} instead of {before.fingerprint}, and {changed} of {len(old)} groups "
        "come out differently",
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
    layer, worst, error = min(slopes, key=lambda each: each[1] + SURELY * each[2])
    data = {"learning_rate": learning_rate, "slopes": {layer: value for layer, value, _ in slopes}}
    measured = (
        f"of a step at the learning rate {learning_rate:g}, {fmean(values):.0%} reaches the layers' outputs "
        f"(least: {worst:.0%} ± {error:.0%}, {layer})"
    )
    if worst + SURELY * error < LEAST_SLOPE:
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
        "mend what the message names",
    )
