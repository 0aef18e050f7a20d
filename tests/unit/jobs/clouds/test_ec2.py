"""AWS's own error codes: which calls are repeated, how often, and which error the user gets for the others."""

from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from groupwise.jobs.clouds import ec2
from groupwise.jobs.clouds.backend import CloudError, Unreachable
from groupwise.jobs.clouds.ec2 import AwsRefused, Ec2, NoCredentials


class Scripted:
    """A client whose answers are these, errors among them."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = [*answers], []

    def __getattr__(self, verb: str) -> Any:
        def call(**words: Any) -> Any:
            self.asked.append((verb, words))
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def aws(*answers: Any) -> tuple[Ec2, Scripted]:
    client = Scripted(*answers)
    services = ("ec2", "sts", "ssm", "pricing")
    return Ec2("r", pause=0.0, _clients={(each, "r"): client for each in services}), client


def refusal(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, "Verb")


@pytest.mark.parametrize(
    "passes", [refusal("RequestLimitExceeded"), EndpointConnectionError(endpoint_url="x")]
)
def test_what_passes_by_itself_is_tried_again_a_few_times(passes: Exception) -> None:
    asked, client = aws(passes, passes, {"Account": "7"})
    assert asked.account() == "7"
    assert len(client.asked) == 3
    asked, client = aws(*[passes] * 99)
    with pytest.raises(Unreachable):
        asked.account()
    assert len(client.asked) == ec2.TRIES


@pytest.mark.parametrize(("said", "expected", "words"), [
    (NoCredentialsError(), NoCredentials, "aws configure"), (refusal("AuthFailure"), NoCredentials, "does not accept the credentials"),
    (refusal("UnauthorizedOperation"), AwsRefused, "lists what is needed"),
    (refusal("InsufficientInstanceCapacity"), AwsRefused, "InsufficientInstanceCapacity"),
    (refusal("VcpuLimitExceeded"), AwsRefused, "VcpuLimitExceeded"),
])  # fmt: skip
def test_the_rest_is_told_at_once(said: Exception, expected: type[CloudError], words: str) -> None:
    asked, client = aws(said)
    with pytest.raises(expected, match=words):
        asked.account()
    assert len(client.asked) == 1


def test_one_that_is_gone_or_not_there_yet_is_told_from_one_that_is_ended() -> None:
    assert aws({})[0].terminate("i-1")
    assert not aws(refusal("InvalidInstanceID.NotFound"))[0].terminate("i-1")
    with pytest.raises(AwsRefused):
        aws(refusal("OperationNotPermitted"))[0].terminate("i-1")
