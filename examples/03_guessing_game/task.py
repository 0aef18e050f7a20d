"""A game of several turns: guess a digit from 1 to 3, and hear after a guess whether the secret is higher or lower.

Whoever listens needs two guesses: the middle first, then where the answer points. Whoever does not wins half of the games.
"""

from groupwise import Step

DIGITS = "123"


class GuessingGame:
    """One game; made anew for each rollout."""

    def reset(self, secret):
        """Begin. Any column of the row can be asked for by its name."""
        self.secret = secret
        self.won = False

    def step(self, completion):
        """Answer a guess. Text goes back to the policy as it stands here."""
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
    """The share of games won, told from the transcripts."""
    won = [text.endswith("yes") for text in completions]
    return {"metrics": {"win_rate": sum(won) / len(won)}}
