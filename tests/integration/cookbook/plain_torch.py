"""Training that a server has done, done again by plain torch: one datum at a time, as the documentation of the Tinker API has it.

The datums are those that a recipe has sent, as the server's ledger stores them; its folder has the weights from which each step began.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from groupwise.server.tinker.tensors import messages


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
    """A step of `importance_sampling`, as it was computed by a server, by our learner or by plain torch."""

    loss: float
    norm: float
    """Of the gradient."""
    logprobs: tuple[float, ...]
    """Of all targets of all datums."""
    weights: dict[str, torch.Tensor]
    """After the update, by their names in the file of an adapter."""

    def share_that_differs(self, other: Step, distance: float) -> float:
        """The share of weights that lie further apart than `distance`."""
        assert self.weights.keys() == other.weights.keys()
        pairs = [(self.weights[key], other.weights[key]) for key in self.weights]
        differing = sum(int(((one - two).abs() > distance).sum()) for one, two in pairs)
        return differing / sum(one.numel() for one, _ in pairs)


class Lora(nn.Module):
    """A frozen layer with an adapter: y = x Wᵀ + alpha / r · (x Aᵀ) Bᵀ, rounded to the layer's number format after the sum."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scaling = alpha / rank
        self.down = nn.Parameter(torch.zeros(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, self.down.to(x.dtype))
        up = (self.scaling * self.up).to(x.dtype)
        total = F.linear(x.float(), self.base.weight.float()) + F.linear(low.float(), up.float())
        return total.to(x.dtype)


class PlainModel:
    """A base with an adapter that plain torch trains."""

    def __init__(self, base: Path, adapter: Path, dtype: torch.dtype) -> None:
        """`adapter`: the folder of a saved one, with which it begins."""
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        self._model.requires_grad_(False)
        self._weights = _add_adapter(self._model, adapter)
        self._adam = torch.optim.Adam(self._weights.values())
        self.load(adapter)

    @torch.no_grad()
    def load(self, adapter: Path) -> None:
        """Take the weights of a saved adapter; what Adam has gathered stays."""
        tensors = read_weights(adapter)
        for key, weight in self._weights.items():
            weight.copy_(tensors[key])

    def step(self, datums: tuple[Datum, ...], params: Mapping[str, float]) -> Step:
        """One pass over the datums, one by one, and an update with these parameters of Adam."""
        self._adam.zero_grad()
        loss, logprobs = 0.0, list[float]()
        for datum in datums:
            datum_loss, datum_logprobs = compute_importance_sampling(self._model, datum)
            datum_loss.backward()
            loss += datum_loss.item()
            logprobs += datum_logprobs.tolist()
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        self._adam.param_groups[0].update(
            lr=params["learning_rate"], betas=(params["beta1"], params["beta2"]), eps=params["eps"]
        )
        self._adam.step()
        weights = {key: weight.detach().clone() for key, weight in self._weights.items()}
        return Step(loss, norm, tuple(logprobs), weights)


def compute_importance_sampling(model: Any, datum: Datum) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of -exp(logprob - sampled logprob) * advantage over the tokens, and the log-probabilities of the targets [N]."""
    logits_NV = model(input_ids=torch.tensor([datum.tokens])).logits[0].float()
    targets_N1 = torch.tensor(datum.targets).unsqueeze(-1)
    logprobs_N = logits_NV.log_softmax(-1).gather(-1, targets_N1).squeeze(-1)
    ratio_N = (logprobs_N - torch.tensor(datum.logprobs)).exp()
    return -(ratio_N * torch.tensor(datum.advantages)).sum(), logprobs_N


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that a server has done."""

    request: bytes
    """Of `forward_backward`, as the client sent it."""
    datums: tuple[Datum, ...]
    adam: Mapping[str, float]
    """The parameters of the update."""
    adapter: Path
    """The folder with the weights from which it began."""
    of_server: Step
    """What the server computed."""


def read_recorded_steps(server_folder: Path) -> list[RecordedStep]:
    """The steps of the model that was made last, each a `forward_backward` and an `optim_step`."""
    with closing(
        sqlite3.connect(f"file:{server_folder / 'server.db'}?mode=ro", uri=True)
    ) as ledger:
        (name,) = ledger.execute(
            "SELECT line FROM verb_calls WHERE kind = 'CreateModel' ORDER BY position DESC LIMIT 1"
        ).fetchone()
        calls = "SELECT content, body FROM verb_calls WHERE line = ? AND kind = ? ORDER BY sequence"
        passes = ledger.execute(calls, (name, "forward_backward")).fetchall()
        updates = ledger.execute(calls, (name, "OptimStep")).fetchall()
        records = ledger.execute(
            "SELECT metrics, grad_norm FROM verb_steps WHERE model = ? ORDER BY step", (name,)
        ).fetchall()
    saved = server_folder / "verbs" / name.replace(":", "_") / "sampler_weights"
    folders = [*(saved / f"_sampler-{number}" for number in range(len(passes))), saved / "final"]
    steps: list[RecordedStep] = []
    for number, ((request, answer), (update, _), (metrics, norm)) in enumerate(
        zip(passes, updates, records, strict=True)
    ):
        after = read_weights(folders[number + 1])
        of_server = Step(json.loads(metrics)["loss/policy"], norm, _read_logprobs(answer), after)
        adam = json.loads(update)["adam_params"]
        steps.append(RecordedStep(request, _read_datums(request), adam, folders[number], of_server))
    return steps


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


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter."""
    return load_file(folder / "adapter_model.safetensors")


def _add_adapter(model: nn.Module, folder: Path) -> dict[str, nn.Parameter]:
    """Put the layers that a saved adapter has into the model; its weights by their names in the file, in order."""
    config = json.loads((folder / "adapter_config.json").read_text())
    parameters: dict[str, nn.Parameter] = {}
    for key in read_weights(folder):
        name, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            layer = Lora(layer, config["r"], config["lora_alpha"])
            setattr(model.get_submodule(parent), child, layer)
        assert isinstance(layer, Lora)
        parameters[key] = layer.down if kind == "A.weight" else layer.up
    return parameters
