"""Programs and tests of tinker-cookbook, as its package has them, in an environment of its own (`scripts/real_environment.py`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from typing import Any

from tests.integration.cookbook.workplace import MODEL
from tests.processes import wait_until

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = run_path(str(ROOT / "scripts/real_environment.py"))
PYTHON: Path = ENVIRONMENTS["where"]("cookbook") / "bin/python"
SOURCE: Path = ENVIRONMENTS["source_of_cookbook"]()
RELEASE: str = ENVIRONMENTS["RELEASES"]["cookbook"]
TIMEOUT_S = 900.0


def make_environment(folder: Path, url: str) -> dict[str, str]:
    """Variables for a process in this workplace that trains against the server at `url`."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local",
        "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run_own_tests(folder: Path, url: str, file: str) -> None:
    """Run a file of the cookbook's `tests/recipes` by pytest. It starts recipes with `uv run python`; here that is its environment's
    Python.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    uv = programs / "uv"
    uv.write_text(f'#!/bin/sh\nshift 2\nexec {PYTHON} "$@"\n')
    uv.chmod(0o755)
    variables = make_environment(folder, url)
    variables["PATH"] = f"{programs}{os.pathsep}{variables['PATH']}"
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            SOURCE / "tests/recipes" / file,
        ],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{file}:\n{result.stdout[-6000:]}\n{result.stderr[-2000:]}"
    assert "skipped" not in result.stdout, result.stdout[-2000:]


class Program:
    """One recipe with its folder of logs, in which it finds where it was when it is begun again."""

    def __init__(
        self,
        folder: Path,
        url: str,
        recipe: str,
        *words: str,
        name: str = "",
        model_option: str = "model_name",
        logs: Path | None = None,
    ) -> None:
        """`recipe` is a module below `tinker_cookbook.recipes`, `words` its options, `folder` a workplace; the server is at `url`.

        `logs`: where it writes, if that is none of its options.
        """
        self.logs = logs or folder / "logs" / (name or recipe)
        self.output = folder / f"{name or recipe}.txt"
        self._folder = folder
        usual = [f"{model_option}={MODEL}", *([] if logs else [f"log_path={self.logs}"])]
        self._command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", *usual, *words]
        self._environment = make_environment(folder, url)
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def finish(self) -> None:
        """Wait for its end, which must be a good one."""
        assert self._process is not None
        code = self._process.wait(TIMEOUT_S)
        assert code == 0, f"{' '.join(self._command)} ended with {code}:\n{self.said()}"

    def run(self) -> Program:
        """From its beginning to its end."""
        with self.started():
            self.finish()
        return self

    @contextmanager
    def started(self) -> Iterator[None]:
        """While it runs; it is gone afterwards."""
        self.begin()
        try:
            yield
        finally:
            self.kill()

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)

    def wait_for_step(self, step: int) -> None:
        """Until it has written the metrics of a step."""
        process = self._process
        assert process is not None

        def is_there() -> bool:
            reached = any(row.get("step", -1) >= step for row in self.rows())
            assert reached or process.poll() is None, self.said()
            return reached

        wait_until(is_there, f"step {step}", timeout_s=TIMEOUT_S, details=self.said)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of its steps, in order. An unfinished last line is left out."""
        return _lines(self.logs / "metrics.jsonl")

    def metric(self, name: str) -> list[float]:
        """One number of each step that has it."""
        values = [float(row[name]) for row in self.rows() if name in row]
        known = sorted({key for row in self.rows() for key in row})
        assert values, f"{name} is not among {', '.join(known)}\n{self.said()}"
        return values

    def checkpoints(self) -> list[Mapping[str, Any]]:
        """What it noted about its checkpoints, in order."""
        return _lines(self.logs / "checkpoints.jsonl")

    def said(self) -> str:
        """The end of its output."""
        return self.output.read_text(errors="replace")[-6000:]


def _lines(path: Path) -> list[Any]:
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
