"""Files of tensors: what the disk or a damaged file says reaches people as an error that they know."""

import errno
import json

import pytest
import torch

from groupwise.errors import ModelError
from groupwise.models.files import (
    FULL_WEIGHTS,
    INDEX,
    disk_errors,
    read_model_tensors,
    read_shapes,
    read_tensors,
    write_tensors,
)
from groupwise.models.tiny import tiny_model
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
def test_what_cannot_be_read_is_explained(tmp_path, read):
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


def test_an_incomplete_model_is_explained(tmp_path):
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_model_tensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"one\.safetensors"):
        read_model_tensors(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ModelError, match="is damaged"):
        read_model_tensors(tmp_path)
