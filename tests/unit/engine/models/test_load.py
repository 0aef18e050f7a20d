"""Names of models: what they mean, and the messages if nothing has that name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import GenerationConfig, Qwen2VLConfig, T5Config

from groupwise.core import hub_errors
from groupwise.core.errors import ModelError
from groupwise.engine.models import tokenizer as tokenizers
from groupwise.engine.models.bundled import BUNDLED
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.files import FULL_WEIGHTS
from groupwise.engine.models.load import load_model, meta_model, stop_token_ids
from groupwise.engine.models.machine import choose_dtype
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer, write_tiny_model
from groupwise.engine.models.tokenizer import load_tokenizer, resolve

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    write_tiny_model(path)
    return path


def message(call, *arguments) -> str:
    with pytest.raises(ModelError) as caught:
        call(*arguments)
    return str(caught.value)


def named(name, **more) -> ModelConfig:
    return ModelConfig(name=str(name), **more)


# What a name means


def test_an_alias_without_its_package_is_its_hub_id(monkeypatch):
    monkeypatch.setattr(tokenizers, "bundled_folder", lambda name: None)
    found = resolve(named("smollm2-135m-instruct", revision="v1"))
    assert found.location == BUNDLED["smollm2-135m-instruct"].hub_id
    monkeypatch.setattr(hub_errors, "is_reachable", lambda: True)
    assert found.arguments() == {"revision": "v1", "local_files_only": False}
    monkeypatch.setattr(hub_errors, "is_reachable", lambda: False)
    assert found.arguments() == {"revision": "v1", "local_files_only": True}, "no waiting offline"


def test_a_model_folder_is_used_in_place(folder, monkeypatch):
    assert resolve(named(folder)).location == str(folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve(named("~/model")).location == str(folder)
    monkeypatch.chdir(folder.parent)
    assert resolve(named("model")).local


# What is said when nothing is there


def test_a_hub_id_without_the_hub(monkeypatch):
    for reads in (load_tokenizer, lambda config: load_model(config, "float32")):
        said = message(reads, named("nobody/nothing-1b", revision="v2"))
        told = ("model.name 'nobody/nothing-1b'", str(Path.cwd()), "'v2'", "smollm2-135m-instruct")
        assert all(each in said for each in told)
    assert "Did you mean tiny?" in message(load_tokenizer, named("tinny"))
    hub_id = BUNDLED["smollm2-135m-instruct"].hub_id
    assert "135m-instruct is this model" in message(load_tokenizer, named(hub_id, revision="v2"))
    monkeypatch.setattr(tokenizers, "bundled_folder", lambda name: None)
    said = message(load_tokenizer, named("smollm2-135m-instruct"))
    assert "fetch-model smollm2-135m-instruct" in said


def with_projection(path: Path, **given: torch.Tensor) -> bytes:
    """The file with another tensor in place of one, or with none."""
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != Q_PROJ}
    return save({**tensors, **given}, {"format": "pt"})


@pytest.mark.parametrize(
    ("file", "damaged", "told"),
    [
        (FULL_WEIGHTS, lambda path: None, ""),
        (FULL_WEIGHTS, lambda path: path.read_bytes()[: path.stat().st_size // 2], ""),
        (FULL_WEIGHTS, with_projection, Q_PROJ),
        (FULL_WEIGHTS, lambda path: with_projection(path, **{Q_PROJ: torch.zeros(3, 3)}),
         f"{Q_PROJ} (stored as (3, 3), the config says (16, 16))"),
        ("config.json", lambda path: b'{"model_type": "nonesuch"}', ""),
    ],
)  # fmt: skip
def test_a_damaged_model_is_refused_and_no_weight_is_initialised_at_random(
    folder, file, damaged, told
):
    content = damaged(folder / file)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    said = message(load_model, named(folder), "float32")
    assert told in said
    assert told or str(folder) in said


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Qwen2VLConfig(), "qwen2_vl, whose inputs include images"),
        (T5Config(), "t5, which transformers"),
    ],
)
def test_models_of_images_and_encoder_decoders_are_refused(tmp_path, config, told):
    config.save_pretrained(tmp_path)
    for load in (load_model, meta_model):
        arguments = ("float32",) if load is load_model else ()
        assert told in message(load, ModelConfig(name=str(tmp_path)), *arguments)


def test_a_chat_template_file_replaces_the_tokenizers(folder, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert load_tokenizer(named(folder, chat_template=str(template))).chat_template == (
        "{{ messages[0]['content'] }}"
    )
    assert "no.jinja" in message(load_tokenizer, named(folder, chat_template="no.jinja"))


# What is loaded


def test_a_model_is_loaded_frozen_and_in_the_number_format_asked_for(folder):
    model = load_model(named(folder), "bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_the_number_format_suits_what_is_trained():
    assert choose_dtype(named("x"), full=True, device="cpu") == "float32"
    assert choose_dtype(named("x", dtype="float32"), full=False, device="cpu") == "float32"
    assert choose_dtype(named("x", dtype="bfloat16"), full=False, device="cpu") == "bfloat16"
    assert choose_dtype(named("x", dtype="bfloat16"), full=True, device="cpu") == "bfloat16"
    assert choose_dtype(named("x", dtype="tf32"), full=False, device="cpu") == "float32"


def test_stop_tokens_of_all_three_owners_count():
    model: Any = tiny_model()
    tokenizer = tiny_tokenizer()
    model.config.eos_token_id = 7
    model.generation_config = GenerationConfig(eos_token_id=[9, 8])
    assert stop_token_ids(model, tokenizer) == (1, 7, 8, 9)
    model.config.eos_token_id = None
    model.generation_config = None
    assert stop_token_ids(model, tokenizer) == (1,)
