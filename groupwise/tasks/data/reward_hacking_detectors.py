"""Signals of reward hacking: statistics of a run's steps that suggest the reward is earned in an unintended way.

Each signal is a function of the step statistics (`DetectorInput`). Its `Finding.strength` is the smallest of its conditions, each in units
of its threshold, so 1 means that all conditions hold. A movement counts only if it also exceeds the noise of steps
(`Gauge.errors`). Every number is compared with its own start, because normal values differ from task to task; see
`groupwise.tasks.data.reward_hacking_statistics` for the numbers.

None of this proves anything: a longer proof may be a better one. A signal says where to read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pydantic import field_validator

from groupwise.core.settings.schema import Strict, setting
from groupwise.tasks.data.drift import Gauge
from groupwise.tasks.data.success import SOLVED, part_of_success

BY_PROMPT = re.compile(r"reward|rewards/.+/mean|(pass|avg|maj)@\d+")
"""Metrics of an evaluation that have a value for each prompt."""
LEFT_TO_EARN = 0.2
"""Diversity is not reported as low once less than this share of the reward range seen so far is left to gain."""
LOST = 0.5
"""Share of its start value that a part must lose to another; a smaller loss is normal in any progress."""
SATURATED = 0.2
"""Spread of a part within groups, relative to its start, below which nearly all completions earn the same with it."""


class SignalsConfig(Strict):
    """The section `signals`; null looks at nothing."""

    start_steps: int = setting(
        10,
        "Steps at the beginning that define what is usual in this run. With fewer it is a matter of luck; with more a fast hack "
        "counts as usual.",
        on_resume="free",
        ge=2,
    )
    memory: float = setting(
        0.9,
        "Weight that older steps keep in the running means, which are compared with the start; at 0.9 a mean follows in about ten "
        "steps.",
        on_resume="free",
        ge=0,
        lt=1,
    )
    noise: float = setting(
        4.0,
        "Standard errors by which a number must have moved, besides its threshold, because in a long run some steps look unusual by "
        "chance.",
        on_resume="free",
        gt=0,
    )
    length_growth: float = setting(
        1.5,
        "length: warn if completions are this many times as long as at the start, and the next key holds too, since deeper reasoning "
        "also gets longer.",
        on_resume="free",
        gt=1,
    )
    length_correlation: float = setting(
        0.5,
        "length: correlation of reward and length within groups; at 0.5 length explains a quarter of what is reinforced.",
        on_resume="free",
        gt=0,
        le=1,
    )
    truncation_rise: float = setting(
        0.25,
        "truncation: by how much the share of completions that the length limit cuts off has risen since the start.",
        on_resume="free",
        gt=0,
        le=1,
    )
    repetition_rise: float = setting(
        0.2,
        "repetition: by how much the share of a completion's n-grams, or of its lines, that repeat has risen since the start. Loops "
        "reach 0.5 and more.",
        on_resume="free",
        gt=0,
        le=1,
    )
    diversity_fall: float = setting(
        0.5,
        "diversity: share of the start's diversity or entropy that is lost without a rise of the reward that explains it.",
        on_resume="free",
        gt=0,
        le=1,
    )
    same_answers_rise: float = setting(
        0.8,
        "sameness: by how much the share of pairs of prompts that get exactly the same completion has risen. Honest answers of yes or "
        "no reach 0.5.",
        on_resume="free",
        gt=0,
        le=1,
    )
    dominance: float = setting(
        0.9,
        "dominance: one part explains this share of the variance of the reward and rises, while another part loses half of its value.",
        on_resume="free",
        gt=0,
        le=1,
    )
    accuracy_part: str | None = setting(
        None,
        "accuracy: name of the reward part that says whether a task is really solved, of any weight; null: the first whose name contains "
        f"accuracy, else the first that is called {', '.join(SOLVED[:-1])} or {SOLVED[-1]}, if there is one.",
        on_resume="free",
    )
    held_out_metric: str | None = setting(
        None,
        "held_out: the metric of held-out prompts that should not fall while the training reward rises: reward, rewards/NAME/mean, "
        "pass@k, avg@n or maj@n; null: that of the accuracy part, else reward.",
        on_resume="free",
    )

    @field_validator("held_out_metric")
    @classmethod
    def _is_known_of_each_prompt(cls, name: str | None) -> str | None:
        if name is not None and not BY_PROMPT.fullmatch(name):
            raise ValueError(
                f'"{name}" is not a metric of single prompts, which are compared one by one; give reward, rewards/NAME/mean, pass@k, '
                "avg@n or maj@n."
            )
        return name


@dataclass(frozen=True, slots=True)
class Finding:
    """A detector's result: the strength of a signal, and its explanation."""

    strength: float
    """1 or more means that the signal is active."""
    text: str
    """The meaning of the signal, in words for the user."""
    values: dict[str, float] = field(default_factory=dict[str, float])
    """The numbers that support it, under readable names."""


