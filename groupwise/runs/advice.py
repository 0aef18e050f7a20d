"""Explains in words what the numbers of a run's last steps mean, and what to do about it.

Each piece of advice is a condition on the mean of the last few steps. None of them is proof; they say where to look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import StoreError
from groupwise.core.types import TINY
from groupwise.runs.encoding import label
from groupwise.runs.find import mean_of
from groupwise.runs.folder import is_served, read_config
from groupwise.runs.notebook_names import is_of_notebook, own_names
from groupwise.runs.records import RolloutFilter
from groupwise.runs.store import Store

RECENT = 10
"""Steps over which the mean is taken."""
OF_PARTS = 64
"""Newest rollouts that are read for the names of the rewards: those of a mixture have different ones."""


WITHOUT_SIGNAL, DISTINCT, SOLVED = "frac_reward_zero_std", "groups/distinct", "rollouts/solved"
"""Metrics: share of groups whose members all have the same reward; share of a group's completions that differ; share of solved rollouts."""
DISTILLATION = "distillation/kl"
"""Mean KL (nats per token) to the teacher of a distillation; other runs do not have it."""
LOGPROB_GAP = "sampling/logprob_gap"
"""Metric: how far learner and sampler differ, in nats per token."""
MAX_WITHOUT_SIGNAL = 0.7
"""Share of groups without signal above which the policy hardly learns."""
MIN_DISTINCT = 0.5
"""Share of distinct completions below which the members of a group count as alike."""
MAX_HARDLY_SOLVED = 0.04
"""Share of solved samples at which a group of 8 has none in `MAX_WITHOUT_SIGNAL` of all cases."""
MAX_SOLVED = 0.9
"""Share of solved completions above which equal rewards and sure answers are not a fault: the policy has learnt what there is."""
FAULTS_UNLESS_LEARNT = (WITHOUT_SIGNAL, "entropy")
OF_TINY = (WITHOUT_SIGNAL, SOLVED)
DO_WITH_TINY = (
    "That is expected of model.name=tiny, a toy with random weights: it shows that the task runs. For a config of a model that can "
    "learn: groupwise init -t TASK -m smollm2-135m-instruct."
)
"""What to do about the metrics of OF_TINY in a run of that model. It is said once."""
COMPARE = "Compare it with the untrained model on held-out prompts (groupwise eval). "
"""The advice of a run that has not been evaluated before and after its training."""
DO_WITH_TINY_AS_CLIENT = (
    "That is expected of the model tiny, a toy with random weights: it shows that the client works. One that can learn: start with "
    "model_id: smollm2-135m-instruct."
)
"""What a client of the training server does about the metrics of OF_TINY in a run of that model."""
DO_WITH_TINY_IN_NOTEBOOK = (
    "That is expected of the model tiny, a toy with random weights: it shows that the cells work. One that can learn: "
    'TrainingConfig(model="smollm2-135m-instruct").'
)
"""What the user of a notebook does about the metrics of OF_TINY in a run of that model."""
_TINY_REMEDIES = (DO_WITH_TINY, DO_WITH_TINY_AS_CLIENT, DO_WITH_TINY_IN_NOTEBOOK)


@dataclass(frozen=True, slots=True)
class Advice:
    """A rule about one metric, and what to do if it holds."""

    metric: str
    problem: str
    """What is wrong, in a few words; "" if nothing is."""
    holds: Callable[[float], bool]
    says: str
    """A text with `{value}` in place of the number, and `{threshold}` in place of the settings of a solved completion."""
    do: str
    form: str = "{:.0%}"
    alike: bool | None = None
    """Give the advice only if the completions of a group are mostly alike (True) or mostly different (False). None: always."""
    do_as_client: str = ""
    """What to do in a run of the training server, whose clients have the prompts and rewards. Empty: the same as `do`."""
    do_in_notebook: str = ""
    """What to do in a run of a notebook, which has no warm-up and no commands. Empty: the same as `do`, with the notebook's names."""
    do_in_sft: str = ""
    """What to do in a supervised run, which has keys of its own. Empty: the same as `do`."""


