"""The message for a package of verifiers that was written for another of its interfaces; `integration/environments` plays in real ones."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from groupwise.tasks.external import kinds


def test_an_environment_of_the_older_interface_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(kinds.__file__).with_name("bridges")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    (tmp_path / "old_words.py").write_text("import missing\ndef load_environment(n=1): ...")
    (tmp_path / "verifiers-0.4.0.dist-info").mkdir()
    (tmp_path / "verifiers-0.4.0.dist-info/METADATA").write_text("Name: verifiers\nVersion: 0.4.0")
    verifiers_bridge = importlib.import_module("verifiers_bridge")

    with pytest.raises(
        ImportError, match=r"old-words has load_environment.*0\.4\.0.*verifiers<0\.2"
    ):
        verifiers_bridge.load("old-words", {})
