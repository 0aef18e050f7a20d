"""A service without engine and ledger, for tests of the HTTP side. It answers at once, unless it is told to wait or to refuse."""

import asyncio
import io
from collections.abc import Sequence
from typing import Any, BinaryIO

from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    AnyRewards,
    CheckpointAnswer,
    CheckpointsAnswer,
    CloseAnswer,
    CompletionsRequest,
    EventData,
    GroupAnswer,
    RewardAnswer,
    RewardOfTrajectory,
    StartAnswer,
    StartRequest,
    StatusAnswer,
    StepAnswer,
    StepRequest,
    StopAnswer,
    TokenizerAnswer,
)
from groupwise.server.ledger.idempotency import StoredResponse
from groupwise.server.run.downloads import OpenFile, OpenVersion
from groupwise.server.run.responses import (
    answer_of,
    completions_answer,
    rewards_answer,
    step_answer,
)

RUN = "tiny"


class FakeService:
    """`fails` has what a method raises, `blocked` the methods that wait until `let_go` is set."""

    def __init__(self) -> None:
        self.has_run = False
        """Whether a run is active."""
        self.fails: dict[str, BaseException] = {}
        self.blocked: set[str] = set()
        self.let_go = asyncio.Event()
        self.entered = asyncio.Event()
        """Set when a blocked method has been reached."""
        self.cancelled: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[tuple[str, Any], tuple[str, StoredResponse]] = {}
        self.committed: list[Any] = []
        self.happened: list[EventData] = []
        self.news = asyncio.Event()
        self.told = 0
        """The newest event that somebody has had."""
        self.refused: list[str] = []
        self.not_ready: str | None = None
        self.files: list[tuple[str, int, BinaryIO]] = [
            ("adapter_model.safetensors", 4, io.BytesIO(b"\x00\x01\x02\x03")),
            ("tokenizer.json", 2, io.BytesIO(b"{}")),
        ]
        self.opened: list[OpenVersion] = []
        self.began = False
        self.shut = False

    def active_conductor(self) -> object | None:
        return self if self.has_run else None

    async def _called(self, name: str, argument: Any = None) -> None:
        self.calls.append((name, argument))
        if name in self.fails:
            raise self.fails[name]
        if name in self.blocked:
            self.entered.set()
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            if self.shut:
                raise Refusal("shutting_down")

    def _keep(self, caller: Caller, answer: StoredResponse) -> None:
        if caller.answer_key is not None:
            named = caller.answer_key
            self.answers[caller.key_id, (named.route, named.key)] = (named.body_hash, answer)

    def happen(self, kind: str, **fields: Any) -> None:
        """Add an event."""
        self.happened.append(EventData(id=len(self.happened) + 1, kind=kind, at=1.0, **fields))
        self.news.set()

    async def begin(self) -> None:
        self.began = True

    async def shut_down(self, seconds: float) -> None:
        self.shut = True
        self.let_go.set()

    def ready(self) -> str | None:
        return self.not_ready

    async def finished_run(self, request: StartRequest) -> str | None:
        return None

    async def start(self, request: StartRequest, caller: Caller) -> StartAnswer:
        await self._called("start", request)
        answer = StartAnswer(
            run_id=RUN,
            model_version=(RUN, 0),
            fingerprint="f0",
            max_steps=request.max_steps,
            groups_per_step=request.prompts_per_step,
            tokenizer_hash="t0",
        )
        self.committed.append(request)
        self._keep(caller, answer_of(answer))
        return answer

    async def stop(self) -> StopAnswer:
        await self._called("stop")
        return StopAnswer(run_id=RUN, step=3)

    async def completions(
        self, request: CompletionsRequest, caller: Caller
    ) -> Sequence[GroupAnswer]:
        await self._called("completions", request)
        drawn: Any = {"completions": ["a", "b"], "completion_tokens": [[1], [2]]}
        policy: Any = {"model_version": (RUN, 0), "fingerprint": "f0", "expires_at": 600.0}
        ends: Any = {"finish_reasons": ["stop", "length"]}
        groups = [
            GroupAnswer(
                group_id=f"g-{len(self.calls)}-{n}",
                prompt=prompt,
                draw=n,
                **drawn,
                **ends,
                **policy,
            )
            for n, prompt in enumerate(request.all_prompts)
        ]
        self._keep(caller, completions_answer(request, groups))
        return groups

    async def give_up(self, group_id: str) -> None:
        await self._called("give_up", group_id)

    async def rewards(self, request: AnyRewards, caller: Caller) -> Sequence[RewardAnswer]:
        if "rewards" in self.fails:
            raise self.fails["rewards"]
        self.committed.append(request)
        ids = ["g-1"]
        if not isinstance(request, RewardOfTrajectory):
            ids = [group.group_id or "g-1" for group in request.all_groups]
        answers = [
            RewardAnswer(group_id=id, model_version=(RUN, 0), status="accepted") for id in ids
        ]
        self._keep(caller, rewards_answer(request, answers))
        await self._called("rewards", request)  # from here on it only waits for the step
        return answers

    async def close_group(self, name: str, caller: Caller) -> CloseAnswer:
        await self._called("close_group", name)
        answer = CloseAnswer(closed=[name], given_up=[])
        self._keep(caller, answer_of(answer))
        return answer

    async def rewards_trained(
        self, answers: Sequence[RewardAnswer], seconds: float
    ) -> Sequence[RewardAnswer]:
        return answers

    async def step_taken(self, answer: StepAnswer, seconds: float) -> StepAnswer:
        return answer

    async def step(self, request: StepRequest, caller: Caller) -> StepAnswer:
        await self._called("step", request)
        answer = StepAnswer(status="accepted", step=0, group_ids=["g-1"])
        self._keep(caller, step_answer(request, answer))
        return answer

    async def status(self) -> StatusAnswer:
        await self._called("status")
        last = self.happened[-1].id if self.happened else None
        return StatusAnswer(phase="running", run_id=RUN, step=0, last_event_id=last)

    async def activity(self) -> ActivityAnswer:
        await self._called("activity")
        return ActivityAnswer(at=0.0, run_id=RUN)

    async def last_event(self) -> int:
        await self._called("last_event")
        return self.happened[-1].id if self.happened else 0

    async def events(self, after: int | None, limit: int) -> Sequence[EventData]:
        newer = [event for event in self.happened if event.id > (after or 0)][:limit]
        self.told = max([self.told, *(event.id for event in newer)])
        return newer

    async def next_event(self, after: int, seconds: float) -> None:
        while not self.happened or self.happened[-1].id <= after:
            self.news.clear()
            await self.news.wait()

    async def open_version(self, version: str | None) -> OpenVersion:
        await self._called("open_version", version)
        files = [OpenFile(name, size, file) for name, size, file in self.files]
        self.opened.append(OpenVersion((RUN, 4), "f4", "adapter", files))
        return self.opened[-1]

    async def checkpoints(self) -> CheckpointsAnswer:
        await self._called("checkpoints")
        return CheckpointsAnswer(checkpoints=[])

    async def save_checkpoint(self, name: str, caller: Caller) -> CheckpointAnswer:
        await self._called("save_checkpoint", name)
        answer = CheckpointAnswer(name=name, run_id=RUN, step=0, address=name)
        self._keep(caller, answer_of(answer))
        return answer

    async def tokenizer(self) -> TokenizerAnswer:
        await self._called("tokenizer")
        return TokenizerAnswer(hash="t0", tokenizer_json="{}")

    async def count_refusal(self, code: str) -> None:
        self.refused.append(code)

    async def remembered(self, caller: Caller) -> StoredResponse | None:
        named = caller.answer_key
        if named is None:
            return None
        stored = self.answers.get((caller.key_id, (named.route, named.key)))
        if stored is None:
            return None
        if stored[0] != named.body_hash:
            raise Refusal("idempotency_key_reused")
        return stored[1]
