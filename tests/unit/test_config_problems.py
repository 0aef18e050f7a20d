"""All problems of a config are reported at once: none is hidden by another, and none is caused by another.

1. What is said of two mistakes that have nothing to do with each other is what is said of each alone.
2. A check across keys is silent where a key that it reads is wrong, or may be there under another name: it would judge a default.
3. A check across keys is made whatever else is wrong, above all without a model's name, the commonest mistake.
4. A check that does not say what it reads is taken to read its whole section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from groupwise.core.errors import ConfigError
from groupwise.core.settings.schema import SKIP_CONFLICT_CHECKS, Strict, leaves
from groupwise.core.settings.tree import parse_yaml
from groupwise.training.config import RunConfig, load_config, with_task_schema
from groupwise.training.sft_config import SftConfig
from tests.rotation import turn

KEY_OF_ANOTHER_ALGORITHM = "algorithm.scale_rewards=group"
WRONG_VALUES = """
model.name=null model.dtype=x lora.r=0 sampler.engine=openai sampler.temperature=0 sampler.stop=x sampler.min_completion_length=-1
algorithm.type=reinforce-pp algorithm.preset=dapo_papr algorithm.beta=-1 algorithm.kl_estimator=k9
training.learning_rate=.nan training.num_generations=.inf training.max_steps=ten training.schedule=fixed training.max_off_policy_steps=-1
training.num_generations=0 training.max_steps=0 training.seed=.nan lora.dropout=1 lora.target_modules=all sampler.max_num_seqs=7
eval.top_p=1 run.name=run@3 run.name=../x
data.max_prompt_length=0 rewards.workers=0 rewards.time_limit=0 rollout.type=twostage rollout.max_turns=0
eval.temperature=cold eval.samples_per_prompt=0 eval.top_k=0 eval.pass_at_k=[0] run.name=a/b run.threads=0
callbacks=[3] callbacks=[{"often":3}] task=3
""".split()
WRONG_KEYS = """
model.nam=tiny algorithm.typ=reinforce_pp algorithm.scale_rewards=group sampler.top_p=0.5 smapler={"max_completion_length":900}
sampler.max_tokens=900 training.num_generation=1 training.lr=1e-3 eval.temprature=1.0 rollout.typ=two_stage api_key=x
model.token=sk-123 run.hub_token=sk-123
""".split()
OTHER_PRESET = "algorithm.preset=dapo_paper algorithm.type=grpo"
TWO_STAGE_AND = [
    f"rollout.type=two_stage {word}"
    for word in (
        "rollout.max_turns=3",
        "sampler.max_completion_length=900",
        "eval.max_completion_length=900",
    )
]
CONFLICTS = [
    *"""
model.adapter_revision=v2
algorithm.kl_target=0.1 algorithm.delta=1.1 algorithm.importance_sampling_cap=2.0 algorithm.max_resample_rounds=3
training.num_generations=1 training.minibatches=9 training.schedule=free sampler.min_completion_length=900
rollout.max_answer_length=5 eval.samples_per_prompt=4 eval.top_p=0.5 eval.min_p=0.5 eval.pass_at_k=[8]
""".split(),
    "training.max_steps=5 training.num_train_epochs=1.0",
    "training.warmup_steps=5 training.warmup_ratio=0.1",
    "rewards.in_process=true rewards.workers=2",
    "rewards.in_process=true rewards.start_limit=5.0",
    "run.threads=2 run.processes=4",
    OTHER_PRESET,
    *TWO_STAGE_AND,
]

OF_THE_ALGORITHM = [
    word for word in CONFLICTS if word.startswith("algorithm.") and word != OTHER_PRESET
]
COMPARES_NOBODY, LEAST = "training.num_generations=1", "sampler.min_completion_length=900"
GREEDY = ["eval.samples_per_prompt=4", "eval.top_p=0.5", "eval.min_p=0.5"]
ANSWER = "rollout.max_answer_length=5"
UNSURE_TYPE = [KEY_OF_ANOTHER_ALGORITHM, *OF_THE_ALGORITHM, COMPARES_NOBODY]
DECIDES: dict[str, list[str]] = {
    "algorithm.type=reinforce-pp": [*UNSURE_TYPE, "algorithm.typ=reinforce_pp"],
    "algorithm.preset=dapo_papr": UNSURE_TYPE,
    "algorithm.typ=reinforce_pp": [*UNSURE_TYPE, OTHER_PRESET], OTHER_PRESET: UNSURE_TYPE,
    "algorithm.beta=-1": ["algorithm.kl_target=0.1"],
    "training.max_off_policy_steps=-1": ["training.schedule=free", "algorithm.importance_sampling_cap=2.0"],
    "training.num_generation=1": [COMPARES_NOBODY], "rollout.type=twostage": [LEAST, ANSWER],
    "rollout.typ=two_stage": [LEAST, ANSWER, *TWO_STAGE_AND],
    'smapler={"max_completion_length":900}': [LEAST, TWO_STAGE_AND[1]],
    "sampler.max_tokens=900": [LEAST, TWO_STAGE_AND[1]],
    **{mistake: [LEAST, ANSWER] for mistake in TWO_STAGE_AND}, "eval.temperature=cold": GREEDY,
    "eval.temprature=1.0": GREEDY, "eval.samples_per_prompt=0": ["eval.pass_at_k=[8]"],
    "eval.samples_per_prompt=4": ["eval.pass_at_k=[8]"],
}  # fmt: skip
"""Mistakes, and those of which another thing is said, or nothing, beside them."""

SFT_CONFLICTS = [
    "training.max_steps=5 training.num_train_epochs=1.0",
    "data.completion_only_loss=false data.assistant_turns=last",
]


@cache
def read(mistake: str) -> dict[str, Any]:
    """Values by dotted key."""
    pairs = [word.partition("=") for word in mistake.split()]
    return {key: parse_yaml(f"value: {text}")["value"] for key, _, text in pairs}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in {"model.name": "tiny", **values}.items():
        *above, last = key.split(".")
        section = config
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return config


def said_of(*mistakes: str, load: Callable[[Mapping[str, Any]], Any] = load_config) -> set[str]:
    values = {key: value for mistake in mistakes for key, value in read(mistake).items()}
    with pytest.raises(ConfigError) as caught:
        load(nested(values))
    return set(str(caught.value).split("\n"))


def pairs_of(mistakes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those that can be made together."""
    for first, second in combinations(mistakes, 2):
        one, other = read(first), read(second)
        if all(one[key] == other[key] for key in one.keys() & other.keys()):
            yield first, second


