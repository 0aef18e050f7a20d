"""What a run made, or what it recorded, as files for other programs: the command `groupwise runs export`.

    adapter          the adapter as it is, with tokenizer and model card
    merged           one model, the adapter added to its base
    gguf             the merged model for llama.cpp, by its converter
    jsonl, parquet   rollouts, metrics and evaluations

Everything is built beside its place and appears whole. What is there already stays, unless it may be replaced.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from groupwise.errors import ModelError, RunError, UsageError
from groupwise.evaluation.policies import find_policy
from groupwise.models.artefact import CARD, TOKENIZER, is_adapter, write_artefact
from groupwise.models.card import Place, model_card, results_of
from groupwise.models.config import ModelConfig
from groupwise.runs import durable
from groupwise.runs.find import resolve_run
from groupwise.runs.folder import RECORD, read_config, read_summary
from groupwise.runs.records import RolloutFilter
from groupwise.runs.store import Store

if TYPE_CHECKING:
    from groupwise.models.export import ExportDtype

logger = logging.getLogger(__name__)

Format = Literal["adapter", "merged", "gguf", "jsonl", "parquet"]
CONVERTER = "convert_hf_to_gguf.py"
CONVERTER_VARIABLE = "GROUPWISE_GGUF_CONVERTER"
"""The environment variable that says where the converter is."""
ENOUGH = 0.95
"""Share of an adapter's change that must survive the rounding, lest a warning is due."""
LONGEST_TOLD = 2000
"""Characters of what a converter said, the last ones."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    run: str
    step: int
    """Steps of the run that it has."""
    format: Format
    folder: Path
    files: tuple[str, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """For people and `--json`."""
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
) -> Exported:
    """Write a run (`RUN`, `RUN@STEP`) to a folder in a format. Raises UsageError for what was given wrongly, before any work."""
    if dtype != "auto" and to not in ("merged", "gguf"):
        raise UsageError(f"--dtype has no effect on {to}; it is that of a merged model.")
    if converter is not None and to != "gguf":
        raise UsageError(f"--converter has no effect on {to}; it makes a GGUF file.")
    _check_place(output, force)
    if to in ("jsonl", "parquet"):
        path, step = resolve_run(run, runs_dir)
        _check_parquet(to)
        with Store.open(path / RECORD, readonly=True) as store:
            last = store.last_step()
            steps = min(step if step is not None else sys.maxsize, 0 if last is None else last + 1)
            write = _write_jsonl if to == "jsonl" else _write_parquet
            made = _made(output, force, lambda folder: _write_record(store, steps, folder, write))
        return Exported(path.name, steps, to, output, made)
    weights = _weights(run, runs_dir)
    _check_kind(weights, to)
    program = _converter(converter) if to == "gguf" else None
    made = _made(
        output, force, lambda folder: _write_weights(weights, to, dtype, program, folder, output)
    )
    return Exported(weights.run.name, weights.step, to, output, made)


# --- the place -----------------------------------------------------------------------------------


def _check_place(output: Path, force: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output names a folder.")
    durable.check_can_write(output)
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not force:
        raise UsageError(
            f"{output} is not empty. Name another --output, or give --force to replace the whole folder."
        )
    place = output.resolve()
    if place in (Path.home(), Path.cwd(), *Path.home().parents, *Path.cwd().parents) or any(
        (place / name).exists() for name in (RECORD, ".git")
    ):
        raise UsageError(
            f"{output} is no folder that an export should replace: you are in it, or it is a run or a repository. Name another "
            "--output."
        )


def _made(output: Path, force: bool, fill: Callable[[Path], None]) -> tuple[str, ...]:
    """Fill a folder beside its place and publish it; returns the names of its files."""
    building = durable.building_path(output)
    shutil.rmtree(building, ignore_errors=True)
    try:
        with durable.explained(output):
            building.mkdir(parents=True)
            fill(building)
            names = tuple(sorted(file.name for file in building.iterdir()))
            if force and output.is_dir():
                durable.remove_folder(output)
            durable.publish_folder(building, output)
    except FileExistsError:
        raise UsageError(
            f"{output} was filled by somebody else meanwhile; nothing of it was replaced."
        ) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return names


# --- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weights:
    """What is exported: a checkpoint of a run, or its final weights."""

    run: Path
    folder: Path
    step: int

    @property
    def final(self) -> bool:
        return self.folder.name == "final"


def _weights(run: str, runs_dir: Path) -> _Weights:
    found = find_policy(run, runs_dir)
    if found.run is None or found.folder is None:
        raise UsageError(
            f"{run!r} is no run. Give the name of one, its folder, or either with @STEP; --dir is the folder that holds the runs."
        )
    return _Weights(found.run, found.folder, int(found.label.rpartition("@")[2]))


def _check_kind(weights: _Weights, to: Format) -> None:
    if to == "adapter" and not is_adapter(weights.folder):
        raise UsageError(
            f"{weights.run.name} trained all weights of its model, so it has no adapter. Give --to merged: the model as it is."
        )


def _write_weights(
    weights: _Weights,
    to: Format,
    dtype: ExportDtype,
    program: Path | None,
    folder: Path,
    output: Path,
) -> None:
    card = _card(weights, to, output.name)
    if to == "adapter":
        write_artefact(folder, weights.folder, card, _tokenizer(weights))
    elif to == "merged":
        _write_model(weights, dtype, folder)
        (folder / CARD).write_text(card, encoding="utf-8")
    else:
        assert program is not None, "it was looked for"
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=durable.BUILDING) as between:
            _write_model(weights, dtype, Path(between))
            _convert(program, Path(between), folder / f"{weights.run.name}.gguf")
        (folder / CARD).write_text(card, encoding="utf-8")


def _write_model(weights: _Weights, dtype: ExportDtype, folder: Path) -> None:
    from groupwise.models.export import write_merged, write_whole

    if is_adapter(weights.folder):
        written = write_merged(_model(weights), weights.folder, folder, dtype)
        if written.kept < ENOUGH:
            logger.warning(
                "in %s, %.0f %% of the adapter's change is lost in rounding; --dtype float32 keeps all of it",
                written.dtype,
                100 * (1 - written.kept),
            )
    else:
        write_whole(weights.folder, folder, dtype)
    _tokenizer(weights, always=True).save_pretrained(folder)


def _card(weights: _Weights, to: Format, name: str) -> str:
    results = results_of(read_summary(weights.run)) if weights.final else {}
    return model_card(
        weights.run,
        weights.folder,
        weights.step,
        place=Place(name, file=f"{weights.run.name}.gguf" if to == "gguf" else None),
        results=results,
        merged=to != "adapter",
    )


def _model(weights: _Weights) -> ModelConfig:
    """The base that the run trained on."""
    given = read_config(weights.run)["model"]
    return ModelConfig.model_validate({**given, "adapter": None, "adapter_revision": None})


def _tokenizer(weights: _Weights, *, always: bool = False) -> Any:
    """The tokenizer as the run used it: that beside the weights or the final ones, else the base's. None where it comes with them."""
    for folder in (weights.folder, weights.run / "final"):
        if any(next(folder.glob(pattern), None) for pattern in TOKENIZER):
            if folder == weights.folder and not always:
                return None
            from groupwise.models.export import stored_tokenizer

            return stored_tokenizer(folder)
    from groupwise.models.tokenizer import load_tokenizer

    return load_tokenizer(_model(weights))


