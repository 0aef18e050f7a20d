"""Where ranks are expected."""

from pathlib import Path

from groupwise import build, machine_layout
from groupwise.config import load_config
from groupwise.ranks import ahead


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
