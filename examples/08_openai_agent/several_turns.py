"""An agent of several turns becomes trainable: each of its calls says to which trajectory it belongs, and each trajectory gets one reward.

groupwise serve --output-dir served                  in one terminal
python examples/08_openai_agent/several_turns.py     in another, with `pip install openai`
"""

import os
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import openai

from groupwise import GroupwiseError, TrainingClient

URL = os.environ.get("GROUPWISE_URL", "http://127.0.0.1:8000")
STEPS, TRAJECTORIES, TURNS, LENGTH = 25, 8, 2, 8


def agent(client, trajectory):
    """The agent as it was, but for `store` and `metadata`: it asks, looks at the answer, and asks again. Returns what the model wrote."""
    messages, texts = [{"role": "user", "content": "Write the letter a."}], []
    for _ in range(TURNS):
        answer = client.chat.completions.create(
            model="latest",
            messages=messages,
            max_tokens=LENGTH,
            store=True,
            metadata={"trajectory": trajectory, "group": "letters"},
        )
        texts.append(answer.choices[0].message.content or "")
        seen = f"I see it {texts[-1].count('a')} times. Again."
        messages += [
            {"role": "assistant", "content": texts[-1]},
            {"role": "user", "content": seen},
        ]
    return texts


def one_step(client, server):
    """Run a group of trajectories at once and reward each as a whole; the mean reward. The last reward of a group has it trained."""

    def one_trajectory(trajectory):
        texts = agent(client, trajectory)
        reward = sum(text.count("a") for text in texts) / (TURNS * LENGTH)
        server.reward_trajectory(trajectory, reward)
        return reward

    names = [uuid.uuid4().hex for _ in range(TRAJECTORIES)]
    with ThreadPoolExecutor(TRAJECTORIES) as threads:
        return sum(threads.map(one_trajectory, names)) / TRAJECTORIES


def main():
    """Let the agent work, and reward what it did; the server compares the trajectories of a group with each other."""
    key = os.environ.get("GROUPWISE_API_KEY", "no key")
    with TrainingClient(URL) as server, openai.OpenAI(base_url=f"{URL}/v1", api_key=key) as client:
        server.start(
            num_completions_per_prompt=TRAJECTORIES,
            max_completion_length=LENGTH,
            max_steps=STEPS,
            staleness=0,
        )
        try:
            for step in range(STEPS):
                mean = one_step(client, server)
                if step % 5 == 4 or step == 0:
                    print(f"step {step + 1:2}  reward {mean:.2f}", flush=True)
        except KeyboardInterrupt:
            server.stop()  # so that it can be begun again
            raise


if __name__ == "__main__":
    try:
        main()
    except (GroupwiseError, openai.OpenAIError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; what was learnt until then stays on the server.")
