"""The table of Tinker client methods that work against this server. Refusals and the documentation page are made from it.

`python -m groupwise.server.tinker.compatibility` prints the page. A method whose name ends in `_async` behaves like the one without the
suffix.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from groupwise.core.errors import UsageError

CLIENT_VERSION = "0.38.0"
COOKBOOK = Path(__file__).with_name("cookbook.json")
"""Results of the tests of the cookbook's recipes. The tests write this file and then the page."""


class Unsupported(UsageError):
    """The client has this method, but the server does not support it."""

    code = "unsupported"


@dataclass(frozen=True, slots=True)
class Method:
    """A public method of the client."""

    owner: str
    name: str
    works: bool
    note: str = ""
    """Differences from the original, or the reason for refusing it."""
    routes: tuple[tuple[str, str], ...] = ()
    """HTTP method and path of the requests of a refused method; `*` matches one path segment."""


ALL_KEYS = "those of all keys"
IN_USE = "weights that a sampler of an open session uses are removed when that session has ended"
ONE_ACCOUNT = "there is one account: keys have roles, not worlds of their own"
TOKENIZERS = "the client loads it itself: see Tokenizers"
LOCAL = "answered by the client alone"

_service = partial(Method, "ServiceClient")
_training = partial(Method, "TrainingClient")
_sampling = partial(Method, "SamplingClient")
_rest = partial(Method, "RestClient")

METHODS: tuple[Method, ...] = (
    _service("close", True, "releases the models of the session"),
    _service("copy_weights", False, ONE_ACCOUNT, (("POST", "/copy_weights"),)),
    _service(
        "create_custom_loss",
        True,
        "the loss runs in the client, which needs torch",
        (("POST", "/create_custom_loss"),),
    ),
    _service(
        "create_lora_training_client",
        True,
        "optimizer: AdamW alone; as many models at once as `max_models` says",
    ),
    _service("create_rest_client", True),
    _service("create_sampling_client", True, "record_stability_info is refused"),
    _service(
        "create_training_client_from_state",
        True,
        "weights_access_token and another base_model are refused",
    ),
    _service(
        "create_training_client_from_state_with_optimizer",
        True,
        "weights_access_token and another base_model are refused",
    ),
    _service("get_console_url", True, f"{LOCAL}; the address is that of another service"),
    _service("get_server_capabilities", True),
    _service("get_telemetry", True, "what it sends is taken and thrown away"),
    _training("create_sampling_client", True, "record_stability_info is refused"),
    _training("forward", True, "as forward_backward"),
    _training(
        "forward_backward",
        True,
        "cross_entropy, also with K targets for each token; importance_sampling, ppo, cispo, dro and gspo; not stable_reinforce, nor "
        "custom losses on the server; text alone",
    ),
    _training("forward_backward_custom", True, "the loss runs in the client, which needs torch"),
    _training("get_console_url", True, f"{LOCAL}; the address is that of another service"),
    _training("get_info", True),
    _training("get_telemetry", True, "what it sends is taken and thrown away"),
    _training("get_tokenizer", True, TOKENIZERS),
    _training("load_state", True, "weights_access_token is refused"),
    _training("load_state_with_optimizer", True, "weights_access_token is refused"),
    _training("optim_step", True, "AdamParams alone"),
    _training("save_state", True),
    _training(
        "save_weights_and_get_sampling_client",
        True,
        "kind: snapshot alone; the weights of the last 8 such samplers of a model are kept",
    ),
    _training(
        "save_weights_external",
        False,
        "`GET /model` gives the adapter in the format of PEFT",
        (("POST", "/save_weights_external"),),
    ),
    _training(
        "save_weights_for_sampler",
        True,
        "a name is used once, until its weights have expired or were deleted",
    ),
    _sampling("compute_logprobs", True),
    _sampling("create", True),
    _sampling("from_sampler_handle", True),
    _sampling("get_base_model", True, LOCAL),
    _sampling("get_sampler_handle", True, LOCAL),
    _sampling("get_telemetry", True, "what it sends is taken and thrown away"),
    _sampling("get_tokenizer", True, TOKENIZERS),
    _sampling("on_queue_state_change", True, LOCAL),
    _sampling(
        "sample",
        True,
        "prompt_alt_tokens_k is refused; stop adds to the model's own stop tokens, and [] is none at all; log-probabilities of what was "
        "drawn are those at the temperature that was sampled, those of the prompt at temperature 1; topk_prompt_logprobs and "
        "topk_sample_logprobs are 1,024 at most",
    ),
    _rest(
        "assign_session_project",
        False,
        "there are no projects",
        (("PUT", "/sessions/*/project"), ("POST", "/sessions/*/project")),
    ),
    _rest("copy_weights", False, ONE_ACCOUNT, (("POST", "/copy_weights"),)),
    _rest("delete_checkpoint", True, IN_USE),
    _rest("delete_checkpoint_from_tinker_path", True, IN_USE),
    _rest(
        "export_session_trace",
        False,
        "the record of a run is its folder",
        (("POST", "/sessions/*/trace_export"), ("GET", "/sessions/*/trace_export")),
    ),
    _rest("get_audit_log", False, ONE_ACCOUNT, (("GET", "/audit"),)),
    _rest(
        "get_billing_usage",
        False,
        "nothing is billed",
        (("GET", "/billing/usage/events"), ("POST", "/billing/usage/events")),
    ),
    _rest(
        "get_current_checkpoint_storage_usage",
        True,
        "one entry for the whole server; project_id is refused",
    ),
    _rest(
        "get_external_weights_urls",
        False,
        "`GET /model` gives the adapter in the format of PEFT",
        (("GET", "/training_runs/*/checkpoints/**/external_weights_urls"),),
    ),
    _rest("get_sampler", True),
    _rest("get_server_capabilities", True),
    _rest("get_session", True, "the samplers of an open session alone"),
    _rest("get_telemetry", True, "what it sends is taken and thrown away"),
    _rest("get_training_run", True),
    _rest("get_training_run_by_tinker_path", True),
    _rest("get_weights_info_by_tinker_path", True),
    _rest("list_checkpoints", True),
    _rest("list_sessions", True, ALL_KEYS),
    _rest("list_training_runs", True, f"{ALL_KEYS}; project_id is refused"),
    _rest("list_user_checkpoints", True, ALL_KEYS),
    _rest(
        "publish_checkpoint_from_tinker_path",
        False,
        ONE_ACCOUNT,
        (("POST", "/training_runs/*/checkpoints/**/publish"),),
    ),
    _rest(
        "search_sessions",
        False,
        "list_sessions and get_session tell of all of them",
        (("POST", "/sessions/search"), ("GET", "/sessions/search")),
    ),
    _rest("set_checkpoint_ttl_from_tinker_path", True, IN_USE),
    _rest(
        "unpublish_checkpoint_from_tinker_path",
        False,
        ONE_ACCOUNT,
        (("DELETE", "/training_runs/*/checkpoints/**/publish"),),
    ),
    _rest("whoami", False, ONE_ACCOUNT, (("GET", "/auth/apikey/me"),)),
)
"""All methods; a test compares the table with the installed client."""

