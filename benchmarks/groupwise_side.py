"""Groupwise's half of the comparison with TRL: a step of the fixed work whenever it is asked for one."""

from __future__ import annotations

import asyncio
import random
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.step import one_step
from benchmarks.work import ALPHA, MODEL, RANK, Work, prompts
from groupwise import build
from groupwise.config import load_config
from groupwise.models.tokenizer import load_tokenizer
from groupwise.types import GroupRequest, SamplingParams


def serve(connection: Connection, work: Work, dtype: str) -> None:
    """Answer each message with the seconds of a step until one says `end`."""
    config = load_config(
        {
            "model": {"name": MODEL, "dtype": dtype},
            "lora": {"r": RANK, "alpha": ALPHA},
            "sampler": {
                "max_completion_length": work.new_tokens,
                "slots": len(work.prompts) * work.members,
            },
        }
    ).config
    layout = build.choose_layout(config, longest_prompt=work.longest)
    with tempfile.TemporaryDirectory() as folder:
        parts = build.training_parts(config, layout, "bench", Path(folder))
        tokenizer = load_tokenizer(config.model)
        asyncio.run(_steps(connection, work, parts, tokenizer))


async def _steps(connection: Connection, work: Work, parts: build.Parts, tokenizer: Any) -> None:
    await parts.sampler.load(await parts.learner.publish(0))
    connection.send({})
    number = 0
    while connection.recv() != "end":
        number += 1
        connection.send(await _step(work, parts, tokenizer, number))


async def _step(work: Work, parts: build.Parts, tokenizer: Any, number: int) -> dict[str, float]:
    texts = prompts(work, tokenizer, number)
    requests = [_request(work, tokenizer, draw, text, number) for draw, text in enumerate(texts)]
    taken = await one_step(parts, requests, number)
    step = sum(taken.values())
    return {"sampling": taken["sampling"], "learning": step - taken["sampling"], "step": step}


def _request(work: Work, tokenizer: Any, draw: int, text: str, number: int) -> GroupRequest:
    rng = random.Random(f"{number}/{draw}")
    ids = tuple(tokenizer(text)["input_ids"])
    seeds = tuple(rng.getrandbits(63) for _ in range(work.members))
    return GroupRequest(draw, ids, seeds, SamplingParams(work.new_tokens))
