"""The command `groupwise generate`: a service answers every prompt of a dataset; `groupwise sft` can train on the results.

    options    are checked before any request costs money, together with rows, template, rewards, folder and hub
    journal    stores each answer in `answers.jsonl` as it arrives; repeating the command requests only the missing answers
    results    are built from the journal: scored, filtered, in the order of the input

All answers of a folder have the same options, which are stored in `settings.json`; a command with others is refused and the
differences are listed. Shards write into their own subfolders. The command without a shard reads them all, requests the missing answers
and builds the results.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.api.openai_client.client import Client, Endpoint
from groupwise.core import atomic_files
from groupwise.core.errors import (
    EndpointError,
    ResumeMismatchError,
    RunInUseError,
    StoreError,
    UsageError,
)
from groupwise.core.interruption import Interrupted, Interruption, run_to_end
from groupwise.core.terminal.ticker import Ticker
from groupwise.runs.lock import LOCK, RunLock, holder
from groupwise.training.generation.config import GenerateConfig, read_options
from groupwise.training.generation.journal import ANSWERS, Answers, Journal, UsageTotals
from groupwise.training.generation.prompts import Prompts, read_prompts
from groupwise.training.generation.results import (
    TRAIN,
    nothing_was_scored,
    replaced_columns,
    write_results,
)
from groupwise.training.generation.row_requests import Failure, RowRequester, Tally
from groupwise.training.generation.scoring import TOKENS, Scores, Scoring, build_scoring, score_all
from groupwise.training.generation.upload import prepare_upload, upload

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
SUMMARY = "summary.json"
SHARDS = "shard-*-of-*"
PROMPTING = ("api", "prompt_column", "prompt_template", "system_prompt")
"""The options that turn a row into a prompt."""
SAMPLING = ("temperature", "top_p", "max_new_tokens", "stop", "seed", "extra")
"""The other options of each request, except the model. Together with `PROMPTING` they determine the answers, so they are the same for all
answers of a folder.
"""
REFRESH = 1.0
"""Seconds between two updates of the progress line."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The result of a generation."""

    summary: dict[str, Any]
    """Summary for people and `--json`: folder, rows, kept generations, tokens, cost. After a dry run: the plan."""
    folder: Path
    exit_code: int = 0
    """0: done. 1: no row was answered, or none could be scored although scores decide which are kept. 130 or 143: interrupted; all answers
    received so far are kept.
    """


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a command, known before the first request."""

    config: GenerateConfig
    model: str
    shapes: dict[str, Any]
    """The options that determine the answers, with the model."""
    prompts: Prompts
    scoring: Scoring | None

    @property
    def rewards_left_out(self) -> tuple[str, ...]:
        return self.scoring.left_out if self.scoring else ()


def generate(*, dry_run: bool = False, **options: Any) -> GenerateResult:
    """Answer the prompts of a dataset: the command `groupwise generate`, with its options as keywords.

    The options are the keys of `groupwise.training.generation.config.GenerateConfig`. Raises `UsageError` for anything that cannot work,
    before any request costs money, and `EndpointError` if the service fails for good. Repeating the call requests only the missing answers.
    """
    config = read_options(options)
    return run_to_end(_run_generation(config, dry_run=dry_run))


async def _run_generation(config: GenerateConfig, *, dry_run: bool) -> GenerateResult:
    # Files of another kind might be overwritten.
    if config.folder.exists() and not (config.folder / SETTINGS).exists():
        if not config.folder.is_dir():
            raise UsageError(f"{config.folder} is a file. Name a folder for the output.")
        own_files = [
            *config.folder.glob(SHARDS),
            *config.folder.glob(LOCK),
            *config.folder.glob(f"{atomic_files.BUILDING}*"),
        ]
        foreign_files = sorted(
            path.name for path in config.folder.iterdir() if path not in own_files
        )
        if foreign_files:
            raise UsageError(
                f"{config.folder} holds other files ({', '.join(foreign_files[:5])}{', …' if len(foreign_files) > 5 else ''}), "
                "and results would be written among them. Name a new or empty folder."
            )
    plan = _make_plan(config, await _resolve_model(config))
    if dry_run:
        return GenerateResult(_describe_plan(plan), config.folder)
    if config.hub is not None:
        prepare_upload(config.hub, private=config.private)
    with _open_answers(plan) as (answers, journal):
        if orphan_count := _count_orphans(plan, answers):
            logger.warning(
                "%d answers belong to no row of this %s: they stay in the folder and out of the results",
                orphan_count,
                "shard" if config.shard else "input",
            )
        return await _execute_plan(plan, answers, journal)


def _make_plan(config: GenerateConfig, model: str) -> Plan:
    shapes = {"model": model, **{name: getattr(config, name) for name in (*PROMPTING, *SAMPLING)}}
    shapes = json.loads(json.dumps(shapes))
    # All answers of a folder must have been requested with the same options.
    for folder in (config.root, *sorted(config.root.glob(SHARDS))):
        saved = _saved_settings(folder)
        if saved is None:
            continue
        changed_names = [name for name in shapes if saved.get(name) != shapes[name]]
        if changed_names:
            lines = [
                f"  {name}: {json.dumps(saved.get(name))} there, {json.dumps(shapes[name])} now"
                for name in changed_names
            ]
            raise ResumeMismatchError(
                f"{folder} holds answers that were asked for in another way:\n"
                + "\n".join(lines)
                + "\nRepeat the earlier command to continue it, or name another output."
            )
    prompts = read_prompts(config, {name: shapes[name] for name in ("model", *SAMPLING)})
    if prompts.ending_with_assistant:
        logger.warning(
            "%d conversations end with the assistant: %s",
            prompts.ending_with_assistant,
            "its last turns are left out"
            if config.prefill == "drop"
            else "the answers go on with its last words (prefill: drop leaves them out)",
        )
    if replaced_names := replaced_columns(prompts.items, config):
        logger.warning(
            "columns of the data are replaced by those of the results: %s",
            ", ".join(replaced_names),
        )
    atomic_files.check_can_write(config.folder / ANSWERS)
    plan = Plan(config, model, shapes, prompts, build_scoring(config, prompts))
    if plan.rewards_left_out:
        logger.warning(
            "a service gives text and no tokens, so rewards that ask for %s are left out of the scores: %s",
            TOKENS,
            ", ".join(plan.rewards_left_out),
        )
    return plan


async def _execute_plan(plan: Plan, answers: Answers, journal: Journal) -> GenerateResult:
    config, items = plan.config, plan.prompts.items
    missing = [item for item in items if len(answers.of(item.key)) < config.num_generations]
    endpoint = _endpoint(config, plan.model)
    with Interruption() as interruption, Ticker() as ticker:
        async with Client(endpoint, concurrency=config.concurrency) as client:
            complete_count = len(items) - len(missing)
            line = _ProgressLine(ticker, config, client, len(items), complete_count)
            requester = RowRequester(client, config, answers, journal, line.show)
            scores: Scores = {}
            try:
                if missing:
                    await interruption.allow(client.reach())
                    await interruption.allow(
                        line.run_with_refresh(requester.ask(missing), requester.tally)
                    )
                if plan.scoring is not None:
                    scoring = score_all(plan.scoring.scorer, items, answers, line.show_scored)
                    scores = await interruption.allow(scoring)
            except Interrupted as interrupted:
                ticker.note(f"Interrupted. {_resume_hint(config)}")
                entries = {"state": "interrupted", **_cost_entries(plan, answers, requester.tally)}
                return GenerateResult(
                    _summarise_plan(plan, entries), config.folder, interrupted.exit_code
                )
            except EndpointError as error:
                raise EndpointError(f"{error}\n{_resume_hint(config)}", error.status) from error
    return _write_outcome(plan, answers, scores, requester.tally)


def _write_outcome(plan: Plan, answers: Answers, scores: Scores, tally: Tally) -> GenerateResult:
    config = plan.config
    skipped_rows = [Failure(row.index, f"not asked: {row.reason}") for row in plan.prompts.skipped]
    failures = [*tally.failures, *skipped_rows]
    counts = write_results(config.folder, config, plan.prompts.items, answers, scores, failures)
    nothing_scored = nothing_was_scored(config, counts)
    state = "unscored" if nothing_scored else "incomplete" if failures else "done"
    outcome = {"state": state, **counts.summary, "failed": len(failures)}
    summary = _summarise_plan(plan, outcome | _cost_entries(plan, answers, tally))
    if failures:
        logger.warning(
            "%d rows have failed; %s says why. The same command asks for them again.",
            len(failures),
            config.folder / "failures.jsonl",
        )
    if nothing_scored:
        reason, count = counts.unscored.most_common(1)[0]
        has_train_file = (config.folder / TRAIN).exists()
        message = (
            f"None of {counts.generations} generations could be scored, so that none earns min_reward. Of {count} it is "
            f"said:\n  {reason}\n{TRAIN} {'is left as it was' if has_train_file else 'is not written'}. Fix the rewards and give the "
            "same command again: existing answers are scored again, and not asked for again."
        )
        logger.error(message)
    is_usable = bool(counts.rows) and not nothing_scored
    if config.hub is not None and is_usable:
        summary["hub"] = upload(config.folder, config.hub, plan.rewards_left_out)
    atomic_files.write_json(config.folder / SUMMARY, summary)
    return GenerateResult(summary, config.folder, 0 if is_usable else 1)


# --- the folder ----------------------------------------------------------------------------------


@contextmanager
def _open_answers(plan: Plan) -> Generator[tuple[Answers, Journal]]:
    """Lock the folder and read all its answers."""
    config = plan.config
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The folder {config.folder} cannot be made: {error.strerror}.") from error
    lock = _acquire_lock(config.folder)
    try:
        atomic_files.sweep(config.folder)
        if not (config.folder / SETTINGS).exists():
            atomic_files.write_json(config.folder / SETTINGS, {"format": 1, **plan.shapes})
        answers = Answers()
        for shard in _shards(config):
            if (owner := holder(shard)) is not None:
                raise RunInUseError(
                    f"{shard} is still being written by {owner}. Wait for it, then put the shards together."
                )
            answers.read(shard / ANSWERS)
        with Journal(config.folder / ANSWERS, answers) as journal:
            yield answers, journal
    finally:
        lock.release()


def _acquire_lock(folder: Path) -> RunLock:
    try:
        return RunLock.acquire(folder)
    except RunInUseError:
        raise RunInUseError(
            f"{folder} is being written by {holder(folder) or 'another process'}. Wait for it or stop it, or name another output."
        ) from None


def _shards(config: GenerateConfig) -> list[Path]:
    """The folders of shards; empty for a command of one shard."""
    return [] if config.shard else sorted(config.root.glob(SHARDS))


def _saved_settings(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / SETTINGS).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / SETTINGS} cannot be read: {error}.") from error


# --- the service ---------------------------------------------------------------------------------


def _endpoint(config: GenerateConfig, model: str) -> Endpoint:
    return Endpoint(config.base_url, model, config.api_key_env, config.timeout, config.retries)


async def _resolve_model(config: GenerateConfig) -> str:
    """The configured model, that of the folder's answers, or the only model that the service offers."""
    if config.model is not None:
        return config.model
    for folder in (config.root, *sorted(config.root.glob(SHARDS))):
        if (saved := _saved_settings(folder)) is not None:
            return str(saved["model"])
    async with Client(_endpoint(config, "")) as client:
        try:
            models = await client.models(retries=0)
        except EndpointError as error:
            error.message += "\nStart the service, or give its address (--base-url) or the name of a model there (--model)."
            raise
    if len(models) != 1:
        model_list = ", ".join(models) or "none"
        raise UsageError(f"Say which model to ask: {client.endpoint.base_url} serves {model_list}.")
    return models[0]


