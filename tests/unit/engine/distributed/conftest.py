"""Parts of a small training, in this process and in ranks that stay for all tests of a file."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.start import training_parts
from groupwise.training.config import load_config
from tests.forked_zygote import fork_zygotes

CONFIG = {
    "model": {"name": "tiny", "dtype": "float32"},
    "lora": {"r": 4, "alpha": 8},
    "sampler": {"max_completion_length": 12, "max_num_seqs": 8},
    "run": {"threads": 1},
}


@pytest.fixture(scope="module")
def parts_of(tmp_path_factory) -> Iterator[Callable[..., Parts]]:
    """Parts of so many processes with one thread each; closed at the end of the file."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        fork_zygotes(patch)

        def made(processes: int, **lora) -> Parts:
            settings = {**CONFIG, "lora": {**CONFIG["lora"], **lora}}
            config = load_config(settings).config
            layout = replace(
                placement.choose_layout(config, 20),
                processes=processes,
                threads=processes,
                frees_cache=True,
            )
            folder = tmp_path_factory.mktemp("published")
            return stack.enter_context(closing(training_parts(config, layout, "ranks", folder)))

        yield made


@pytest.fixture(scope="module")
def alone(parts_of) -> Parts:
    return parts_of(1)


@pytest.fixture(scope="module")
def two(parts_of) -> Parts:
    return parts_of(2)
