"""Teaches a model on a server to write letters in alphabetical order: the rewards are computed here, and one call is the whole loop.

    groupwise serve --output-dir served                  in one terminal
    python examples/06_alphabetical/client.py            in another

GROUPWISE_URL is the address of the server, without it http://127.0.0.1:8000; GROUPWISE_API_KEY is its key, if it has one.
"""

import sys
from itertools import pairwise

from groupwise import GroupwiseError
from groupwise.api.client import TrainingClient, train
from groupwise.core.terminal.plot import sparkline

LENGTH, STEPS = 16, 60
WORDS = ["apple", "river", "stone", "cloud", "tiger", "piano", "lemon", "ocean"]


def in_order(completions, **_):
    """The share of neighbours that are letters in alphabetical order; characters missing at the end count as not in order."""
    return [
        sum(a.isalpha() and b.isalpha() and a.lower() <= b.lower() for a, b in pairwise(text))
        / (LENGTH - 1)
        for text in completions
    ]


def main():
    """Train, and show how the reward rose."""
    examples = [{"prompt": f"{word}:"} for word in WORDS]
    with TrainingClient() as client:
        client.start(max_completion_length=LENGTH, groups_per_step=4, max_steps=STEPS)
        try:
            trained = train(client, examples, in_order, steps=STEPS)
        except KeyboardInterrupt:
            client.stop()  # so that another training can start
            raise
    rewards = list(trained.rewards.values())
    print(f"reward {rewards[0]:.2f} {sparkline(rewards, 40)} {rewards[-1]:.2f}")


if __name__ == "__main__":
    try:
        main()
    except GroupwiseError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; what was learnt until then stays on the server.")