RULES = (
    Advice(
        WITHOUT_SIGNAL,
        "groups without signal",
        lambda value: value > MAX_WITHOUT_SIGNAL,
        "In {value} of the groups all rollouts earn the same, so that these teach nothing.",
        "Choose examples that the policy solves sometimes (data.curriculum), raise training.num_generations, give rewards that tell more "
        "than right from wrong, or warm the model up first (warm_up).",
        alike=False,
        do_in_notebook="Choose rows that the policy solves sometimes, raise training.num_generations, or give rewards that tell more than "
        "right from wrong.",
        do_as_client="Send prompts that the policy solves sometimes, raise num_completions_per_prompt, or give rewards that tell more than "
        "right from wrong.",
    ),
    Advice(
        WITHOUT_SIGNAL,
        "groups without signal",
        lambda value: value > MAX_WITHOUT_SIGNAL,
        "In {value} of the groups all rollouts earn the same, because most rollouts of a group are alike: there is nothing to choose from.",
        "Raise sampler.temperature or, after a warm-up, end that sooner: its training.stop_when, with a rule such as "
        "groups/with_signal >= 0.6.",
        alike=True,
        do_in_notebook="Raise sampler.temperature, or give rows with more than one way to answer.",
        do_as_client="Raise the temperature of the calls or sampler.temperature, or send prompts with more than one way to answer.",
    ),
    Advice(
        SOLVED,
        "nothing solved",
        lambda value: value == 0,
        "None of the completions of the last steps counts as solved{threshold}.",
        "While the reward rises, go on. If it does not: easier examples or hints in the prompt, a longer warm-up (warm_up), or rewards "
        "that pay for what comes before a right answer.",
        do_in_notebook="While the reward rises, go on. If it does not: easier rows or hints in the prompt, or rewards that pay for what "
        "comes before a right answer. If the rewards do not pay for a right answer, set eval.success_part to the name of one of them.",
        do_as_client="While the reward rises, go on. If it does not: easier prompts, examples in them, or rewards that pay for what comes "
        "before a right answer.",
    ),
    Advice(
        SOLVED,
        "",
        lambda value: value > MAX_SOLVED,
        "{value} of the completions of the last steps are solved: little is left to learn.",
        COMPARE + "To go on: harder examples, or a reward that tells good from very good.",
        do_in_notebook="Compare session.run.evaluations(), before and after. To go on: harder rows, or a reward that tells good from very "
        "good.",
        do_as_client="To go on: harder prompts, or a reward that tells good from very good.",
    ),
    Advice(
        "completions/clipped_ratio",
        "completions cut off",
        lambda value: value > 0.3,
        "{value} of the completions of the last steps are cut off by the length limit.",
        "Read some of them: if the answer is missing, raise sampler.max_completion_length; if it came before, reward brevity or set "
        "sampler.stop.",
        do_as_client="Read some of them: if the answer is missing, raise max_completion_length, or the max_tokens of the calls; if it came "
        "before, reward brevity, or give stop in the calls or sampler.stop at the start.",
    ),
    Advice(
        "rollouts/unscored",
        "rollouts without a score",
        lambda value: value > 0.05,
        "{value} of the rollouts could not be scored. They are left out, which does no harm if they are few.",
        "`groupwise runs rollouts RUN --failed` shows the reasons: a reward that raises, a sandbox or judge that takes too long "
        "(rewards.time_limit).",
    ),
    Advice(
        LOGPROB_GAP,
        "sampler and learner differ",
        lambda value: value > 0.1,
        "Learner and sampler differ by {value} nats a token: they do not compute the same policy.",
        "Look for another base, revision or quantisation behind the sampler; in bfloat16 some hundredths are usual.",
        "{:.2f}",
    ),
    Advice(
        "entropy",
        "no entropy left",
        lambda value: value < 0.05,
        "The entropy is {value} nats: the policy is nearly certain of each token, and its completions of a prompt become alike.",
        "Raise sampler.temperature, lower training.learning_rate, or set algorithm.beta above 0 to stay nearer to the start.",
        "{:.3f}",
        do_as_client="Raise the temperature of the calls or sampler.temperature, lower learning_rate, or set algorithm.beta above 0 to "
        "stay nearer to the start.",
        do_in_sft="Before RL, train less: lower training.learning_rate or training.max_steps, or end the run by training.stop_when.",
    ),
    Advice(
        "kl",
        "far from the reference",
        lambda value: value > 5,
        "The policy is {value} nats a token away from where it began.",
        "Raise algorithm.beta or lower training.learning_rate if the answers become strange; read the newest completions.",
        "{:.1f}",
        do_as_client="Raise algorithm.beta or lower learning_rate if the answers become strange; read the newest completions.",
    ),
    Advice(
        "clip_ratio/region_mean",
        "many tokens clipped",
        lambda value: value > 0.3,
        "The clip leaves {value} of the tokens out of the update: the policy has moved too far from the one that sampled them.",
        "Lower training.learning_rate, or the number of updates for each step.",
        do_as_client="Lower learning_rate, or the number of updates for each step.",
    ),
    Advice(
        "updates/left_out",
        "updates left out",
        lambda value: value > 0,
        "Some updates were left out, because their loss or gradient was not finite.",
        "Look into the folder non-finite of the run; lower training.learning_rate, or train in float32.",
        do_as_client="Look into the folder non-finite of the run; lower learning_rate.",
    ),
)


