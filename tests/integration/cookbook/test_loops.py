"""The two loops of the cookbook that stand in one file each."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.cookbook.running import Program
from tests.integration.server.server_process import Server

pytestmark = pytest.mark.timeout(590)


def test_a_supervised_loop_learns(workplace: Path, server: Server) -> None:
    options = ("batch_size=8", "learning_rate=1e-2", "lora_rank=8", "max_steps=5", "save_every=2")
    program = Program(workplace, server.url, "sl_loop", *options, name="short_sl").run()
    losses = program.metric("train_mean_nll")
    assert len(losses) == 5
    assert losses[-1] < 0.6 * losses[0]
    assert [each["name"] for each in program.checkpoints()] == ["000002", "000004", "final"]


def test_a_reinforced_loop_survives_the_end_of_the_server(workplace: Path, server: Server) -> None:
    options = ("batch_size=2", "group_size=8", "learning_rate=4e-3", "lora_rank=8", "max_steps=6")
    program = Program(workplace, server.url, "rl_loop", *options, "max_tokens=12", name="short_rl")
    with program.started():
        program.wait_for_step(2)
        server.kill()
        server.begin()
        program.finish()
    assert program.metric("step") == [*range(6)]
    model = program.checkpoints()[-1]["state_path"].split("/")[2]
    address = f"file:{server.folder}/server.db?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as ledger:
        query = "SELECT grad_norm FROM verb_steps WHERE model = ? ORDER BY step"
        updates = [norm for (norm,) in ledger.execute(query, (model,))]
    reported = [row["grad_norm"] for row in program.rows() if "grad_norm" in row]
    assert updates == reported, "each update was done once"
