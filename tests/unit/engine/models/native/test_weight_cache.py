"""What is computed from a model's files is written once and mapped afterwards, equal to the bit; a file that is not whole is not used."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from groupwise.core.errors import ConfigError
from groupwise.engine.models import load
from groupwise.engine.models.config import Dtype, ModelConfig
from groupwise.engine.models.native import packed as packed_module
from groupwise.engine.models.native import weight_cache
from groupwise.engine.models.native.causal_lm import CausalLM
from groupwise.engine.models.native.forward import plain_logits
from groupwise.engine.models.native.weights import NativeModel, native_model, write_weight_caches
from tests.meanwhile import right_before
from tests.unit.engine.models.native.families import family

IDS = torch.arange(3, 40)


@pytest.fixture(autouse=True)
def small_models_are_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_cache, "WORTH", 0)
    monkeypatch.setattr(weight_cache, "SPARE", 0)


@pytest.fixture
def folder(tmp_path) -> Path:
    return saved(tmp_path / "model")


def saved(folder: Path, name: str = "qwen2") -> Path:
    family(name).save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: Dtype = "bfloat16") -> CausalLM:
    model = load.load_base(ModelConfig(name=str(folder)), dtype)
    assert isinstance(model, CausalLM)
    return model


def packed(model: CausalLM, *, int8: bool = False) -> NativeModel:
    native = native_model(model)
    assert native is not None
    native.pack(int8=int8)
    return native


def cached(folder: Path, dtype: Dtype = "bfloat16", *, int8: bool = False) -> NativeModel:
    """The native model after its cache was written."""
    model = loaded(folder, dtype)
    native = packed(model, int8=int8)
    write_weight_caches()
    return native


def mapped(folder: Path, dtype: Dtype = "bfloat16") -> CausalLM:
    """The model from its cache; reading its files would fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "read_model_tensors", lambda folder: pytest.fail("files were read"))
        return loaded(folder, dtype)


def files() -> list[Path]:
    return sorted(weight_cache.weights_folder().glob("*"))


