"""A machine's side of `vm prepare` for tests: a working folder, and a fast program in place of Python, venv and pip."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from groupwise.jobs.fleet.machines import builder

NAME = "0123456789abcdef0123"
PYTHON = """\
#!/bin/sh
echo "$*" >> "{folder}/calls"
. "{folder}/behaviour"
case "$*" in
  "-I -c import sys;"*) echo "3.12.1 False" ;;
  *"import json, sys, importlib"*) echo '{{"groupwise": "1.0"}}' ;;
  "-m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *"-m pip install"*) echo "installing with $PIP_INDEX_URL in $TMPDIR" ;;
esac
"""


class BuildFolder:
    """A working folder with its order, and a Python that does what a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environments = folder / "environments"
        self.work = folder / "work"
        self.work.mkdir()
        self._begun: list[subprocess.Popen[str]] = []
        self.python = folder / "python3.12"
        self.python.write_text(PYTHON.format(folder=folder))
        self.python.chmod(0o755)
        self.behaves("")
        (self.work / "lock.txt").write_text("six==1.17.0\n")

    @property
    def place(self) -> Path:
        return self.environments / NAME

    def behaves(self, script: str) -> None:
        (self.folder / "behaviour").write_text(script)

    def order(self, **more: Any) -> dict[str, Any]:
        return {
            "folder": str(self.environments),
            "name": NAME,
            "pythons": [str(self.python)],
            "least": [3, 11],
            "groupwise": "groupwise-1.0-py3-none-any.whl",
            "wheel_sha256": "abc",
            "pins": 1,
            **more,
        }

    def begin(self, with_python: str = sys.executable, **more: Any) -> subprocess.Popen[str]:
        (self.work / "order.json").write_text(json.dumps(self.order(**more)))
        process = subprocess.Popen(
            [with_python, "-I", builder.__file__],
            cwd=self.work,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "SECRET_URL": "hush-hush"},
        )
        self._begun.append(process)
        return process

    def close(self) -> None:
        """Nothing that it has begun is left, whatever became of the test."""
        for process in self._begun:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def build(self, **more: Any) -> dict[str, Any]:
        """Its result, with the log as `log`."""
        (self.work / "result.json").unlink(missing_ok=True)
        process = self.begin(**more)
        log, _ = process.communicate(timeout=60)
        said = json.loads((self.work / "result.json").read_text())
        assert process.returncode == (1 if "problem" in said else 0)
        return said | {"log": log}

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()
