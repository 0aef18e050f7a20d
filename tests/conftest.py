"""What holds for every test: the processor is not oversubscribed, nothing is fetched, chance is fixed."""

import os
import sys

import hypothesis

# Before torch, tokenizers or huggingface_hub read them; subprocesses of tests inherit them.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}.items():
    os.environ.setdefault(name, value)

if "torch" in sys.modules:  # a plugin brought it before the variables above stood
    sys.modules["torch"].set_num_threads(1)

hypothesis.settings.register_profile("groupwise", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("groupwise")
