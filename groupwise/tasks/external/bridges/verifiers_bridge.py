"""Adapts environments of verifiers, of both its interfaces, in the Python that they are installed in.

    0.1.x    a module with `load_environment(**args)`; `args` are its arguments
    0.4      a package with a taskset, perhaps with an environment of several agents; `args` are the block `env` of `vf-eval`'s config:
             {"taskset": {...}, "agent": {"harness": {"id": "null"}}}

The policy is a plain model of the OpenAI protocol at the address that each call brings. Agents run as subprocesses unless `args` say
otherwise, since verifiers' own default is a rented sandbox.

Where several agents are played by the policy (self-play, a proposer and a solver), the seed decides which of them learns, the same for
a whole group, so that members are compared by the same seat. Several traces of one seat, as of best-of-n, count by their mean.

In 0.1.x a reward function that raises is logged and counts as 0. A judge that cannot be reached would so teach the policy that all of its
answers are bad. Here the attempt has failed instead.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import contextvars
import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import groupwise_bridge

POLICY = "GROUPWISE_POLICY_KEY"
"""Variable from which verifiers reads the key of the policy. The address is the key, so that the variable need not exist."""
SPLITS = ("train", "eval")


_raised: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("_raised", default=None)


class _ScoringErrors(logging.Handler):
    """Collects what verifiers 0.1.x logs of reward functions that raised."""

    def emit(self, record: logging.LogRecord) -> None:
        raised, text = _raised.get(), record.getMessage()
        if raised is not None and text.startswith("Error calling"):
            raised.append(text)


@contextmanager
def _collect_raised() -> Iterator[list[str]]:
    """What reward functions raise that are called in the block, as text."""
    raised: list[str] = []
    token = _raised.set(raised)
    try:
        yield raised
    finally:
        _raised.reset(token)


def load(name: str, args: dict[str, Any]) -> Any:
    """Load an environment with the installed release of verifiers. Raises ImportError if it was written for the older interface."""
    import verifiers

    if hasattr(verifiers, "load_environment"):
        return _Verifiers01(name, args)
    found = importlib.util.find_spec(name.rpartition("/")[2].replace("-", "_"))
    source = Path(found.origin).read_bytes() if found and found.origin else b""
    if b"def load_environment(" in source:
        raise ImportError(
            f"{name} has load_environment, the interface of verifiers 0.1, which the installed {importlib.metadata.version('verifiers')} "
            "no longer has. Install the environment with --again --with 'verifiers<0.2'."
        )
    return _Verifiers04(name, args)


class VerifiersAdapter:
    """Answers the calls of the run."""

    async def close(self) -> None:
        """End what the environments have started."""
        for environment in {id(each): each for each in self._environments.values()}.values():
            await environment.close()

    def open(
        self, protocol: int, name: str, args: dict[str, Any], eval_args: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Load the environment, once more with the arguments of evaluation if there are any."""
        assert protocol == 1, f"the run speaks protocol {protocol}, and this bridge 1"
        train = load(name, args)
        self._environments = {
            "train": train,
            "eval": load(name, eval_args) if eval_args is not None else train,
        }
        self._has_eval_args = eval_args is not None
        return {
            "library": f"verifiers {importlib.metadata.version('verifiers')}",
            "notes": train.notes,
            "scores_groups": any(each.scores_groups for each in self._environments.values()),
        }

    def examples(self, split: str, offset: int, limit: int) -> dict[str, Any]:
        """Examples of a split; none of `eval` if the environment does not say which."""
        kind = split if split == "train" or not self._has_eval_args else "train"
        rows = self._environments[split].rows(kind, offset, limit + 1)
        found = [
            {"prompt": prompt, "columns": {"example": offset + i, "split": split, **columns}}
            for i, (prompt, columns) in enumerate(rows[:limit])
        ]
        return {"examples": found, "more": len(rows) > limit}

    async def rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        """Play one attempt."""
        columns = call["example"]["columns"]
        split = columns["split"]
        kind = split if split == "train" or not self._has_eval_args else "train"
        return await self._environments[split].play(kind, columns["example"], call)

    async def score(self, rollouts: list[str]) -> dict[str, Any]:
        """Score attempts of one group together."""
        for environment in self._environments.values():
            if rollouts[0] in environment.unscored:
                return {"answers": await environment.score(rollouts)}
        return {
            "answers": [{} for _ in rollouts]
        }  # the environment of this split scores each alone


