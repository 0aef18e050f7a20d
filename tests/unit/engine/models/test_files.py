"""Files of tensors: what the disk or a damaged file says reaches people as an error that they know."""

import asyncio
import errno
import json
from contextlib import AsyncExitStack

import pytest
import torch

from groupwise.core.errors import ModelError
from groupwise.engine.models.files import (
    FULL_WEIGHTS,
    INDEX,
    check_sent,
    disk_errors,
    read_model_tensors,
    read_shapes,
    read_tensors,
    write_tensors,
)
from groupwise.engine.models.tiny import tiny_model
from groupwise.server.engine.engine_protocol import OpenParts
from groupwise.server.engine.hosted_parts import EngineParts
from tests.disks import small_disk


def test_a_full_disk_is_an_os_error(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match="No space left") as failed:
            write_tensors({"a": torch.zeros(100_000)}, disk / "a.safetensors")
        assert failed.value.errno == errno.ENOSPC
        assert failed.value.filename == str(disk / "a.safetensors")
        with pytest.raises(OSError, match="No space left"), disk_errors(disk):
            tiny_model(hidden_size=128).save_pretrained(disk)


@pytest.mark.parametrize("read", [read_tensors, read_shapes])
def test_missing_and_damaged_files_are_reported(tmp_path, read):
    with pytest.raises(ModelError, match="no x in"):
        read(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"{" * 100)
    with pytest.raises(ModelError, match="x is damaged"):
        read(tmp_path / "x")


def test_a_model_may_stand_in_several_files(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / INDEX).is_file()
    assert not (tmp_path / FULL_WEIGHTS).exists()
    found = read_model_tensors(tmp_path)
    wanted = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    check_sent(tmp_path)


@pytest.mark.parametrize(("file", "content"), [
    (INDEX, {"weight_map": {"a": "../secret.safetensors"}}), (INDEX, {"weight_map": {"a": ".."}}),
    (INDEX, {"weight_map": {"a": "/secret.safetensors"}}), (INDEX, {"weight_map": {"a": "sub\\\\secret"}}),
    ("config.json", {"auto_map": {"AutoModel": "code.Model"}}),
    ("config.json", {"text_config": [{"_attn_implementation": "owner/kernels"}]}),
    ("config.json", {"attn_implementation": {"": "owner/kernels"}}), ("config.json", {"use_timm_backbone": True}),
    ("config.json", {"_attn_implementation": "flash_attention_2"}), ("config.json", {"model_type": "maskformer"}),
    ("config.json", {"experts_implementation": {"a": "deepgemm"}}), ("config.json", {"text_config": {"backbone": "owner/name"}}),
    ("adapter_config.json", {"auto_map": "x"}), ("tokenizer_config.json", {"vocab_file": "/etc/passwd"}),
])  # fmt: skip
def test_uploaded_configs_with_code_or_outside_files_are_refused(tmp_path, file, content):
    (tmp_path / "sent").mkdir()
    write_tensors({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "sent" / file).write_text(json.dumps(content))
    order = OpenParts(
        "serving", {"model": {"name": str(tmp_path / "sent")}}, "r", str(tmp_path), 8, base="b"
    )
    with pytest.raises(ModelError, match=r"expected names of files|what was sent has"):
        asyncio.run(EngineParts(AsyncExitStack()).open(order))
    with pytest.raises(ModelError, match=r"expected names of files|what was sent has"):
        asyncio.run(EngineParts(AsyncExitStack()).plan("serving", {}, 8, str(tmp_path / "sent")))
    if file == INDEX:
        with pytest.raises(ModelError, match="expected names of files"):
            read_model_tensors(tmp_path / "sent")


def test_an_incomplete_model_is_explained(tmp_path):
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_model_tensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"one\.safetensors"):
        read_model_tensors(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ModelError, match="is damaged"):
        read_model_tensors(tmp_path)
