"""The order in which the comparison with TRL asks its two sides; here both are toys that write down what they are asked."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against_trl
from benchmarks.trl_side import OUT_OF_MEMORY
from benchmarks.work import W1, Rules, Workload

FIT = 2
"""Groups in a micro-batch of TRL for which there is memory."""


def serve(connection: Connection, letter: str, rules: Rules) -> None:
    """Answer as a side does, and note each step and the end in the file that `rules` names."""
    connection.send({})
    asked = ""
    while asked != "end":
        asked = connection.recv()
        with Path(rules.model).open("a") as log:
            log.write(letter if asked == "step" else letter.upper())
        if letter == "t" and rules.groups > FIT:
            connection.send(OUT_OF_MEMORY)
            return
        if asked == "step":
            connection.send(
                {"sampling": 1.0, "learning": 2.0, "step": 3.0, "tokens": 4.0, "gpu_mib": 500.0}
            )


def groupwise(connection: Connection, work: Workload, rules: Rules) -> None:
    serve(connection, "g", rules)


def trl(connection: Connection, work: Workload, rules: Rules) -> None:
    serve(connection, "t", rules)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("in_turn", "order", "groups"), [(True, "gtgtgtgtGT", 1), (False, "ggggGtttttT", 2)]
)
def test_sides_take_turns_and_on_a_gpu_one_begins_when_the_other_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_turn: bool, order: str, groups: int
) -> None:
    """There TRL has as many groups in a micro-batch as fit. Toys are forked: a new process would import torch for them."""
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forking)
    monkeypatch.setattr(against_trl, "SIDES", {"groupwise": groupwise, "trl": trl})
    log = tmp_path / "log"
    result: dict[str, Any] = against_trl.compare(W1, 2, Rules("float32", str(log)), in_turn=in_turn)
    assert log.read_text() == order
    assert result["trl"]["seconds"]["learning"] == [2.0, 2.0]
    assert result["trl"]["groups_in_micro_batch"] == groups
    assert against_trl.share_of_memory(result) == 1.0
    against_trl.show("W1", result)
