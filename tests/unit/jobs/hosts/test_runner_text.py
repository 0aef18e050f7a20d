import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.jobs.clouds import spot_notice
from groupwise.jobs.fleet.machines import builder
from groupwise.jobs.hosts import ray_call, ray_gang, seal
from groupwise.jobs.hosts.bootstrap import BOOTSTRAP
from groupwise.jobs.hosts.runner_text import PACKAGE, PIECES, assemble, runner_text
from groupwise.jobs.launch import bootstrap

ENTRY = f"""\"\"\"Answers.\"\"\"
import os
from typing import TYPE_CHECKING

from {PACKAGE}below import double

if TYPE_CHECKING:
    from nowhere import Number


def answer(number: Number) -> str:
    return os.fspath(str(double(number)))
"""
BELOW = "import sys\n\ndouble = lambda number: number * min(2, sys.maxsize)\n"


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    texts = {"requests": ENTRY, "below": BELOW}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_pieces_become_one_module(pieces: Path) -> None:
    text, space = assemble(pieces), {}
    exec(compile(text, "runner", "exec", dont_inherit=True), space)
    assert space["answer"](21) == "42"
    assert text.index("# --- below.py ---") < text.index("# --- requests.py ---")


def test_a_name_has_one_meaning(pieces: Path) -> None:
    (pieces / "below.py").write_text(BELOW + "answer = 1\n")
    with pytest.raises(ValueError, match="both define answer"):
        assemble(pieces)
    (pieces / "requests.py").write_text(ENTRY.replace("import double", "import double as twice"))
    with pytest.raises(ValueError, match="no name may change"):
        assemble(pieces)


@pytest.mark.parametrize("module", ["json", "os.path", "groupwise.core.errors", ".below"])
def test_imports_that_the_assembled_runner_lacks_are_refused(pieces: Path, module: str) -> None:
    (pieces / "below.py").write_text(f"from {module} import dumps\n{BELOW}")
    with pytest.raises(ValueError, match=rf"from {re.escape(module)} import dumps: .*left out"):
        assemble(pieces)


def test_programs_that_are_sent_to_machines_keep_to_python_3_8(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text(runner_text().source)
    (tmp_path / "hosts_bootstrap.py").write_text(BOOTSTRAP)
    for module in (seal, ray_call, ray_gang, spot_notice, bootstrap, builder):
        path = Path(str(module.__file__))
        shutil.copy(path, tmp_path / f"{path.parent.name}_{path.name}")
    for path in tmp_path.iterdir():
        ast.parse(path.read_text(), path.name, feature_version=(3, 8))
    vermin = Path(sys.executable).with_name("vermin")
    command = [vermin, "--violations", "--target=3.8-", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_all_pieces_are_sent() -> None:
    names = {path.name for path in PIECES.glob("*.py")} - {"__init__.py"}
    source = runner_text().source
    assert {name for name in names if f"# --- {name} ---" in source} == names
    assert "groupwise.jobs" not in source.partition("# --- ")[2]
