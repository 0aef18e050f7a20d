"""Reads rows from a source: a local file, a folder of files, or a dataset on the hub.

    read_source("data/train.jsonl")
    read_source("data/sums.csv", split="train[:90%]", columns={"prompt": "question", "answer": "solution"})
    read_source("openai/gsm8k", "main", split="train", revision="e53f048")

A source is local if a file or folder of that name exists, or if the name starts with `.`, `/` or `~`, has more than one `/`, or has
the suffix of a supported file; else it is a dataset on the hub. Every row is a dict of plain values. `columns` adds names: ours,
then theirs; theirs may be a path into a column, as in `reward_model.ground_truth`. Unreadable data raise a `TaskError` that names
the file and, if known, the line.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, cast

from groupwise.core import hub_errors
from groupwise.core.errors import TaskError
from groupwise.core.extras import not_installed
from groupwise.core.plugins import nearest
from groupwise.core.types import NumberedRow, with_number_of
from groupwise.tasks.data.order import Stream

Row = dict[str, Any]

TRAIN = "train"
"""The split of a file that has no splits."""

SAVED_SPLITS, SAVED_STATE = "dataset_dict.json", "state.json"
"""Files that `save_to_disk` of the library datasets writes next to the rows: for several splits, and for one."""

_SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")
_LONGEST_CELL = 2**31 - 1
"""Most characters in a CSV cell; Python's default limit of 131,072 is too small for long answers."""


def read_source(
    source: str,
    config: str | None = None,
    split: str = TRAIN,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    *,
    revision: str | None = None,
    seed: int | None = None,
) -> list[Row]:
    """The rows of a source: the first `limit` of those in `split`, or with a `seed` a random sample. Raises TaskError, also if
    there are none.

    `split` may have a slice: `train[:100]`, `train[10%:]`. A file has only the split `train`; a folder has a file for each split,
    such as `test.jsonl`. `config` and `revision` (a commit, tag or branch) are the hub's.
    """
    if is_local(source):
        hub_options = {"config": config, "revision": revision}
        for name, value in hub_options.items():
            if value is not None:
                raise TaskError(
                    f"The {name} {value!r} of {source!r} has no effect: that is a file or folder here, and only datasets on the hub have "
                    "one. Leave it out."
                )
        rows = _read_local(source, split, limit, seed)
    else:
        rows = _read_hub(source, config, split, revision, limit, seed)
    if not rows:
        raise TaskError(f"The dataset {source!r} has no rows in its split {split!r}.")
    return rename_columns(rows, columns or {}, f"The dataset {source!r}")


def sample(count: int, limit: int | None, seed: int) -> list[int]:
    """Indices, in ascending order, of `limit` rows out of `count`, each equally likely; of all rows if there are no more."""
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(Stream("sample", seed).sample(range(count), limit))


def is_local(source: str) -> bool:
    """True if a source is a local file or folder, rather than the name of a dataset on the hub."""
    path = Path(source).expanduser()
    return (
        path.exists()
        or source.startswith((".", "/", "~"))
        or path.suffix in _READERS
        or source.count("/") > 1
    )


def rename_columns(rows: Sequence[Row], columns: Mapping[str, str], where: str) -> list[Row]:
    """The rows with columns also under our names; a row that lacks one of them stays without it."""
    if not columns:
        return list(rows)
    available = dict.fromkeys(name for row in rows for name in row)
    for our_name, source_name in columns.items():
        if not any(_has_path(row, source_name) for row in rows):
            raise TaskError(no_column(where, source_name, list(available), f" as {our_name!r}"))
    result: list[Row] = []
    for row in rows:
        renamed = {
            our_name: _value_at_path(row, source_name)
            for our_name, source_name in columns.items()
            if _has_path(row, source_name)
        }
        other_columns = {name: value for name, value in row.items() if name not in columns}
        result.append(with_number_of(row, {**renamed, **other_columns}))
    return result


def no_column(where: str, name: str, available: Sequence[str], use: str = "") -> str:
    """The message that no row has a column; `use` says why it is needed."""
    suggestions = nearest(name, available)
    hint = (
        f" Did you mean {' or '.join(repr(suggestion) for suggestion in suggestions)}?"
        if suggestions
        else ""
    )
    columns = ", ".join(available) or "none"
    return f"{where} has no column {name!r}, which the config names{use}.{hint} It has: {columns}."


