"""Every loss is held against torch with Gemma in the usual run; with Llama one is, and the others in the soak."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or item.path.parent != Path(__file__).parent:
            continue
        if call.params.get("both") == "llama" and call.params.get("name", "grpo") != "grpo":
            item.add_marker(pytest.mark.soak)
