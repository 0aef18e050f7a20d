"""A fake non-CPU device: torch's FakeTensorMode on `meta`, so tensors have a shape, dtype and device but no values.

Operations check these as a GPU would: one that mixes this device with the CPU fails, and so does a program that reads a value.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from groupwise.engine.models.native.weights import NativeModel

DEVICE = torch.device("meta")


class FakeDevice:
    """Use it within `here`."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def here(self, answer: bool | None = None) -> Generator[None]:
        """Makes the device current. `answer` is what `bool(tensor)` and `allclose` return; None makes any such read of a value fail."""
        with self._mode, _Lists(answer):
            yield

    def model(self, config: Any, dtype: torch.dtype) -> PreTrainedModel:
        """A model of this config on the device, frozen."""
        with self._mode, DEVICE:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.requires_grad_(False).eval()

    @contextmanager
    def autocast(self, dtype: torch.dtype) -> Generator[None]:
        """Torch's autocast, of which this kind of device has none: what asks for it finds it, and products that it rounds refuse others."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "is_autocast_enabled", lambda device=None: device == DEVICE.type)
            patch.setattr(torch, "get_autocast_dtype", lambda device: dtype)
            patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
            yield

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
        if func in (torch.Tensor.__bool__, torch.allclose) and self._answer is not None:
            return self._answer
        return func(*args, **kwargs)
