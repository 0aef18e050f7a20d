"""The verbs' service, put together; `routes.py` has the HTTP.

    sessions.py     sessions, models and samplers: what there is
    training.py   the calls of a model, one after another in the client's order
    sampling.py   those of samplers, in no order
    futures.py    how all of them are answered later

All of it is in the ledger before clients get an id, and a new process opens it again (`open`): what was answered stays answered, and what
waits is done.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from groupwise.api.http import strict_json
from groupwise.api.schemas.training import ByVerbs
from groupwise.core.errors import UsageError
from groupwise.server.engine.verb_protocol import VerbEngine
from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import CallRow, Outcome
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker import requests, translate
from groupwise.server.tinker.futures import AnswerGone, Futures, Limits, TooManyCalls
from groupwise.server.tinker.sampling import SamplingCalls
from groupwise.server.tinker.sessions import Opened
from groupwise.server.tinker.training import FORWARD_BACKWARD, TrainingCalls

BodyT = TypeVar("BodyT", bound=requests.Body)

KEEP_EVERY = 10
"""Updates of a model between two of its states that are kept, from which it can be made again."""
ACCEPTED_WITHIN = 10.0
"""Seconds that a client waits for its call to be written down."""
REFUSED = "refused"
"""The kind of calls that were refused, but have used a number of their model."""


logger = logging.getLogger(__name__)


class VerbService:
    """All that clients train by verbs on this server."""

    def __init__(
        self,
        engine: VerbEngine,
        ledger: Ledger,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        keep_every: int = KEEP_EVERY,
    ) -> None:
        """`keep_every`: updates of a model after which its state is kept."""
        self._engine = engine
        self._ledger = ledger
        self.futures = Futures(ledger, limits)
        self.opened = Opened(engine, self.futures, ledger, clock)
        self.training = TrainingCalls(self.opened, engine, ledger, keep_every)
        self.sampling = SamplingCalls(self.opened, engine, self.futures, ledger)

    async def open(self) -> None:
        """Open what clients had open before, and go on with their calls; before the first request."""
        self.opened.restore(
            await self._ledger.do(calls.all_sessions),
            await self._ledger.do(calls.all_models),
            await self._ledger.do(calls.all_samplers),
        )
        found = await self._ledger.do(calls.all_calls)
        for row in found:
            self.futures.restore(row)
        for row in found:
            if row.state == "waiting":
                try:
                    self._begin_again(row)
                except UsageError as error:
                    # It was not refused with its number, as it was before: its model is no longer there.
                    self.futures.abandon(row.id, error)
                except Exception as error:  # what one client has left keeps no server from starting
                    logger.exception("the call %s of an earlier process cannot go on", row.id)
                    self.futures.abandon(row.id, UsageError(f"It cannot go on: {error}"))

    def _begin_again(self, row: CallRow) -> None:
        """Begin a call that had no outcome yet when the last process ended."""
        assert row.content is not None
        begin: Mapping[str, Callable[[bytes], Any]] = {
            FORWARD_BACKWARD: lambda content: self.training.forward_backward(
                translate.read(content)
            ),
            "CreateModel": _reading(requests.CreateModel, self.training.create_model),
            "OptimStep": _reading(requests.OptimStep, self.training.optim_step),
            "SaveWeights": _reading(requests.SaveWeights, self.training.save_weights),
            "LoadWeights": _reading(requests.LoadWeights, self.training.load_weights),
            "SaveForSampler": _reading(requests.SaveForSampler, self.training.save_for_sampler),
            "Sample": _reading(requests.Sample, self.sampling.begin_sample),
        }
        if row.kind == REFUSED:
            error = UsageError("This request was refused before.")
            self.opened.model(row.line).line.submit(row.sequence, row.content, error, REFUSED)
        else:
            begin[row.kind](row.content)

    async def accepted(self, id: str) -> None:
        """Return when a call is written down, so that its client may get the id. NotKept if that takes too long."""
        await self.futures.accepted(id, ACCEPTED_WITHIN)

    async def close(self) -> None:
        """End what is under way; the engine stays."""
        self.futures.suspend()
        for model in self.opened.models.values():
            await model.line.close()
        await self.futures.close()

    def status(self) -> ByVerbs:
        """The verbs' part of the server's status."""
        made = [model.id for model in self.opened.models.values() if model.spec is not None]
        return ByVerbs(sessions=self.opened.sessions, models=made, waiting=self.futures.waiting)

    def capabilities(self) -> list[dict[str, Any]]:
        """The bases, as the client reads them."""
        return [
            {"model_name": name, "trainable": True, "sampleable": True}
            for name in self._engine.names()
        ]

    async def refused(self, body: bytes, error: UsageError) -> None:
        """A JSON request was refused before it came to its model's line. If it has a number there, the number is used up: the client
        goes on with the next one, which would wait for it for ever."""
        try:
            given: Any = await strict_json.parse_aside(body)
            model, sequence = given["model_id"], given["seq_id"]
        except (ValueError, TypeError, KeyError):
            return
        found = self.opened.models.get(model) if isinstance(model, str) else None
        if found is None or type(sequence) is not int or not 1 <= sequence < requests.MOST_CALLS:
            return
        # The number was used before: then the request was refused for that.
        with contextlib.suppress(UsageError, AnswerGone, TooManyCalls):
            found.line.submit(sequence, body, error, REFUSED)

    async def answer(self, id: str, patience: float) -> Outcome | None:
        """See `Futures.answer`."""
        return await self.futures.answer(id, patience)


def _reading(kind: type[BodyT], begin: Callable[[BodyT], Any]) -> Callable[[bytes], Any]:
    """Begin a call with its content as it was written down."""
    return lambda content: begin(kind.model_validate_json(content))
