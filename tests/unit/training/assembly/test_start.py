"""What is refused before a model is loaded."""

import pytest

from groupwise.core.errors import UsageError
from groupwise.training import placement
from groupwise.training.assembly.start import start_base, training_parts
from groupwise.training.config import load_config


async def test_commands_that_sample_in_process_refuse_sampling_servers(tmp_path):
    sampler = {"engine": "vllm", "url": "http://127.0.0.1:1"}
    config = load_config({"model": {"name": "tiny"}, "sampler": sampler}).config
    layout = placement.choose_layout(config, 20)
    with pytest.raises(UsageError, match=r"sampler\.engine .* this command"):
        training_parts(config, layout, "run", tmp_path)
    with pytest.raises(UsageError, match=r"sampler\.engine .* a base for"):
        await start_base(config, layout)
