"""A game of several turns: guess a digit from 1 to 3. After a wrong guess the game says whether the secret is higher or lower.

A policy that uses the hint needs two guesses at most: first the 2, then the digit above or below it. One that ignores the hint wins two of
three games at most.
"""

from groupwise import Step

DIGITS = "123"


class GuessingGame:
    """One game; each rollout makes a new one."""

    def reset(self, secret):
        """Begin. The arguments are columns of the row."""
        self.secret = secret
        self.won = False

    def step(self, completion):
        """Answer a guess. The policy reads exactly this text."""
        guess = completion.strip()
        self.won = guess == self.secret
        if self.won:
            return Step("yes", done=True)
        if not guess or guess not in DIGITS:
            return Step("?", reward={"legal": -0.2})
        return Step(">" if guess < self.secret else "<")

    def reward(self):
        """What the whole game earned, once it has ended or was cut off."""
        return {"won": float(self.won)}


def get_environment(config):
    """What makes the environment of a rollout."""
    return GuessingGame


def get_rl_dataset(config):
    """One row for each secret; the prompt gives nothing away."""
    return [{"prompt": "1-3:", "secret": digit} for digit in DIGITS]


def get_eval_dataset(config):
    """There are no other secrets, so the evaluation plays the same games, always with the likeliest guess."""
    return get_rl_dataset(config)


def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):
    """The share of games won, read from the transcripts."""
    won = [text.endswith("yes") for text in completions]
    return {"metrics": {"win_rate": sum(won) / len(won)}}