# --- progress and summary ------------------------------------------------------------------------


class _ProgressLine:
    """The progress line."""

    def __init__(
        self, ticker: Ticker, config: GenerateConfig, client: Client, rows: int, done: int
    ) -> None:
        self._ticker = ticker
        self._config = config
        self._client = client
        self._rows = rows
        self._done_before = done

    def show(self, tally: Tally) -> None:
        """Show the progress of the answers."""
        usage = tally.usage_totals.usage
        facts = [
            f"rows {self._done_before + tally.answered}/{self._rows}",
            f"tokens {usage.prompt_tokens or 0:,} in, {usage.completion_tokens or 0:,} out",
            f"{tally.tokens_per_second:,.0f} tok/s",
        ]
        cost = _compute_cost(self._config, tally.usage_totals)
        if cost is not None:
            facts.append(f"cost {cost:.2f}")
        if tally.failures:
            facts.append(f"failed {len(tally.failures)}")
        if tally.answered:
            remaining = self._rows - self._done_before - tally.answered - len(tally.failures)
            facts.append(f"eta {_format_clock(tally.seconds / tally.answered * remaining)}")
        if pause := self._client.pause:
            facts.append(f"the service asks for a pause of {pause:.0f} s")
        self._ticker.show("  ".join(facts))

    def show_scored(self, count: int) -> None:
        """Show the progress of the scoring."""
        self._ticker.show(f"scored {count}/{self._rows} rows")

    async def run_with_refresh(self, work: Coroutine[Any, Any, Tally], tally: Tally) -> None:
        """Await work, and update the line every `REFRESH` seconds even if no answer arrives."""

        async def refresh() -> None:
            while True:
                self.show(tally)
                await asyncio.sleep(REFRESH)

        refresh_task = asyncio.ensure_future(refresh())
        try:
            await work
        finally:
            refresh_task.cancel()


