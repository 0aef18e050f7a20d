"""The adapter that a run starts from: everything wrong with it is found before any weights are loaded."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from groupwise.core.errors import ModelError
from groupwise.engine.models import adapters
from groupwise.engine.models.adapters import (
    adapter_commit,
    adapter_folder,
    check_adapter,
    leave_out_pictures,
    meta_adapter,
    starting_config,
    warn_of_other_base,
)
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import CONFIG, WEIGHTS, new_lora_config, read_lora_config
from groupwise.engine.models.tiny import tiny_model
from groupwise.engine.models.tokenizer import resolve
from tests.tunix_models import model_of

TINY = ModelConfig(name="tiny")


@pytest.fixture
def adapter(tmp_path):
    """A folder with an adapter of the tiny model: rank 4, alpha 8, dropout 0.05, on two kinds of layers."""
    settings = LoraConfig(r=4, alpha=8, dropout=0.05, target_modules=("q_proj", "v_proj"))
    model = AdaptedModel(tiny_model(), new_lora_config(settings))
    model.add("policy", trainable=True, seed=0)
    model.save("policy", tmp_path)
    return tmp_path


@pytest.fixture
def no_loading(monkeypatch):
    """Weights of a model must not be read."""

    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)


def starting(adapter, **more) -> ModelConfig:
    return ModelConfig(name="tiny", adapter=str(adapter), **more)


@pytest.mark.parametrize(
    "given",
    [{}, {"r": 4, "alpha": 8, "dropout": 0.05}, {"target_modules": ("self_attn.v_proj", "q_proj")}],
)
def test_lora_settings_that_match_the_adapter_are_accepted(adapter, given, no_loading):
    check_adapter(starting(adapter), LoraConfig(**given))
    config = starting_config(starting(adapter), LoraConfig(**given))
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.05)


@pytest.mark.parametrize(("given", "told"), [
    ({"r": 16}, r"^--init-from .*lora\.r is 16"), ({"alpha": 4}, r"lora\.alpha is 4"), ({"dropout": 0.0}, r"lora\.dropout is 0\.0"),
    ({"target_modules": ("q_proj",)}, r"lora\.target_modules .*v_proj"),
    ({"target_modules": "all-linear"}, r"lora\.target_modules names 10 layers"),
])  # fmt: skip
def test_lora_settings_that_contradict_the_adapter_are_refused(adapter, given, told, no_loading):
    with pytest.raises(ModelError, match=told):
        check_adapter(starting(adapter), LoraConfig(**given), "--init-from")


def test_a_missing_damaged_or_excluded_adapter_is_refused(adapter, no_loading):
    check_adapter(TINY, LoraConfig())
    assert adapter_folder(TINY) is None
    with pytest.raises(ModelError, match="/nope"):
        check_adapter(starting("/nope"), LoraConfig())
    with pytest.raises(ModelError, match="lora is null"):
        check_adapter(starting(adapter), None)
    (adapter / CONFIG).write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        check_adapter(starting(adapter), LoraConfig())


def test_tensors_are_held_against_the_model(adapter, no_loading):
    tensors = load_file(adapter / WEIGHTS)
    first, *_ = sorted(tensors)
    save_file({**tensors, first: torch.zeros(4, 5)}, adapter / WEIGHTS)
    with pytest.raises(ModelError, match=rf"{first}: \(4, 5\) instead of \(4, 16\)"):
        check_adapter(starting(adapter), LoraConfig())
    del tensors[first]
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(ModelError, match=r"missing \(1\)"):
        check_adapter(starting(adapter), LoraConfig())
    (adapter / WEIGHTS).write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="is damaged"):
        check_adapter(starting(adapter), LoraConfig())


# model.revision


FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def hub(adapter, tmp_path_factory, monkeypatch) -> Path:
    """A cache of the hub with two commits of one adapter: `main` is the second, `v1` the first."""
    cache = tmp_path_factory.mktemp("hub")
    stored = cache / "models--someone--adapter"
    for commit in (FIRST, SECOND):
        shutil.copytree(adapter, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs/main").write_text(SECOND)
    (stored / "refs/v1").write_text(FIRST)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    adapters._fetched_once.cache_clear()
    return stored


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, SECOND), ("main", SECOND), ("v1", FIRST), (FIRST, FIRST)]
)
def test_an_adapter_may_come_from_the_hub_at_a_revision(hub, revision, commit):
    model = starting("someone/adapter", adapter_revision=revision)
    assert adapter_folder(model) == hub / "snapshots" / commit
    assert adapter_commit(model) == commit
    check_adapter(model, LoraConfig())


def test_a_branch_that_moves_meanwhile_stays_where_it_was_found(hub):
    before = adapter_folder(starting("someone/adapter"))
    (hub / "refs/main").write_text(FIRST)
    assert adapter_folder(starting("someone/adapter")) == before


def test_an_adapter_of_the_text_alone_leaves_pictures_out(tmp_path):
    model, settings = ModelConfig(name=str(model_of("gemma3-pictures"))), LoraConfig()
    config = starting_config(model, settings)
    leave_out_pictures(model, config)
    adapted = meta_adapter(model, config)
    assert adapted.layers
    assert all(".language_model.layers." in path for path in adapted.layers)
    (tmp_path / CONFIG).write_text(json.dumps(adapted.configs["hollow"].to_json()))
    save_file({k: torch.zeros(v.shape) for k, v in adapted.parameters("hollow").items()}, tmp_path / WEIGHTS)  # fmt: skip
    check_adapter(model.model_copy(update={"adapter": str(tmp_path)}), settings)


@pytest.mark.parametrize(("named", "model", "warned"), [
    ("org/other", "tiny", True), ("tiny", "tiny", False), (None, "tiny", False),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct", False),
])  # fmt: skip
def test_an_adapter_of_another_base_is_warned_about(adapter, caplog, named, model, warned):
    changed(adapter, base_model_name_or_path=named)
    resolve(ModelConfig(name=model))  # making a bundled model ready is told of, too
    caplog.clear()
    with caplog.at_level(logging.WARNING, "groupwise"):
        warn_of_other_base(read_lora_config(adapter), ModelConfig(name=model), adapter)
    assert bool(caplog.records) == warned
    assert not warned or "names org/other" in caplog.text


def changed(adapter, **keys) -> None:
    described = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**described, **keys}))
