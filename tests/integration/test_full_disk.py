"""A disk that is full: a message and no traceback, the last complete checkpoint stands, and with room again the run goes on."""

from __future__ import annotations

import json

import pytest
import torch

import groupwise
from groupwise.cli.main import main
from groupwise.core import atomic_files
from groupwise.core.errors import CheckpointError, StoreError
from groupwise.runs import checkpoints
from tests.disks import fill, small_disk
from tests.integration.toy_run import TOY, config, what_must_be_equal


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("point", "time", "leave", "told"),
    [
        ("commit:step:after", 4, 20_000, r"the checkpoint .*step-4"),
        ("remove:step-2:after", 1, 4_000, "final"),
        *(
            pytest.param(*where, marks=pytest.mark.soak(suite="kills"))
            for where in (
                ("folder:step-2:after", 1, 0, "the run's record"),
                ("file:manifest.json:before", 2, 0, r"the checkpoint .*step-4|the run's record"),
            )
        ),
    ],
)
def test_the_checkpoint_stands_and_the_run_continues(
    whole_toy, tmp_path, monkeypatch, point, time, leave, told
):
    with small_disk(tmp_path / "disk", "6m") as disk:
        seen = []

        def full(name: str) -> None:
            seen.append(name)
            if name == point and seen.count(point) == time:
                fill(disk, leave)

        settings = config(disk / "runs")
        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "on_write", full)
            with pytest.raises(
                (CheckpointError, StoreError), match=rf"cannot .*{told}.* (full|No space left)"
            ):
                groupwise.rl(settings, TOY)
        kept = checkpoints.newest(disk / "runs/toy/checkpoints")
        assert kept is not None
        assert kept.step >= 2
        (disk / "ballast").unlink()
        resumed = groupwise.rl(settings, TOY, resume=True)
        assert resumed.exit_code == 0
        assert what_must_be_equal(resumed.folder) == whole_toy.equal


def test_the_command_ends_with_a_message(tmp_path, capfd):
    with small_disk(tmp_path / "disk", "100k") as disk:
        path = tmp_path / "c.json"
        path.write_text(json.dumps(config(disk / "runs")))
        assert main(["rl", "-c", str(path), "-t", TOY, "--json"]) in (1, 2)
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    assert json.loads(shown.out)["error"]["code"] in ("store", "checkpoint", "usage")