def advice_on(store: Store) -> list[dict[str, Any]]:
    """The advice that applies now, with the numbers."""
    steps = store.step_count()
    if not steps:
        return []
    outcomes = ["rollouts/scored", "rollouts/failed", "rollouts/timed_out"]
    curves = store.metrics(
        [*(rule.metric for rule in RULES), DISTINCT, DISTILLATION, *outcomes],
        since=max(0, steps - RECENT),
    )
    recent = {name: mean_of([value for _, value in curve]) for name, curve in curves.items()}
    means = {name: value for name, value in recent.items() if value is not None}
    scored, *unscored_shares = (means.get(name, 0.0) for name in outcomes)
    if total := scored + sum(unscored_shares):
        means["rollouts/unscored"] = sum(unscored_shares) / total
    learnt = means.get(SOLVED, 0.0) > MAX_SOLVED
    meta = store.get_meta()
    is_compared = {"before", "after"} <= {name for _, name, _ in store.evaluations_with_rows()}
    advice: list[dict[str, Any]] = []
    for rule in RULES:
        value = means.get(rule.metric)
        applies = rule.alike is None or rule.alike == (means.get(DISTINCT, 1.0) < MIN_DISTINCT)
        if rule.metric == WITHOUT_SIGNAL and DISTILLATION in means:
            continue  # the teacher has something to say of equal rewards, too
        if learnt and rule.metric in FAULTS_UNLESS_LEARNT:
            continue
        if value is not None and rule.holds(value) and applies:
            if rule.metric == LOGPROB_GAP and _updates_between(store):
                continue  # the gap is then mostly what the step itself has learnt
            threshold = "" if is_served(meta) else " (eval.success_threshold, eval.success_part)"
            text = rule.says.format(value=rule.form.format(value), threshold=threshold)
            do = _remedy(rule, meta).removeprefix(COMPARE if is_compared else "")
            if do in _TINY_REMEDIES and any(given["do"] == do for given in advice):
                continue
            facts = {"metric": rule.metric, "problem": rule.problem, "value": value}
            advice.append({**facts, "says": text, "do": do})
    return [*advice, *_on_parts_without_pay(store, steps)]


