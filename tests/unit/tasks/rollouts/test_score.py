"""Between groups and rewards: what is sent to the scorer, and where its results go."""

from groupwise.core.reward_call.request import GroupScore, MemberScore, ScoreRequest
from groupwise.core.types import RewardPart
from groupwise.tasks.rollouts.score import score_group, score_request

CHAT = [{"role": "user", "content": "ask"}]


class Recorder:
    """A scorer that answers what it was made with."""

    def __init__(self, score: GroupScore) -> None:
        self.answer = score
        self.asked: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> GroupScore:
        self.asked.append(request)
        return self.answer


def test_every_column_is_repeated_for_each_member(make_group, written):
    group = make_group((written(1),), (written(2, 3),), answer="gold", level=3)
    asked = score_request(group, global_step=5, max_steps=9)
    assert asked.prompts == ["ask", "ask"]
    assert asked.completions == ["text 0", "text 1"]
    assert asked.completion_ids == [[1], [2, 3]]
    assert asked.columns == {
        "answer": ["gold", "gold"],
        "level": [3, 3],
        "origin": ["fresh", "fresh"],
    }
    assert (asked.draw, asked.global_step, asked.max_steps) == (4, 5, 9)


def test_answers_to_a_chat_are_messages(make_group, written):
    asked = score_request(make_group((written(1),), prompt=CHAT), 0, 0)
    assert asked.prompts == [CHAT]
    assert asked.completions == [[{"role": "assistant", "content": "text 0"}]]


async def test_verdicts_come_back_to_their_rollouts(make_group, written):
    group = make_group((written(1),), (written(2),), (written(3),))
    part = RewardPart("r", 1.5)
    score = GroupScore(
        (
            MemberScore("scored", None, 1.5, (part,), {"seen": 1}),
            MemberScore("failed", "it raised"),
            MemberScore("timed_out", "30 s"),
        ),
        {"share": 0.5},
    )
    found = await score_group(Recorder(score), group, 1, 2)  # type: ignore[arg-type]
    assert [each.outcome for each in found.rollouts] == ["scored", "failed", "timed_out"]
    assert [each.reward for each in found.rollouts] == [1.5, None, None]
    assert [each.reason for each in found.rollouts] == [None, "it raised", "30 s"]
    assert (found.rollouts[0].parts, found.rollouts[0].notes) == ((part,), {"seen": 1})
    assert found.metrics == {"share": 0.5}
    assert [each.segments for each in found.rollouts] == [each.segments for each in group.rollouts]
    assert found.scored == (found.rollouts[0],)