def _has_path(row: Row, path: str) -> bool:
    if path in row:
        return True
    first, _, rest = path.partition(".")
    inner = row.get(first)
    return bool(rest) and isinstance(inner, dict) and _has_path(cast("Row", inner), rest)


def _value_at_path(row: Row, path: str) -> Any:
    if path in row:
        return row[path]
    first, _, rest = path.partition(".")
    return _value_at_path(row[first], rest)


# --- splits --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Split:
    """A split's name and the selected slice of it, as in `train[10%:]`."""

    name: str
    start: str | None
    stop: str | None

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        return rows[_resolve_bound(self.start, len(rows)) : _resolve_bound(self.stop, len(rows))]


def _resolve_bound(bound: str | None, count: int) -> int | None:
    if bound is None or not bound.endswith("%"):
        return None if bound is None else int(bound)
    return round(int(bound[:-1]) * count / 100)


# --- files ---------------------------------------------------------------------------------------


def _read_local(source: str, split: str, limit: int | None, seed: int | None) -> list[Row]:
    match = _SPLIT.fullmatch(split)
    if match is None:
        raise TaskError(
            f"The split {split!r} of {source!r} is none that can be read. Write a name, with or without a slice: train, train[:100], "
            "train[10%:90%]."
        )
    split_spec, path = (
        _Split(match["name"], match["start"], match["stop"]),
        Path(source).expanduser(),
    )
    if not path.exists():
        raise TaskError(_missing_file_message(source, path))
    files = _files_of(path, split_spec.name) if path.is_dir() else [path]
    if not path.is_dir() and split_spec.name != TRAIN:
        raise TaskError(
            f"{source} is one file, which has no splits: its rows are the split 'train', and {split_spec.name!r} was asked for. Name the "
            "other file, or take a slice: train[:90%] and train[90%:]."
        )

    def rows() -> Iterator[Row]:
        return (row for file in files for row in _reader_of(file)(file))

    if split_spec.is_whole and seed is None:
        return list(islice(rows(), limit))
    if split_spec.is_whole and seed is not None and limit is not None:
        # Counted first, since all of them may not fit into memory.
        sampled = {*sample(sum(1 for _ in rows()), limit, seed)}
        return [NumberedRow(row, index) for index, row in enumerate(rows()) if index in sampled]
    split_rows = split_spec.of([NumberedRow(row, index) for index, row in enumerate(rows())])
    if seed is None:
        return list(split_rows[:limit])
    return [split_rows[index] for index in sample(len(split_rows), limit, seed)]