INTRODUCTION = """\
The `tinker` package ({version}) runs against `groupwise serve` as it stands. Point it there, and give it a key of the server that may
train, in another terminal than the server's. The client wants it to begin with `tml-`, in place of `gw-`, also where the server has no
keys and looks at none:

```bash
pip install 'groupwise[train,server,tinker]'
groupwise serve --output-dir served
export TINKER_BASE_URL=http://127.0.0.1:8000
export TINKER_API_KEY=tml-…
```

Base models are those that `/start` may load. One base is in memory at a time, with up to `max_models` adapters; a run of ask/post that is
active is one of them, and the others are then made over its base. While a client has models, no run can be started; a run that trains all
weights has its model to itself. A client that ends without closing its session (`ServiceClient.close`) keeps its models in memory until
another client or a run needs their room; then they make way after 60 seconds without a heartbeat, and after ten minutes in any case. A
session that is in use makes way only when an admin starts a run with `replace: true`. What models have saved stays, until it expires
(`ttl_seconds`) or is deleted.

The server writes down every call before it is acknowledged, and every answer before it is told. So the engine, or the server, may be
killed at any time: the client waits a while, and its loop goes on as if nothing had happened. The state of a model is kept every
`keep_models_every` updates, and the calls after it are done again. `max_context_length` bounds prompt and completion of samples. An
adapter of the output head (`train_unembed`, which is the client's default) makes sampling and learning slower than without.

Losses are sums over tokens, as the client documents them: nothing is divided by anything. They take log-probabilities at temperature 1, so
sample at temperature 1 where the ratio is to begin at 1. The clip of `ppo` and `cispo` is 0.8 to 1.2, that of `gspo` 0.9997 to 1.0004 (its
paper's), unless `loss_fn_config` gives `clip_low_threshold` and `clip_high_threshold`; `dro` needs a `beta` there.

Targets need not be the tokens that follow in the input: each target has its log-probability after the input before it, is trained on by its
weight or advantage, and its log-probability is given back, also where the weight is 0. A target below 0, such as -100, is refused
where it has a weight; without one it stands for the token that follows in the input. Losses look at the tokens whose weight or advantage is
not 0. `dro` also looks where the advantage alone is 0, but not where the sampled log-probability is 0 as well, which is how prompts are
padded; `gspo` looks where its `sequence_ratio_mask` is not 0, and refuses an advantage elsewhere. For distillation, `cross_entropy` takes
`target_tokens` and `weights` of the shape (N, K), dense or sparse, and gives back log-probabilities of the same shape; its metrics count
each target with a weight as a token. The teacher's come from `sample` with `topk_prompt_logprobs` or `target_prompt_logprobs`.

Names of projects, tags, and where a datum's tokens come from (`with_provenance`), are taken and not kept; metadata and names of sessions
are. What is refused is refused at once, with its name and the reason. The tables are made from `groupwise/server/tinker/compatibility.py`;
every method that ends in `_async` does what the one without it does.
"""

