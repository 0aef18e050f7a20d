"""Which weights a name referred to."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.engine.models import files
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.files import FULL_WEIGHTS
from groupwise.engine.models.identity import identity
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import WEIGHTS, new_lora_config
from groupwise.engine.models.tiny import tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def named(folder, **more) -> str:
    return identity(ModelConfig(name=str(folder), **more))


def test_the_same_files_are_the_same_wherever_they_stand(folder, tmp_path):
    first = named(folder)
    assert len(first) == 16
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved" / "optimiser.safetensors").write_bytes(b"no part of it")
    assert named(tmp_path / "moved") == first
    assert identity(ModelConfig(name="tiny")) == identity(ModelConfig(name="tiny"))


def test_weights_and_config_count_but_not_the_version_that_wrote_it(folder):
    first = named(folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "transformers_version": "9.9"}))
    assert named(folder) == first
    (folder / "config.json").write_text(json.dumps({**described, "rope_theta": 7.0}))
    assert named(folder) != first
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / FULL_WEIGHTS)
    tensors["model.norm.weight"][-1] += 1e-3
    save_file(tensors, folder / FULL_WEIGHTS, metadata={"format": "pt"})
    assert named(folder) != first


def test_a_large_file_is_sampled_from_its_beginning_to_its_end(folder, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 100)
    monkeypatch.setattr(files, "BLOCK", 64)
    first = named(folder)
    for place in (30, -1):  # the list of tensors; the last number
        whole = bytearray((folder / FULL_WEIGHTS).read_bytes())
        whole[place] ^= 1
        (folder / FULL_WEIGHTS).write_bytes(whole)
        assert named(folder) != first
        whole[place] ^= 1
        (folder / FULL_WEIGHTS).write_bytes(whole)
    assert named(folder) == first


def test_the_starting_adapter_counts(folder, tmp_path):
    model = AdaptedModel(tiny_model(), new_lora_config(LoraConfig(r=2, alpha=2)))
    model.add("policy", trainable=True, seed=0)
    model.save("policy", tmp_path)
    first = named(folder, adapter=str(tmp_path))
    assert first != named(folder)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({key: tensor + torch.ones(()) for key, tensor in tensors.items()}, tmp_path / WEIGHTS)
    assert named(folder, adapter=str(tmp_path)) != first


def test_on_the_hub_it_is_the_commit(tmp_path, monkeypatch):
    commits = {None: "aaa", "main": "aaa", "v2": "bbb"}
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda repo, file, revision, **_: tmp_path / commits[revision] / file,
    )
    first = named("org/model")
    assert named("org/model", revision="main") == first
    assert named("org/model", revision="v2") != first
    assert named("org/other") != first
