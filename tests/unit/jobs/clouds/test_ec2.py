"""AWS's own error codes: which calls are repeated, how often, and which error the user gets for the others."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from groupwise.jobs.clouds import ec2
from groupwise.jobs.clouds.backend import CloudError, Unreachable
from groupwise.jobs.clouds.ec2 import AwsRefused, Ec2, NoCredentials
from tests.fake_aws import SUPPORTED


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
def test_temporary_errors_of_ec2_are_retried_a_few_times(passes: Exception) -> None:
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
def test_errors_that_are_not_transient_are_raised_at_once(
    said: Exception, expected: type[CloudError], words: str
) -> None:
    asked, client = aws(said)
    with pytest.raises(expected, match=words):
        asked.account()
    assert len(client.asked) == 1


def test_terminate_distinguishes_missing_machines_from_terminated_ones() -> None:
    assert aws({})[0].terminate("i-1")
    assert not aws(refusal("InvalidInstanceID.NotFound"))[0].terminate("i-1")
    with pytest.raises(AwsRefused):
        aws(refusal("OperationNotPermitted"))[0].terminate("i-1")


def test_a_login_by_aws_login_signs_and_one_that_does_not_hold_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = "arn:aws:iam::123456789012:user/me"
    (tmp_path / "config").write_text(f"[profile mine]\nlogin_session = {session}\n")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_LOGIN_CACHE_DIRECTORY", str(tmp_path))
    with pytest.raises(NoCredentials, match="`aws login`"):
        Ec2("us-east-1", "mine", pause=0.0).account()
    keys = {
        "accessKeyId": "AKIALOGIN",
        "secretAccessKey": "s",
        "sessionToken": "t",
        "accountId": "7",
    }
    login = {
        "accessToken": {**keys, "expiresAt": "2999-01-01T00:00:00Z"},
        "refreshToken": "r", "dpopKey": "k", "clientId": "c",
    }  # fmt: skip
    name = hashlib.sha256(session.encode()).hexdigest()
    (tmp_path / f"{name}.json").write_text(json.dumps(login))
    client = Ec2("us-east-1", "mine")._client("ec2", "us-east-1")
    assert client._request_signer._credentials.access_key == "AKIALOGIN"


@pytest.mark.parametrize(("described", "supported", "others"), [
    (SUPPORTED, ("g4dn", "g6e", "p4de", "p5", "p5en", "p6-b200"), ("p3", "p3dn", "g5g", "g6f", "p6e-gb200", "g4ad")),
    ("Supported EC2 instances: G4dn, P4, P6. PyTorch-2.1", ("p4d", "p6-b200"), ("p5", "p3")),
    (None, ("p3", "p5"), ()),
])  # fmt: skip
def test_an_image_supports_the_families_that_it_names(
    described: str | None, supported: tuple[str, ...], others: tuple[str, ...]
) -> None:
    image = {"RootDeviceName": "/dev/sda1", "Architecture": "x86_64", "BlockDeviceMappings": []}
    found = aws({"Images": [{**image, "Description": described}]})[0].image("ami-1")
    assert [found.supports(family) for family in supported] == [True] * len(supported)
    assert [found.supports(family) for family in others] == [False] * len(others)
