"""Make the synchronous client of the training server from the asynchronous one: `.venv/bin/python scripts/generate_sync_client.py`.

Words are replaced, and ruff simplifies and formats the result. `--check` writes nothing; its exit status is 1 if the module is not current.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "groupwise/api/client"
SOURCE = FOLDER / "async_training_client.py"
TARGET = FOLDER / "training_client.py"

HEADER = f"# Made from {SOURCE.name} by scripts/generate_sync_client.py. Do not edit.\n"
REPLACEMENTS = (
    (r" After a change, run `python scripts[^.]*\.py`: [^.]*\.", ""),
    (r"await asyncio\.to_thread\(download\.finish\)", "download.finish()"),
    (r"an asynchronous context manager", "a context manager"),
    (r"The asynchronous client", "The synchronous client"),
    (r"Several tasks", "Several threads"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(TrainingClient|Client|BaseTransport|Iterator)\b", r"\1"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\ba(read|close|closing|iter_bytes)\b", r"\1"),
    (r"\bread_response_async\b", "read_response"),
    (r"\basync_direct_transport\b", "direct_transport"),
    (r"\btiming\.sleep\(", "timing.sleep_blocking("),
    (r"(from groupwise\.api\.client\.connection import)", r"{IMPORTS}\1"),
    (r"(    def start\()", r"{METHOD}\1"),
)
"""Patterns in their order, and what stands in their place."""

OWN = {
    "{IMPORTS}": "from groupwise.api.client.async_training_client import AsyncTrainingClient\n"
    "from groupwise.core.errors import UsageError\n",
    "{METHOD}": '''\
    def asynchronous(self) -> AsyncTrainingClient:
        """A client of the same server, with the same key, for coroutines."""
        transport, of = self._transport, self.connection
        if transport is not None and not isinstance(transport, httpx2.AsyncBaseTransport):
            raise UsageError(
                f"The transport {type(transport).__name__} is synchronous only; give AsyncTrainingClient one of its own."
            )
        return AsyncTrainingClient(
            of.url,
            of.key,
            retry_timeout=of.retry_timeout,
            timeout=of.timeout,
            timing=of.timing,
            transport=transport,
        )

''',
}
"""What the synchronous client alone has."""


def generated() -> str:
    """The text of the synchronous module."""
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in REPLACEMENTS:
        text, times = re.subn(pattern, replacement, text)
        if not times:
            raise SystemExit(f"{pattern} is not in {SOURCE} any more: change REPLACEMENTS.")
    for mark, own in OWN.items():
        text = text.replace(mark, own)
    text = HEADER + text
    for verb in ("check --fix --unsafe-fixes --select F401,I,SIM117,UP028", "format"):
        command = [sys.executable, "-m", "ruff", *verb.split(), "--quiet", "--no-cache"]
        command += ["--stdin-filename", str(TARGET), "-"]
        done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
        text = done.stdout
    return text


def main() -> int:
    """Write the module, or check it."""
    if sys.argv[1:] == ["--check"]:
        return int(TARGET.read_text(encoding="utf-8") != generated())
    TARGET.write_text(generated(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
