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
from groupwise.engine.sampler.servers.spawned_server import largest_rank
from groupwise.notebook import drive
from groupwise.notebook.config import TrainingConfig
from groupwise.notebook.core import core_config, run_folder
from groupwise.notebook.datasets import format_prompt
from groupwise.notebook.previous_runs import number_of
from groupwise.notebook.session import Session, differing, refuse_no_config, refuse_other
from groupwise.notebook.training import TrainerState
from groupwise.runs import checkpoints
from groupwise.runs.folder import CHECKPOINTS
from groupwise.training.review.export import export

HF_LORA = "hf_lora"
"""The folder within a checkpoint that holds the exported adapter."""


def export_checkpoint(config: TrainingConfig, trainer_state: TrainerState | Session) -> str:
    """Write the newest checkpoint's adapter, with tokenizer and model card, into its `hf_lora/`. Returns the checkpoint's folder.

    peft and vLLM load it as it is. With save_to_drive it is also zipped there. A session may be given in place of the state, after an
    interruption or in a new kernel. Raises RunNotFoundError if there is no checkpoint, UsageError for a state of another config.
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
    ]
    mirror = drive.mirror_of(config, run.name)
    mirror_folder = None if mirror is None else mirror.folder_of(run)
    if mirror_folder is not None:
        target = mirror_folder / f"{run.name}.zip"
        with atomic_files.explaining_disk_errors(target):
            building = str(atomic_files.building_path(target))
            atomic_files.publish_file(Path(shutil.make_archive(building, "zip", adapter)), target)
        rows.append(("zip", str(target)))
    show(Table("Export", rows))
    _show_commands(config, run.name, adapter)
    return str(newest.path)


def _run_of(config: TrainingConfig, source: object) -> Path:
    """The run's folder of a trainer state or a session. Raises UsageError if it belongs to another config."""
    refuse_no_config(config)
    if isinstance(source, Session):
        refuse_other(config, source)
        return source.run.folder
    if not isinstance(source, TrainerState):
        raise UsageError(
            f"Expected a trainer state or a session second, got {type(source).__name__}: export_checkpoint(config, trainer_state)."
        )
    run, first = Path(source.checkpoint_dir), run_folder(config).name
    if source.config is not None and (fields := differing(config, source.config)):
        raise UsageError(
            f"The trainer state is of {run}, which was trained with another config: {fields} differ. Give the config that it was trained "
            "with: export_checkpoint(trainer_state.config, trainer_state)."
        )
    # Without a config, the name of the folder is checked.
    if source.config is None and number_of(run.name, first) is None:
        raise UsageError(
            f"The trainer state is of {run}, but runs of this config are called {first}, {first}-2 and so on. Give the config that it was "
            "trained with."
        )
    return run


def _show_commands(config: TrainingConfig, name: str, adapter: Path) -> None:
    """Show how to load the adapter with peft, and how to serve it with vLLM."""
    model = core_config(config).config.model
    chat = {"role": "user", "content": format_prompt("What is 3 + 4?", config)}
    base, served = json.dumps(model.name), quote(model.name)
    imports = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
    ]
    if model.name in ALIASES:
        imports.append("from groupwise.engine.models.bundled import fetch_model")
        base, served = f"fetch_model({base})", f'"$(groupwise fetch-model {model.name})"'
    revision = f", revision={json.dumps(model.revision)}" if model.revision else ""
    # Load the base in float32: added to a rounded base, the adapter's changes would be rounded too.
    lines = [
        *imports,
        "",
        f'base = AutoModelForCausalLM.from_pretrained({base}{revision}, dtype="float32")',
        f'model = PeftModel.from_pretrained(base, "{adapter}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{adapter}")',
        f"chat = [{json.dumps(chat)}]",
        'inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
    ]
    show(Code("To load it", "\n".join(lines)))
    revision = f" --revision {quote(model.revision)}" if model.revision else ""
    lora = f"--enable-lora --max-lora-rank {largest_rank(config.lora_rank)} --lora-modules {quote(f'{name}={adapter}')}"
    show(Code("To serve it", f"vllm serve {served}{revision} {lora}"))
