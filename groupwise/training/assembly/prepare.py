"""What a command does with a config before any parts are built: start ranks early, ask what the parts need, refuse what cannot be built.

Dry runs import this module, and none of those that build.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from groupwise.algorithms.registry import make
from groupwise.core.accelerators import NVIDIA
from groupwise.core.errors import ConfigError, UsageError
from groupwise.core.types import TINY
from groupwise.engine.backends.unsloth import library
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.torchrun import check_world_size, read_torchrun_rank
from groupwise.training.config import RunConfig
from groupwise.training.placement import most_processes, samplers_of

if TYPE_CHECKING:
    from groupwise.engine.models.config import ModelConfig
    from groupwise.training.placement import AnyConfig


@contextmanager
def expected_ranks(config: AnyConfig) -> Generator[None]:
    """Like `expect_ranks`, as a context: ranks that were not needed end with it."""
    expect_ranks(config)
    try:
        yield
    finally:
        prefork.end_zygote()


def expect_ranks(config: AnyConfig) -> None:
    """Start the zygote early if the config will probably need ranks, because its imports take seconds; else end one that was started
    before the config was read. For Unsloth, import it now, because it must be imported before transformers.

    This is a guess: on a machine with a GPU but without its driver's file, a zygote may be started in vain.
    """
    library.import_first(config.model)
    torch_alone = config.run.server is None and config.model.backend == "transformers"
    several = (
        most_processes(config) > 1 or config.distributed.learners > 1 or samplers_of(config) > 0
    )
    if torch_alone and config.model.name != TINY and not NVIDIA.exists() and several:
        prefork.start_zygote()
    else:
        prefork.end_zygote()


def be_launched(config: AnyConfig) -> None:
    """If torchrun started this process as a rank other than the first, become that rank and never return.

    The process of the first rank runs the whole program and calls the others. Raises UsageError if their number differs from the config's.
    """
    launch = read_torchrun_rank()
    check_world_size(launch, config.distributed.learners)
    if launch is not None and launch.rank > 0:
        from groupwise.engine.distributed import peer

        peer.run_torchrun_rank(launch)


def build_algorithm(config: RunConfig) -> Any:
    """The configured algorithm."""
    return make(config.algorithm.type, config.algorithm.knobs)


def needs_reference(config: RunConfig) -> bool:
    """True if the learner needs the policy that the run started from: for a KL penalty, or as the teacher."""
    starts_teacher = config.teacher is not None and config.teacher.weights == "start"
    return build_algorithm(config).needs_reference or starts_teacher


def prompt_room(model: ModelConfig, completion: int) -> int:
    """Most tokens that a prompt may have if the completion may have `completion` tokens. Raises UsageError if a service does not answer."""
    if model.backend != "tinker":
        return prefork.prompt_room(model, completion)
    from groupwise.engine.backends.tinker.service import longest_context

    limits = [longest_context(model), model.max_seq_length]
    return min((limit for limit in limits if limit), default=1 << 30) - completion


def check_stop_tokens(config: RunConfig, tokenizer: Any) -> None:
    """Raise ConfigError if `sampler.stop_token_ids` has ids that the tokenizer does not have."""
    unknown = [token for token in config.sampler.stop_token_ids if token >= len(tokenizer)]
    if unknown:
        raise ConfigError(
            f"sampler.stop_token_ids has {', '.join(map(str, unknown))}, but the tokens of {config.model.name} end at "
            f"{len(tokenizer) - 1}."
        )


def with_configured_stops(stops: tuple[int, ...], config: RunConfig) -> tuple[int, ...]:
    """The model's stop tokens and those of `sampler.stop_token_ids`, in order."""
    return tuple(sorted({*stops, *config.sampler.stop_token_ids}))


def refuse_servers(config: AnyConfig, why: str) -> None:
    """Raise UsageError for `sampler.engine: vllm` if the parts have to sample in this process."""
    if isinstance(config, RunConfig) and config.sampler.engine != "torch":
        raise UsageError(
            f"sampler.engine is {config.sampler.engine}, but {why}. Leave it out, and sampler.url too."
        )


def refuse_services(config: AnyConfig, why: str) -> None:
    """Raise UsageError for the backend tinker if the parts have to be on this machine."""
    if config.model.backend == "tinker":
        raise UsageError(
            f"model.backend is tinker, with which a service trains in groupwise rl and sft, and answers in groupwise eval; but {why}. "
            "Leave model.backend out."
        )
