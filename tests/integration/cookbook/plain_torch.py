"""Training that a server has done, done again by plain torch and PEFT: one datum at a time, as the documentation of the Tinker API has it.

The datums are those that a recipe has sent, as the server's ledger stores them. Each step begins with the weights that the server had then,
which its folder has as well; so one step's rounding does not add to the next one's.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from groupwise.engine.models.machine import has_bfloat16
from groupwise.server.tinker.messages import messages


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of N tokens, as the client sent it."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the targets, when they were sampled; 0 where they were not."""
    advantages: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What the server has computed in one step of `importance_sampling`, and what plain torch computes."""

    datums: tuple[Datum, ...]
    losses: tuple[float, float]
    """The server's, and that of plain torch; likewise below."""
    norms: tuple[float, float]
    """Of the gradient."""
    logprobs: tuple[tuple[float, ...], tuple[float, ...]]
    """Of all targets of all datums."""
    share_of_other_updates: float
    """The share of weights whose update by Adam differs by more than 5 % of the learning rate."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request in the ledger, and the answer to it."""

    kind: str
    content: bytes
    answer: bytes


def repeated_steps(model_folder: Path, server_folder: Path) -> Iterator[Step]:
    """The steps of the model that was made last, each a `forward_backward` and an `optim_step`; `model_folder` has the base."""
    name, calls, records = _read_ledger(server_folder)
    saved = server_folder / "verbs" / name.replace(":", "_") / "sampler_weights"
    dtype = torch.bfloat16 if has_bfloat16("cpu") else torch.float32
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
    model = PeftModel.from_pretrained(base, saved / "_sampler-0", is_trainable=True)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    adam = torch.optim.Adam(weights)
    forwards = [call for call in calls if call.kind == "forward_backward"]
    updates = [json.loads(call.content) for call in calls if call.kind == "OptimStep"]
    assert len(forwards) == len(updates) == len(records)
    for number, (forward, update, record) in enumerate(
        zip(forwards, updates, records, strict=True)
    ):
        set_peft_model_state_dict(model, _weights(saved / f"_sampler-{number}"))
        datums = _read_datums(forward.content)
        adam.zero_grad()
        loss, logprobs = 0.0, []
        for datum in datums:
            datum_loss, datum_logprobs = importance_sampling(model, datum)
            datum_loss.backward()
            loss += datum_loss.item()
            logprobs += datum_logprobs.tolist()
        norm = math.sqrt(sum(float((weight.grad**2).sum()) for weight in weights))
        params = update["adam_params"]
        adam.param_groups[0].update(
            lr=params["learning_rate"], betas=(params["beta1"], params["beta2"]), eps=params["eps"]
        )
        adam.step()
        yield Step(
            datums,
            (record.loss, loss),
            (record.norm, norm),
            (_read_logprobs(forward.answer), tuple(logprobs)),
            _share_that_differs(
                get_peft_model_state_dict(model, save_embedding_layers=False),
                _weights(
                    saved / (f"_sampler-{number + 1}" if number + 1 < len(updates) else "final")
                ),
                0.05 * params["learning_rate"],
            ),
        )


def importance_sampling(model: Any, datum: Datum) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of -exp(logprob - sampled logprob) * advantage over the tokens, and the log-probabilities of the targets [N]."""
    logits_NV = model(input_ids=torch.tensor([datum.tokens])).logits[0].float()
    targets_N1 = torch.tensor(datum.targets).unsqueeze(-1)
    logprobs_N = logits_NV.log_softmax(-1).gather(-1, targets_N1).squeeze(-1)
    ratio_N = (logprobs_N - torch.tensor(datum.logprobs)).exp()
    return -(ratio_N * torch.tensor(datum.advantages)).sum(), logprobs_N


@dataclass(frozen=True, slots=True)
class _Record:
    loss: float
    norm: float


def _read_ledger(server_folder: Path) -> tuple[str, list[Call], list[_Record]]:
    """The name of the model that was made last, its calls in order, and the server's record of its steps."""
    with closing(
        sqlite3.connect(f"file:{server_folder / 'server.db'}?mode=ro", uri=True)
    ) as ledger:
        (name,) = ledger.execute(
            "SELECT line FROM verb_calls WHERE kind = 'CreateModel' ORDER BY position DESC LIMIT 1"
        ).fetchone()
        calls = ledger.execute(
            "SELECT kind, content, body FROM verb_calls WHERE line = ? ORDER BY sequence", (name,)
        ).fetchall()
        steps = ledger.execute(
            "SELECT metrics, grad_norm FROM verb_steps WHERE model = ? ORDER BY step", (name,)
        ).fetchall()
    records = [_Record(json.loads(metrics)["loss/policy"], norm) for metrics, norm in steps]
    return name, [Call(*call) for call in calls], records


def _read_datums(content: bytes) -> tuple[Datum, ...]:
    request = messages().ForwardBackwardRequest()
    request.ParseFromString(content)
    assert request.loss_fn == "importance_sampling"

    def numbers(packed: bytes, form: str) -> tuple[Any, ...]:
        return tuple(number for (number,) in struct.iter_unpack(f"<{form}", packed))

    return tuple(
        Datum(
            tuple(
                t for chunk in datum.model_input for t in numbers(chunk.encoded_text.tokens, "i")
            ),
            numbers(datum.loss_fn_inputs["target_tokens"].dense, "q"),
            numbers(datum.loss_fn_inputs["logprobs"].dense, "f"),
            numbers(datum.loss_fn_inputs["advantages"].dense, "f"),
        )
        for datum in request.data
    )


def _read_logprobs(answer: bytes) -> tuple[float, ...]:
    output = messages().ForwardBackwardOutput()
    output.ParseFromString(answer)
    packed = b"".join(record.fields["logprobs"].data for record in output.loss_fn_outputs)
    return tuple(logprob for (logprob,) in struct.iter_unpack("<f", packed))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def _share_that_differs(
    own: dict[str, torch.Tensor], other: dict[str, torch.Tensor], distance: float
) -> float:
    assert own.keys() == other.keys()
    differing = sum(int(((own[key] - other[key]).abs() > distance).sum()) for key in own)
    return differing / sum(weight.numel() for weight in own.values())
