"""What `groupwise init` chooses, by which facts, and that values given by the user stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from groupwise.core.errors import UsageError
from groupwise.training.init.choices import (
    LENGTHS,
    MAX_STEP_SECONDS,
    SLOTS,
    Draft,
    choose_lengths,
    choose_required_keys,
    choose_step,
    choose_trainable,
    fit_memory,
    fit_time,
)

STEPS, EPOCHS = "training.max_steps", "training.num_train_epochs"
LEAST, LONGEST = "sampler.min_completion_length", "sampler.max_completion_length"
BUDGETS = (8192, 4096, 2048)


def draft(*overrides: str, kind: str = "rl") -> Draft:
    return Draft(kind, "tiny", overrides)  # type: ignore[arg-type]


# --- beside what was given -----------------------------------------------------------------------


def values(chosen: Draft, *keys: str) -> tuple[object, ...]:
    config = chosen.load().config.model_dump()
    return tuple(config[section][key] for section, key in (name.split(".") for name in keys))


@pytest.mark.parametrize(("words", "expected"), [
    ("training.num_train_epochs=3", {EPOCHS: 3.0, STEPS: None}), ("training.num_train_epochs=null", {STEPS: 100}),
    ("training.max_steps=null", {STEPS: None, EPOCHS: 1.0}),
    ("algorithm.preset=dapo_paper", {"algorithm.type": "dapo", "algorithm.epsilon": 0.2}),
    ("algorithm={preset: gspo_paper}", {"algorithm.type": "gspo"}), ("algorithm.preset=null", {"algorithm.type": "dr_grpo"}),
    ("sampler.min_completion_length=300", {LEAST: 300, LONGEST: 304}), ("sampler.min_completion_length=100", {LONGEST: 112}),
    ("algorithm.type=dapo; algorithm.soft_punish_cache=100", {LONGEST: 512}),
    ("training.minibatches=12", {"training.prompts_per_step": 12}), ("training.minibatches=3", {"training.prompts_per_step": 3}),
    ("training.schedule=free", {"training.max_off_policy_steps": 1}), ("rollout.max_answer_length=20", {"rollout.type": "two_stage"}),
    ("rollout.max_turns=3", {"rollout.type": "environment"}),
    ("rollout.max_answer_length=600; sampler.min_completion_length=400", {"rollout.type": "two_stage", LONGEST: 256}),
    ("eval.samples_per_prompt=4", {"eval.temperature": 1.0}), ("eval.top_p=0.9", {"eval.temperature": 1.0, "eval.top_p": 0.9}),
    ("eval.pass_at_k=[1,8]", {"eval.samples_per_prompt": 8, "eval.temperature": 1.0}),
    ("eval.pass_at_k=[1]", {"eval.samples_per_prompt": 1, "eval.temperature": 0.0}),
    ("eval.samples_per_prompt=2; eval.temperature=0.5", {"eval.temperature": 0.5}),
])  # fmt: skip
def test_the_rest_is_chosen_around_what_was_given(words, expected):
    """From the first draft on, since it is loaded before anything is measured."""
    chosen = draft(*words.split("; "))
    choose_required_keys(chosen)
    chosen.load()
    choose_step(chosen, "cpu", 2)
    choose_lengths(chosen, [40], "measured", (64, "wanted"), 4096)
    fit_time(chosen, lambda: 2 * MAX_STEP_SECONDS)
    assert values(chosen, *expected) == tuple(expected.values())
    given = {word.partition("=")[0] for word in words.split("; ")}
    written = {choice.key for choice in chosen.choices()} - given
    assert not {STEPS, EPOCHS} <= written
    assert not {"algorithm.preset", "algorithm.type"} <= written


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "parameters", "words", "full", "rate"), [
    ("rl", 7_000, (), True, 1e-2), ("sft", 7_000, (), True, 1e-2),
    ("rl", 135_000_000, (), False, 1e-4), ("sft", 135_000_000, (), False, 1e-4),
    ("rl", 7_000_000_000, (), False, 1e-5), ("sft", 7_000_000_000, (), False, 1e-4),
    ("rl", 135_000_000, ("lora=null",), True, 1e-6),
    ("sft", 135_000_000, ("lora=null",), True, 1e-5),
])  # fmt: skip
def test_the_choice_of_trained_weights_and_learning_rate(kind, parameters, words, full, rate):
    chosen = draft(*words, kind=kind)
    choose_trainable(chosen, parameters)
    config = chosen.load().config
    assert (config.lora is None, config.training.learning_rate) == (full, rate)


# --- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "prompts", "wanted", "limit", "expected"), [
    ((), [40], 64, 2048, (64, 1984, None)), ((), [40], 256, 200, (152, 48, None)), ((), [190, 90], 64, 200, (64, 136, None)),
    (("sampler.max_completion_length=30",), [40], 256, 100, (30, 70, None)),
    (("rollout.type=environment",), [4], 64, 2048, (64, 608, None)), (("rollout.type=environment",), [4], 128, 2048, (128, 16, 2032)),
    (("rollout.type=external",), [4], 128, 2048, (128, 16, 2032)), (("rollout.type=external",), [4], 128, 100, (84, 16, 84)),
    (("rollout.type=external",), [4, 1990], 128, 2048, (48, 2000, 48)),
    (("rollout.type=external",), [4, 3000], 128, 2048, (128, 1024, 1024)),
    (("rollout.type=two_stage",), [40], 64, 2048, (256, 1132, None)), (("rollout.type=two_stage",), [40], 64, 512, (256, 48, None)),
])  # fmt: skip
def test_prompt_and_completion_fit_the_model_together(words, prompts, wanted, limit, expected):
    chosen = draft(*words)
    choose_lengths(chosen, prompts, "measured", (wanted, "wanted"), limit)
    keys = ("sampler.max_completion_length", "data.max_prompt_length", "rollout.max_rollout_length")
    assert values(chosen, *keys) == expected
    whole = chosen.config.rollout.longest(chosen.config.sampler.max_completion_length)
    assert expected[1] + whole <= limit


@pytest.mark.parametrize(("words", "named"), [
    ((), "--model tiny has 64"), (("rollout.type=external",), "rollout.type"), (("rollout.type=two_stage",), "rollout.type"),
    (("sampler.max_completion_length=60", "training.seed=1"), "sampler.max_completion_length"),
    (("rollout.type=external", "rollout.max_rollout_length=60"), "rollout.max_rollout_length or rollout.type"),
])  # fmt: skip
def test_without_room_for_a_prompt_only_what_the_user_gave_is_named(words, named):
    with pytest.raises(UsageError) as refused:
        choose_lengths(draft(*words), [60, 62], "measured", (64, "wanted"), 64)
    keys = {key for key in LENGTHS if key in str(refused.value)}
    assert keys <= {word.partition("=")[0] for word in words}
    assert named in str(refused.value)


# --- memory and time -----------------------------------------------------------------------------


def needed(chosen: Draft) -> Callable[[], float]:
    """A plan: 1 MiB for a token of a micro-batch, a tenth of it with checkpointing, 100 MiB for a slot."""

    def plan() -> float:
        config = chosen.config
        share = 0.1 if config.training.gradient_checkpointing else 1.0
        slots = config.sampler.max_num_seqs or 64
        assert config.training.max_tokens_per_microbatch is not None
        return share * config.training.max_tokens_per_microbatch + 100 * slots

    return plan


@pytest.mark.parametrize(("free", "expected"), [
    (None, (8192, None, False)), (20_000, (8192, None, False)), (14_000, (4096, None, False)),
    (7_000, (2048, 32, False)), (8_500, (2048, None, True)), (3_900, (8192, 16, True)),
    (2_500, (2048, 16, True)), (100, (2048, 8, True)),
])  # fmt: skip
def test_memory_takes_the_fastest_settings_that_fit(free, expected):
    chosen = draft()
    fit_memory(chosen, needed(chosen), free, BUDGETS, SLOTS)
    config = chosen.config
    training = config.training
    found = (training.max_tokens_per_microbatch, config.sampler.max_num_seqs)
    assert (*found, training.gradient_checkpointing) == expected
    assert free in (None, 100) or needed(chosen)() <= 0.8 * free
