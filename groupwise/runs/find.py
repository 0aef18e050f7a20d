"""Finds runs: resolves `RUN`, `RUN@STEP` or a path, and lists all runs.

A step in an address is a number of steps done: `sort@40` is the checkpoint after 40 steps. A checkpoint that a client of the training
server saved under a name is found by that name, or by its path:

    D/runs/<run>/                     the folder of runs of a server
    D/checkpoints/<name>/saved.json   a checkpoint that was saved by name, with its run and step
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from groupwise.core.errors import RunNotFoundError, StoreError
from groupwise.runs import checkpoints
from groupwise.runs.checkpoints import Checkpoint
from groupwise.runs.encoding import moment
from groupwise.runs.folder import (
    CHECKPOINTS,
    FINAL,
    FINAL_STEP,
    RECORD,
    ShownState,
    State,
    shown_state,
)
from groupwise.runs.records import Order, RolloutFilter, RolloutView
from groupwise.runs.store import Store

SAVED = "saved.json"
"""The file of a checkpoint that was saved by name; it holds at least `run` and `step`."""
T = TypeVar("T")
K = TypeVar("K")
ENDS = 5
"""The first and the last reward of a run are means over this many steps, at most half of them: a single step is too noisy."""


@dataclass(frozen=True, slots=True)
class Address:
    """The run, and perhaps checkpoint, that a reference names."""

    path: Path
    """The run folder."""
    checkpoint: Checkpoint | None
    """None if the reference names the run as a whole."""

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One line of the list of runs."""

    name: str
    path: Path
    state: ShownState | None
    """None if the folder is broken; `broken` says why."""
    steps: int = 0
    """Steps done."""
    max_steps: int | None = None
    reward_first: float | None = None
    """Mean reward of the first few steps."""
    reward_last: float | None = None
    loss_first: float | None = None
    """Mean loss of the first few steps."""
    loss_last: float | None = None
    started: float | None = None
    """Seconds since 1970."""
    model: str | None = None
    task: str | None = None
    broken: str | None = None


def resolve(reference: str, runs_dir: Path = Path("runs")) -> Address:
    """Resolve a run name in `runs_dir`, or a path to a run or checkpoint folder; a run may have `@STEP` appended.

    RunNotFoundError lists the existing runs or checkpoints. Damaged checkpoints count as missing.
    """
    address = _find_folder(reference, runs_dir)
    if address is not None:
        return address
    name, step = _split_reference(reference)
    if step is None:
        raise RunNotFoundError(no_such_run(name, runs_dir))
    run = _find_folder(name, runs_dir)
    if run is None:
        raise RunNotFoundError(no_such_run(name, runs_dir))
    complete = checkpoints.complete(run.path / CHECKPOINTS, verify=False)
    for checkpoint in complete:
        if checkpoint.step == step:
            checkpoint.verify()
            return Address(run.path, checkpoint)
    names = ", ".join(f"{run.name}@{checkpoint.step}" for checkpoint in complete) or "none"
    damaged = "".join(f" Skipped as damaged: {skipped}." for skipped in complete.skipped)
    raise RunNotFoundError(
        f"the run '{run.name}' has no checkpoint after {step} steps. There are: {names}.{damaged} "
        "How many are kept is run.save_total_limit, how often they are made run.save_steps."
    )


def resolve_run(reference: str, runs_dir: Path = Path("runs")) -> tuple[Path, int | None]:
    """The run folder and the step that a reference names; a checkpoint of that step need not exist."""
    address = _find_folder(reference, runs_dir)
    if address is not None:
        return address.path, address.checkpoint.step if address.checkpoint else None
    name, step = _split_reference(reference)
    run = _find_folder(name, runs_dir)
    if run is None or step is None:
        raise RunNotFoundError(no_such_run(name, runs_dir))
    return run.path, step


def newest_unfinished(name: str, runs_dir: Path) -> Path:
    """The newest unfinished run that was requested under `name` (or has this name).

    RunNotFoundError if all of them are finished, or there are none; StoreError if the record of the run called `name` cannot be read.
    """
    runs = runs_called(name, runs_dir)
    if not runs:
        same_name = _find_folder(name, runs_dir)
        if same_name is not None:
            Store.facts(same_name.path / RECORD)
        raise RunNotFoundError(no_such_run(name, runs_dir))
    unfinished = [(path, facts) for path, facts in runs if facts.get("state") != "finished"]
    if not unfinished:
        names = ", ".join(path.name for path, _ in runs)
        raise RunNotFoundError(
            f"nothing to resume: every run called '{name}' in {runs_dir} is finished ({names}). "
            "Start a new one without --resume."
        )
    return max(unfinished, key=lambda run: moment(run[1].get("created_at")) or 0.0)[0]


