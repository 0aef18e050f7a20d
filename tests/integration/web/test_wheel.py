"""The dashboard as it is installed: out of a wheel, far from this folder, with its templates, scripts and styles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.web_runs import write_run

ROOT = Path(__file__).parents[3]
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with nothing but what the wheel holds."""
    folder = tmp_path / "wheel"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def address(site: Path, tmp_path: Path) -> Iterator[str]:
    """Of `groupwise web` out of it."""
    write_run(tmp_path / "runs" / "first", 3)
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "groupwise", "web", "--port", "0", "--dir", "runs"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as served:
        try:
            yield _address(served)
        finally:
            served.terminate()
        assert served.wait(20) == 0


def _address(served: subprocess.Popen[str]) -> str:
    assert served.stdout is not None
    said = ""
    for line in served.stdout:
        said += line
        if found := ADDRESS.search(line):
            return found[0]
    pytest.fail(f"it did not begin:\n{said}")


def test_pages_and_all_that_they_load_are_in_the_wheel(address: str, site: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    where = [sys.executable, "-c", "import groupwise.dashboard.app as app; print(app.__file__)"]
    told = subprocess.run(where, env=env, check=True, capture_output=True, text=True, cwd="/")
    assert Path(told.stdout.strip()).is_relative_to(site), "it is this package and no other"
    with httpx2.Client(base_url=address) as client:
        for path in ("/runs", "/runs/first", "/runs/first/rollouts", "/runs/first/rollouts/1"):
            page = client.get(path, headers={"accept": "text/html"})
            assert page.status_code == 200, page.text
        loaded = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
        assert len(loaded) == 8
        for each in loaded:
            assert client.get(each).status_code == 200, each