def advice_before_training(
    rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Advice on an untrained model, if hardly any held-out sample is solved and most earn the same reward. `rows`: one per sample."""
    verdicts = [bool(row["success"]) for row in rows if row["success"] is not None]
    rewards = Counter(row["reward"] for row in rows if row["reward"] is not None)
    if not verdicts or not rewards or config.get("warm_up"):
        return []
    solved = sum(verdicts) / len(verdicts)
    [(usual, count)] = rewards.most_common(1)
    if solved > MAX_HARDLY_SOLVED or count <= MAX_WITHOUT_SIGNAL * rewards.total():
        return []
    some = f"Only {sum(verdicts)} of {len(verdicts)} samples count"
    how_many = some if any(verdicts) else f"None of {len(verdicts)} samples counts"
    says = f"{how_many} as solved (eval.success_threshold, eval.success_part), and most earn the same reward, {usual:.3g}"
    if config["model"]["name"] == TINY:
        do = DO_WITH_TINY
    elif config["eval"]["temperature"] == 0:
        says += ", where each answer is the most probable one"
        do = "A training samples, and may find more: evaluate with --samples-per-prompt 4 eval.temperature=1.0."
    else:
        says += ": reinforcement learning has little to learn from"
        do = (
            "Warm the model up first: a hook get_sft_dataset in the task brings right answers, and the section warm_up of the config "
            "trains on them. Or choose easier examples, put hints into the prompt, or give rewards that pay for what comes before a "
            "right answer."
        )
    facts = {"metric": "pass@1", "problem": "hardly anything solved", "value": solved}
    return [{**facts, "says": f"{says}.", "do": do}]


def _on_parts_without_pay(store: Store, steps: int) -> list[dict[str, Any]]:
    """Advice on each reward, of several, that was 0 for all completions of the last steps."""
    newest = RolloutFilter(committed=True, outcome="scored", order="newest", limit=OF_PARTS)
    parts = [part for view in store.rollouts(newest, 1) for part in view.parts]
    names = dict.fromkeys(part.name for part in parts if part.weight)
    unpaid: list[tuple[str, str]] = []
    for name in names:
        mean, std = (f"rewards/{label(name)}/{kind}" for kind in ("mean", "std"))
        curves = store.metrics([mean, std], since=max(0, steps - RECENT))
        if mean in curves and not any(value for curve in curves.values() for _, value in curve):
            unpaid.append((name, mean))
    if len(unpaid) == len(names):  # other advice says that nothing is earned
        return []
    return [
        {
            "metric": mean,
            "problem": "",
            "value": 0.0,
            "says": f"The reward {name} was 0 for every completion of the last steps: it has taught nothing.",
            "do": "For a penalty that is as it should be. Other rewards should pay sometimes: let this one pay for a part of what it asks "
            "for, or ask for it in the prompt.",
        }
        for name, mean in unpaid
    ]


def _remedy(rule: Advice, meta: Mapping[str, Any]) -> str:
    """What to do if the rule holds in a run with these facts, in the words of those who started it."""
    is_toys = meta.get("model") == TINY and rule.metric in OF_TINY and rule.problem
    if is_served(meta):
        return DO_WITH_TINY_AS_CLIENT if is_toys else rule.do_as_client or rule.do
    if is_of_notebook(meta):
        return DO_WITH_TINY_IN_NOTEBOOK if is_toys else own_names(rule.do_in_notebook or rule.do)
    if is_toys:
        return DO_WITH_TINY
    return (meta.get("kind") == "sft" and rule.do_in_sft) or rule.do


def _updates_between(store: Store) -> bool:
    """True if updates come between sampling and learning, by the config in the run's folder: several in a step, or sampling ahead."""
    try:
        training = read_config(store.path.parent).get("training", {})
    except StoreError:  # a record without a run folder
        return False
    updates = training.get("num_iterations", 1) * training.get("minibatches", 1)
    return updates > 1 or training.get("max_off_policy_steps", 0) > 0
