"""A device that is no processor, without having one: tensors of which everything is known but their numbers.

Operations on them check shapes, number formats and devices as a GPU would: one that mixes this device with the processor fails, and so
does a program that waits for a number. Torch calls the device `meta`; what matters is that it is not `cpu`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from groupwise.models.native.weights import NativeModel

DEVICE = torch.device("meta")


class FakeDevice:
    """The device. Everything that concerns it is to be done within `here`."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def here(self, answer: bool | None = None) -> Generator[None]:
        """Without an `answer` to every question that a program asks of a tensor, it must ask none."""
        with self._mode, _Lists(answer):
            yield

    def model(self, config: Any, dtype: torch.dtype) -> PreTrainedModel:
        """A model of this config on the device, frozen."""
        with self._mode, DEVICE:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.requires_grad_(False).eval()

    def native(self, model: PreTrainedModel) -> NativeModel:
        """The model as plain matrices."""
        with self.here(), torch.no_grad():
            return NativeModel(model, check=False)


class _Lists(TorchFunctionMode):
    """Lists become tensors on the processor first, as for a GPU."""

    def __init__(self, answer: bool | None) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.__bool__ and self._answer is not None:
            return self._answer
        return func(*args, **kwargs)