# --- GGUF ----------------------------------------------------------------------------------------


def _converter(given: Path | None) -> Path:
    """llama.cpp's converter: as given, as the environment says, or on the path."""
    named = given or os.environ.get(CONVERTER_VARIABLE) or shutil.which(CONVERTER)
    if named is None:
        raise ModelError(
            f"GGUF files are made by llama.cpp's {CONVERTER}, which is not here. Get it by: git clone "
            f"https://github.com/ggml-org/llama.cpp (and pip install gguf), then name it by --converter PATH or "
            f"{CONVERTER_VARIABLE}."
        )
    path = Path(named).expanduser()
    path = path / CONVERTER if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"There is no file {path}; --converter names llama.cpp's {CONVERTER}.")
    return path


def _convert(program: Path, model: Path, output: Path) -> None:
    """Run it; it needs nothing but this Python and the packages that it imports."""
    done = subprocess.run(
        [sys.executable, str(program), str(model), "--outfile", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not output.is_file():
        told = (done.stderr or done.stdout).strip()[-LONGEST_TOLD:]
        raise RunError(f"{program} failed (exit code {done.returncode}):\n{told}")


# --- the record ----------------------------------------------------------------------------------

Write = Callable[[Path, str, Iterable[list[Row]]], None]


def _write_record(store: Store, steps: int, folder: Path, write: Write) -> None:
    """Everything that was recorded of the first so many steps."""
    write(folder, "rollouts", _rollouts(store, steps))
    write(folder, "metrics", _metrics(store, steps))
    write(folder, "evaluations", _evaluations(store, steps))


def _rollouts(store: Store, steps: int) -> Iterator[list[Row]]:
    for step in range(steps):
        views = store.rollouts(RolloutFilter(step=step, limit=sys.maxsize))
        yield [asdict(view) for view in views]


def _metrics(store: Store, steps: int) -> Iterator[list[Row]]:
    """A row for each step, with every name that the run has."""
    curves = {name: dict(curve) for name, curve in store.metrics().items()}
    for step in range(steps):
        yield [{"step": step, **{name: curve.get(step) for name, curve in curves.items()}}]


def _evaluations(store: Store, steps: int) -> Iterator[list[Row]]:
    """A row for each metric of each evaluation."""
    for record in store.evaluations(rows=False):
        if record.step <= steps:
            facts = {"step": record.step, "name": record.name, "policy": record.policy}
            yield [{**facts, "metric": name, "value": v} for name, v in record.metrics.items()]


def _write_jsonl(folder: Path, name: str, parts: Iterable[list[Row]]) -> None:
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as file:
        for rows in parts:
            for row in rows:
                plain = durable.without_nan(row)
                file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")


def _check_parquet(to: Format) -> None:
    if to == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError("Parquet needs the package pyarrow: pip install 'groupwise[train]'.")


def _write_parquet(folder: Path, name: str, parts: Iterable[list[Row]]) -> None:
    import pyarrow  # pyright: ignore[reportMissingTypeStubs]
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    arrow, tables = cast("Any", pyarrow), cast("Any", parquet)
    schema = _schema(arrow, name, parts := list(parts) if name == "metrics" else parts)
    with tables.ParquetWriter(folder / f"{name}.parquet", schema) as writer:
        for rows in parts:
            writer.write_table(
                arrow.Table.from_pylist([_encodable(row) for row in rows], schema=schema)
            )


def _schema(arrow: Any, name: str, parts: Any) -> Any:
    """The columns of a file, so that an empty one has them too."""
    text, number, whole = arrow.string(), arrow.float64(), arrow.int64()
    if name == "metrics":
        names = list(parts[0][0])[1:] if parts else []
        return arrow.schema([("step", whole), *((each, number) for each in names)])
    if name == "evaluations":
        named = [(each, text) for each in ("name", "policy", "metric")]
        return arrow.schema([("step", whole), *named, ("value", number)])
    part = [("name", text), ("value", number), ("weight", number), ("turn", whole)]
    return arrow.schema(
        [
            *((each, whole) for each in ("id", "step", "draw", "member", "attempt", "example")),
            *((each, text) for each in ("outcome", "reason")),
            *((each, number) for each in ("reward", "advantage")),
            ("parts", arrow.list_(arrow.struct(part))),
            ("truncated", arrow.bool_()),
            ("completion_tokens", whole),
            *((each, text) for each in ("prompt", "completion", "ended_by")),
        ]
    )


def _encodable(row: Mapping[str, Any]) -> Row:
    """Without halves of characters, which a model may write and UTF-8 has not."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in row.items()
    }