def _format_clock(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def _compute_cost(config: GenerateConfig, totals: UsageTotals) -> float | None:
    if config.price_in is None and config.price_out is None:
        return None
    tokens_in, tokens_out = totals.usage.prompt_tokens or 0, totals.usage.completion_tokens or 0
    return (tokens_in * (config.price_in or 0.0) + tokens_out * (config.price_out or 0.0)) / 1e6


def _cost_entries(plan: Plan, answers: Answers, tally: Tally) -> dict[str, Any]:
    """Tokens and cost of this command; under `in_all`, those of all answers, including earlier commands."""
    entries = {
        **_billed_entries(plan.config, tally.usage_totals),
        "tokens_per_second": round(tally.tokens_per_second, 1),
        "in_all": _billed_entries(plan.config, answers.usage_totals),
    }
    if orphan_count := _count_orphans(plan, answers):
        entries["answers_of_no_row"] = orphan_count
    return entries


def _billed_entries(config: GenerateConfig, totals: UsageTotals) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "requests": totals.requests,
        "prompt_tokens": totals.usage.prompt_tokens,
        "completion_tokens": totals.usage.completion_tokens,
    }
    if (cost := _compute_cost(config, totals)) is not None:
        entries["cost"] = cost
    if totals.without_usage:
        entries["answers_without_usage"] = totals.without_usage
    return entries


