"""Every loss is held against torch with Gemma in the usual run; with Llama one is, and the others in the soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.tunix import environment

DIVIDED = Path(__file__).parent / "inside" / "divided.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or item.path.parent != Path(__file__).parent:
            continue
        if call.params.get("both") == "llama" and call.params.get("name", "grpo") != "grpo":
            item.add_marker(pytest.mark.soak(suite="tunix"))


@pytest.fixture
def divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU Tunix's layers leave out how they are divided: workers are started so that they do not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{environment.python()}" -P -s "{DIVIDED}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv(environment.VARIABLE, str(python))
