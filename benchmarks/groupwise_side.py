"""Groupwise's half of the comparison with TRL: a step of the fixed work whenever it is asked for one."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.memory import used_on_the_gpu
from benchmarks.step import config_of, one_step, request
from benchmarks.work import Rules, Workload, prompts
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.prepare import expect_ranks
from groupwise.training.assembly.start import training_parts


def serve(connection: Connection, work: Workload, rules: Rules) -> None:
    """Answer each message with the seconds of a step until one says `end`."""
    config = config_of(work, rules.dtype, model=rules.model)
    expect_ranks(config)  # as the command line does
    layout = placement.choose_layout(config, longest_prompt=work.longest)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(training_parts(config, layout, "bench", Path(folder))) as parts,
    ):
        tokenizer = load_tokenizer(config.model)
        asyncio.run(_steps(connection, work, parts, tokenizer))


async def _steps(connection: Connection, work: Workload, parts: Parts, tokenizer: Any) -> None:
    await parts.sampler.load(await parts.learner.publish(0))
    connection.send({})
    number = 0
    while connection.recv() != "end":
        connection.send(await _step(work, parts, tokenizer, number))
        number += 1


async def _step(work: Workload, parts: Parts, tokenizer: Any, number: int) -> dict[str, float]:
    texts = prompts(work, tokenizer, number)
    requests = [
        request(work, draw, tokenizer(text)["input_ids"], number, parts.stop_token_ids)
        for draw, text in enumerate(texts)
    ]
    taken = await one_step(parts, requests, number)
    tokens = taken.pop("tokens")
    step = sum(taken.values())
    learning = step - taken["sampling"]
    return {
        "sampling": taken["sampling"],
        "learning": learning,
        "step": step,
        "tokens": tokens,
        "gpu_mib": used_on_the_gpu(),
    }