TOKENIZER_SECTION = """\
## Tokenizers

The client loads tokenizers itself, by the name of the base: from a folder of that name in its working folder, else from the Hugging Face
hub. The bundled model is served under its hub id, too (`HuggingFaceTB/SmolLM2-135M-Instruct`; its weights are those of a 4-bit file, not
the hub's own), and a folder `org/name` in the server's `model_dir` by that name; so recipes that look tokenizers, renderers or chat
templates up by name find them. What no hub has (`tiny`, your own models), or where there is no hub, the server gives out:

```bash
curl -fsS -H "X-API-Key: $TINKER_API_KEY" "$TINKER_BASE_URL/api/v1/tokenizer?base_model=tiny" -o tokenizer.zip
python -m zipfile -e tokenizer.zip tiny
```

After that `get_tokenizer()` of both clients, and `AutoTokenizer.from_pretrained("tiny")`, find it in the folder in which the program is
started.
"""

SAVED_SECTION = """\
## Saved weights

What `save_state` and `save_weights_for_sampler` save stays in the server's folder (`verbs/<model>/`) when its session has ended and when
the server is started again. With `ttl_seconds` (from 1 second to ten years) it expires: then it is neither listed nor loaded any more, and
its files are removed within a minute. `set_checkpoint_ttl_from_tinker_path` changes that, and `delete_checkpoint` lets it expire at once.
In either case a sampling client of an open session that uses these weights goes on: the files are removed when its session has ended.
Weights that were saved without a name, for one sampling client, last as long as their session.

Sessions and training runs (each model is one) stand in the server's ledger, and are listed when they have ended, too.
"""

SUPERVISED = """\
import tinker
from tinker import types

client = tinker.ServiceClient()
training = client.create_lora_training_client("tiny", rank=8, seed=1).result()

tokens = [11, 12, 13, 14, 15, 16, 17, 18]
example = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.0, *[1.0] * 6]},
)
adam = types.AdamParams(learning_rate=0.05)

# All calls are under way before the first answer is asked for; they keep their order.
calls = []
for _ in range(20):
    calls.append(training.forward_backward([example], "cross_entropy"))
    training.optim_step(adam)
losses = [call.result().metrics["loss:sum"] for call in calls]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
print(training.save_state("taught").result().path)
client.close("success").result()
"""
REINFORCED = """\
import tinker
from tinker import types

LETTER = 40
client = tinker.ServiceClient()
training = client.create_lora_training_client("tiny", rank=8, seed=1).result()
prompt = [21, 22, 23]


def rollout(sequence, advantage):
    tokens, before = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": before + sequence.logprobs,
            "advantages": before + [advantage] * len(sequence.tokens),
        },
    )


means = []
for step in range(15):
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step, stop=[])
    request = types.ModelInput.from_ints(prompt)
    sequences = sampling.sample(request, num_samples=16, sampling_params=params).result().sequences
    rewards = [sequence.tokens.count(LETTER) / len(sequence.tokens) for sequence in sequences]
    means.append(sum(rewards) / len(rewards))
    data = [rollout(sequence, reward - means[-1]) for sequence, reward in zip(sequences, rewards)]
    learning = training.forward_backward(data, "importance_sampling")
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    learning.result()
print(f"reward {means[0]:.2f} -> {means[-1]:.2f}")
client.close("success").result()
"""
EXAMPLES: tuple[tuple[str, str], ...] = (
    ("Supervised: the loss falls", SUPERVISED),
    ("Reinforced: sample, score, learn (GRPO)", REINFORCED),
)
"""Complete programs, by title."""