def assert_equal(one: NativeModel, other: NativeModel) -> None:
    def numbers(native: NativeModel) -> list[Tensor]:
        tiles = [each for linear in native.products for each in linear.packed_tensors.values()]
        weights = [linear.weight_OI for linear in native.products]
        return [*weights, *tiles, plain_logits(native, IDS), torch.tensor(native.shift)]

    for ours, theirs in zip(numbers(one), numbers(other), strict=True):
        assert ours.dtype == theirs.dtype
        # Bits, not numbers: some constants are whole numbers in float32, which may be those of NaN.
        assert torch.equal(*(each.flatten().view(torch.uint8) for each in (ours, theirs)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3-biases", "llama-mha-tied"])
def test_mapped_weights_are_the_computed_ones(name, dtype, tmp_path):
    folder = saved(tmp_path / "model", name)
    model = loaded(folder, dtype)
    computed = packed(model)
    write_weight_caches()
    found = mapped(folder, dtype)
    assert_equal(computed, packed(found))
    for (parameter, ours), theirs in zip(model.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(ours, theirs), parameter


@pytest.mark.parametrize("name", ["qwen2", "qwen3-biases"])
def test_mapped_whole_numbers_are_the_computed_ones(name, tmp_path, monkeypatch):
    """They and the decoding order of the head are a file of their own, beside that of a run without."""
    folder = saved(tmp_path / "model", name)
    computed = cached(folder, int8=True)
    cached(folder)
    assert [path.stem.rpartition("-")[2] for path in files()] == ["decoding", "int8", "matrices"]
    monkeypatch.setattr(packed_module, "quantized", lambda weight: pytest.fail("computed again"))
    found = packed(mapped(folder), int8=True)
    assert_equal(computed, found)
    for ours, theirs in zip(computed.products, found.products, strict=True):
        x = torch.randn(3, ours.weight_OI.shape[1], generator=torch.Generator().manual_seed(1))
        x = x.to(ours.weight_OI.dtype)
        assert torch.equal(ours.few(x), theirs.few(x))


def test_writes_to_mapped_weights_stay_private_and_take_effect(folder):
    cached(folder)
    before = [path.read_bytes() for path in files()]
    model = mapped(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    ours = packed(model)
    write_weight_caches()
    assert [path.read_bytes() for path in files()] == before
    model.weight_cache = None
    assert_equal(ours, packed_anew(model))


def packed_anew(model: CausalLM) -> NativeModel:
    native = NativeModel(model, check=False)
    native.pack()
    return native


def test_released_weights_are_mapped_again_when_they_are_read(folder):
    computed = cached(folder)
    native = packed(mapped(folder))
    native.release_decoding()
    assert_equal(computed, native)


@pytest.mark.parametrize("damage", ["cut", "bit", "header", "empty", "foreign"])
@pytest.mark.parametrize("kind", ["matrices", "decoding"])
def test_a_damaged_file_is_made_again(kind, damage, folder, caplog):
    computed = cached(folder)
    (path,) = (path for path in files() if path.stem.endswith(kind))
    whole = path.read_bytes()
    bit = bytearray(whole)
    bit[-100] ^= 1
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "bit": bytes(bit),
            "header": b"\xff" * 8 + whole[8:],
            "empty": b"",
            "foreign": b"weights of something else" * 1000,
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert_equal(computed, cached(folder))
    assert ("is damaged" in caplog.text) == (damage != "empty")
    assert path.read_bytes() == whole


def test_another_format_and_changed_files_have_files_of_their_own(folder):
    cached(folder, "bfloat16")
    assert_equal(cached(folder, "float32"), packed_anew(loaded(folder, "float32")))
    assert len(files()) == 4
    model = family("qwen2")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)
    assert_equal(cached(folder), packed_anew(loaded(folder)))
    assert len(files()) == 6


def test_the_least_recently_used_file_is_removed(tmp_path, monkeypatch):
    for number in range(2):
        cached(saved(tmp_path / f"model-{number}"))
    for path in files():
        os.utime(path, (0, 1000 if "model-0" in path.name else 2000))
    mapped(tmp_path / "model-0")  # its matrices are now the most recently used
    bound = sum(path.stat().st_size for path in files())
    monkeypatch.setenv(weight_cache.VARIABLE, str(bound / 2**30))
    cached(saved(tmp_path / "model-2"))
    left = {(path.name[: len("model-0")], path.stem.rpartition("-")[2]) for path in files()}
    recent = {("model-0", "matrices"), ("model-2", "matrices"), ("model-2", "decoding")}
    assert left >= recent
    assert ("model-0", "decoding") not in left
    assert sum(path.stat().st_size for path in files()) <= bound


def test_unfinished_files_of_dead_writers_are_removed(folder):
    cached(folder)
    abandoned = weight_cache.weights_folder() / ".building-weights-1-1"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    cached(folder, "float32")
    assert not abandoned.exists()


def test_without_room_or_a_folder_a_run_only_takes_longer(folder, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(weight_cache, "SPARE", 1 << 60)
        computed = cached(folder)
        monkeypatch.setattr(weight_cache, "SPARE", 0)
        monkeypatch.setenv(weight_cache.VARIABLE, "0.000001")
        cached(folder)
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        monkeypatch.delenv(weight_cache.VARIABLE)
        assert_equal(computed, cached(folder))
    for reason in ("stay free", f"{weight_cache.VARIABLE} allows 9.99309e-07", "Not a directory"):
        assert any("cannot be cached" in line and reason in line for line in caplog.messages)
    assert not any((tmp_path / "cache").rglob("*.*"))


def test_the_variable_turns_the_cache_off_and_refuses_what_is_no_size(folder, monkeypatch):
    monkeypatch.setenv(weight_cache.VARIABLE, "0")
    cached(folder)
    assert files() == []
    for given in ("lots", "-1", "nan"):
        monkeypatch.setenv(weight_cache.VARIABLE, given)
        with pytest.raises(ConfigError, match="GiB"):
            loaded(folder)


def test_clear_deletes_all_files(folder):
    cached(folder)
    size = sum(path.stat().st_size for path in files())
    assert weight_cache.clear() == size
    assert files() == []


@pytest.mark.parametrize("name", ["clear", "_make_room"])
def test_files_that_another_run_removes_meanwhile_are_left_out(name, monkeypatch):
    folder = weight_cache.weights_folder()
    folder.mkdir(parents=True)
    gone, other = folder / ".building-a-1-1", folder / "b.weights"
    gone.touch()
    other.write_bytes(b"1234")
    right_before(monkeypatch, Path, "stat", gone.unlink, lambda path: path == gone)
    if name == "clear":
        assert weight_cache.clear() == 4
    else:
        weight_cache._make_room(folder, 1)
        assert other.exists()
    assert not gone.exists()
