"""What the bundle for a GPU machine without a package index contains, and that `make gpu` then uses no index. uv and pip are replaced."""

import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import gpu_bundle, vllm_bundle

ROOT = Path(__file__).resolve().parents[2]
RESOLVED = "pydantic==2.14.3\ntorch==2.13.0\nnumpy==2.5.5\nnvidia-cublas==13.1\ntorch-like==1.0\n"


@pytest.mark.parametrize(("wheel_mb", "code"), [(1, 0), (41, 1)])
def test_it_holds_what_torch_does_not_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, wheel_mb: int, code: int
) -> None:
    asked: list[Any] = []

    def run(command: list[str], input: str = "", **_: Any) -> SimpleNamespace:
        asked.append((command, input))
        if "download" in command:
            with (tmp_path / "build" / "pydantic.whl").open("wb") as wheel:
                wheel.truncate(wheel_mb * 1_000_000)
        return SimpleNamespace(stdout=RESOLVED)

    monkeypatch.setattr(gpu_bundle, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_bundle, "PYPROJECT", ROOT / "pyproject.toml")
    monkeypatch.setattr(gpu_bundle, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_bundle.main(["--python", "3.13"]) == code
    (_, wanted), (download, _) = asked
    names = {line.partition(">")[0] for line in wanted.split("\n")}
    assert {"transformers", "peft", "pydantic", "pytest", "hypothesis"} <= names
    assert not {"datasets", "pyarrow", "numba", "ruff"} & names
    assert download[-2:] == ["pydantic==2.14.3", "torch-like==1.0"]
    assert "3.13" in download
    command = "make gpu WHEELS=build PYTHON=python3.13"
    assert (command in capsys.readouterr().out) == (code == 0)


def test_with_wheels_make_takes_the_python_that_is_there() -> None:
    shown = subprocess.run(
        ["make", "-n", "gpu", "WHEELS=build/gpu", "PYTHON=python-of-the-gpu"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert shown.count("python-of-the-gpu -") == 3, "installs, looks for a GPU, tests"
    assert "--no-index" in shown
    assert not {"bootstrap.py", ".venv"} & {*shown.replace("/", " ").split()}


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    """One of a container of machine code: kind 1 is PTX, 2 machine code."""
    header = struct.pack("<HHIQ", kind, 0, 64, len(payload)) + bytes(12)
    return header + struct.pack("<I", architecture) + bytes(32) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_library_keeps_the_machine_code_of_one_gpu_in_its_place() -> None:
    ours, ptx = entry(2, 90, b"nine" * 20), entry(1, 80, b"text" * 30)
    other, smaller = entry(2, 80, b"eight" * 20), entry(2, 120, b"two")
    first, second = container(other, ours, ptx, ours), container(entry(1, 75, b"old"), other, ptx)
    third = container(other, smaller)
    library = b"code" + first + b"data" + second + third + b"end"
    reduced = vllm_bundle.reduced(library, 90)
    assert len(reduced) == len(library)
    found = [
        b"".join(code for *_, code in vllm_bundle.entries_of(reduced, start, size))
        for start, size in vllm_bundle.containers(reduced)
    ]
    assert found == [ours + ours, ptx, smaller]
    whole = [reduced.find(part) for part in (b"code", b"data", b"end")]
    assert whole == [library.find(part) for part in (b"code", b"data", b"end")]