INTERNAL: tuple[tuple[str, str, str], ...] = (
    ("POST", "/auth/token", "keys are not exchanged for tokens"),
    ("POST", "/cancel_future", "samples are not cancelled one by one"),
    ("POST", "/retrieve_futures", "each answer is fetched by itself"),
    ("POST", "/join_sampling_session", "copies of a sampling client number themselves"),
)
"""Routes that the client calls only if the server enables them; this server does not."""


RECIPES = """\
These programs of `tinker-cookbook` {release} were run as the package has them against `groupwise serve`, with a very small model on two
cores; only the name of the model, sizes and folders were given. Those below `tests/` are the cookbook's own tests that need a service, from
its source distribution. `make soak SUITE=cookbook` runs them again and writes this table.
"""
NOT_RUN: tuple[tuple[str, str], ...] = (
    ("`vlm_classifier`, `audio`", "the server takes text alone"),
    (
        "`distillation.on_policy_multi_teacher`, `multiplayer_rl.twenty_questions`",
        "unless all models that they name are one: the server has one base in memory at a time",
    ),
    ("`harbor_rl`, `code_rl`", "they need a service that runs containers"),
    (
        "`search_tool`, `rubric`, `verifiers_rl`, `multiplayer_rl.text_arena`, `eval` with inspect",
        "they need a further service or package",
    ),
    (
        "`forecasting`, `rl_numerics_check`, `sdft`, `distillation.off_policy_reasoning`",
        "they need large data sets",
    ),
    (
        "tests of `tests/` for the recipes above, `shorter`, `rlhf` and `guess_number`, and of exported weights",
        "they need what is said above, thousands of samples a step, or the weights of large models",
    ),
)
"""Recipes that the tests leave out, and why."""


def refused_route(method: str, path: str) -> Unsupported | None:
    """Why a route of the protocol is refused; None if the protocol has no such route."""
    owners = [
        f"{entry.owner}.{entry.name}"
        for entry in METHODS
        if any(_fits(route, method, path) for route in entry.routes)
    ]
    if owners:
        reason = next(entry.note for entry in METHODS if f"{entry.owner}.{entry.name}" == owners[0])
        return Unsupported(f"{' and '.join(owners)}: not supported by this server; {reason}.")
    for internal_method, route, reason in INTERNAL:
        if _fits((internal_method, route), method, path):
            return Unsupported(f"{method} {route} is not supported by this server: {reason}.")
    return None


def page() -> str:
    """The documentation page, in Markdown."""
    return "\n".join(_page_lines()) + "\n"


def _page_lines() -> Iterator[str]:
    yield "# The Tinker client"
    yield ""
    yield from INTRODUCTION.format(version=CLIENT_VERSION).splitlines()
    yield from ("", *SAVED_SECTION.splitlines(), "", *TOKENIZER_SECTION.splitlines())
    for title, program in EXAMPLES:
        yield from ("", f"## {title}", "", "```python", *program.splitlines(), "```")
    yield from _recipe_lines()
    for owner in dict.fromkeys(method.owner for method in METHODS):
        yield ""
        yield f"## {owner}"
        yield ""
        yield "| method | works | |"
        yield "|---|---|---|"
        for entry in METHODS:
            if entry.owner == owner:
                yield f"| `{entry.name}` | {'yes' if entry.works else 'no'} | {entry.note} |"


def _recipe_lines() -> Iterator[str]:
    table = json.loads(COOKBOOK.read_text())
    yield from ("", "## Recipes of tinker-cookbook", "")
    yield from RECIPES.format(release=table["release"]).splitlines()
    yield from ("", "<!-- recipes: begin -->", "| recipe | passes | what is seen | seconds |")
    yield "|---|---|---|---|"
    for row in table["recipes"]:
        passes = "yes" if row["passes"] else "no"
        yield f"| `{row['recipe']}` | {passes} | {row['seen']} | {row['seconds']} |"
    for recipes, reason in NOT_RUN:
        yield f"| {recipes} | not run | {reason} | |"
    yield "<!-- recipes: end -->"


def _fits(route: tuple[str, str], method: str, path: str) -> bool:
    pattern = re.escape(route[1]).replace(r"\*\*", ".+").replace(r"\*", "[^/]+")
    return route[0] == method and re.fullmatch(pattern, path.rstrip("/")) is not None


if __name__ == "__main__":
    sys.stdout.write(page())
