"""The first program of a launched job, with a stand-in for the builder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.jobs.launch import bootstrap

BEGIN = Path(bootstrap.__file__)
BUILDER = """\
import json
order = json.load(open("order.json"))
json.dump({"python": order["answer"], "folder": order["folder"]}, open("result.json", "w"))
print("made")
"""
REPORT_PROGRAM = (
    "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('told', 'w'))"
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder, whose environment is a folder with a program `tell`."""
    own, bin_folder = tmp_path / ".groupwise", tmp_path / "env" / "bin"
    own.mkdir()
    bin_folder.mkdir(parents=True)
    (own / "bootstrap.py").write_bytes(BEGIN.read_bytes())
    (own / "builder.py").write_text(BUILDER)
    order = {"folder": "~/environments", "answer": str(bin_folder / "python")}
    (own / "order.json").write_text(json.dumps(order))
    (bin_folder / "tell").write_text(f"#!{sys.executable}\n{REPORT_PROGRAM}\n")
    (bin_folder / "tell").chmod(0o755)
    return tmp_path


def begun(work: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-I", ".groupwise/bootstrap.py", *words],
        cwd=work,
        env={"HOME": "/home/of/somebody", "PATH": "/usr/bin:/bin", "OWN": "kept"},
        capture_output=True,
        check=False,
    )


def test_the_command_gets_its_words_and_the_environment_first_on_path(work: Path) -> None:
    odd = ["a b", "", "-v", "--", "it's", "two\nlines", "$(x)", "é"]
    done = begun(work, "tell", *odd)
    log = f"{bootstrap.BUILDING}\nmade\n{bootstrap.READY}\n"
    assert (done.returncode, done.stdout.decode()) == (0, log), done.stderr
    words, environment = json.loads((work / "told").read_text())
    assert words == odd
    path = environment["PATH"].split(os.pathsep)[0]
    own = (environment["VIRTUAL_ENV"], environment["OWN"])
    assert (path, *own) == (str(work / "env/bin"), str(work / "env"), "kept")
    result = json.loads((work / ".groupwise/result.json").read_text())
    assert result["folder"] == "/home/of/somebody/environments"
    done = begun(work, "not-there", "x")
    assert done.returncode == bootstrap.NOT_FOUND
    assert b"not-there: No such file or directory" in done.stderr


def test_without_an_environment_the_command_does_not_run(work: Path) -> None:
    (work / ".groupwise/builder.py").write_text("print('no room'); raise SystemExit(1)")
    done = begun(work, "tell")
    log = f"{bootstrap.BUILDING}\nno room\n"
    assert (done.returncode, done.stdout.decode()) == (bootstrap.UNAVAILABLE, log)
    assert not (work / "told").exists()
