"""How the log of a build is shown: stages stay, lines of pip are progress, and a failure shows the last of them and where all are."""

import io
from pathlib import Path

import pytest

from groupwise.cli.installing import SHOWN_LINES, BuildLog, LaunchedLog
from groupwise.core.terminal.ticker import Ticker
from groupwise.jobs.launch.bootstrap import BUILDING, READY

STAGES = ["1/4 an environment with Python 3.12.1 (/usr/bin/python3) in /e/1", "3/4 2 releases as locked"]  # fmt: skip
PIP = [f"  Collecting package-{number}==1.0 (from -r lock.txt (line {number}))" for number in range(30)]  # fmt: skip
END = "made in 9 s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ticking(stream: io.StringIO) -> Ticker:
    seconds = iter(range(10_000))
    return Ticker(stream, every=None, clock=lambda: float(next(seconds)))


# --- a build of `vm prepare`


def test_in_a_pipe_a_build_is_a_line_for_each_stage_and_its_file_has_all(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = BuildLog(ticking(stream), tmp_path / "prepare" / "vm.log")
    whole = [STAGES[0], STAGES[1], *PIP, END]
    for line in whole:
        log.add(line)
    assert stream.getvalue().splitlines() == [*STAGES, END]
    assert log.file.read_text().splitlines() == whole


def test_in_a_terminal_one_line_says_what_is_being_installed(tmp_path: Path) -> None:
    stream = Terminal()
    log = BuildLog(ticking(stream), tmp_path / "vm.log", "vm-1: ")
    log.add(STAGES[1])
    for line in PIP:
        log.add(line)
    shown = stream.getvalue()
    assert shown.count("\n") == 1
    assert shown.endswith("\r\x1b[Kvm-1: Collecting package-29==1.0")


def test_a_build_that_fails_shows_the_last_lines_of_pip_and_names_the_file(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = BuildLog(ticking(stream), tmp_path / "vm.log")
    for line in [*STAGES, *PIP]:
        log.add(line)
    log.show_failure()
    *of_pip, named = stream.getvalue().splitlines()[len(STAGES) :]
    assert of_pip == PIP[-SHOWN_LINES:]
    assert str(log.file) in named


# --- the log of a job that was launched


def written(text: str, size: int, stream: io.StringIO | None = None) -> str:
    """What is shown of a log that arrives in pieces of this size."""
    shown = bytearray()
    log = LaunchedLog(shown.extend, ticking(stream or io.StringIO()), "groupwise launch logs j")
    data = text.encode()
    for start in range(0, len(data), size):
        log.write(data[start : start + size])
    log.end()
    return shown.decode()


def lines(*parts: str) -> str:
    return "".join(f"{part}\n" for part in parts)


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("job", ["step 1\n  indented\n", "\r 50 %\r100 %", "1/4 of it\n", ""])
def test_a_build_before_a_job_is_its_stages_and_the_job_writes_what_it_likes(size: int, job: str) -> None:  # fmt: skip
    log = lines(BUILDING, *STAGES, *PIP, END, READY) + job
    assert written(log, size) == lines(BUILDING, *STAGES, END, READY) + job
    there = lines(BUILDING, "it is there already: /e/1", READY) + job
    assert written(there, size) == there
    assert written(job, size) == job


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_build_before_a_job_that_fails_is_shown_before_its_reason(size: int) -> None:
    reason = "pip could not install everything: the disk there is full"
    whole = "  the whole log: groupwise launch logs j"
    expected = lines(BUILDING, *STAGES, *PIP[-SHOWN_LINES:], whole, reason)
    assert written(lines(BUILDING, *STAGES, *PIP, reason), size) == expected


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("log", ["The", f"{BUILDING}\n1/4 an envi", f"{BUILDING}\n{READY}\nThe"])
def test_a_log_that_breaks_off_is_shown_to_its_last_byte(size: int, log: str) -> None:
    assert written(log, size) == log


def test_the_progress_in_a_terminal_is_removed_before_the_job_writes() -> None:
    stream = Terminal()
    written(lines(BUILDING, *STAGES, *PIP, END, READY, "step 1"), 100_000, stream)
    assert "Collecting package-29==1.0" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
