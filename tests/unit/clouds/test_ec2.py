"""What AWS says in words of its own: what is tried again, how often, and what becomes of the rest; types that are known here."""

from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from groupwise.clouds import ec2
from groupwise.clouds.ec2 import BotoEc2, Group, NoCredentials, Refused, Request
from groupwise.clouds.ec2_types import gpus_of, list_price, quota_code
from groupwise.clouds.port import CloudError, Unreachable


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


def aws(*answers: Any) -> tuple[BotoEc2, Scripted]:
    client = Scripted(*answers)
    services = ("ec2", "sts", "ssm", "pricing")
    return BotoEc2("r", pause=0.0, _clients={(each, "r"): client for each in services}), client


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


@pytest.mark.parametrize(
    ("said", "expected", "words"),
    [
        (NoCredentialsError(), NoCredentials, "aws configure"),
        (refusal("AuthFailure"), NoCredentials, "does not take the credentials"),
        (refusal("UnauthorizedOperation"), Refused, "lists what is needed"),
        (refusal("InsufficientInstanceCapacity"), Refused, "InsufficientInstanceCapacity"),
        (refusal("VcpuLimitExceeded"), Refused, "VcpuLimitExceeded"),
    ],
)
def test_the_rest_is_told_at_once(said: Exception, expected: type[CloudError], words: str) -> None:
    asked, client = aws(said)
    with pytest.raises(expected, match=words):
        asked.account()
    assert len(client.asked) == 1


def test_a_console_of_an_older_type_is_read_all_the_same() -> None:
    asked, client = aws(refusal("UnsupportedOperation"), {"Output": "x"})
    assert asked.console("i-1") == "x"
    assert [words for _, words in client.asked] == [
        {"InstanceId": "i-1", "Latest": True},
        {"InstanceId": "i-1"},
    ]


def test_one_that_is_gone_or_not_there_yet_is_told_from_one_that_is_ended() -> None:
    assert aws({})[0].terminate("i-1")
    assert not aws(refusal("InvalidInstanceID.NotFound"))[0].terminate("i-1")
    with pytest.raises(Refused):
        aws(refusal("OperationNotPermitted"))[0].terminate("i-1")


def test_the_spot_price_is_the_highest_of_the_zones() -> None:
    for prices, expected in (("0.4", "0.55"), 0.55), ((), None):
        history = {"SpotPriceHistory": [{"SpotPrice": each} for each in prices]}
        assert aws(history)[0].price("g5.xlarge", spot=True) == expected


def test_a_group_lets_in_whom_its_rules_name() -> None:
    group = Group("sg-1", ((20, 25), (8000, 8000)))
    assert (group.lets_in(22), group.lets_in(26)) == (True, False)
    anything = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}
    nobody = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": []}
    for rule, lets in ((anything, True), (nobody, False)):
        found = {"SecurityGroups": [{"GroupId": "sg-1", "IpPermissions": [rule]}]}
        group = aws(found)[0].group("sg-1", None)
        assert group is not None
        assert group.lets_in(22) is lets


def test_a_subnet_is_asked_for_by_its_name() -> None:
    request = Request("t", "x", "ami", "/dev/xvda", "k", ("sg",), "", {"job": "j"}, subnet="s-1")
    asked = request.parameters()
    assert asked["SubnetId"] == "s-1"
    assert "InstanceMarketOptions" not in asked
    names = [each["Key"] for each in asked["TagSpecifications"][0]["Tags"]]
    assert names == ["groupwise:job", "Name"]


def test_types_that_are_known_here() -> None:
    assert [gpus_of(each) for each in ("g5.2xlarge", "g5.48xlarge", "p4d.24xlarge")] == [1, 8, 8]
    assert gpus_of("c7i.large") == 0
    assert list_price("g5.2xlarge", "us-east-1") == 1.212
    assert list_price("g5.2xlarge", "eu-west-1") is None
    assert quota_code("g5.2xlarge", spot=False) == "L-DB2E81BA"
    assert quota_code("p5.48xlarge", spot=True) == "L-C4BD4855"
    assert quota_code("inf2.xlarge", spot=False) is None
