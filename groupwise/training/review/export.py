"""`groupwise runs export`: writes the weights or the record of a run as files for other programs.

    adapter          the adapter unchanged, with tokenizer and model card
    merged           one model: the adapter added to its base
    gguf             the merged model for llama.cpp, made by its converter
    jsonl, parquet   the record: rollouts, metrics, evaluations with their rows, warnings

The files are built in a temporary folder next to the output, which is then renamed atomically. An existing folder is replaced only with
--force.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupwise.core import atomic_files
from groupwise.core.errors import ModelError, RunError, UsageError
from groupwise.engine.models.artefact import CARD, TOKENIZER, is_adapter, write_artefact
from groupwise.engine.models.card import WeightsLocation, model_card, results_of
from groupwise.engine.models.config import ModelConfig, recorded_base
from groupwise.runs import checkpoints
from groupwise.runs.find import label_of, resolve_run, run_around
from groupwise.runs.folder import RECORD, read_config, read_summary
from groupwise.runs.record_files import check_can_write, write_record
from groupwise.runs.store import Store
from groupwise.training.evaluation.policies import find_policy

if TYPE_CHECKING:
    from groupwise.engine.models.export import ExportDtype

logger = logging.getLogger(__name__)

Format = Literal["adapter", "merged", "gguf", "jsonl", "parquet"]
CONVERTER = "convert_hf_to_gguf.py"
CONVERTER_VARIABLE = "GROUPWISE_GGUF_CONVERTER"
"""The environment variable with the path of the converter."""
MIN_KEPT_SHARE = 0.95
"""Fraction of an adapter's change that must survive rounding; below it, a warning is logged."""
MAX_OUTPUT_CHARACTERS = 2000
"""Number of characters from the end of a converter's output that an error quotes."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The exported files."""

    run: str
    step: int
    """Number of steps of the run that the export includes."""
    format: Format
    folder: Path
    files: tuple[str, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """The export as plain data, for people and `--json`."""
        return {**asdict(self), "folder": str(self.folder), "files": list(self.files)}


def export(
    run: str,
    to: Format,
    output: Path,
    *,
    runs_dir: Path = Path("runs"),
    dtype: ExportDtype = "auto",
    converter: Path | None = None,
    force: bool = False,
    keep_change: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a run (`RUN`, `RUN@STEP`) to a folder in a format. Raises UsageError for wrong arguments before any work.

    `keep_change`: write a merged model in float32 if rounding would lose the adapter's change, instead of a warning.
    `trust_remote_code`: allow the run's config to enable code from the model repository.
    """
    if dtype != "auto" and to not in ("merged", "gguf"):
        raise UsageError(f"--dtype has no effect on {to}; it is that of a merged model.")
    if converter is not None and to != "gguf":
        raise UsageError(f"--converter has no effect on {to}; it makes a GGUF file.")
    _check_output(output, force)
    if to in ("jsonl", "parquet"):
        path, step = resolve_run(run, runs_dir)
        check_can_write(to)
        with Store.open(path / RECORD, readonly=True) as store:
            steps = min(store.step_count(), sys.maxsize if step is None else step)
            file_names = _fill_output(
                output, force, lambda folder: write_record(store, to, folder, steps)
            )
        return Exported(path.name, steps, to, output, file_names)
    policy = find_policy(run, runs_dir)
    trained_by = policy.run or (None if policy.folder is None else run_around(policy.folder))
    if trained_by is None or policy.folder is None:
        raise UsageError(
            f"{run!r} is not a run. Give the name of one, its folder, or either with @STEP; --dir is the folder that holds the runs."
        )
    step = int(label_of(trained_by, policy.folder).rpartition("@")[2])
    weights = _ExportedWeights(trained_by, policy.folder, step, trust_remote_code)
    with checkpoints.reading(weights.folder):
        if to == "adapter" and not is_adapter(weights.folder):
            raise UsageError(
                f"{weights.run.name} trained all weights of its model, so it has no adapter. Give --to merged: the model as it is."
            )
    program = _find_converter(converter) if to == "gguf" else None
    min_kept = MIN_KEPT_SHARE if keep_change else 0.0

    def fill(folder: Path) -> None:
        _write_weights(weights, to, dtype, program, folder, output, min_kept)

    with checkpoints.reading(weights.folder):
        file_names = _fill_output(output, force, fill)
    return Exported(weights.run.name, weights.step, to, output, file_names)


# --- the place -----------------------------------------------------------------------------------


def _check_output(output: Path, force: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output names a folder.")
    atomic_files.check_can_write(output)
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not force:
        raise UsageError(
            f"{output} is not empty. Name another --output, or give --force to replace the whole folder."
        )
    folder = output.resolve()
    if folder in (Path.home(), Path.cwd(), *Path.home().parents, *Path.cwd().parents) or any(
        (folder / name).exists() for name in (RECORD, ".git")
    ):
        raise UsageError(
            f"{output} is not a folder that an export should replace: you are in it, or it is a run or a repository. Name another "
            "--output."
        )


def _fill_output(output: Path, force: bool, fill: Callable[[Path], None]) -> tuple[str, ...]:
    """Fill the output folder in a temporary place and rename it; returns the names of its files."""
    try:
        atomic_files.make_folder(output, fill, replace=force)
    except FileExistsError:
        raise UsageError(
            f"{output} was filled by another program meanwhile; nothing in it was replaced."
        ) from None
    return tuple(sorted(file.name for file in output.iterdir()))


# --- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ExportedWeights:
    """The weights to export: a checkpoint of a run, or its final weights."""

    run: Path
    folder: Path
    step: int
    trusted: bool = False
    """True if code of the base model may run."""

    @property
    def final(self) -> bool:
        return self.folder.name == "final"


def _write_weights(
    weights: _ExportedWeights,
    to: Format,
    dtype: ExportDtype,
    program: Path | None,
    folder: Path,
    output: Path,
    min_kept: float,
) -> None:
    # The checkpoint of the last step also contains the final weights.
    summary = read_summary(weights.run) or {}
    is_final = weights.final or summary.get("final_step") == weights.step
    card = model_card(
        weights.run,
        weights.folder,
        weights.step,
        location=WeightsLocation(
            output.name, file=f"{weights.run.name}.gguf" if to == "gguf" else None
        ),
        results=results_of(summary) if is_final else {},
        merged=to != "adapter",
    )
    if to == "adapter":
        write_artefact(folder, weights.folder, card, _find_tokenizer(weights))
    elif to == "merged":
        _write_model(weights, dtype, folder, min_kept)
        (folder / CARD).write_text(card, encoding="utf-8")
    else:
        assert program is not None, "it was looked for"
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=atomic_files.BUILDING
        ) as temp_folder:
            _write_model(weights, dtype, Path(temp_folder))
            _convert_to_gguf(program, Path(temp_folder), folder / f"{weights.run.name}.gguf")
        (folder / CARD).write_text(card, encoding="utf-8")


def _write_model(
    weights: _ExportedWeights, dtype: ExportDtype, folder: Path, min_kept: float = 0.0
) -> None:
    from groupwise.engine.models.export import write_merged, write_whole

    if is_adapter(weights.folder):
        files = write_merged(_base_model(weights), weights.folder, folder, dtype, keeping=min_kept)
        if files.kept_share < MIN_KEPT_SHARE:
            logger.warning(
                "in %s, %.0f %% of the adapter's change is lost in rounding; --dtype float32 keeps all of it",
                files.dtype,
                100 * (1 - files.kept_share),
            )
    else:
        write_whole(weights.folder, folder, dtype)
    _find_tokenizer(weights, always=True).save_pretrained(folder)


def _base_model(weights: _ExportedWeights) -> ModelConfig:
    """The base model of the run."""
    model_section = read_config(weights.run)["model"]
    return recorded_base(model_section, trust_remote_code=weights.trusted)


def _find_tokenizer(weights: _ExportedWeights, *, always: bool = False) -> Any:
    """The tokenizer of the run: the one stored with the weights or the final weights, otherwise the base model's.

    None if it is stored with the weights already, unless `always`.
    """
    for folder in (weights.folder, weights.run / "final"):
        if any(next(folder.glob(pattern), None) for pattern in TOKENIZER):
            if folder == weights.folder and not always:
                return None
            from groupwise.engine.models.export import stored_tokenizer

            return stored_tokenizer(folder)
    from groupwise.engine.models.tokenizer import load_tokenizer

    return load_tokenizer(_base_model(weights))


# --- GGUF ----------------------------------------------------------------------------------------


def _find_converter(path_option: Path | None) -> Path:
    """Path of llama.cpp's converter: from the argument, the environment variable, or PATH."""
    converter = path_option or os.environ.get(CONVERTER_VARIABLE) or shutil.which(CONVERTER)
    if converter is None:
        raise ModelError(
            f"GGUF files are made by llama.cpp's {CONVERTER}, which is not here. Get it by: git clone "
            f"https://github.com/ggml-org/llama.cpp (and pip install gguf), then name it by --converter PATH or "
            f"{CONVERTER_VARIABLE}."
        )
    path = Path(converter).expanduser()
    path = path / CONVERTER if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"There is no file {path}; --converter names llama.cpp's {CONVERTER}.")
    return path


def _convert_to_gguf(program: Path, model: Path, output: Path) -> None:
    """Run the converter with this Python, which must have the packages that it imports."""
    process = subprocess.run(
        [sys.executable, str(program), str(model), "--outfile", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode or not output.is_file():
        output_end = (process.stderr or process.stdout).strip()[-MAX_OUTPUT_CHARACTERS:]
        raise RunError(f"{program} failed (exit code {process.returncode}):\n{output_end}")
