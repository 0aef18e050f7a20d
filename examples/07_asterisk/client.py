"""Teaches a model on a server to write asterisks, with one call for each thing: start, completions, rewards.

    groupwise serve --output-dir served                  in one terminal
    python examples/07_asterisk/client.py                in another

GROUPWISE_URL is the address of the server, without it http://127.0.0.1:8000; GROUPWISE_API_KEY is its key, if it has one.
"""

import sys

from groupwise import GroupwiseError
from groupwise.api.client import TrainingClient, rewards_for
from groupwise.core.terminal.plot import sparkline

LENGTH, STEPS = 16, 60
PROMPTS = ["apple:", "river:", "stone:", "cloud:"]


def asterisks(completions):
    """The share of asterisks in each completion of LENGTH characters."""
    return [text.count("*") / LENGTH for text in completions]


def one_step(client):
    """The mean reward of a step, and one of its completions."""
    groups = client.completions_batch(PROMPTS).groups
    scored = [rewards_for(one, asterisks(one.completions)) for one in groups]
    learnt = client.rewards_batch(scored, wait=True).groups[0]
    return (learnt.metrics or {})["reward"], groups[0].completions[0]


def main():
    """Train, and show how the reward rises."""
    means = []
    with TrainingClient() as client:
        client.start(max_completion_length=LENGTH, groups_per_step=len(PROMPTS), max_steps=STEPS)
        try:
            for step in range(STEPS):
                mean, text = one_step(client)
                means.append(mean)
                print(f"step {step + 1}/{STEPS}  reward {mean:.2f}  {text!r}")
        except KeyboardInterrupt:
            client.stop()  # so that another training can start
            raise
    print(f"reward {means[0]:.2f} {sparkline(means, 40)} {means[-1]:.2f}")


if __name__ == "__main__":
    try:
        main()
    except GroupwiseError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; what was learnt until then stays on the server.")