@pytest.mark.parametrize("parts", [8, pytest.param(1, marks=pytest.mark.soak(suite="training"))])
def test_mistakes_that_have_nothing_to_do_with_each_other_are_reported_as_each_alone(
    parts: int,
) -> None:
    """Of all pairs a part, with the next commit another one."""
    mistakes = [*WRONG_VALUES, *WRONG_KEYS, *CONFLICTS]
    alone = {mistake: said_of(mistake) for mistake in mistakes}
    pairs = [*pairs_of(mistakes)][turn() % parts :: parts]
    changed = {
        frozenset((first, second))
        for first, second in pairs
        if said_of(first, second) != alone[first] | alone[second]
    }
    expected = {frozenset((one, other)) for one, others in DECIDES.items() for other in others}
    assert changed == expected & {*map(frozenset, pairs)}


@pytest.mark.parametrize("mistake", [*WRONG_VALUES, *WRONG_KEYS, *CONFLICTS])
def test_each_mistake_is_reported_once_with_a_key_that_it_is_about(mistake: str) -> None:
    (said,) = said_of(mistake)
    assert any(key.rpartition(".")[2] in said for key in read(mistake))


def test_all_of_what_does_not_go_together_is_reported() -> None:
    said = said_of("rewards.in_process=true rewards.workers=2 rewards.start_limit=5.0")
    assert {line.split()[2] for line in said} == {"workers", "start_limit"}
    environment = "rollout.type=environment rollout.in_process=true rollout.workers=2"
    assert len(said_of(f"{environment} rollout.start_limit=5.0")) == 2
    assert len(said_of("eval.top_p=0.5 eval.min_p=0.5 eval.top_k=3")) == 3
    conflicting = "algorithm.beta=0.1 algorithm.kl_estimator=k1 algorithm.kl_gradient=estimator"
    assert len(said_of(f"{conflicting} algorithm.delta=1.1 algorithm.max_resample_rounds=3")) == 3


def conflicting_keys(section: Strict, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for conflict in section.conflicts():
        yield from ((*at, *key.split(".")) for key in conflict.keys)
    for name in section.__class__.model_fields:
        if isinstance(inner := getattr(section, name), Strict):
            yield from conflicting_keys(inner, (*at, name))


@pytest.mark.parametrize(("root", "mistakes"), [(RunConfig, CONFLICTS), (SftConfig, SFT_CONFLICTS)])
def test_checks_read_keys_that_there_are(root: type[Strict], mistakes: Sequence[str]) -> None:
    known = {leaf.path for leaf in leaves(root)}
    for mistake in mistakes:
        made = root.model_validate(
            nested(read(mistake)), strict=False, context=SKIP_CONFLICT_CHECKS
        )
        keys = set(conflicting_keys(made))
        assert keys, mistake
        assert keys <= known


class Undeclared(BaseModel):
    low: int = 0
    high: int = 9
    other: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> Undeclared:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


@pytest.mark.parametrize(("task", "told"), [
    ({"low": 20}, ["task: low is above high"]), ({"low": 20, "high": "x"}, ["task.high is"]),
    ({"low": 20, "hihg": 30}, ["task.hihg is not a key; did you mean task.high?"]), ({"low": 20, "other": "x"}, ["task.other is"]),
])  # fmt: skip
def test_a_check_that_does_not_say_what_it_reads_reads_its_section(
    task: dict[str, Any], told: list[str]
) -> None:
    loaded = load_config({"model": {"name": "tiny"}, "task": task})
    with pytest.raises(ConfigError) as caught:
        with_task_schema(loaded, Undeclared)
    said = str(caught.value).split("\n")
    assert [len(said), told[0] in said[0]] == [1, True]
