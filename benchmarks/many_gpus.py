"""What a run on many GPUs would do, computed: `python -m benchmarks.many_gpus` prints the table of docs/operate/scaling.md.

Nobody has measured this. One H100 was measured (`results/gpu-*.json`): tokens that it samples and learns in a second, and the
milliseconds of a token of all rows. From these, the memory plan (`plan_model`) and the bandwidth of a network follow the seconds of one
step, whose parts take place as the loop does them with a lag of 1: samplers draw the next step while learners learn from this one and one
process records it; then the weights are published. Of all ways to divide the GPUs the one with the shortest step is taken; GPUs that
would shorten it by less than 2 % are left out.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import SIZES, Size
from benchmarks.step import RESULTS
from benchmarks.work import RANK
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.plan import MIB, plan_model

MEASURED = RESULTS / "gpu-nvidia-h100-80gb-hbm3-16-cores.json"
RUNS = ((8, 256), (64, 256), (1024, 256), (1024, 4096))
"""GPUs, and prompts of a step."""
MEMBERS = 16
PROMPT_TOKENS, TOKENS, LONGEST = 200, 500, 1000
"""Of a prompt, of a mean completion and of the longest one of a step."""
ON_A_MACHINE = 8
NVLINK, NETWORK, SHARED_FOLDER = 450e9, 50e9, 2e9
"""Bytes a second: between GPUs of a machine, from a GPU to another machine (400 Gbit/s), from the file system with the adapters."""
RECORDING = 0.73e-3
"""Seconds of the main process for a completion of 500 tokens, at least: 0.33 ms to parse a server's answer, 0.40 to commit it."""
MICROBATCH = 8192


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run; seconds, but for the counts."""

    learners: int
    samplers: int
    sampling: float
    learning: float
    publishing: float
    recording: float
    published_bytes: float
    """Bytes that all samplers receive together."""
    longest: float
    """Seconds until the longest completion is drawn; more samplers do not shorten it."""

    @property
    def seconds(self) -> float:
        """Samplers and learners work at the same time, and stop for the new weights."""
        return max(self.sampling + self.publishing, self.learning + self.publishing, self.recording)

    @property
    def limit(self) -> str:
        """The part of the step that takes longest."""
        if self.recording >= self.seconds:
            return "the one process that records"
        if self.publishing > max(self.sampling, self.learning):
            return "publishing"
        if self.learning > self.sampling:
            return "learning"
        return "the longest completion" if self.sampling <= self.longest else "sampling"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's size, and what one GPU does with it."""

    name: str
    whole: bool
    """All weights are trained, instead of an adapter."""
    sampled: float
    """Tokens a second of one GPU; `learnt` likewise."""
    learnt: float
    token_seconds: float
    """One token of all rows."""
    publication: float
    """Seconds until one GPU has an adapter."""
    parameters: int
    trained: int
    learner_gib: float
    """Memory of a learner's GPU."""


def measured_model(name: str, *, whole: bool) -> Model:
    """A model as one H100 was seen to compute it."""
    seen = json.loads(MEASURED.read_text())["sizes"][name]
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(size)))
        plan = plan_model(
            ModelConfig(name=folder),
            None if whole else LoraConfig(r=RANK),
            dtype="bfloat16",
            decoding=None,
            microbatch=MICROBATCH,
            needs_reference=False,
            device="cuda",
        )
    flops = size.products_of_all_weights() / size.products_of_learning() if whole else 1.0
    return Model(
        name=name,
        whole=whole,
        sampled=seen["sampling"]["tokens_per_second"],
        learnt=seen["learning, 16384 tokens"]["tokens_per_second"] / flops,
        token_seconds=seen["sampling"]["milliseconds_per_token"] / 1e3,
        publication=sum(seen["publication"].values()),
        parameters=plan.parameters,
        trained=plan.trained_parameters,
        learner_gib=plan.memory.total * MIB / 2**30,
    )


def _config(size: Size) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": size.tied,
        "torch_dtype": "bfloat16",
    }


def best_step(model: Model, gpus: int, prompts: int) -> Step:
    """The shortest step on at most so many GPUs, with the fewest of those that take at most 2 % longer."""
    counts = (*range(1, ON_A_MACHINE), *range(ON_A_MACHINE, gpus, ON_A_MACHINE))
    steps = [
        step(model, learners, samplers, prompts)
        for learners in counts
        for samplers in counts
        if learners + samplers <= gpus
    ]
    enough = 1.02 * min(each.seconds for each in steps)
    return min(
        (each for each in steps if each.seconds <= enough),
        key=lambda each: (each.learners + each.samplers, each.seconds),
    )


def step(model: Model, learners: int, samplers: int, prompts: int) -> Step:
    """One step of so many learners and samplers, each on a GPU of its own."""
    sampled, longest = prompts * MEMBERS * TOKENS, LONGEST * model.token_seconds
    wire = NVLINK if learners <= ON_A_MACHINE else NETWORK
    # Gradients are summed as float32, in a ring.
    summing = 2 * 4 * model.trained * (learners - 1) / learners / wire
    if model.whole:  # bfloat16, to one server after the other
        published = 2.0 * model.parameters * samplers
        publishing = published / NETWORK
    else:  # float32 files, which all servers read at the same time
        published = 4.0 * model.trained * samplers
        publishing = model.publication + published / SHARED_FOLDER
    return Step(
        learners=learners,
        samplers=samplers,
        sampling=max(longest, sampled / (samplers * model.sampled)),
        learning=(prompts * PROMPT_TOKENS + sampled) / (learners * model.learnt) + summing,
        publishing=publishing,
        recording=prompts * MEMBERS * RECORDING,
        published_bytes=published,
        longest=longest,
    )


def table() -> str:
    """The table of docs/operate/scaling.md."""
    head = (
        "| model | GPUs | completions of a step | learners + samplers | a step | sampled, tokens/s | "
        "learnt, tokens/s | weights, MB/s | limit |"
    )
    rows = [head, "|" + "---|" * (head.count("|") - 1)]
    for name, whole in (("1.5B", False), ("1.5B", True), ("8B", False)):
        model = measured_model(name, whole=whole)
        for gpus, prompts in RUNS:
            best = best_step(model, gpus, prompts)
            tokens = prompts * MEMBERS * TOKENS / best.seconds
            learnt = tokens + prompts * PROMPT_TOKENS / best.seconds
            cells = (
                f"{name}, {'all weights' if whole else f'adapter of rank {RANK}'}",
                f"{gpus:,}",
                f"{prompts * MEMBERS:,}",
                f"{best.learners} + {best.samplers}",
                f"{best.seconds:.1f} s",
                f"{round(tokens, -3):,.0f}",
                f"{round(learnt, -3):,.0f}",
                f"{best.published_bytes / best.seconds / 1e6:,.0f}",
                best.limit,
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Print the table, and the memory of a learner."""
    print(table())
    for name, whole in (("1.5B", False), ("1.5B", True), ("8B", False), ("8B", True)):
        model = measured_model(name, whole=whole)
        print(
            f"{name}, {'all weights' if whole else 'adapter'}: {model.learner_gib:.0f} GiB for a learner"
        )


if __name__ == "__main__":
    main()
