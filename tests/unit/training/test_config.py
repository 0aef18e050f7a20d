"""The config of a run: its keys, what it refuses, and what a resume and a task see of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from groupwise.algorithms.presets import PRESETS
from groupwise.algorithms.registry import make
from groupwise.core.errors import ConfigError
from groupwise.core.settings.schema import leaves
from groupwise.training.config import (
    LoadedConfig,
    RunConfig,
    compare_for_resume,
    documentation,
    json_schema,
    load_config,
    resolved_values,
    view,
    with_task_schema,
)
from groupwise.training.foreign_keys import foreign_to_rl
from groupwise.training.sft_config import sft_schema

MINIMAL: dict[str, Any] = {"model": {"name": "tiny"}}


def words(text: str) -> list[str]:
    return text.split()


def load(text: str, folder: Path, *words: str) -> LoadedConfig:
    path = folder / "c.yaml"
    path.write_text(f"model: {{name: tiny}}\n{text}")
    return load_config(path, words)


def refusal(text: str, folder: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, folder, *words)
    return str(caught.value).replace(f"{folder}/", "")


# --- the schema


def test_every_key_says_what_it_is() -> None:
    silent = [leaf.path for leaf in leaves(RunConfig) if not leaf.key.description]
    assert silent == []


def test_the_pages_of_the_documentation_are_up_to_date() -> None:
    for name, text in documentation().items():
        page = Path(__file__).parents[3] / "docs" / name
        assert page.read_text() == text, "`make fix` makes it again"


@pytest.mark.parametrize(("name", "schema"), [("rl", json_schema()), ("sft", sft_schema())])
def test_the_json_schemas_are_up_to_date(name: str, schema: str) -> None:
    file = Path(__file__).parents[3] / "docs" / "schemas" / f"{name}.json"
    assert file.read_text() == schema, "`make fix` makes it again"


def test_foreign_names_are_not_keys_here_and_point_to_keys_that_exist() -> None:
    known = {leaf.path[-1] for leaf in leaves(RunConfig)}
    assert known.isdisjoint(foreign_to_rl())
    sections = {leaf.path[0] for leaf in leaves(RunConfig)}
    keys = {".".join(leaf.path) for leaf in leaves(RunConfig)}
    for advice in (each.advice for each in foreign_to_rl().values()):
        named = [word.strip(".,") for word in advice.split() if word.split(".")[0] in sections]
        assert all(name in keys for name in named if "." in name), advice


def test_not_yet_keys_are_not_keys_here() -> None:
    for leaf in leaves(RunConfig):
        section: Any = leaf.section
        assert leaf.path[-1] not in section.not_yet


# --- loading


def test_only_the_model_is_required() -> None:
    config = load_config(MINIMAL).config
    assert config.algorithm.type == "dr_grpo"
    assert config.training.max_steps == 100
    assert config.lora is not None
    assert config.lora.r == 16
    with pytest.raises(ConfigError, match=r"^config: model\.name .*required"):
        load_config({})


def test_a_file_is_read_with_overrides_typed_like_it(tmp_path: Path) -> None:
    text = "training:\n  learning_rate: 1e-6\n  max_steps: 3\n"
    config = load(text, tmp_path, "training.learning_rate=2e-6", "lora=null").config
    assert (config.training.learning_rate, config.training.max_steps) == (2e-6, 3)
    assert config.lora is None


def test_an_argument_that_says_how_long_replaces_what_the_file_says_in_the_other_way() -> None:
    def lengths(training: dict[str, Any], *given: str) -> tuple[int | None, float | None]:
        config = load_config({**MINIMAL, "training": training}, given).config.training
        return config.max_steps, config.num_train_epochs

    assert lengths({"max_steps": None, "num_train_epochs": 1}, "training.max_steps=3") == (3, None)
    assert lengths({"max_steps": 9}, "training.num_train_epochs=2") == (None, 2.0)
    assert lengths({"max_steps": 9}, "training.num_train_epochs=null") == (9, None)
    both: dict[str, Any] = {"max_steps": 9, "num_train_epochs": 1}
    for training, given in (
        (both, ()),
        ({}, ("training.max_steps=3", "training.num_train_epochs=2")),
    ):
        with pytest.raises(ConfigError, match="one of the two"):
            lengths(training, *given)


@pytest.mark.parametrize("given", [
    [], ["lora=null", "training.num_train_epochs=0.5"], ["algorithm.type=grpo", "algorithm.scale_rewards=none", "sampler.stop=[a, b]"],
    ["rewards.reward_weights=[1, 0.5]", "lora.target_modules=[q_proj]", "task.x={y: [1]}"],
])  # fmt: skip
def test_the_resolved_config_loads_to_the_same(given: list[str]) -> None:
    config = load_config(MINIMAL, given).config
    stored = json.loads(json.dumps(resolved_values(config)))
    assert load_config(stored).config == config
    assert compare_for_resume(stored, config).fixed == {}


def test_one_completion_per_prompt_is_refused_for_algorithms_that_compare_groups() -> None:
    def alone(**algorithm: Any) -> Any:
        return load_config({**MINIMAL, "training": {"num_generations": 1}, "algorithm": algorithm})

    assert alone(type="reinforce_pp").config.training.num_generations == 1
    for algorithm in (
        {"type": "grpo"},
        {"type": "rloo"},
        {"type": "reinforce_pp", "group_baseline": True},
        {"type": "reinforce_pp", "dynamic_sampling": True},
    ):
        with pytest.raises(ConfigError, match=r"num_generations is 1, .* 2"):
            alone(**algorithm)


# --- what is refused


@pytest.mark.parametrize(
    "word",
    words("""
    sampler.engine=openai sampler.repetition_penalty=1.1
    training.optim=adamw_8bit
    repetition_penalty=1.1
    """),
)
def test_parts_that_come_later_are_refused_as_such(tmp_path: Path, word: str) -> None:
    message = refusal("", tmp_path, word)
    assert "not in this version" in message
    assert "\n" not in message


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "5"), ("min_p", "0.1")])
def test_training_draws_from_the_whole_distribution_and_says_why(
    tmp_path: Path, key: str, value: str
) -> None:
    message = refusal("", tmp_path, f"sampler.{key}={value}")
    assert "draw completions from another" in message
    assert f"eval.{key}" in message
    message = refusal("", tmp_path, f"{key}={value}")
    assert f"eval.{key}? sampler.{key} is none either: it would draw" in message
    settings = [f"eval.{key}={value}", "eval.temperature=1.0"]
    assert load_config(MINIMAL, settings).config.eval.model_dump()[key] == float(value)
    off = load_config(MINIMAL, [f"eval.{key}=null"]).config
    assert off == load_config(MINIMAL).config


def test_int8_is_corrected_for() -> None:
    key = "importance_sampling_correction"
    int8 = ["sampler.quantization=int8"]
    assert load_config(MINIMAL, int8).config.algorithm.knobs[key] == "token_truncate"
    assert load_config(MINIMAL, [*int8, f"algorithm.{key}=token_mask"])
    for word in (f"algorithm.{key}=none", "run.server=http://127.0.0.1:1", "sampler.engine=vllm"):
        with pytest.raises(ConfigError, match=r"quantization is \"?int8"):
            load_config(MINIMAL, [*int8, word])


# --- algorithms


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_type_and_values(name: str) -> None:
    section = load_config(MINIMAL, [f"algorithm.preset={name}"]).config.algorithm
    preset = PRESETS[name]
    assert section.type == preset.algorithm
    assert make(section.type, section.knobs) == make(preset.algorithm, preset.knobs)
    given = resolved_values(load_config(MINIMAL, [f"algorithm.preset={name}"]).config)
    assert load_config(given).config.algorithm == section


# --- resuming


def test_a_resume_sees_what_is_free_what_is_layout_and_what_is_fixed() -> None:
    old = resolved_values(load_config(MINIMAL).config)
    changes = ["training.max_steps=200", "run.threads=1", "training.learning_rate=1", "task.n=3"]
    found = compare_for_resume(old, load_config(MINIMAL, changes).config)
    assert found.free == {"training.max_steps": (100, 200)}
    assert found.warned == {"run.threads": (None, 1)}
    assert found.fixed == {"training.learning_rate": (1e-5, 1.0), "task.n": (None, 3)}


# --- the task section


class Sorting(BaseModel):
    count: int = Field(default=3, ge=2, le=5)
    language: str = "en"


def test_a_task_schema_refuses_with_line_and_path(tmp_path: Path) -> None:
    loaded = load("task:\n  count: 9\n  langage: de\n", tmp_path)
    with pytest.raises(ConfigError) as caught:
        with_task_schema(loaded, Sorting)
    assert str(caught.value).replace(f"{tmp_path}/", "").split("\n") == [
        "c.yaml:3: task.count is 9; it must be a whole number (at least 2, at most 5).",
        "c.yaml:4: task.langage is not a key; did you mean task.language?",
    ]


def test_the_view_shows_everything_and_cannot_be_written() -> None:
    config = load_config(MINIMAL, ["task.words=3"]).config
    seen = view(config)
    assert seen.task.words == seen["task"]["words"] == 3
    assert seen.algorithm.type == "dr_grpo"
    assert seen == resolved_values(config)
    with pytest.raises(AttributeError, match="can only be read"):
        seen.task.words = 4


def test_all_mistakes_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
training:
  learning_rat: 1e-5
  num_generations: 0
sampler: {engine: openai, temperature: 0}
learning_rate: 1e-5
task:
  hf_token: hf_123456
"""
    found = refusal(text, tmp_path, "run.dri=x").split("\n")
    assert [SECRET if SECRET in line else line for line in found] == [
        "c.yaml:3: training.learning_rat is not a key; did you mean training.learning_rate?",
        "c.yaml:4: training.num_generations is 0; it must be a whole number (at least 1).",
        "c.yaml:5: sampler.engine: openai is not in this version; it must be one of torch, vllm, sglang.",
        "c.yaml:5: sampler.temperature is 0; it must be a number (above 0).",
        "c.yaml:6: learning_rate is not a key; did you mean training.learning_rate?",
        SECRET,
        "override run.dri=x: run.dri is not a key; did you mean run.dir?",
    ]
    assert "hf_123456" not in "".join(found)


@pytest.mark.parametrize(("word", "told"), [
    ("scale_rewards=group", "it is a key of grpo, dapo, gspo, cispo, gmpo, "),
    ("epsilon_hi=0.3", "algorithm.epsilon_high (of grpo, dr_grpo,"),
    ("type=gropo", "did you mean grpo?"),
])  # fmt: skip
def test_an_unknown_knob_names_the_nearest_and_who_has_it(
    tmp_path: Path, word: str, told: str
) -> None:
    assert told in refusal("", tmp_path, f"algorithm.{word}")


SECRET = "c.yaml:8: task.hf_token looks like a secret"
