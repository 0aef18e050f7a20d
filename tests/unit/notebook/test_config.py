"""The config of a notebook: validated at once, with messages for people, frozen once a session has it, and without credentials in any
output."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.reward_call.tags import Tags
from groupwise.core.settings.schema import setting
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.datasets import dataset_of


def any_values(**values: Any) -> Any:
    """Values that a type checker would refuse."""
    return values


def made(**values: Any) -> TrainingConfig:
    return TrainingConfig(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_batchs": 3}, "num_batches?"),
        ({"num_batchs": 3, "learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"learning_rate": "3e-6"}, 'learning_rate is "3e-6"'),
        ({"num_batches": 1}, "num_batches 1 × train_fraction 0.9"),
        *(
            ({"num_batches": value}, "num_batches is ")
            for value in (True, np.True_, 10.5, np.array([1, 2]))
        ),
        ({"train_fraction": 1.0}, "train_fraction is 1.0"),
        ({"num_generations": 1}, "num_generations is 1"),
        ({"devices": "x"}, 'devices is "x"'),
        ({"devices": -1}, "devices is -1"),
        ({"devices": [4, 1], "backend": "torch"}, "a mesh"),
        ({"backend": "jax"}, "one of auto, torch, tunix"),
        ({"report_to": ("wandbb",)}, "tensorboard, wandb"),
        ({"reasoning_start": ""}, "one of them is empty"),
        ({"solution_end": "<answer>"}, "cannot be distinguished"),
        ({"lora_alpha": 1.5}, "lora_alpha is 1.5"),
        ({"checkpoint_dir": "my runs"}, 'checkpoint_dir: "my runs"'),
        ({"overrides": {"training.weigt_decay": 1}}, "training.weight_decay"),
        ({"overrides": {"run.dir": "x"}}, "run.dir"),
        ({"overrides": {3: 1}}, "overrides"),
        ({"overrides": {"training.seed": object()}}, "training.seed is of the type object"),
    ],
)
def test_invalid_values_are_refused_without_pydantics_words(values, said):
    with pytest.raises(ConfigError) as refused:
        made(**values)
    assert said in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_an_experiment_is_named_as_one_folder_can_be():
    names = ("", ".", "..", "../x", "/tmp/x", "a/b", "a\\b", "my exp", "ü1", "-a", "base", "a\n")
    for beside in ({}, {"checkpoint_dir": "there"}, {"save_to_drive": True}):
        config = made(**beside)
        for name in names:
            with pytest.raises(ConfigError) as refused:
                made(experiment_name=name, **beside)
            [line] = str(refused.value).splitlines()
            assert f"experiment_name: {json.dumps(name, ensure_ascii=False)} cannot name" in line
            with pytest.raises(ConfigError, match="name an experiment"):
                config.experiment_name = name
        assert config == made(**beside)


def test_a_change_is_checked_and_a_refused_one_changes_nothing():
    config = TrainingConfig()
    config.num_generations = 8
    config.experiment_name = "mine"
    assert (config.num_generations, config.checkpoint_dir) == (8, "checkpoints/mine")
    for name, value in (("num_generations", 1), ("num_batches", 1), ("nun_batches", 9)):
        with pytest.raises(ConfigError, match=name):
            setattr(config, name, value)
    assert (config.num_generations, config.num_batches) == (8, 500)


def test_given_values_win_over_computed_defaults():
    given = TrainingConfig(checkpoint_dir="there", system_prompt="Answer.")
    given.experiment_name = "mine"
    assert (given.checkpoint_dir, given.system_prompt) == ("there", "Answer.")
    computed = TrainingConfig(solution_start="[[", solution_end="]]")
    assert "[[ and ]]" in computed.system_prompt
    assert (computed.tags, TrainingConfig().tags) == (
        Tags("reasoning", ("[[", "]]")),
        Tags("reasoning", "answer"),
    )
    assert TrainingConfig(save_to_drive=True, experiment_name="e").checkpoint_dir == (
        "/content/drive/MyDrive/e"
    )


def test_a_prepared_config_cannot_be_changed_but_another_made_of_it():
    config = TrainingConfig(experiment_name="mine", num_generations=4)
    config.prepared()
    with pytest.raises(ConfigError, match=r"config\.changed\(beta=…\)"):
        config.beta = 0.0
    other = config.changed(beta=0.0, experiment_name="other")
    other.num_batches = 7
    assert (other.beta, other.num_generations, other.checkpoint_dir) == (
        0.0,
        4,
        "checkpoints/other",
    )
    assert config.beta == 0.08


SECRET = "hf_Zq81kLmN20pQ"


def test_credentials_show_nowhere_not_even_in_an_error():
    names = ("hf_token", "wandb_api_key", "kaggle_key", "kaggle_username")
    values = [{name: value} for name in names for value in (12345678, SECRET)]
    for each in (*values, {"overrides": {"run.hub.token": SECRET}}):
        with pytest.raises(ConfigError) as refused:
            made(**each, beta=-1.0)
        assert not any(each in str(refused.value) for each in ("12345678", SECRET))
    with pytest.raises(ConfigError) as refused:
        cast("Any", TrainingConfig)(SECRET)
    assert SECRET not in str(refused.value)
    config = made(**dict.fromkeys(names, SECRET))
    dumped = (json.dumps(config.model_dump(mode="json")), config.model_dump_json())
    assert not any(SECRET in each for each in (repr(config), str(config), *dumped))
    assert cast("SecretStr", config.hf_token).get_secret_value() == SECRET
    config.overrides["run.hub.token"] = SECRET
    config.overrides["model"] = {"name": SECRET}
    assert SECRET not in repr(config)
    with pytest.raises(ConfigError) as refused:
        config.beta = -1.0
    assert SECRET not in str(refused.value)


class WithKeys(TrainingConfig):
    openai_api_key: str = ""
    use_api_key: bool = True
    judge_url: str = ""
    services: dict[str, Any] = setting({}, "With their keys.")
    listed: list[Any] = setting([], "Likewise.")


PLAIN = "plain-XYZ987"
KEYS = any_values(
    openai_api_key=PLAIN, judge_url=f"https://me:{PLAIN}@host/v1", services={"one": {"api_key": PLAIN, "pages": 3}},
    listed=[{"password": PLAIN}, SECRET], reasoning_start=SECRET,
)  # fmt: skip


def test_credentials_among_the_fields_of_a_subclass_show_nowhere():
    config = WithKeys(**KEYS)
    assert not any(each in repr(config) + str(config) for each in (PLAIN, SECRET))
    assert "services={'one': {'api_key': '…', 'pages': 3}}" in repr(config)
    assert "use_api_key=True" in repr(config)
    assert config.openai_api_key == PLAIN
    for wrong in (
        {"beta": -1.0},
        {"reasoning_end": SECRET},
        {"listed": {"a": SECRET}},
        {"openai_api_key": [PLAIN]},
    ):
        with pytest.raises(ConfigError) as refused:
            WithKeys(**{**KEYS, **any_values(**wrong)})
        assert not any(each in str(refused.value) for each in (PLAIN, SECRET))


class WithNumbers(TrainingConfig):
    pages: int | None = None
    ratio: int | float = 1
    anything: Any = None


def test_numbers_are_taken_as_the_field_has_them():
    for name, value, taken in (
        ("num_batches", np.int64(10), 10), ("num_batches", 10.0, 10), ("num_batches", np.float32(10), 10), ("lora_alpha", 32.0, 32),
        ("learning_rate", np.float32(0.5), 0.5), ("learning_rate", np.array(0.5), 0.5), ("learning_rate", torch.tensor(0.5), 0.5),
        ("beta", np.int64(1), 1.0), ("dataset_max", 9.0, 9), ("devices", np.int64(2), 2), ("use_openrubrics", np.False_, False),
        ("pages", 3.0, 3), ("ratio", 2.0, 2.0), ("anything", 2.0, 2.0), ("report_to", ["wandb"], ("wandb",)), ("dataset", Path("a"), "a"),
    ):  # fmt: skip
        config = WithNumbers(**any_values(**{name: value}))
        set_later = WithNumbers()
        setattr(set_later, name, value)
        assert getattr(config, name) == taken, name
        for each in (config, config.changed(**{name: value}), set_later):
            assert type(getattr(each, name)) is type(taken), name
        with pytest.raises(ConfigError) as refused:
            WithNumbers(**any_values(**{name: value, "epsilon": -1.0}))
        assert str(refused.value) == "WithNumbers: epsilon is -1.0; it must be a number (above 0)."


def test_a_mask_is_no_credential():
    for mask in ("**********", "*", SecretStr("**********")):
        for also in ({}, {"beta": -1.0}):
            with pytest.raises(ConfigError, match="not a credential") as refused:
                made(hf_token=mask, **also)
            assert ("beta" in str(refused.value)) == bool(also)
        config = TrainingConfig()
        with pytest.raises(ConfigError, match="not a credential"):
            config.hf_token = mask
        assert config.hf_token is None
    with pytest.raises(ConfigError, match="not a credential"):
        made(**made(hf_token=SECRET).model_dump(mode="json"))


class WithKey(TrainingConfig):
    service_key: SecretStr | None = None


def test_credentials_are_copied_but_not_pickled():
    config = WithKey(hf_token=SECRET, service_key=SecretStr(SECRET), beta=0.5)
    config.prepared()
    written = pickle.dumps(config)
    assert SECRET.encode() not in written
    read = pickle.loads(written)
    assert (read.hf_token, read.service_key, read.beta) == (None, None, 0.5)
    assert read.model_fields_set == {"beta"}
    with pytest.raises(ConfigError, match="cannot be changed"):
        read.beta = 0.1
    for copied in (config, copy.copy(config), copy.deepcopy(config), config.changed(beta=0.1)):
        assert cast("SecretStr", copied.hf_token).get_secret_value() == SECRET


@settings(max_examples=40)
@given(st.integers(1, 5000), st.sampled_from([0.1, 0.25, 0.5, 0.9, 0.95]))
def test_steps_are_the_floor_of_the_product(batches, share):
    from fractions import Fraction
    from math import floor

    steps = floor(batches * Fraction(str(share)))
    if steps == 0:
        with pytest.raises(ConfigError, match="less than one step"):
            TrainingConfig(num_batches=batches, train_fraction=share)
    else:
        assert TrainingConfig(num_batches=batches, train_fraction=share).max_steps == steps


@pytest.mark.parametrize("rows", [[{"question": "1 + 1?", "answer": "2"}], object()])
def test_rows_in_place_of_a_dataset_name_lead_to_register_dataset(rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"dataset: is .*register_dataset"):
        TrainingConfig(dataset=rows)
    with pytest.raises(UsageError, match="register_dataset"):
        dataset_of(TrainingConfig(use_openrubrics=False))