class _Verifiers01:
    """An environment of verifiers 0.1.x."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        import verifiers

        self._environment = verifiers.load_environment(name, **args)
        logging.getLogger("verifiers.rubrics").addHandler(_ScoringErrors(logging.ERROR))
        self.notes: list[str] = []
        together = getattr(self._environment, "requires_group_rollouts", False)
        self.scores_groups = together and self._environment.rubric.has_group_rewards
        if together and not self.scores_groups:
            self.notes.append("its scores of whole groups are not asked: only a rubric's are")
        self.unscored: dict[str, Any] = {}
        """States of attempts that wait for the rest of their group, by the attempt's name."""

    def rows(self, split: str, offset: int, limit: int) -> list[tuple[Any, dict[str, Any]]]:
        """Prompts and answers."""
        data = self._data(split)
        stop = min(offset + limit, len(data)) if data is not None else 0
        found: list[tuple[Any, dict[str, Any]]] = []
        for index in range(offset, stop):
            row = data[index]
            answer = row.get("answer")
            found.append(
                (_plain(row["prompt"]), {} if answer in (None, "") else {"answer": answer})
            )
        return found

    def _data(self, split: str) -> Any:
        environment = self._environment
        if split == "train":
            return environment.get_dataset()
        environment.build_eval_dataset()
        return environment.eval_dataset

    async def play(self, split: str, index: int, call: dict[str, Any]) -> dict[str, Any]:
        """One attempt, scored by the environment's rubric."""
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        environment, limits = self._environment, call["limits"]
        if hasattr(environment, "max_turns"):
            own = environment.max_turns
            most = limits["max_turns"]
            environment.max_turns = most if own is None or own < 1 else min(own, most)
        client = ClientConfig(
            api_key_var=POLICY, api_base_url=call["base_url"], max_retries=2, connect_timeout=30.0
        )
        row = dict(self._data(split)[index])
        row.setdefault("example_id", index)
        sampling = dict(call["sampling"])
        if self.scores_groups:
            output = await environment.rollout(row, resolve_client(client), call["model"], sampling)
            scores = {}
        else:
            with _collect_raised() as raised:
                output = await environment.run_rollout(
                    row, client=client, model=call["model"], sampling_args=sampling
                )
            scores = self._scores(output, raised)
        ending = {
            "stopped": output.get("stop_condition"),
            "truncated": bool(output.get("is_truncated")),
        }
        if error := output.get("error"):
            if self.scores_groups:
                await environment.rubric.cleanup(output)
            return {**ending, "error": _error_words(error)}
        if self.scores_groups:
            self.unscored[call["rollout"]] = output
        return {**scores, **ending}

    async def score(self, rollouts: Sequence[str]) -> list[dict[str, Any]]:
        """Score attempts of one group together."""
        rubric = self._environment.rubric
        states = [self.unscored.pop(name) for name in rollouts]
        with _collect_raised() as raised:
            await rubric.score_group(states)
        for state in states:
            await rubric.cleanup(state)
        return [self._scores(state, raised) for state in states]

    def _scores(self, scored: Any, raised: Sequence[str]) -> dict[str, Any]:
        """Rewards and metrics of an attempt; an error if a function `raised`."""
        if raised:
            return {"error": raised[0]}
        metrics = {k: v for k, v in (scored.get("metrics") or {}).items() if _is_number(v)}
        rewards = self._rewards(float(scored["reward"]), metrics)
        names = {reward["name"] for reward in rewards}
        return {
            "rewards": rewards,
            "metrics": {name: value for name, value in metrics.items() if name not in names},
        }

    def _rewards(self, total: float, metrics: dict[str, float]) -> list[dict[str, Any]]:
        """The total, by the functions of the rubric if these add up to it."""
        rubric = self._environment.rubric
        names, weights = rubric._get_reward_func_names(), rubric._get_reward_weights()
        parts = [
            {"name": name, "value": metrics[name], "weight": float(weight)}
            for name, weight in zip(names, weights, strict=True)
            if name in metrics and weight
        ]
        whole = sum(part["value"] * part["weight"] for part in parts)
        if parts and len({p["name"] for p in parts}) == len(parts) and math.isclose(whole, total):
            return parts
        return [{"name": "reward", "value": total}]

    async def close(self) -> None:
        """End what the environment has started."""
        await self._environment._teardown()


