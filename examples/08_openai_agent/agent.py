"""Trains an agent that uses the client of OpenAI: its calls have `store=True`, and are rewarded by their ids.

groupwise serve --output-dir served          in one terminal
python examples/08_openai_agent/agent.py     in another, with `pip install openai`
"""

import os
import sys

import openai

from groupwise import GroupwiseError, TrainingClient

URL = os.environ.get("GROUPWISE_URL", "http://127.0.0.1:8000")
STEPS, CALLS = 30, 8


def agent(client, question):
    """The agent, unchanged except for `store`: one call, one answer."""
    answer = client.chat.completions.create(
        model="latest", messages=[{"role": "user", "content": question}], max_tokens=8, store=True
    )
    return answer.id, answer.choices[0].message.content or ""


def one_step(client, server):
    """Ask the same question several times and reward each answer; returns the mean reward."""
    rewards = []
    for _ in range(CALLS):
        called, text = agent(client, "Write the letter a.")
        rewards.append(text.count("a") / 8)
        server.rewards(called, rewards[-1:])
    return sum(rewards) / CALLS


def main():
    """Let the agent work, and reward what it did; the server compares the answers to the same question with each other."""
    key = os.environ.get("GROUPWISE_API_KEY", "no key")
    with TrainingClient(URL) as server, openai.OpenAI(base_url=f"{URL}/v1", api_key=key) as client:
        started = server.start(
            run_name="openai-agent",
            num_completions_per_prompt=CALLS,
            max_completion_length=8,
            max_steps=STEPS,
            staleness=0,
        )
        print("run", started.run_id, flush=True)
        try:
            for step in range(STEPS):
                mean = one_step(client, server)
                if step % 5 == 4 or step == 0:
                    print(f"step {step + 1:2}  reward {mean:.2f}", flush=True)
        except KeyboardInterrupt:
            server.stop()  # so that another training can start
            raise


if __name__ == "__main__":
    try:
        main()
    except (GroupwiseError, openai.OpenAIError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; what was learnt until then stays on the server.")
