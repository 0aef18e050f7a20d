"""Where things are kept that can be had again."""

from pathlib import Path

from groupwise.cache import cache_folder


def test_the_cache_follows_the_system(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder("models") == Path("/somewhere/groupwise/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder("models") == Path("/home/me/.cache/groupwise/models")