def _count_orphans(plan: Plan, answers: Answers) -> int:
    """Number of answers whose row no longer exists or now has another prompt."""
    return answers.count_orphans({item.key for item in plan.prompts.items})


def _summarise_plan(plan: Plan, entries: Mapping[str, Any]) -> dict[str, Any]:
    rows = len(plan.prompts.items) + len(plan.prompts.skipped)
    base: dict[str, Any] = {"output": str(plan.config.folder), "model": plan.model, "rows": rows}
    if plan.rewards_left_out:
        base["rewards_left_out"] = list(plan.rewards_left_out)
    return {**base, **entries}


def _describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan for a dry run."""
    config, answers = plan.config, Answers()
    for folder in (config.folder, *_shards(config)):
        answers.read(folder / ANSWERS)
    missing = [
        config.num_generations - min(len(answers.of(item.key)), config.num_generations)
        for item in plan.prompts.items
    ]
    return {
        **_summarise_plan(plan, {}),
        "rows_to_ask": sum(1 for count in missing if count),
        "generations_to_ask": sum(missing),
        "rows_that_cannot_be_asked": len(plan.prompts.skipped),
        "answers_of_no_row": _count_orphans(plan, answers),
        "base_url": _endpoint(config, plan.model).base_url,
        "first_prompt": plan.prompts.items[0].prompt if plan.prompts.items else None,
    }


def _resume_hint(config: GenerateConfig) -> str:
    return f"What has come is kept in {config.folder}; the same command continues."
