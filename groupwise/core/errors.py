"""Every error that Groupwise raises on purpose.

    GroupwiseError
    ├── UsageError                    exit code 2: what was given cannot work; nothing has been started (75: the hub did not answer)
    │   ├── ConfigError               (ValueError) a config key or value; collects all of them
    │   ├── TaskError                 the task file, a hook, or the data that it returned
    │   ├── ModelError                a model, adapter or tokenizer that cannot be found or loaded
    │   ├── RunNotFoundError          (LookupError) a run, step or checkpoint that is not there
    │   ├── RunInUseError             a live process holds the run folder
    │   └── ResumeMismatchError       the checkpoint was made with something else
    └── RunError                      exit code 1, but for one: the run failed; `code` says how
        ├── NothingScoredError        several steps in a row without one scored group
        ├── PolicyMismatchError       the sampler serves other weights than the learner published
        ├── NonFiniteError            loss or gradient was not finite too often
        ├── OutOfMemoryError          a computer or its GPU has no memory left
        ├── WorkerLostError           (75) a process that samples or learns is gone; begun again, the run goes on from its checkpoint
        ├── CheckpointError           a checkpoint is torn or cannot be read
        ├── StoreError                the run's record cannot be read or written
        ├── RewardWorkerError         reward workers cannot be started, or a stateful reward timed out
        ├── EnvironmentWorkerError    likewise of environments
        ├── EndpointError             a service that was asked over HTTP gave no usable answer; `status` is its HTTP status
        ├── SandboxError              no box for code of a model could be built
        └── CallbackError             a callback failed that the run cannot go on without

A message says what was given, what was expected, what exists and what to do. Errors are picklable: they cross processes.
A reward that fails is none of these: it is data (`Rollout.outcome`).
"""

from __future__ import annotations

EX_TEMPFAIL = 75
"""EX_TEMPFAIL of sysexits.h: the same command may succeed later. A fleet tries it again."""


class GroupwiseError(Exception):
    """The root; `str(error)` is the message for people."""

    code = "error"
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback: the message is for people, and says all."""
        return [f"{type(self).__name__}: {self.message}"]


class UsageError(GroupwiseError):
    """The input cannot work. Mend the command, the config or the file that the message names."""

    code = "usage"
    exit_code = 2

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        """`temporary`: nothing is wrong with it that waiting would not mend (the hub does not answer)."""
        super().__init__(message)
        if temporary:
            self.exit_code = EX_TEMPFAIL


class ConfigError(UsageError, ValueError):
    """A config key or value is wrong; the message lists every problem at once."""

    code = "config"


class TaskError(UsageError):
    """The task file, one of its hooks, or the data that a hook returned is wrong."""

    code = "task"


class ModelError(UsageError):
    """A model, adapter or tokenizer cannot be found or loaded; the message says where it was looked for."""

    code = "model"


class RunNotFoundError(UsageError, LookupError):
    """There is no such run, step or checkpoint; the message lists those there are."""

    code = "run_not_found"


class RunInUseError(UsageError):
    """A live process holds this run folder. Stop it, or choose another `run.name`."""

    code = "run_in_use"


class ResumeMismatchError(UsageError):
    """The checkpoint was made with another model, data, config or format; the message shows the difference."""

    code = "resume_mismatch"


class RunError(GroupwiseError):
    """The run failed on its way. `--resume` goes on from its last checkpoint."""

    code = "run_failed"


class NothingScoredError(RunError):
    """Too many steps in a row, or all of a run, had no scored group. The message counts the reasons; mend the reward functions."""

    code = "nothing_scored"


class PolicyMismatchError(RunError):
    """The sampler serves other weights than the learner published."""

    code = "policy_mismatch"


class NonFiniteError(RunError):
    """Loss or gradient was not finite. Lower the learning rate, or look at the rewards."""

    code = "non_finite"


class OutOfMemoryError(RunError):
    """There is no memory left for what had to be computed. Lower what the message names."""

    code = "out_of_memory"


class WorkerLostError(RunError):
    """A process that samples or learns has ended. Nothing is wrong with the run: `--resume` goes on from its last checkpoint."""

    code = "worker_lost"
    exit_code = EX_TEMPFAIL


class CheckpointError(RunError):
    """A checkpoint is torn or unreadable."""

    code = "checkpoint"


class StoreError(RunError):
    """The run's record cannot be read or written (disk full, wrong format version)."""

    code = "store"


class RewardWorkerError(RunError):
    """Reward workers cannot be started, or a reward that cannot be replaced timed out."""

    code = "reward_worker"


class EnvironmentWorkerError(RunError):
    """Workers for environments cannot be started, or an environment that cannot be replaced timed out."""

    code = "environment_worker"


class EndpointError(RunError):
    """A service that was asked over HTTP gave no usable answer; the message holds what came instead."""

    code = "endpoint"

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` is the HTTP status of the last answer; None where there was none, or one that is no answer to the question."""
        super().__init__(message)
        self.status = status
        self.may_pass = False
        """True if another attempt, or another server, may do better: no answer came, or too slowly, or the server was overloaded."""


class SandboxError(RunError):
    """No sandbox could be built: it is not the fault of the code that was to run in it."""

    code = "sandbox"


class CallbackError(RunError):
    """A callback failed that says of itself that the run cannot go on without it. Mend it, or remove it."""

    code = "callback"