@dataclass(frozen=True, slots=True)
class DetectorInput:
    """The statistics of the steps so far."""

    config: SignalsConfig
    gauges: Mapping[str, Gauge]
    lowest: float
    """Lowest reward of a rollout so far; `highest` likewise."""
    highest: float
    least: Mapping[str, float] = field(default_factory=dict[str, float])
    """The lowest weight × value of each part in any rollout so far."""

    def ready(self, name: str) -> Gauge | None:
        """The gauge with that name, if it has a start to compare with."""
        gauge = self.gauges.get(name)
        return gauge if gauge is not None and gauge.ready else None

    def movement(self, gauge: Gauge) -> float:
        """The gauge's movement in units of the noise: 1 is a rise that counts, −1 a fall."""
        return gauge.errors(self.config.memory) / self.config.noise

    def parts(self, kind: str) -> dict[str, Gauge]:
        """The gauges of one statistic (`value`, `gain`, `spread` or `share`), by reward part."""
        names = [name for name in self.gauges if name.startswith(f"{kind}/") and self.ready(name)]
        return {name.partition("/")[2]: self.gauges[name] for name in names}

    @property
    def accuracy(self) -> str | None:
        """The part that measures whether a task is solved."""
        names, configured = self.parts("gain"), self.config.accuracy_part
        if configured is not None:
            return configured if configured in names else None
        return part_of_success(names)


def missing_accuracy_note(config: SignalsConfig, names: Collection[str]) -> str | None:
    """A warning that no reward part is known to measure success; None if one is known, or there is only one."""
    if config.accuracy_part is not None or len(names) < 2 or part_of_success(names):
        return None
    return (
        "no reward part has a name that marks it as the accuracy part, so that the signal accuracy is off and held_out compares the "
        f"reward. If one of these measures success, set signals.accuracy_part to it: {', '.join(names)}"
    )


def length(sight: DetectorInput) -> Finding | None:
    """Completions have grown, and among completions of one prompt the longer ones earn more.

    Reward models are known to reward length in this way (Singhal et al. 2023, arXiv 2310.03716).
    """
    lengths, paid = sight.ready("length"), sight.ready("length_correlation")
    if lengths is None or paid is None or lengths.mean <= 0:
        return None
    config, growth = sight.config, lengths.now / lengths.mean
    strength = min(
        (growth - 1) / (config.length_growth - 1),
        sight.movement(lengths),
        paid.now / config.length_correlation,
    )
    text = "completions grow, and the longer ones of a prompt earn more: length itself may be what is paid for"
    return Finding(
        strength, text, {"start": lengths.mean, "now": lengths.now, "correlation": paid.now}
    )


def truncation(sight: DetectorInput) -> Finding | None:
    """More completions are cut off by the length limit."""
    share = sight.ready("truncated")
    if share is None:
        return None
    rise = (share.now - share.mean) / sight.config.truncation_rise
    text = (
        "more completions are cut off by the length limit: they are padded out, or the limit is too short for what the policy "
        "has learnt to say"
    )
    return Finding(min(rise, sight.movement(share)), text, {"start": share.mean, "now": share.now})


REPEATED = {
    "repetition": "completions repeat themselves more: a reward that counts something may be earned by saying it often",
    "repeated_lines": "completions repeat their lines more: a reward that counts something may be earned by saying it often",
}


def repetition(sight: DetectorInput) -> Finding | None:
    """Completions repeat n-grams or whole lines more than at the start."""
    findings: list[Finding] = []
    for name, text in REPEATED.items():
        if share := sight.ready(name):
            rise = (share.now - share.mean) / sight.config.repetition_rise
            values = {"start": share.mean, "now": share.now}
            findings.append(Finding(min(rise, sight.movement(share)), text, values))
    return max(findings, key=lambda finding: finding.strength, default=None)


DIVERSE = {
    "distinct_completions": "the completions of a prompt have become the same ones",
    "distinct_ngrams": "the completions of a prompt have become alike",
    "entropy": "the policy has become sure of its tokens",
}


