"""A run's page as one file. That it opens without a server is seen in a browser (`integration/web/test_browser.py`)."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from groupwise.core.errors import UsageError
from groupwise.dashboard.runs.one_file import write_one_file
from groupwise.runs.find import best_and_worst
from tests.web_runs import HOSTILE, write_run


def test_the_file_has_all_that_it_needs_and_may_load_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "sent", 6, write=lambda *_: HOSTILE)
    page = write_one_file(str(run), tmp_path / "new" / "sent.html").read_text("utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:script|link|img|a)\b[^>]* (?:src|href)=\"(?!#|data:)", page)
    found = re.search(r'id="curves">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    curves = json.loads(found[1])
    assert len(curves["reward\nreward_std"]["runs"]["sent"]["reward"]["mean"]) == 6
    assert curves["rollouts/failed\nrollouts/timed_out"]["totals"]["sent"]["mean"] == [2.0] * 6
    assert str(tmp_path) not in page, "where it was made is nobody's business"
    without_script = re.search(r"<noscript>.*?svg\+xml;base64,(.*?)\".*?</noscript>", page)
    assert without_script is not None
    assert ">reward</text>" in base64.b64decode(without_script[1]).decode()


def test_the_highest_rewards_are_those_of_the_run_with_their_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sent", 8)
    best = best_and_worst(run)["best"]
    assert best.step is not None
    assert best.step < 8, "the newest step has others"
    page = write_one_file(str(run), tmp_path / "sent.html").read_text("utf-8")
    highest = page.split(">The highest rewards of the run<")[1].split("</article>")[0]
    assert f"Rollout {best.rollout} of group {best.group}</b><span>step {best.step}<" in highest


@pytest.mark.parametrize(("run", "file", "says"), [
    ("sent@2", "new.html", "without @2"), ("sent", "there.html", "--force"), ("sent", ".", "is a folder"),
])  # fmt: skip
def test_a_page_that_cannot_be_written_says_why(
    tmp_path: Path, run: str, file: str, says: str
) -> None:
    write_run(tmp_path / "sent", 1)
    (tmp_path / "there.html").write_text("mine")
    with pytest.raises(UsageError, match=re.escape(says)):
        write_one_file(run, tmp_path / file, runs_dir=tmp_path)
    assert (tmp_path / "there.html").read_text() == "mine"
