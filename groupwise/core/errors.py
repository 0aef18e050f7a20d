"""Every error that Groupwise raises on purpose.

    GroupwiseError
        ├── UsageError                    exit code 2: the input cannot work; nothing was started (75: the Hugging Face Hub did not answer)
    │   ├── ConfigError               (ValueError) a config key or value; collects all of them
        │   ├── TaskError                 the task file, one of its hooks, or the data that a hook returned
    │   ├── ModelError                a model, adapter or tokenizer that cannot be found or loaded
        │   ├── RunNotFoundError          (LookupError) a run, step or checkpoint that does not exist
    │   ├── RunInUseError             a live process holds the run folder
        │   └── ResumeMismatchError       the checkpoint was made with another model, data, config or format
        └── RunError                      exit code 1, with one exception: the run failed; `code` says how
        ├── NothingScoredError        several steps in a row without one scored group
        ├── PolicyMismatchError       the sampler serves other weights than the learner published
                ├── NonFiniteError            loss or gradient was not finite too often
                ├── OutOfMemoryError          a computer or its GPU has no memory left
                ├── WorkerLostError           (75) a sampling or learning process ended; started again, the run resumes from its checkpoint
                ├── CheckpointError           a checkpoint is incomplete or cannot be read
        ├── StoreError                the run's record cannot be read or written
        ├── RewardWorkerError         reward workers cannot be started, or a stateful reward timed out
                ├── EnvironmentWorkerError    the same for environments
                ├── EndpointError             a service called over HTTP gave no usable response; `status` is its HTTP status
                ├── SandboxError              no sandbox for a model's code could be built
                └── CallbackError             a callback failed, and the run cannot continue without it

A message says what was given, what was expected, what exists and what to do. Errors are picklable: they cross processes.
A failed reward is none of these: it is data (`Rollout.outcome`).
"""

from __future__ import annotations

EX_TEMPFAIL = 75
"""EX_TEMPFAIL of sysexits.h: the same command may succeed later. A fleet retries the job."""


class GroupwiseError(Exception):
    """The base class; `str(error)` is the message for people."""

    code = "error"
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback: the message is complete and meant for people."""
        return [f"{type(self).__name__}: {self.message}"]


class UsageError(GroupwiseError):
    """The input cannot work. Fix the command, the config or the file that the message names."""

    code = "usage"
    exit_code = 2

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        """`temporary`: the input is right and the same command may succeed later (the Hugging Face Hub did not answer)."""
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
    """A model, adapter or tokenizer cannot be found or loaded; the message lists the places that were searched."""

    code = "model"


class RunNotFoundError(UsageError, LookupError):
    """No such run, step or checkpoint exists; the message lists the existing ones."""

    code = "run_not_found"


class RunInUseError(UsageError):
    """A live process holds this run folder. Stop it, or choose another `run.name`."""

    code = "run_in_use"


class ResumeMismatchError(UsageError):
    """The checkpoint was made with another model, data, config or format; the message shows the difference."""

    code = "resume_mismatch"


class RunError(GroupwiseError):
    """The run failed. `--resume` continues it from its last checkpoint."""

    code = "run_failed"


class NothingScoredError(RunError):
    """Too many steps in a row, or all of a run, had no scored group. The message counts the reasons; fix the reward functions."""

    code = "nothing_scored"

    def __init__(self, message: str, *, wrong_code: bool = False) -> None:
        """`wrong_code`: the reward functions themselves are wrong, so that the same command fails again."""
        super().__init__(message)
        if wrong_code:
            self.exit_code = UsageError.exit_code


class PolicyMismatchError(RunError):
    """The sampler serves other weights than the learner published."""

    code = "policy_mismatch"


class NonFiniteError(RunError):
    """Loss or gradient was not finite. Lower the learning rate, or look at the rewards."""

    code = "non_finite"


class OutOfMemoryError(RunError):
    """The memory was too small for a computation. Lower the setting that the message names."""

    code = "out_of_memory"


class WorkerLostError(RunError):
    """A sampling or learning process ended. Nothing is wrong with the run: `--resume` continues it from its last checkpoint."""

    code = "worker_lost"
    exit_code = EX_TEMPFAIL


class CheckpointError(RunError):
    """A checkpoint is incomplete or unreadable."""

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
    """A service called over HTTP gave no usable response; the message contains what it sent instead."""

    code = "endpoint"

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` is the HTTP status of the last response; None if there was no response, or none that belongs to this request."""
        super().__init__(message)
        self.status = status
        self.is_retryable = False
        """True if another attempt, or another server, may succeed: there was no response, it was too slow, or the server was overloaded."""


class SandboxError(RunError):
    """No sandbox could be built. The code that was to run in it is not at fault."""

    code = "sandbox"


class CallbackError(RunError):
    """A callback failed that declares itself essential to the run. Fix it, or remove it."""

    code = "callback"