def _files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split: `train.jsonl`, or in pieces `train-00000-of-00002.parquet`, also in the folder `data`.

    In a folder made by `save_to_disk` of the library datasets, the files that it lists; they are the split `train` unless it names
    another.
    """
    saved_folder = folder / split if (folder / SAVED_SPLITS).is_file() else folder
    if (saved_folder / SAVED_STATE).is_file():
        file = saved_folder / SAVED_STATE
        state = _require_row(
            _parse_json(_decode_utf8(file.read_bytes(), str(file)), str(file)), str(file)
        )
        saved_split = state.get("_split") or TRAIN
        if saved_split != split and saved_folder.name != split:
            raise TaskError(
                f"The folder {saved_folder} holds the split {saved_split!r} of a saved dataset, and {split!r} was asked for. Name the "
                "other folder, or take a slice: train[:90%] and train[90%:]."
            )
        match state.get("_data_files"):
            case [*files] if all(
                isinstance(entry, dict) and _is_bare_name(cast("Row", entry).get("filename"))
                for entry in files
            ):
                return [saved_folder / entry["filename"] for entry in files]
            case files:
                raise TaskError(
                    f"{file} has `_data_files`: {files!r:.80}. Expected a list with the `filename` of each file, in the same folder."
                )
    candidates = [
        file for directory in (folder, folder / "data") for file in sorted(directory.glob("*"))
    ]
    readable = [file for file in candidates if file.suffix in _READERS and file.is_file()]
    matches = [file for file in readable if re.split(r"[.-]", file.name)[0] == split]
    if not matches:
        names = ", ".join(str(file.relative_to(folder)) for file in readable) or "none"
        raise TaskError(
            f"The folder {folder} has no file for the split {split!r}. A folder of data has files such as {split}.jsonl or "
            f"{split}-00000.parquet; those here that can be read are: {names}. Name one of them, or another split."
        )
    return matches


def _is_bare_name(value: Any) -> bool:
    """True if it names a file of the same folder."""
    return isinstance(value, str) and Path(value).name == value


def _reader_of(file: Path) -> Callable[[Path], Iterable[Row]]:
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise TaskError(
            f"{file} is of a kind that is not read here ({file.suffix or 'no suffix'}). Files of data end with "
            f"{', '.join(_READERS)}."
        )
    return reader


def _missing_file_message(source: str, path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    files = [file.name for file in folder.iterdir() if file.suffix in _READERS]
    suggestions = nearest(path.name, files)
    hint = (
        f" Did you mean {' or '.join(str(folder / name) for name in suggestions)}?"
        if suggestions
        else ""
    )
    listing = ", ".join(sorted(files)[:20]) or "none"
    hub = "" if path.suffix in _READERS else " A dataset on the hub is named OWNER/NAME."
    return f"There is no file of data {source!r}: looked for {path.absolute()}.{hint} Files of data in {folder}: {listing}.{hub}"


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            text = _decode_utf8(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, where)
            if text.strip():
                yield _require_row(_parse_json(text, where), where)


def _read_json(file: Path) -> Iterator[Row]:
    content = _parse_json(
        _decode_utf8(file.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(file)), str(file)
    )
    if isinstance(content, dict) and isinstance(cast("Row", content).get("data"), list):
        content = cast("Row", content)["data"]
    if not isinstance(content, list):
        raise TaskError(
            f'{file} holds {_json_kind(content)}. Expected a list of rows, or {{"data": [rows]}}; one row per line is .jsonl.'
        )
    for index, entry in enumerate(cast("list[Any]", content)):
        yield _require_row(entry, f"{file}, entry {index}")


def _read_csv(file: Path, delimiter: str = ",") -> Iterator[Row]:
    """Rows of a CSV file. Every value is text, because CSV has no types."""
    text = _decode_utf8(file.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(file))
    previous_limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        lines = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = cast("list[str]", next(lines, ()))
        duplicates = sorted({name for name in header if header.count(name) > 1})
        if duplicates:
            raise TaskError(
                f"{file}: the first line names the column {duplicates[0]!r} twice. Give each its name."
            )
        for cells in lines:
            if cells and len(cells) != len(header):
                raise TaskError(
                    f"{file}, line {lines.line_num}: {len(cells)} values for {len(header)} columns ({', '.join(header)}). Text with "
                    'separators or line breaks must be in quotes, "like, this".'
                )
            if cells:
                yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        kind = file.suffix[1:].upper()
        raise TaskError(f"{file} cannot be read as {kind}: {error}.") from error
    finally:
        csv.field_size_limit(previous_limit)


def _read_tsv(file: Path) -> Iterator[Row]:
    return _read_csv(file, "\t")


def _read_parquet(file: Path) -> Iterator[Row]:
    tables = _import_pyarrow(file, "pyarrow.parquet")
    with _reading_as(file, "Parquet"), tables.ParquetFile(file) as table:
        for batch in table.iter_batches():
            yield from batch.to_pylist()


_ARROW_FILE = b"ARROW1"
"""The first bytes of a file in Arrow's file format; a stream begins otherwise."""


def _read_arrow(file: Path) -> Iterator[Row]:
    """Reads rows of both formats of Arrow: the stream, which the library datasets writes, and the file (Feather), which polars writes."""
    arrow = _import_pyarrow(file, "pyarrow")
    with _reading_as(file, "Arrow"), arrow.memory_map(str(file)) as memory:
        if memory.read(len(_ARROW_FILE)) == _ARROW_FILE:
            reader = arrow.ipc.open_file(memory)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            memory.seek(0)
            batches = arrow.ipc.open_stream(memory)
        for batch in batches:
            batch.validate(full=True)  # otherwise invalid offsets read beyond the end of the file
            yield from batch.to_pylist()


