"""The run folder, and the lock that lets only one process write to it.

    runs/<name>/
        config.json     the resolved configuration
        run.db          steps, metrics, rollouts, evaluations (`groupwise.runs.store`)
        summary.json    how it ended
        checkpoints/    step-N/ (`groupwise.runs.checkpoints`)
            records/        step-N.db, the segments of the record from deleted checkpoints (`groupwise.runs.record_segments`)
            routed_experts/ choices of experts of rollouts that may be trained on again (`groupwise.runs.routed_experts`)
        final/          the trained adapter or model with its tokenizer
            start/          the weights that the run was started from, if they are another run's
            tokenizer/      decodes the record's token ids; written when the run starts
            results/        results of evaluations, never overwritten
        reward.svg      the curve
        log.txt         what the package logged
            vllm.log        what the vLLM of the run's own printed, if it has one
            lock            held by the process that works on the run

A new run is built in a temporary folder next to its final path and then renamed, so it appears whole. The record holds its state:
`running` until it ends as `finished`, `stopped` (by a client of the training server), `interrupted` or `failed`. A run recorded as
`running` that no process holds has `crashed`.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

from groupwise.core import atomic_files
from groupwise.core.errors import (
    GroupwiseError,
    RunInUseError,
    RunNotFoundError,
    StoreError,
    UsageError,
)
from groupwise.runs import checkpoints
from groupwise.runs.config import RESERVED
from groupwise.runs.lock import LOCK, RunLock, holder, is_held
from groupwise.runs.records import ResumeRecord
from groupwise.runs.schema import RECORD
from groupwise.runs.store import Store

State = Literal["running", "finished", "stopped", "interrupted", "failed"]
ShownState = Literal["running", "finished", "stopped", "interrupted", "failed", "crashed"]

CONFIG = "config.json"
SUMMARY = "summary.json"
RESULTS = "results"
CHECKPOINTS = "checkpoints"
FINAL = "final"
START = "start"
"""Holds the weights that the run was started from by `--init-from`."""
TOKENIZER = "tokenizer"
SERVER_LOG = "vllm.log"
CLIENTS = "clients"
"""The task name of a run of the training server, whose clients have the prompts and rewards."""
FINAL_STEP = "final_step"
"""Key of the fact that says after how many steps the weights in `final/` were saved."""

BUILDING_SECONDS = 60.0
"""A run still under construction that no process holds counts as dead after this many seconds: building one takes milliseconds."""

MAX_JSON, DEEPEST_JSON = 16 << 20, 200
"""Limits for reading a configuration or summary: bytes, and nesting depth. Far more than any file that we write."""

_LOGGER = logging.getLogger("groupwise")


class RunFolder:
    """A run folder held by this process. Close it, or use it as a context manager, which also records how the run ended."""

    def __init__(self, path: Path, lock: RunLock, store: Store) -> None:
        self.path = path
        self.name = path.name
        self.store = store
        """The run's record, open for writing."""
        self.checkpoints = path / CHECKPOINTS
        self.final = path / FINAL
        self.results = path / RESULTS
        self.curve = path / "reward.svg"
        self._lock = lock
        self._log = _LogFile(path / "log.txt")

    @classmethod
    def create(
        cls,
        runs_dir: Path,
        name: str,
        config: Mapping[str, Any],
        meta: Mapping[str, Any] | None = None,
        *,
        keep_tokens: bool = True,
    ) -> RunFolder:
        """Make `runs_dir/name`, or `name-2`, `name-3` … if finished runs have that name.

        UsageError if an unfinished run has the name or if the folder is not writable, RunInUseError if the run is live.
        `meta` are facts for lists of runs: kind, model, task, max_steps.
        """
        _refuse_reserved(name)
        with _explaining_folder_errors(runs_dir):
            runs_dir.mkdir(parents=True, exist_ok=True)
        # Runs that died before they were published.
        for building_folder in runs_dir.glob(f"{atomic_files.BUILDING}*"):
            with suppress(FileNotFoundError):  # just begun; or another process has finished it
                age = time.time() - (building_folder / LOCK).stat().st_mtime
                if age > BUILDING_SECONDS and not is_held(building_folder):
                    shutil.rmtree(building_folder, ignore_errors=True)
        while True:
            with _explaining_folder_errors(runs_dir):
                path = _free_path(runs_dir, name)
                building = atomic_files.building_path(path)
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()
            with suppress(FileExistsError):  # another process was faster: look again
                lock = _build_run_folder(building, path, name, config, meta or {})
                return cls._open_held(path, lock, keep_tokens=keep_tokens)

    @staticmethod
    def would_create(runs_dir: Path, name: str) -> Path:
        """The folder that `create` would make now. Raises the same errors; creates and locks nothing."""
        _refuse_reserved(name)
        with _explaining_folder_errors(runs_dir):
            path = _free_path(runs_dir, name)
            atomic_files.try_to_write(runs_dir)
        return path

    @classmethod
    def open(cls, path: Path, *, keep_tokens: bool = True) -> RunFolder:
        """Open an existing run to resume it: sets its state to `running` and deletes the unfinished files of a dead process.

        RunNotFoundError if it is not a run folder, RunInUseError if another process holds it, UsageError or StoreError if it cannot
        be written.
        """
        if not (path / RECORD).is_file():
            raise RunNotFoundError(f"{path} is not a run folder: it has no {RECORD}.")
        lock = RunLock.acquire(path)
        folder = cls._open_held(path, lock, keep_tokens=keep_tokens)
        try:
            with atomic_files.explaining_disk_errors(path):
                atomic_files.sweep(path)
                checkpoints.sweep(folder.checkpoints)
            folder.store.set_meta({"state": "running", "error": None})
        except BaseException:
            folder._release()
            raise
        return folder

    @classmethod
    def _open_held(cls, path: Path, lock: RunLock, *, keep_tokens: bool) -> RunFolder:
        """Open a folder whose lock was taken; the lock is released if record or log cannot be opened."""
        try:
            store = Store.open(path / RECORD, keep_tokens=keep_tokens)
            try:
                with atomic_files.explaining_disk_errors(path):
                    return cls(path, lock, store)
            except BaseException:
                store.close()
                raise
        except BaseException:
            lock.release()
            raise

    @property
    def state(self) -> State:
        """The recorded state."""
        return self.store.get_meta()["state"]

    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return read_config(self.path)

    def resume(self, config: Mapping[str, Any], record: ResumeRecord) -> None:
        """Record a resume, and write the configuration that applies from now on."""
        self.store.record_resume(record)
        atomic_files.write_json(self.path / CONFIG, dict(config))

    def keep_tokenizer(self, fill: Callable[[Path], None]) -> None:
        """Make `tokenizer/` from the files that `fill` writes, unless it exists. Tokens can then be decoded before the run has ended."""
        folder = self.path / TOKENIZER
        if not folder.is_dir():
            atomic_files.make_folder(folder, fill, replace=False)

    def write_final(self, fill: Callable[[Path], None], step: int | None = None) -> Path:
        """Make `final/` from the files that `fill` writes into the folder that it receives; an earlier one is replaced.

        `step`: the number of steps after which the weights were saved; None: all steps so far. `find.final_step` reads it.
        """
        atomic_files.make_folder(self.final, fill, replace=True)
        if step is None:
            last_step = self.store.last_step()
            step = 0 if last_step is None else last_step + 1
        self.store.set_meta({FINAL_STEP: step})
        return self.final

    def finish(
        self,
        state: State,
        summary: Mapping[str, Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Record how the run ended, in summary.json and in the record."""
        trouble = None
        if isinstance(error, GroupwiseError):
            trouble = {"code": error.code, "message": str(error)}
        elif error is not None:
            code = "error" if isinstance(error, Exception) else "interrupted"
            trouble = {"code": code, "message": f"{type(error).__name__}: {error}"}
        self.summarise(state, summary, trouble)
        self.store.set_meta({"state": state, "error": trouble, "finished_at": time.time()})

    def summarise(
        self,
        state: State,
        summary: Mapping[str, Any] | None = None,
        trouble: dict[str, Any] | None = None,
    ) -> None:
        """Write how the run ends to summary.json. Until `finish` has also set the state in the record, a resume continues the run."""
        content = {"run": self.name, "state": state, "error": trouble, **(summary or {})}
        atomic_files.write_json(self.path / SUMMARY, content)

    def close(self) -> None:
        """Release the folder. A run that is still `running` then counts as interrupted."""
        try:
            if self.state == "running":
                self.finish("interrupted")
        finally:
            self._release()

    def _release(self) -> None:
        self._log.close()
        self.store.close()
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(StoreError):  # a full disk must not hide the original error
            if self.state == "running":
                self.finish(
                    "failed" if isinstance(error, Exception) else "interrupted", error=error
                )
        with suppress(StoreError):
            self.close()


def is_served(facts: Mapping[str, Any]) -> bool:
    """True if these facts of a run say that the training server made it."""
    return facts.get("task") == CLIENTS and not facts.get("task_file")


def read_config(path: Path) -> dict[str, Any]:
    """The resolved configuration of a run; StoreError if it cannot be read."""
    return _read_json(path / CONFIG)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The configuration as dotted keys and their values as JSON; `prefix` is put before the keys."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False)
    return flat


def read_summary(path: Path) -> dict[str, Any] | None:
    """How a run ended; None if it has no summary yet. StoreError if the file cannot be read."""
    return _read_json(path / SUMMARY) if (path / SUMMARY).exists() else None


def shown_state(path: Path, recorded: State) -> ShownState:
    """The recorded state of a run, or `crashed` if that is `running` and no live process holds the run."""
    return "crashed" if recorded == "running" and not is_held(path) else recorded


def read_state(path: Path) -> ShownState:
    """The state of a run; StoreError if its record cannot be read."""
    with Store.open(path / RECORD, readonly=True) as store:
        return shown_state(path, store.get_meta()["state"])


def add_result(path: Path, name: str, content: Any, rows: Path | None = None) -> Path:
    """Write `results/<name>.json` of a run, or `<name>-2.json` … : an earlier result is never overwritten.

    `rows` is a finished file on the same disk, which becomes `results/<name>.jsonl`; for data too large for one JSON value.
    Needs no lock: a finished or a live run may be evaluated. StoreError if it cannot be written; call
    `atomic_files.check_can_write(result_file(...))` to find out before a long evaluation.
    """
    folder = path / RESULTS
    with atomic_files.explaining_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        file = result_file(path, name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            if rows is None:
                atomic_files.write_json(file, content, replace=False)
            else:
                # The rows first, so that a result never lacks them. Raises FileExistsError, leaving nothing, if either file exists.
                rows_file = file.with_suffix(".jsonl")
                atomic_files.publish_file(rows, rows_file, replace=False)
                try:
                    atomic_files.write_json(file, content, replace=False)
                except BaseException:
                    rows_file.unlink(missing_ok=True)
                    raise
            return file
    raise AssertionError("unreachable")


def result_file(path: Path, name: str) -> Path:
    """The path of the result of this name in a run."""
    return path / RESULTS / f"{name}.json"


def _refuse_reserved(name: str) -> None:
    if name in RESERVED:
        raise UsageError(
            f"A run cannot be called {name!r}: that names the model itself, as in `--policy {name}`. "
            "Choose another run.name=<name>."
        )


@contextmanager
def _explaining_folder_errors(runs_dir: Path) -> Generator[None, None, None]:
    """While a run does not exist yet, report an OSError as a wrong `run.dir` (UsageError), not as a failed run."""
    try:
        yield
    except OSError as error:
        reason = "it is a file" if runs_dir.is_file() else error.strerror or str(error)
        raise UsageError(
            f"run.dir: no run can be made in {runs_dir}: {reason}. Fix that, or name another folder by run.dir=<folder>."
        ) from error


def _free_path(runs_dir: Path, name: str) -> Path:
    for number in count(1):
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
        if not (path / RECORD).is_file():
            raise UsageError(
                f"{path} exists and is not a run folder. Move it away, or choose another run.name=<name>."
            )
        state = read_state(path)
        if state == "running":
            raise RunInUseError(
                f"{path} is in use by {holder(path) or 'another process'}. "
                "Wait for it or stop it, or start another run with run.name=<another name>."
            )
        if state != "finished":
            raise UsageError(
                f"{path} holds an unfinished run ({state}). Go on with it by --resume, "
                f"or start another one beside it with run.name=<another name than {name}>."
            )
    raise AssertionError("unreachable")


def _build_run_folder(
    building: Path, path: Path, name: str, config: Mapping[str, Any], meta: Mapping[str, Any]
) -> RunLock:
    """Fill the folder under its building name and rename it to `path`; the returned lock moves with it."""
    lock = RunLock.acquire(building)
    try:
        atomic_files.write_json(building / CONFIG, dict(config))
        with Store.create(building / RECORD) as store:
            store.set_meta(
                {
                    **meta,
                    "requested_name": name,
                    "created_at": time.time(),
                    "state": "running",
                    "error": None,
                }
            )
        with atomic_files.explaining_disk_errors(building):
            for room in (CHECKPOINTS, RESULTS):
                (building / room).mkdir()
        atomic_files.publish_folder(building, path)
    except BaseException:
        lock.release()
        shutil.rmtree(building, ignore_errors=True)
        raise
    return lock


def _read_json(path: Path) -> dict[str, Any]:
    """Read JSON that another program may have written. Raises StoreError."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not an ordinary file")
        with path.open("rb") as file:
            data = file.read(MAX_JSON + 1)
        if len(data) > MAX_JSON:
            raise ValueError(f"it is larger than {MAX_JSON} bytes")
        content = json.loads(data)
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        # Raise RecursionError for JSON nested deeper than DEEPEST_JSON: it can be read, but the code that writes or shows it recurses.
        level: list[Any] = [content]
        for _ in range(DEEPEST_JSON):
            children: list[Any] = [
                value.values() if type(value) is dict else value for value in level
            ]
            level = [child for value in children for child in value if type(child) in (dict, list)]
        if level:
            raise RecursionError
        return cast("dict[str, Any]", content)
    except RecursionError:
        reason = "it is nested too deep"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise StoreError(f"cannot read {path}: {reason}. Restore it from a copy.")


class _LogFile:
    """Writes the package's log records to a file while the run is open."""

    def __init__(self, path: Path) -> None:
        self._handler = _Handler(path, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(_Formatter())
        self._previous_level = _LOGGER.level
        _LOGGER.addHandler(self._handler)
        if _LOGGER.getEffectiveLevel() > logging.INFO:
            _LOGGER.setLevel(logging.INFO)

    def close(self) -> None:
        _LOGGER.removeHandler(self._handler)
        _LOGGER.setLevel(self._previous_level)
        with suppress(OSError):  # a log line lost to a full disk is acceptable
            self._handler.close()


class _Handler(logging.FileHandler):
    """Drops lines that cannot be written: the record already reports a full disk, so the log need not do so for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    """Time in UTC, level, message. Control characters are escaped: messages may contain a model's text."""

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return "".join(
            letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
            for letter in super().format(record)
        )