def list_runs(runs_dir: Path = Path("runs")) -> list[RunInfo]:
    """All runs in a folder, oldest first; unreadable folders come last, with the reason."""
    infos = [run_info(path) for path in run_folders(runs_dir)]
    infos = [info for info in infos if info.broken is None or info.path.is_dir()]  # else removed
    return sorted(infos, key=lambda info: (info.broken is not None, info.started or 0.0, info.name))


def run_info(path: Path) -> RunInfo:
    """The list entry of one run; never raises for a broken one."""
    return run_info_and(path, lambda _: None)[0]


def run_info_and(path: Path, look: Callable[[Store], T]) -> tuple[RunInfo, T | None]:
    """`run_info`, and the result of `look` on the open record; that is None for a broken run."""
    try:
        with Store.open(path / RECORD, readonly=True) as store:
            facts = store.get_meta()
            if facts["state"] not in get_args(State):
                raise StoreError(
                    f"{path / RECORD} has the state {facts['state']!r:.40}, which there is not."
                )
            reward_first, reward_last = map(mean_of, store.curve_ends("reward", ENDS))
            loss_first, loss_last = map(mean_of, store.curve_ends("loss", ENDS))
            info = RunInfo(
                name=path.name,
                path=path,
                state=shown_state(path, facts["state"]),
                steps=store.step_count(),
                max_steps=_of_kind(facts.get("max_steps"), int),
                reward_first=reward_first,
                reward_last=reward_last,
                loss_first=loss_first,
                loss_last=loss_last,
                started=moment(facts.get("created_at")),
                model=_of_kind(facts.get("model"), str),
                task=_of_kind(facts.get("task"), str),
            )
            return info, look(store)
    except Exception as error:  # noqa: BLE001 — the folder may contain anything, and the other runs must still be listed
        return RunInfo(path.name, path, state=None, broken=str(error)), None


def final_step(path: Path) -> int:
    """The step of the weights in a run's `final/`: the best step if the run was configured to keep that, else the last one."""
    step = Store.facts(path / RECORD).get(FINAL_STEP)
    return run_info(path).steps if step is None else step


def run_around(weights: Path) -> Path | None:
    """The run that a folder with weights belongs to, if it is its `final/` or one of its checkpoints; else None."""
    folder = weights.resolve()
    if (saved := saved_facts(folder)) is not None:
        run = folder.parent.parent / "runs" / str(saved["run"])
        return run if (run / RECORD).is_file() else None
    if folder.name == FINAL and (folder.parent / RECORD).is_file():
        return folder.parent
    return folder.parent.parent if _is_checkpoint_folder(folder) else None


def saved_by_name(run: Path) -> dict[str, int]:
    """Checkpoints of a run of the training server that clients saved by name, with their number of steps."""
    files = sorted(run.resolve().parent.parent.glob(f"{CHECKPOINTS}/[!.]*/{SAVED}"))
    found = {file.parent.name: saved_facts(file.parent) for file in files}
    return {
        name: int(facts["step"])
        for name, facts in found.items()
        if facts and facts["run"] == run.name
    }


