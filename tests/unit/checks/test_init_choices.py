"""What `groupwise init` chooses from which facts, and that whatever the user gave stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import BaseModel, Field

from groupwise.checks.init_choices import (
    PATIENCE,
    SLOTS,
    Answers,
    Draft,
    choose_dtype,
    choose_lengths,
    choose_step,
    choose_teacher_step,
    choose_trained,
    fit_memory,
    fit_time,
    rounded_up,
    wanted_completion,
)
from groupwise.errors import ConfigError

BUDGETS = (8192, 4096, 2048)


class TaskSection(BaseModel):
    words: int = Field(3, description="Words in each prompt.")
    folder: str | None = None


def draft(*overrides: str, kind: str = "rl") -> Draft:
    return Draft(kind, "tiny", overrides)  # type: ignore[arg-type]


# --- what was given ------------------------------------------------------------------------------


def test_what_was_given_stands():
    given = draft("training.learning_rate=0.5")
    given.choose(("training", "learning_rate"), 0.1, "chosen")
    given.choose(("training", "seed"), 7, "chosen")
    assert (given.config.training.learning_rate, given.config.training.seed) == (0.5, 7)
    reasons = {choice.key: choice.reason for choice in given.choices()}
    assert reasons["training.learning_rate"] == "given on the command line"
    assert reasons["training.seed"] == "chosen"


@pytest.mark.parametrize("word", ["lora=null", "lora.r=4", "lora={r: 4}"])
def test_a_section_and_its_keys_are_about_the_same(word):
    given = draft(word)
    choose_trained(given, 100_000_000)
    choose_trained(given, 1_000)
    assert [choice.value for choice in given.choices() if choice.path[0] == "lora"] == [
        given._given[choice.path] for choice in given.choices() if choice.path[0] == "lora"
    ]
    assert (given.config.lora is None) == (word == "lora=null")


def test_what_was_given_wrongly_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"override training\.learning_rat=1"):
        draft("training.learning_rat=1").loaded()


def test_choices_stand_in_the_order_of_the_schema_and_the_task_comes_last():
    chosen = Draft("rl", "tiny", ("run.name=mine", "task.folder=x"), TaskSection)
    chosen.choose(("data", "max_prompt_length"), 9, "so long")
    chosen.choose(("sampler", "max_completion_length"), 9, "so long")
    assert [(choice.key, choice.value, choice.reason) for choice in chosen.choices()] == [
        ("model.name", "tiny", ""),
        ("sampler.max_completion_length", 9, "so long"),
        ("data.max_prompt_length", 9, "so long"),
        ("run.name", "mine", "given on the command line"),
        ("task.words", 3, "Words in each prompt."),
        ("task.folder", "x", "given on the command line"),
    ]


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parameters", "words", "full", "rate"),
    [
        ("rl", 7_000, (), True, 1e-2),
        ("sft", 7_000, (), True, 1e-2),
        ("rl", 135_000_000, (), False, 1e-4),
        ("sft", 135_000_000, (), False, 1e-4),
        ("rl", 7_000_000_000, (), False, 1e-5),
        ("sft", 7_000_000_000, (), False, 1e-4),
        ("rl", 135_000_000, ("lora=null",), True, 1e-6),
        ("sft", 135_000_000, ("lora=null",), True, 1e-5),
    ],
)
def test_what_is_trained_and_how_fast(kind, parameters, words, full, rate):
    chosen = draft(*words, kind=kind)
    choose_trained(chosen, parameters)
    config = chosen.loaded().config
    assert (config.lora is None, config.training.learning_rate) == (full, rate)


@pytest.mark.parametrize(
    ("dtype", "there", "told"),
    [
        ("bfloat16", True, "bfloat16 on this machine"),
        ("float32", True, "all weights are trained"),
        ("float32", False, "has no bfloat16"),
    ],
)
def test_the_number_format_is_left_to_the_machine_and_named(dtype, there, told):
    chosen = draft()
    choose_dtype(chosen, dtype, there)
    assert chosen.config.model.dtype == "auto"
    assert told in chosen.chosen["model", "dtype"].reason


# --- lengths -------------------------------------------------------------------------------------


def test_lengths_are_rounded_up():
    assert [rounded_up(tokens) for tokens in (1, 16, 16.5, 33)] == [16, 16, 32, 48]


@pytest.mark.parametrize(
    ("answers", "turns", "tokens", "told"),
    [
        (None, False, 256, "nothing in the task says"),
        (None, True, 128, "one turn"),
        (Answers(40, "get_sft_dataset", True, 400), False, 64, "of 400 (get_sft_dataset) has 40"),
        (Answers(3, "column `answer`", False, 9), False, 64, "room for a sentence"),
        (Answers(300, "column `answer`", False, 9), False, 656, "twice that"),
    ],
)
def test_completions_are_as_long_as_right_answers_and_more(answers, turns, tokens, told):
    found, reason = wanted_completion(answers, turns)
    assert found == tokens
    assert told in reason


def lengths(chosen: Draft) -> tuple[int, int | None, int | None]:
    config = chosen.config
    return (
        config.sampler.max_completion_length,
        config.data.max_prompt_length,
        config.rollout.max_rollout_length,
    )


@pytest.mark.parametrize(
    ("words", "longest", "wanted", "limit", "expected"),
    [
        ((), 40, 64, 2048, (64, 48, None)),
        ((), 40, 256, 200, (152, 48, None)),
        ((), 190, 64, 200, (64, 136, None)),
        (("sampler.max_completion_length=30",), 40, 256, 100, (30, 48, None)),
        (("rollout.type=environment",), 4, 64, 2048, (64, 16, None)),
        (("rollout.type=environment",), 4, 128, 2048, (128, 16, 2032)),
        (("rollout.type=two_stage",), 40, 64, 2048, (256, 48, None)),
    ],
    ids=["both", "completion", "prompt", "given", "turns", "many turns", "two stages"],
)
def test_prompt_and_completion_fit_the_model_together(words, longest, wanted, limit, expected):
    chosen = draft(*words)
    choose_lengths(chosen, longest, "measured", (wanted, "wanted"), limit)
    assert lengths(chosen) == expected
    whole = chosen.config.rollout.longest(chosen.config.sampler.max_completion_length)
    assert expected[1] is not None
    assert expected[1] + whole <= limit


def test_prompts_that_do_not_fit_are_said_to_be_left_out():
    chosen = draft()
    choose_lengths(chosen, 190, "measured", (64, ""), 200)
    assert "longer ones are left out" in chosen.chosen["data", "max_prompt_length"].reason


# --- the step ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "examples", "prompts", "told"),
    [
        ("cpu", 692, 8, "692 examples takes 87 steps"),
        ("cuda", 692, 16, "takes 44 steps"),
        ("cpu", 3, 3, "takes 1 step"),
    ],
)
def test_a_step_draws_no_more_than_there_is(device, examples, prompts, told):
    chosen = draft()
    choose_step(chosen, device, examples)
    assert chosen.config.training.prompts_per_step == prompts
    assert chosen.chosen["training", "max_steps"].reason.endswith(told)


@pytest.mark.parametrize(("rows", "steps", "size"), [(400, 75, 16), (1000, 63, 16), (5, 3, 5)])
def test_few_rows_of_a_teacher_are_seen_several_times(rows, steps, size):
    chosen = draft(kind="sft")
    choose_teacher_step(chosen, rows, 150)
    training = chosen.sft_config.training
    assert (training.max_steps, training.examples_per_step) == (steps, size)
    assert chosen.sft_config.data.max_length == 150


def test_epochs_that_were_given_leave_no_steps():
    chosen = draft("training.num_train_epochs=2.0", kind="sft")
    choose_teacher_step(chosen, 400, 150)
    assert chosen.sft_config.training.max_steps is None


# --- memory and time -----------------------------------------------------------------------------


def needed(chosen: Draft) -> Callable[[], float]:
    """A plan: 1 MiB for a token of a micro-batch, a tenth of it with checkpointing, 100 MiB for a slot."""

    def plan() -> float:
        config = chosen.config
        share = 0.1 if config.training.gradient_checkpointing else 1.0
        slots = config.sampler.slots or 64
        return share * config.training.max_tokens_per_microbatch + 100 * slots

    return plan


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (None, (8192, None, False)),
        (20_000, (8192, None, False)),
        (14_000, (4096, None, False)),
        (7_000, (2048, 32, False)),
        (8_500, (2048, None, True)),
        (3_900, (8192, 16, True)),
        (2_500, (2048, 16, True)),
        (100, (2048, 8, True)),
    ],
)
def test_memory_takes_the_fastest_settings_that_fit(free, expected):
    chosen = draft()
    fit_memory(chosen, needed(chosen), free, BUDGETS, SLOTS)
    config = chosen.config
    found = (
        config.training.max_tokens_per_microbatch,
        config.sampler.slots,
        config.training.gradient_checkpointing,
    )
    assert found == expected
    assert free in (None, 100) or needed(chosen)() <= 0.8 * free


def test_a_budget_that_was_given_is_not_fitted():
    chosen = draft("training.max_tokens_per_microbatch=8192", "sampler.slots=64")
    fit_memory(chosen, needed(chosen), 100, BUDGETS, SLOTS)
    config = chosen.config
    assert (config.training.max_tokens_per_microbatch, config.sampler.slots) == (8192, 64)
    assert config.training.gradient_checkpointing


@pytest.mark.parametrize(
    ("words", "seconds", "expected"),
    [
        ((), PATIENCE / 64, (8, 8)),
        ((), PATIENCE / 33, (4, 8)),
        ((), PATIENCE / 10, (2, 4)),
        ((), PATIENCE, (2, 4)),
        (("training.prompts_per_step=8",), PATIENCE / 33, (8, 4)),
    ],
)
def test_a_step_that_takes_minutes_gets_smaller(words, seconds, expected):
    """`seconds` for each completion."""
    chosen = draft(*words)
    choose_step(chosen, "cpu", 100)

    def step() -> float:
        training = chosen.config.training
        return seconds * training.prompts_per_step * training.num_generations

    fit_time(chosen, step)
    training = chosen.config.training
    assert (training.prompts_per_step, training.num_generations) == expected
