"""The backend that a notebook uses by default, by the devices of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.core import accelerators
from groupwise.core.errors import ConfigError
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import GEMMA, core_config, model_of


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without accelerators, whose PCI devices are folders."""
    monkeypatch.setattr(accelerators, "PCI", tmp_path)
    monkeypatch.setattr(accelerators, "NVIDIA", tmp_path / "nvidiactl")
    return tmp_path


def plug_in(machine: Path, vendor: str, device: str) -> None:
    folder = machine / f"0000:00:{device}"
    folder.mkdir()
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


def test_a_gpu(machine: Path) -> None:
    (machine / "nvidiactl").touch()
    config = TrainingConfig()
    assert (model_of(config), config.chosen_backend) == (GEMMA, "torch")


def test_a_tpu_is_for_tunix(machine: Path) -> None:
    plug_in(machine, "0x1ae0", "0x0063")
    config = TrainingConfig(devices=(4, 2))
    model = core_config(config).config.model
    assert (model.name, model.backend, model.mesh) == (GEMMA, "tunix", (4, 2))
    assert TrainingConfig(backend="torch").chosen_backend == "torch"


def test_a_training_server_has_torch_whatever_there_is_here(machine: Path) -> None:
    plug_in(machine, "0x1ae0", "0x0063")
    model = core_config(TrainingConfig(model="tiny"), server="http://there:1").config.model
    assert (model.backend, model.mesh) == ("transformers", None)
    with pytest.raises(ConfigError, match=r"'tunix', .*training server .*backend"):
        core_config(TrainingConfig(model="tiny", backend="tunix"), server="http://there:1")
    with pytest.raises(ConfigError, match=r"\(4, 1\), a mesh.* training server"):
        core_config(TrainingConfig(model="tiny", devices=(4, 1)), server="http://there:1")