def _import_pyarrow(file: Path, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise TaskError(not_installed(f"Reading {file}", "train", "pyarrow")) from missing


@contextmanager
def _reading_as(file: Path, kind: str) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # pyarrow raises one of these
        raise TaskError(f"{file} cannot be read as {kind}: {error}") from error


def _read_text(file: Path) -> Iterator[Row]:
    """A row for each line, in the column `text`."""
    text = _decode_utf8(file.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(file))
    lines = (line.rstrip("\r\n") for line in StringIO(text, newline=None))
    return ({"text": line} for line in lines if line.strip())


_READERS: dict[str, Callable[[Path], Iterable[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_text,
}

ENDINGS = tuple(_READERS)
"""Suffixes of data files."""


def _decode_utf8(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{where}: byte {error.start} is not UTF-8 (0x{data[error.start]:02x}). Save the file as UTF-8."
        ) from error


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise TaskError(f"{where} is nested too deep to be read.") from None
    except ValueError as error:
        hint = " One row per line is .jsonl." if where.endswith(".json") else ""
        raise TaskError(f"{where} is not JSON: {error}.{hint}") from error


def _require_row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise TaskError(
            f'{where} holds {_json_kind(value)}. Expected a row: {{"column": value, …}}.'
        )
    return cast("Row", value)


def _json_kind(value: Any) -> str:
    words = {"dict": "an object", "list": "a list", "str": "text", "NoneType": "null"}
    name = type(value).__name__
    return words.get(name, name)


# --- the hub -------------------------------------------------------------------------------------


def _read_hub(
    source: str,
    config: str | None,
    split: str,
    revision: str | None,
    limit: int | None,
    seed: int | None,
) -> list[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as missing:
        subject = f"{source!r} is not a file here, and loading it from the hub"
        raise TaskError(not_installed(subject, "train", "datasets")) from missing
    library: Any = datasets
    was_enabled = library.is_progress_bar_enabled()
    library.disable_progress_bars()
    try:
        dataset = library.load_dataset(source, config, split=split, revision=revision)
    except (ValueError, OSError, library.exceptions.DatasetsError) as error:
        options = {"config": config, "split": split, "revision": revision}
        described = ", ".join(
            f"{name} {value!r}" for name, value in options.items() if value is not None
        )
        reason = str(error).strip() or repr(error)
        offline = isinstance(error, ConnectionError)
        advice = (
            "The hub cannot be reached. A dataset that was loaded once is found in the cache of this machine; else give a file"
            if offline
            else "Look at its page for its configs and splits, or give a file"
        )
        raise TaskError(
            f"The dataset {source!r} ({described}) could not be had from the hub, after looking for a file or folder of that name in "
            f"{Path.cwd()}:\n  {reason}\n{advice} ({', '.join(_READERS)}).",
            temporary=hub_errors.is_temporary(error),
        ) from error
    finally:
        if was_enabled:
            library.enable_progress_bars()
    numbers = row_numbers(dataset) or range(len(dataset))
    if limit is None:
        return list(map(NumberedRow, dataset, numbers))
    indices = range(len(dataset))[:limit] if seed is None else sample(len(dataset), limit, seed)
    return [
        NumberedRow(row, numbers[index])
        for row, index in zip(dataset.select(indices), indices, strict=True)
    ]


def row_numbers(dataset: Any) -> Sequence[int] | None:
    """The indices of a Dataset's rows in its original split, of which it may be a slice or shuffled; None if they count from 0.

    A Dataset of the library datasets remembers which slice was loaded, and how it was filtered, shuffled or selected from; only if
    a single contiguous piece was selected, its start is lost.
    """
    match = _SPLIT.fullmatch(str(getattr(dataset, "split", None)))
    splits: Mapping[str, Any] = getattr(getattr(dataset, "info", None), "splits", None) or {}
    first = 0
    if match is not None and match["name"] in splits:
        all_rows = range(splits[match["name"]].num_examples)
        loaded = all_rows[
            _resolve_bound(match["start"], len(all_rows)) : _resolve_bound(
                match["stop"], len(all_rows)
            )
        ]
        first = loaded.start if len(loaded) == dataset.data.num_rows else 0
    indices: Any = getattr(dataset, "_indices", None)
    if not hasattr(indices, "column"):
        return range(first, first + len(dataset)) if first else None
    return [first + index for index in indices.column(0).to_pylist()]
