"""Where ranks are expected, and what a sampler is told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from groupwise import build, machine_layout
from groupwise.config import load_config
from groupwise.ranks import ahead
from groupwise.sampler.torch_sampler import DecodeLayout


def test_a_zygote_is_begun_early_only_where_it_will_be_needed(monkeypatch):
    begun = []
    monkeypatch.setattr(ahead, "begin", lambda: begun.append(True))
    monkeypatch.setattr(ahead, "give_up", begun.clear)
    monkeypatch.setattr(machine_layout, "_cores", lambda: 2)

    def expected(**sections) -> bool:
        with build.expected_ranks(load_config(sections).config):
            found = bool(begun)
        assert not begun
        return found

    large = {"name": "some/model"}
    assert expected(model=large) == (not Path("/dev/nvidiactl").exists())
    assert not expected(model={"name": "tiny"})
    assert not expected(model=large, run={"processes": 1})
    assert not expected(model=large, run={"threads": 1})
    assert not expected(model=large, lora=None)


def test_a_sampler_is_told_of_its_engine(monkeypatch):
    def sampler(*given: Any, **more: Any) -> Any:
        return given, more

    monkeypatch.setattr("groupwise.sampler.torch_sampler.TorchSampler", sampler)
    for eager in (False, True):
        config = load_config(
            {"model": {"name": "tiny"}, "sampler": {"enforce_eager": eager}}
        ).config
        layout: Any = SimpleNamespace(slots=16, key_length=64)
        made: Any = build._sampler(config, layout, "weights", "tokenizer")
        given, more = made
        assert given == ("weights", "tokenizer", DecodeLayout(16, 64))
        assert more == {"enforce_eager": eager}
