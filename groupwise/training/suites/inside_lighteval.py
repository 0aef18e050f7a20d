"""A file that lighteval loads as custom tasks, in lighteval's own environment: it may only use the standard library.

It adds no task. It records the installed releases, which lighteval does not report, and removes the tasks' own token limits: lighteval
would send them in addition to the requested limit (`max_tokens` and `max_completion_tokens`), and some services use the wrong one or
reject both.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata

VARIABLE = "GROUPWISE_SUITE_RELEASES"
"""The environment variable with the path of the file to write."""
PACKAGES = ("lighteval", "litellm")
LIMITED = ("math_500", "gpqa", "lcb.main")
"""Modules whose tasks have their own token limit."""

TASKS_TABLE: list[object] = []


def _prepare(file: str) -> None:
    for module in LIMITED:
        loaded = sys.modules.get(f"lighteval.tasks.tasks.{module}")
        for task in getattr(loaded, "TASKS_TABLE", ()):
            task.generation_size = None
    with open(file, "w", encoding="utf-8") as stream:
        json.dump({name: metadata.version(name) for name in PACKAGES}, stream)


if VARIABLE in os.environ:
    _prepare(os.environ[VARIABLE])
