"""A fake head node of Slurm or Ray, which answers a runner's requests about one attempt, `j.1`."""

from typing import Any

from groupwise.jobs.hosts.host import Request, RunnerResponse

ATTEMPT = {"job": "j", "epoch": 1, "place": "0123abcd99", "folder": "/srv/attempts/j.1"}
WAITS = {"state": "queued", "same_boot": False, "age": 0.0}


class Head:
    """Subclasses return from `ran` what a program of the cluster (sbatch, the Ray API) prints, and its exit code."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = {**ATTEMPT, **WAITS, **state}
        self.voided: str | None = None
        self.forgotten = False

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        assert timeout > 0
        body = request.body
        if request.verb == "run":
            return RunnerResponse(self.ran(body["arguments"]))
        if request.verb == "hello":
            texts = ("python", "boot_id", "home", "root")
            return RunnerResponse(
                {**dict.fromkeys(texts, "x"), "protocols": [1], "hostname": "head"}
            )
        if request.verb == "void" and self.state["state"] == "queued":
            self.voided = body["because"]
            refused = {"code": "voided", "message": self.voided}
            self.state.update(state="voided", refused=refused if self.voided else None)
        if request.verb == "forget":
            self.forgotten = True
        return RunnerResponse({"attempts": [self.state]} if request.verb == "wait" else self.state)

    def ran(self, arguments: list[str]) -> dict[str, Any]:
        raise NotImplementedError

    async def close(self) -> None: ...