class _Verifiers04:
    """An environment of verifiers 0.4: a taskset, and the agents that play it."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        block = {**args, "taskset": {"id": name, **args.get("taskset", {})}}
        seats = agent_config_fields(resolve_env_config(block))
        for seat in seats:
            own = dict(block.get(seat) or {})
            block[seat] = {"runtime": {"type": "subprocess"}, **own}
        self._environment = load_environment(resolve_env_config(block))
        self._tasks: list[Any] = []
        self._more = iter(self._environment.taskset)
        self._serving: Any = None
        self._lock = asyncio.Lock()
        self.notes: list[str] = []
        self.scores_groups = False
        self.unscored: dict[str, Any] = {}

    def _task(self, index: int) -> Any:
        while len(self._tasks) <= index:
            self._tasks.append(next(self._more))
        return self._tasks[index]

    def rows(self, split: str, offset: int, limit: int) -> list[tuple[Any, dict[str, Any]]]:
        """Prompts of the tasks; of `eval` none, because a taskset has no such split."""
        found: list[tuple[Any, dict[str, Any]]] = []
        for index in range(offset, offset + limit if split == "train" else offset):
            try:
                data = self._task(index).data
            except StopIteration:
                break
            columns: dict[str, Any] = {}
            answer = getattr(data, "answer", None)
            if isinstance(answer, str | int | float):
                columns["answer"] = answer
            found.append((self._prompt(data, index), columns))
        return found

    def _prompt(self, data: Any, index: int) -> Any:
        """What readers see; the harness may begin otherwise."""
        text = data.prompt or data.description or data.name or f"task {index}"
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else _plain(text)
        if data.system_prompt:
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        return messages

    async def play(self, split: str, index: int, call: dict[str, Any]) -> dict[str, Any]:
        """One episode."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        async with self._lock:
            if self._serving is None:
                self._serving = self._environment.serving()
                await self._serving.__aenter__()
        context = ModelContext(
            model=call["model"],
            client=EvalClientConfig(base_url=call["base_url"], api_key_var=POLICY),
            sampling=SamplingConfig(**call["sampling"]),
        )
        (slot,) = self._environment.slots(self._task(index))
        episode = await self._environment.run_slot(slot, context)
        return _answer_of(episode, call["seed"])

    async def close(self) -> None:
        """End the tool servers."""
        if self._serving is not None:
            await self._serving.__aexit__(None, None, None)


def _answer_of(episode: Any, seed: int) -> dict[str, Any]:
    """The rewards of the seat that learns."""
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    seats = sorted({trace.agent.name for trace in trained})
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok and errors:
        return {"error": f"{errors[-1].type}: {errors[-1].message}"}
    if not seats:
        return {"error": "the environment has no agent that the policy plays"}
    seat = seats[seed % len(seats)]
    traces = [trace for trace in trained if trace.agent.name == seat]
    rewards = _by_name((name, r) for t in traces for name, r in t.rewards.items() if r)
    metrics = _by_name((name, v) for t in traces for name, v in t.metrics.items() if _is_number(v))
    notes: dict[str, Any] = {"seat": seat} if len(seats) > 1 else {}
    if info := traces[-1].info:
        notes["info"] = info
    return {
        "rewards": [
            {
                "name": name,
                "value": sum(r.score for r in given) / len(traces),
                "weight": given[0].weight,
            }
            for name, given in rewards.items()
        ],
        "metrics": {name: sum(values) / len(values) for name, values in metrics.items()},
        "sessions": [trace.id for trace in traces],
        "stopped": traces[-1].stop_condition,
        "truncated": any(trace.is_truncated for trace in traces),
        "notes": notes,
    }


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return values


def _plain(messages: Any) -> Any:
    """Messages without keys that hold None, as dictionaries; of pictures only that they are there, since a prompt is shown as text."""
    if isinstance(messages, str):
        return messages
    dumped = [dict(m) if isinstance(m, dict) else m.model_dump(mode="json") for m in messages]
    for message in dumped:
        if isinstance(parts := message.get("content"), list):
            message["content"] = "\n".join(
                part.get("text") or f"[{part['type']}]" for part in parts
            )
    return [{k: v for k, v in message.items() if v is not None} for message in dumped]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _error_words(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("error_chain_repr") or error.get("error") or error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    groupwise_bridge.serve(VerifiersAdapter())
