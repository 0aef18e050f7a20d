"""The trained adapter, as other programs load it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from shlex import quote

from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError, UsageError
from groupwise.core.terminal.notebook import Code, Table, show
from groupwise.engine.models.bundled import ALIASES
from groupwise.engine.models.config import ModelConfig
from groupwise.notebook import drive
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import core_config, run_folder
from groupwise.notebook.run_naming import number_of
from groupwise.notebook.session import Session, differing, refuse_no_config, refuse_other
from groupwise.notebook.training import TrainerState
from groupwise.runs import checkpoints
from groupwise.runs.folder import CHECKPOINTS
from groupwise.training.review.export import export

HF_LORA = "hf_lora"
"""The folder within a checkpoint that holds the exported adapter."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the largest rank of an adapter; it refuses adapters of a larger rank."""


def export_checkpoint(config: TrainingConfig, trainer_state: TrainerState | Session) -> str:
    """Write the newest checkpoint's adapter, with tokenizer and model card, into its `hf_lora/`. Returns the checkpoint's folder.

    peft and vLLM load it as it is. With save_to_drive it is also zipped there. A session will do in place of the state, after an
    interruption or in a new kernel. Raises RunNotFoundError where there is no checkpoint, UsageError for a state of another config.
    """
    run = _run_of(config, trainer_state)
    newest = checkpoints.newest(run / CHECKPOINTS)
    if newest is None:
        raise RunNotFoundError(
            f"{run} has no checkpoint yet, so there is nothing to export. They are written every run.save_steps steps, when the cell is "
            "interrupted, and at the end of train_grpo(config, session)."
        )
    adapter = newest.path / HF_LORA
    export(
        f"{run}@{newest.step}",
        "adapter",
        adapter,
        runs_dir=run.parent,
        force=True,
        trust_remote_code=True,
    )
    rows = [
        ("checkpoint", f"{newest.path}, after {newest.step} steps"),
        ("adapter", str(adapter)),
        *_zipped(config, run, adapter),
    ]
    show(Table("Export", rows))
    model = core_config(config).config.model
    show(Code("To load it", _loading(model, adapter)))
    show(Code("To serve it", _serving(model, config.lora_rank, run.name, adapter)))
    return str(newest.path)


def _run_of(config: TrainingConfig, told: object) -> Path:
    refuse_no_config(config)
    if isinstance(told, Session):
        refuse_other(config, told)
        return told.run.folder
    if not isinstance(told, TrainerState):
        raise UsageError(
            f"Expected a trainer state or a session second, got {type(told).__name__}: export_checkpoint(config, trainer_state)."
        )
    _refuse_state_of_another(config, told)
    return Path(told.checkpoint_dir)


def _refuse_state_of_another(config: TrainingConfig, state: TrainerState) -> None:
    """Raises UsageError for a state of another config; if the state has no config, the name of its folder decides."""
    run, first = Path(state.checkpoint_dir), run_folder(config).name
    if state.config is not None and (changed := differing(config, state.config)):
        raise UsageError(
            f"The trainer state is of {run}, which was trained with another config: {changed} differ. Give the config that it was trained "
            "with: export_checkpoint(trainer_state.config, trainer_state)."
        )
    if state.config is None and number_of(run.name, first) is None:
        raise UsageError(
            f"The trainer state is of {run}, but runs of this config are called {first}, {first}-2 and so on. Give the config that it was "
            "trained with."
        )


def _loading(model: ModelConfig, adapter: Path) -> str:
    """Over a base in float32: over a rounded one, what was learned is rounded too."""
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
    ]
    base = json.dumps(model.name)
    revision = f", revision={json.dumps(model.revision)}" if model.revision else ""
    if model.name in ALIASES:
        lines.append("from groupwise.engine.models.bundled import fetch_model")
        base = f"fetch_model({base})"
    return "\n".join(
        [
            *lines,
            "",
            f'base = AutoModelForCausalLM.from_pretrained({base}{revision}, dtype="float32")',
            f'model = PeftModel.from_pretrained(base, "{adapter}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{adapter}")',
        ]
    )


def _serving(model: ModelConfig, rank: int, name: str, adapter: Path) -> str:
    bundled = model.name in ALIASES
    base = f'"$(groupwise fetch-model {model.name})"' if bundled else quote(model.name)
    revision = f" --revision {quote(model.revision)}" if model.revision else ""
    most = next((each for each in VLLM_RANKS if each >= rank), rank)
    lora = f"--enable-lora --max-lora-rank {most} --lora-modules {quote(f'{name}={adapter}')}"
    return f"vllm serve {base}{revision} {lora}"


def _zipped(config: TrainingConfig, run: Path, adapter: Path) -> list[tuple[str, str]]:
    """Zips the adapter into this run's folder on Drive; nothing if there is none."""
    mirror = drive.mirror_of(config, run.name)
    place = None if mirror is None else mirror.place_of(run)
    if place is None:
        return []
    target = place / f"{run.name}.zip"
    with atomic_files.explained(target):
        made = Path(shutil.make_archive(str(atomic_files.building_path(target)), "zip", adapter))
        atomic_files.publish_file(made, target)
    return [("zip", str(target))]