def saved_facts(folder: Path) -> dict[str, Any] | None:
    """What `saved.json` says of a checkpoint that was saved by name; None if the folder is not one, or is being deleted."""
    if folder.parent.name != CHECKPOINTS:
        return None
    try:
        facts = json.loads((folder / SAVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = cast("dict[str, Any]", facts) if isinstance(facts, dict) else {}
    return known if {"run", "step"} <= known.keys() else None


def newest_weights(run: Path) -> Path | None:
    """Folder of the weights in `final/`, else of the newest checkpoint; None before the first checkpoint."""
    if (run / FINAL).is_dir():
        return run / FINAL
    newest = checkpoints.newest(run / CHECKPOINTS)
    return None if newest is None else newest.path


def label_of(run: Path, weights: Path) -> str:
    """`run@step` of a run's `final/` or of one of its checkpoints."""
    folder = weights.resolve()
    if (saved := saved_facts(folder)) is not None:
        return f"{run.name}@{saved['step']}"
    step = final_step(run) if folder.name == FINAL else int(folder.name.removeprefix("step-"))
    return f"{run.name}@{step}"


def _of_kind(value: Any, kind: type[K]) -> K | None:
    """The value if it has this type, else None: another program may have written it."""
    return value if isinstance(value, kind) else None


def reward_ends(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean reward (or loss) of the first and of the last few steps; None if there are none."""
    count = max(1, min(ENDS, len(rewards) // 2))
    return mean_of(rewards[:count]), mean_of(rewards[-count:])


def mean_of(values: Sequence[float]) -> float | None:
    """The mean of the values without NaN; None if there are none."""
    numbers = [value for value in values if value == value]
    return sum(numbers) / len(numbers) if numbers else None


def _find_folder(reference: str, runs_dir: Path) -> Address | None:
    """The run or checkpoint folder with exactly this name or path."""
    for path in (Path(reference), runs_dir / reference):
        if not reference or not _is_accessible(path):
            continue
        if (path / RECORD).is_file():
            return Address(path.resolve(), None)
        if _is_checkpoint_folder(path):
            path = path.resolve()
            with checkpoints.reading(path):
                return Address(path.parent.parent, checkpoints.read(path))
    for path in (Path(reference), runs_dir.parent / CHECKPOINTS / reference):
        if reference and _is_accessible(path) and (path / SAVED).is_file():
            run = run_around(path)
            if run is None:
                raise RunNotFoundError(
                    f"the checkpoint {path} was saved by name, and its run has been deleted from {path.resolve().parent.parent / 'runs'}. "
                    "GET /model of the training server still gives its files."
                )
            return Address(run, checkpoints.read(path.resolve()))
    return None


def _is_accessible(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or a parent folder has no permission
        return False


def _is_checkpoint_folder(path: Path) -> bool:
    path = path.resolve()
    return (
        path.is_dir()
        and path.parent.name == CHECKPOINTS
        and (path.parent.parent / RECORD).is_file()
    )


def _split_reference(reference: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.+)@(\d+)", reference, re.DOTALL)
    return (match[1], int(match[2])) if match else (reference, None)


def is_file(path: Path) -> bool:
    """True if the file exists. False also for an impossible name, and in a folder without permission."""
    try:
        return path.is_file()
    except OSError:
        return False


def no_such_run(name: str, runs_dir: Path) -> str:
    """The message for a missing run: the existing runs, and a similar name."""
    names = [path.name for path in run_folders(runs_dir)]
    if not names:
        return (
            f"there is no run '{name}': the folder {runs_dir} holds no runs. Give a path, or --dir."
        )
    close_matches = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean '{close_matches[0]}'?" if close_matches else ""
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"there is no run '{name}' in {runs_dir}.{hint} There are: {listed}."


def run_folders(runs_dir: Path) -> list[Path]:
    """Every folder in `runs_dir` that may be a run, by name; hidden ones are left out."""
    if not runs_dir.is_dir():
        return []
    return sorted(
        path
        for path in runs_dir.iterdir()
        if not path.name.startswith(".") and _is_accessible(path)
    )


def runs_called(name: str, runs_dir: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The runs that were requested under `name`, or have this name, with their facts; unreadable ones are left out."""
    runs: list[tuple[Path, dict[str, Any]]] = []
    for path in run_folders(runs_dir):
        with suppress(StoreError):
            facts = Store.facts(path / RECORD)
            if name in (path.name, facts.get("requested_name")):
                runs.append((path, facts))
    return runs


def best_and_worst(folder: Path) -> dict[Order, RolloutView]:
    """The scored rollouts of a run's steps with the highest and with the lowest reward, by `best` and `worst`.

    Only `best` if all rewards are equal, and neither if there is none.
    """
    found: dict[Order, RolloutView] = {}
    orders: tuple[Order, ...] = ("best", "worst")
    with Store.open(folder / RECORD, readonly=True) as store:
        for order in orders:
            scored = RolloutFilter(committed=True, outcome="scored", order=order, limit=1)
            for view in store.rollouts(scored):
                found[order] = view
    if len(found) > 1 and found["best"].reward == found["worst"].reward:
        del found["worst"]
    return found