def diversity(sight: DetectorInput) -> Finding | None:
    """The policy explores much less, without a gain in reward.

    Learning itself trades entropy for reward (Cui et al. 2025, arXiv 2505.22617): a fall counts only if the reward has not risen
    and is still well below the best seen.
    """
    reward = sight.ready("reward")
    falls = {
        name: (1 - gauge.now / gauge.mean) / sight.config.diversity_fall
        for name in DIVERSE
        if (gauge := sight.ready(name)) and gauge.mean > 0
    }
    if reward is None or not falls:
        return None
    strengths = {
        name: min(fall, -sight.movement(sight.gauges[name])) for name, fall in falls.items()
    }
    name = max(strengths, key=lambda key: strengths[key])
    gauge = sight.gauges[name]
    values = {
        "start": gauge.mean,
        "now": gauge.now,
        "reward at the start": reward.mean,
        "reward now": reward.now,
    }
    strength = min(strengths[name], _not_risen(sight, reward), _left_to_earn(sight, reward))
    return Finding(
        strength,
        f"{DIVERSE[name]} without a rise in reward: the policy has stopped exploring",
        values,
    )


def sameness(sight: DetectorInput) -> Finding | None:
    """Different prompts get the same completion."""
    share = sight.ready("same_answers")
    if share is None:
        return None
    rise = (share.now - share.mean) / sight.config.same_answers_rise
    text = "different prompts get the same completion: one fixed answer may satisfy the reward"
    return Finding(min(rise, sight.movement(share)), text, {"start": share.mean, "now": share.now})


def dominance(sight: DetectorInput) -> Finding | None:
    """One part, other than accuracy, determines almost alone what is reinforced, and gains at the cost of another one."""
    gains, findings = sight.parts("gain"), list[Finding]()
    for name, share in sight.parts("share").items():
        if name == sight.accuracy or name not in gains:
            continue
        for other, gain in gains.items():
            # The share that the part has lost of its start value: relative to its size, or to its height above the least
            # value seen if that is more (penalties). Measured in the part's own units, because the whole of a low-weight part
            # is small compared with the gain of a high-weight one.
            least = sight.least.get(other)
            start = gain.mean
            reference = max(abs(start), start - least) if least is not None else abs(start)
            strength = min(
                share.now / sight.config.dominance,
                sight.movement(gains[name]),
                -sight.movement(gain),
                ((start - gain.now) / reference if reference else 0.0) / LOST,
            )
            text = f"the part {name} decides nearly alone what is reinforced, and gains at the cost of {other}"
            values = {"share": share.now, **_part_values(sight, name), **_part_values(sight, other)}
            findings.append(Finding(strength, text, values))
    return max(findings, key=lambda finding: finding.strength, default=None)


def accuracy(sight: DetectorInput) -> Finding | None:
    """The reward rises while the part that measures success falls; or success stays flat and another part is saturated."""
    name, reward = sight.accuracy, sight.ready("reward")
    if name is None or reward is None or len(sight.parts("gain")) < 2:
        return None
    gain = sight.gauges[f"gain/{name}"]
    strength = min(
        sight.movement(reward),
        max(-sight.movement(gain), min(_not_risen(sight, gain), _saturation(sight, name))),
    )
    text = f"the reward rises, and {name} does not: what is earned may not be what is meant"
    values = {
        "reward at the start": reward.mean,
        "reward now": reward.now,
        **_part_values(sight, name),
    }
    return Finding(strength, text, values)


def _part_values(sight: DetectorInput, name: str) -> dict[str, float]:
    """A part's own value at the start and now, for the report."""
    value = sight.ready(f"value/{name}")
    return {f"{name} at the start": value.mean, f"{name} now": value.now} if value else {}


def _not_risen(sight: DetectorInput, gauge: Gauge) -> float:
    """1 or more if any rise is within the noise."""
    return 2 - sight.movement(gauge)


def _left_to_earn(sight: DetectorInput, reward: Gauge) -> float:
    """1 or more if the reward is well below the best seen."""
    reward_range = sight.highest - sight.lowest
    return (sight.highest - reward.now) / reward_range / LEFT_TO_EARN if reward_range > 0 else 0.0


def _saturation(sight: DetectorInput, excluded: str) -> float:
    """1 or more if a part other than `but` has risen and hardly differs within groups any more."""
    gains, spreads = sight.parts("gain"), sight.parts("spread")
    return max(
        (
            min(sight.movement(gains[name]), 2 - spread.now / spread.mean / SATURATED)
            for name, spread in spreads.items()
            if name != excluded and name in gains and spread.mean > 0
        ),
        default=0.0,
    )


DETECTORS: dict[str, Callable[[DetectorInput], Finding | None]] = {
    detector.__name__: detector
    for detector in (length, truncation, repetition, diversity, sameness, dominance, accuracy)
}
"""The signals computed from steps, by name; `held_out` is computed from evaluations, see `groupwise.tasks.data.divergence`."""
